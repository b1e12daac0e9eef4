"""What the plan foresees is what a step communicates, to the byte, on every axis."""

from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import CommunicationProfiler
from lightning_par.engine.tensor.chunked_logits import ChunkedHead, LossOptions
from lightning_par.profiling.comm_volume import CommVolumeEntry
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

SHARED = ("broadcast",)
"""A batch and a loss that are given to the ranks of a replica; not in the expected volume."""


class SilentModule(ToyModule):
    """Logs nothing, since the plan cannot know what a user logs."""

    def __init__(self, *args: Any, chunk_size: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        if chunk_size is not None:
            self.model.head.__class__ = ChunkedHead
            self.model.head.options = LossOptions(chunk_size=chunk_size)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch["ids"])
        return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"].flatten())


class Keeper(CommunicationProfiler):
    """Keeps what the last step counted and what was expected."""

    counted: tuple[CommVolumeEntry, ...] = ()
    expected: tuple[CommVolumeEntry, ...] = ()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        last = self.recording.steps.last()
        self.counted, self.expected = last.entries, last.expected
        self.recording.stop()


def rows(rank: int, world: int, folder: Any, options: Any, run: Any) -> Any:
    keeper = Keeper(folder=folder)
    options = {"tp": 1, "pp": 1, **options}
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    strategy = Hybrid3DStrategy(**{names.get(k, k): v for k, v in options.items()})
    quiet_trainer(
        devices=world,
        strategy=strategy,
        max_steps=2,
        callbacks=[keeper],
        limit_val_batches=0,
        accumulate_grad_batches=run.get("accumulate", 1),
    ).fit(SilentModule("sgd", **run.get("module", {})), loader(ToyData(200), run.get("batch", 6)))
    return [
        {(e.axis, e.operation): (e.calls, e.payload, e.sent) for e in entries}
        for entries in (keeper.counted, keeper.expected)
    ]


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp": (2, {"tp": 2, "sequence_parallel": False}, {}),
    "tp and sp": (2, {"tp": 2}, {}),
    "tp, logits in chunks": (2, {"tp": 2}, {"module": {"chunk_size": 25}}),
    "pp": (2, {"pp": 2, "num_microbatches": 4}, {}),
    "pp, one micro-batch": (2, {"pp": 2, "num_microbatches": 1}, {}),
    "pp, V shape, head untied": (
        2,
        {"pp": 2, "schedule": "zbv", "num_microbatches": 3},
        {"module": {"tied": False}},
    ),
    "pp, interleaved": (2, {"pp": 2, "schedule": "interleaved", "num_microbatches": 4}, {}),
    "dp, ZeRO 0": (2, {"zero_stage": 0}, {}),
    "dp, ZeRO 1": (2, {"zero_stage": 1}, {}),
    "dp, ZeRO 2": (2, {"zero_stage": 2}, {}),
    "dp, ZeRO 3": (2, {"zero_stage": 3}, {}),
    "dp, accumulating": (2, {"zero_stage": 2}, {"accumulate": 3}),
    "pp and dp, ZeRO 3": (4, {"pp": 2, "zero_stage": 3, "num_microbatches": 3}, {}),
    "pp and dp, ZeRO 2": (4, {"pp": 2, "zero_stage": 2, "num_microbatches": 3}, {}),
    "pp and dp, weights later": (
        4,
        {"pp": 2, "zero_stage": 3, "schedule": "zb-h1", "num_microbatches": 3},
        {},
    ),
    "tp, sp and pp": (4, {"tp": 2, "pp": 2, "num_microbatches": 3}, {}),
    "tp and dp, uneven vocabulary": (4, {"tp": 2, "zero_stage": 3}, {}),
    "replicas of shards": (
        4,
        {"zero_stage": 2, "data_parallel_replicate_size": 2},
        {},
    ),
}


COVERING = (
    "tp",
    "tp and sp",
    "tp, logits in chunks",
    "pp",
    "dp, ZeRO 0",
    "dp, ZeRO 2",
    "pp and dp, ZeRO 3",
)
"""Every formula at least once; the others combine them in other ways."""


def cells() -> list[Any]:
    rest = pytest.mark.exhaustive
    return [pytest.param(n, marks=() if n in COVERING else rest) for n in LAYOUTS]


@pytest.mark.parametrize("layout", cells())
def test_expected_volume_equals_counted_volume(layout: str, tmp_path: Any) -> None:
    world, options, run = LAYOUTS[layout]
    for counted, expected in run_ranks(rows, world, tmp_path, options, run, timeout=120):
        wanted = {k: v for k, v in counted.items() if k[1] not in SHARED}
        assert expected == wanted
        assert expected
