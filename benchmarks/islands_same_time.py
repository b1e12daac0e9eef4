"""What islands and replicas in step have learned after the same time on a slow network.

Both train a GPT of 3.2 million parameters on the sources of Python's standard library, as
processes that talk through a network namespace (see `islands_step_time`). Each contender makes the
steps that it is told; the time from its first to its last step is printed beside the loss of
held-out text, in nats, of the weights that all share at the end.
"""

import argparse
import json
import statistics
from typing import Any

import lightning.pytorch as pl
from _learn import make_trainer, quiet
from islands_step_time import BATCH, Clock, launch, make_strategy

from lightning_par.models import GPTModule, TextDataModule
from lightning_par.profiling.comm_volume import CommVolume

COUNT = 2
SIZES = {
    "num_layers": 4,
    "model_dim": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "tied_head": False,
}


def work(name: str, steps: int, seed: int, lr: float) -> None:
    """Train on one rank; print the seconds of the steps and the loss."""
    quiet()
    pl.seed_everything(seed, verbose=False)
    strategy, devices = make_strategy(name, COUNT, 30, optimizer="average")
    module = GPTModule(overrides=SIZES, lr=lr, max_steps=steps, warmup_steps=steps // 20)
    with CommVolume() as volume:
        clock = Clock(1, steps - 1, volume)
        trainer = make_trainer(steps, strategy=strategy, devices=devices, callbacks=[clock])
        trainer.fit(module, TextDataModule(length=128, batch_size=BATCH, seed=seed))
    (start, *_), (end, *_) = clock.marks
    print(json.dumps([end - start, float(trainer.callback_metrics["val_loss"])]), flush=True)


def main() -> None:
    """Train each contender once for each seed, and print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = ["in step", "in step, int8", "islands, int8, 4 fragments, overlap 4"]
    parser.add_argument("--steps", type=int, nargs=3, default=[75, 190, 560], help=f"of {names}")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        work(options.work, options.steps[0], options.seeds[0], options.lr)
        return
    found: dict[str, list[Any]] = {name: [] for name in names}
    for seed in options.seeds:
        for name, steps in zip(names, options.steps, strict=True):
            words = [__file__, "--work", name, "--lr", str(options.lr), "--seeds", str(seed)]
            said = launch(name, COUNT, [*words, "--steps", *[str(steps)] * 3])
            seconds, loss = max(each[0] for each in said), said[0][1]
            found[name].append(loss)
            print(
                f"{name:<40} seed {seed}  {steps} steps  {seconds:6.1f} s  {loss:.4f}", flush=True
            )
    for name, losses in found.items():
        print(f"{name:<40} mean {statistics.mean(losses):.4f}")


if __name__ == "__main__":
    main()
