"""Bytes of a step by rank, for 20 layouts of a GPT: measured, forecast and rehearsed.

    python benchmarks/memory_by_layout.py [--only "tp 2" ...] [--kinds]

Measured are the tensors that are alive on a real rank in its second step, counted at every
operation. Nothing is fitted on them.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from _gpt import BenchModule, CONFIG, loader, TOKENS
from _paired import Arguments, launch
from lightning.pytorch.callbacks import Callback

from lightning_par.callbacks import ActivationCheckpointing
from lightning_par.observe.live_bytes import GRADIENTS, LiveBytes, OPTIMIZER, PARAMETERS
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.shapes import Layout, Recompute
from lightning_par.strategies import Hybrid3DStrategy
from lightning_par.strategies.options import MeshOptions
from lightning_par.verification.rehearse import distinct_ranks, rehearse_apart

MODEL = replace(CONFIG, num_layers=8)
SAMPLES = 8
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
TENSOR = {**ONES, "tensor_parallel_size": 2}
PIPE = {**ONES, "pipeline_parallel_size": 4, "num_microbatches": 8}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout: ranks, options of the strategy, what is recomputed, batches of a step."""

    ranks: int = 1
    options: dict[str, Any] = field(default_factory=lambda: dict(ONES))
    recompute: Recompute = "none"
    accumulated: int = 1

    @property
    def chosen(self) -> MeshOptions:
        """The options with all that is left to the strategy."""
        return Hybrid3DStrategy(**self.options).options

    @property
    def layout(self) -> Layout:
        """The same as the planner says it."""
        chosen = self.chosen
        sizes = chosen.fit_sizes(self.ranks, self.ranks)
        return Layout.from_options(
            chosen,
            sizes,
            SAMPLES // sizes.data // self.accumulated,
            accumulated=self.accumulated,
            recompute=self.recompute,
        )

    def run(
        self, callback: Callback, steps: int, *plugins: Any
    ) -> tuple[pl.Trainer, pl.LightningModule, Any]:
        """Return Trainer, module and data."""
        strategy = Hybrid3DStrategy(**self.options, verify=False, gather_after_run=False)
        recomputing = [ActivationCheckpointing(mode=self.recompute)]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=self.ranks,
            strategy=strategy,
            plugins=list(plugins),
            callbacks=[callback, *(recomputing if self.recompute != "none" else [])],
            max_steps=steps,
            accumulate_grad_batches=self.accumulated,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        batch = SAMPLES // self.layout.sizes.data // self.accumulated
        return trainer, BenchModule(MODEL), loader(batch)


CASES = {
    "one device": Case(),
    "4 accumulated": Case(accumulated=4),
    "full recomputation": Case(recompute="full"),
    "selective recomputation": Case(recompute="selective"),
    "tp 2": Case(ranks=2, options=TENSOR),
    "tp 2, no sequence parallelism": Case(ranks=2, options={**TENSOR, "sequence_parallel": False}),
    "dp 2, ZeRO 1": Case(ranks=2, options={**ONES, "zero_stage": 1}),
    "dp 2, ZeRO 2": Case(ranks=2, options={**ONES, "zero_stage": 2}),
    "dp 2, ZeRO 3": Case(ranks=2, options={**ONES, "zero_stage": 3}),
    "cp 2": Case(ranks=2, options={**ONES, "context_parallel_size": 2}),
    "pp 4, 1f1b": Case(ranks=4, options=PIPE),
    "pp 4, gpipe": Case(ranks=4, options={**PIPE, "schedule": "gpipe"}),
    "pp 4, interleaved": Case(ranks=4, options={**PIPE, "schedule": "interleaved"}),
    "pp 4, zb-h1": Case(ranks=4, options={**PIPE, "schedule": "zb-h1"}),
    "pp 4, zbv, full recomputation": Case(
        ranks=4, options={**PIPE, "schedule": "zbv"}, recompute="full"
    ),
    "tp 2 x pp 2": Case(
        ranks=4, options={**TENSOR, "pipeline_parallel_size": 2, "num_microbatches": 4}
    ),
    "dp 4, ZeRO 3, 2 accumulated": Case(ranks=4, options={**ONES, "zero_stage": 3}, accumulated=2),
    "dp 2 copies x 2 shards, ZeRO 2": Case(
        ranks=4, options={**ONES, "zero_stage": 2, "data_parallel_replicate_size": 2}
    ),
    "tp 2 x pp 2 x dp 2, ZeRO 1": Case(
        ranks=8, options={**TENSOR, "pipeline_parallel_size": 2, "num_microbatches": 4}
    ),
    "tp 2 x cp 2 x dp 2, ZeRO 3": Case(
        ranks=8, options={**TENSOR, "context_parallel_size": 2, "zero_stage": 3}
    ),
}


class SecondStep(Callback):
    """Notes the most bytes that are alive in the second step, by kind.

    Args:
        live: Counts them.
    """

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.memory, self.updating = live, dict[str, int](), 0
        self._begun = False

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: object) -> None:
        """Begin with what the first step left."""
        if trainer.global_step == 1 and not self._begun:
            self._begun = True
            self.live.mark([*module.parameters(), *module.buffers()], PARAMETERS)
            self.live.mark([list(o.state.values()) for o in trainer.optimizers], OPTIMIZER)
            self.live.restart()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: object) -> None:
        """Take down forward and backward."""
        self.live.mark([p.grad for p in module.parameters()], GRADIENTS)
        self.memory = self.live.kinds

    def on_train_end(self, *_: object) -> None:
        """Take down the peak with the update."""
        self.updating = self.live.peak


def measure(path: Path, case: Case, _: Arguments) -> None:
    """Train for two steps; write the bytes by kind, and the peak with the update, of every rank."""
    with LiveBytes() as live:
        seen = SecondStep(live)
        trainer, module, data = case.run(seen, 2)
        trainer.fit(module, data)
    found: list[Any] = [None] * case.ranks
    dist.all_gather_object(found, (seen.memory, seen.updating))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))


def rehearsed(case: Case, rank: int) -> dict[str, int]:
    """Return the bytes of a rehearsed rank by kind."""

    def make(observer: Callback, environment: Any) -> tuple[pl.Trainer, pl.LightningModule, Any]:
        return case.run(observer, 1, environment)

    return rehearse_apart(make, num_nodes=1, devices=case.ranks, rank=rank).memory


def main() -> None:
    """Print, for every layout, the fullest rank's bytes; and the errors over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--kinds", action="store_true", help="print the bytes by kind of each rank")
    options = parser.parse_args()
    code = implementation("32-true", load_profile("h100"))
    arguments = Arguments(pairs=1, steps=1, warmup=0, profile=False)
    errors: dict[str, list[float]] = {"forecast": [], "rehearsed": [], "forecast of rehearsed": []}
    print("| layout | measured, MB | forecast | rehearsed | forecast of rehearsed |")
    print("|---|---|---|---|---|")
    for name in options.only:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bytes.json"
            launch(partial(measure, path, case), arguments, ranks=case.ranks)
            measured = json.loads(path.read_text())
        layout = case.layout
        ranks = predict_memory(read_shape(MODEL, TOKENS), layout, code).ranks
        rows = []
        for rank in distinct_ranks(layout.sizes):
            by_kind, peak = measured[rank]
            again = rehearsed(case, rank)
            guess = ranks[layout.sizes.coordinates(rank)["pp"]]
            rows.append((peak, sum(guess.values()), sum(again.values())))
            if options.kinds:
                for what in (by_kind, guess, again):
                    print(rank, {k: round(v / 1e6, 2) for k, v in what.items()}, end=" ")
                    print(f"{sum(what.values()) / 1e6:.2f}, with the update {peak / 1e6:.2f}")
        print(f"| {name} | {_cells(rows, errors)} |", flush=True)
    for what, found in errors.items():
        sizes = [abs(e) for e in found]
        print(
            f"{what}: mean error {statistics.mean(sizes):.1%} of {len(found)} ranks, bias "
            f"{statistics.mean(found):+.1%}, largest {max(sizes):.1%}"
        )


def _cells(rows: Sequence[tuple[float, float, float]], errors: dict[str, list[float]]) -> str:
    """Return the cells of the rank that holds most; add the errors of all."""
    for real, guess, again in rows:
        found = guess / real - 1, again / real - 1, guess / again - 1
        for errors_of, error in zip(errors.values(), found, strict=True):
            errors_of.append(error)
    real, guess, again = max(rows)
    apart = (guess / real - 1, again / real - 1, guess / again - 1)
    return " | ".join([f"{real / 1e6:.1f}", *(f"{error:+.0%}" for error in apart)])


if __name__ == "__main__":
    main()
