"""What the proofs of a run cost between its first step and its end.

The smallest reference GPT on 2 gloo ranks. First, step times in turns: without any proof, and with
one that is never due after the first step, where ranks still compare checksums of their copies
every 16 steps. Then a run with `verify="auto"`: how much of its time the later proofs took.
"""

import argparse
import time
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
from _gpt import BenchModule, loader
from _paired import add_arguments, Arguments, compare, fit, launch, read_arguments, Turn
from first_step_proof import LAYOUTS, SIZES
from lightning.pytorch.callbacks import Callback

from lightning_par.strategies import Hybrid3DStrategy


class _Spent(Callback):
    """Prints what the later proofs have taken, at the end of a run of some seconds of CPU time."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._began, self._busy = seconds, 0.0, 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            self._began, self._busy = time.perf_counter(), time.process_time()
        if trainer.global_step % 10 == 9:
            late = time.process_time() - self._busy > self._seconds
            trainer.should_stop = bool(trainer.strategy.broadcast(late))

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            strategy: Any = trainer.strategy
            proof, seconds = strategy.start.proof, time.perf_counter() - self._began
            share, told = proof._cadence._spent / seconds, proof.outcomes
            busy = time.process_time() - self._busy
            print(f"{trainer.global_step} steps in {seconds:.0f} s, {busy:.0f} s of CPU time")
            print(f"later proofs took {share:.2%} of the seconds: {told}", flush=True)


def step_times(arguments: Arguments, *, layout: str, size: str) -> None:
    """Compare on one rank of several."""

    def run(verify: Any, turn: Turn) -> None:
        strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=verify)
        data = loader(8, vocab=SIZES[size].vocab_size)
        fit(BenchModule(SIZES[size]), data, strategy, turn, arguments)

    contenders = {"no proof": partial(run, False), "between proofs": partial(run, "every 1000000")}
    compare(f"{layout}, {size}", contenders, arguments, targets={"between proofs": 1.0})


def budget(_: Arguments, *, layout: str, size: str, seconds: float) -> None:
    """Run on one rank of several."""
    trainer = pl.Trainer(
        strategy=Hybrid3DStrategy(**LAYOUTS[layout]),
        accelerator="cpu",
        devices=2,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[_Spent(seconds)],
    )
    trainer.fit(BenchModule(SIZES[size]), loader(8, vocab=SIZES[size].vocab_size))


def main() -> None:
    """Print the tables."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--size", default="tiny", choices=list(SIZES))
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU time of the run")
    parser.add_argument("--only-budget", action="store_true", help="without step times")
    options = parser.parse_args()
    for layout in options.layouts:
        if not options.only_budget:
            body = partial(step_times, layout=layout, size=options.size)
            launch(body, read_arguments(options), ranks=2)
        run = partial(budget, layout=layout, size=options.size, seconds=options.seconds)
        launch(run, read_arguments(options), ranks=2)


if __name__ == "__main__":
    main()
