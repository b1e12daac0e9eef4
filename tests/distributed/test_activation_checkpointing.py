"""ActivationCheckpointing on a mesh: what one process computes, recomputed where it says."""

import warnings
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import ActivationCheckpointing
from lightning_par.engine.activations import checkpointing
from tests.support.exhaustive import some
from tests.support.faults.user_mistakes import Bare
from tests.support.models.toy_gpt import Block, loader, ToyData, ToyModule
from tests.support.parity import assert_parity, quiet_trainer
from tests.support.ranks.api import ranks

SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
TP2: dict[str, Any] = {"tp": 2}
PP2: dict[str, Any] = {"pp": 2, "num_microbatches": 4}
ZBH1 = {**PP2, "schedule": "zb-h1"}
COMPILED = {"compile_blocks": {"backend": "aot_eager"}}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp2 full": (TP2, {"mode": "full"}),
    "tp2 selective": (TP2, {}),
    "tp2 parts": (TP2, {"parts": ["attention"]}),
    "pp2 full": (PP2, {"mode": "full"}),
    "pp2 selective offloaded": (PP2, {"offload": "cpu"}),
    "pp2 zb-h1 full": (ZBH1, {"mode": "full"}),
    "pp2 zb-h1 selective": (ZBH1, {}),
    "pp2 zbv auto": ({**PP2, "schedule": "zbv"}, {"mode": "full", "per_stage": "auto"}),
    "zero3 full": ({"dp": 2, "zero_stage": 3}, {"mode": "full"}),
    "zero3 selective": ({"dp": 2, "zero_stage": 3}, {"every": 2}),
    "tp2 pp2 full": ({**PP2, "tp": 2}, {"mode": "full", "offload": "cpu"}),
    "tp2 pp2 zb-h1 selective": ({**ZBH1, "tp": 2}, {}),
    "tp2 full compiled": ({**TP2, **COMPILED}, {"mode": "full"}),
    "zero3 selective compiled": ({"dp": 2, "zero_stage": 3, **COMPILED}, {}),
    "pp2 offloaded compiled": ({**PP2, **COMPILED}, {"offload": "cpu"}),
}

LARGE = {"tp2 parts", "zero3 selective", "tp2 pp2 full", "zero3 selective compiled"}
LARGE |= {"tp2 selective", "pp2 zb-h1 selective"}  # both at once stay
LARGE |= {"tp2 full compiled"}  # the pipeline's stays


@pytest.mark.parametrize(
    "case",
    some(CASES, LARGE),
)
def test_recomputed_blocks_equal_one_process(case: str) -> None:
    """Tied head, unequal blocks, uneven labels, an odd last batch; clipped."""
    sizes, options = CASES[case]
    degrees = {axis: sizes.get(axis, 1) for axis in SIZES}
    rest = {name: value for name, value in sizes.items() if name not in SIZES}
    strategy = {SIZES[axis]: degree for axis, degree in degrees.items()} | rest
    world = degrees["tp"] * degrees["pp"] * degrees["dp"]
    assert_parity(
        "hybrid3d",
        strategy,
        world,
        degrees["dp"],
        callbacks=[ActivationCheckpointing(**options)],
        batch_size=8,
        size=20,
        ignored=True,
        module={"optimizer": "sgd"},
        trainer={"gradient_clip_val": 0.05},
    )


class Noisy(ToyModule):
    """Every block ends in dropout."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for block in self.model.blocks:
            block.mlp.append(nn.Dropout(0.3))


def train_noisy(strategy: Any, callbacks: list[Any]) -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    module = Noisy(optimizer="sgd")
    torch.manual_seed(12)
    made = quiet_trainer(
        strategy=strategy, devices=2, max_epochs=1, precision="64-true", callbacks=callbacks
    )
    made.fit(module, loader(ToyData(12), 4))
    state = made.strategy.gather_state_dict()
    return [value.clone() for value in state.values()]


@ranks(2)
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "schedule": "zb-h1"},
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3},
    ],
    ids=["tp2", "pp2 zb-h1", "zero3"],
)
def test_dropout_is_that_of_the_forward_on_a_mesh(
    rank: int, world: int, sizes: dict[str, Any]
) -> None:
    sizes = {**sizes, "verify": False}  # one process draws other noise
    wanted = train_noisy(Hybrid3DStrategy(**sizes), [])
    for options in ({"mode": "full"}, {"mode": "selective"}):
        got = train_noisy(Hybrid3DStrategy(**sizes), [ActivationCheckpointing(**options)])
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize(
    ("options", "again"),
    [
        ({"mode": "full"}, ([1, 1], [1, 1])),
        ({"mode": "full", "every": 2}, ([1, 0], [1, 0])),
        ({"mode": "none"}, ([0, 0], [0, 0])),
        ({"per_stage": ["none", "full"]}, ([0, 0], [1, 1])),
        # Stage 0 holds 2 micro-batches, stage 1 one: twice what "selective" keeps is more than all.
        ({"per_stage": "auto"}, ([1, 1], [0, 0])),
    ],
    ids=["full", "every", "none", "by hand", "auto"],
)
def test_a_stage_recomputes_what_it_is_told_to(
    rank: int, world: int, options: dict[str, Any], again: tuple[list[int], list[int]]
) -> None:
    calls: dict[int, int] = {}
    forward = Block.forward

    def count(block: Block, x: Tensor) -> Tensor:
        calls[id(block)] = calls.get(id(block), 0) + 1
        return forward(block, x)

    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "num_microbatches": 4}
    module = ToyModule(blocks=4, optimizer="sgd")
    with patch.object(Block, "forward", count):
        quiet_trainer(
            strategy=Hybrid3DStrategy(**sizes, stage_blocks=[2, 2]),
            devices=2,
            max_steps=1,
            callbacks=[ActivationCheckpointing(**options)],
        ).fit(module, loader(ToyData(4), 4))
    held = [b for b in module.model.blocks if isinstance(b, Block) and id(b) in calls]
    assert [calls[id(b)] // 4 - 1 for b in held] == again[rank]


@ranks(1)
def test_a_strategy_of_lightning_recomputes_too(rank: int, world: int) -> None:
    found = []
    original = checkpointing.checkpoint

    def watch(*args: Any, **kwargs: Any) -> Any:
        found.append("context_fn" in kwargs)
        return original(*args, **kwargs)

    callback = ActivationCheckpointing(every=3)
    made = quiet_trainer(devices=1, max_epochs=1, callbacks=[callback])
    with patch.object(checkpointing, "checkpoint", watch):
        module = ToyModule(blocks=4)
        made.fit(module, loader(ToyData(4), 4))
        made.fit_loop.max_epochs = 2
        made.fit(module, loader(ToyData(4), 4))  # the blocks are wrapped already
    assert found == [True] * 4


class Counting(nn.Module):
    """A block whose forward changes buffers: in place, by a new tensor, and before it reads one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8), spectral_norm(nn.Linear(8, 8))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.norm(x)).relu()
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Unplanned(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
        self.blocks = nn.ModuleList(Counting() for _ in range(4))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.head(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train_unplanned(kind: Any, batches: Any, callbacks: list[Any], **options: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    module = kind()
    made = quiet_trainer(max_epochs=1, precision="64-true", callbacks=callbacks, **options)
    made.fit(module, batches)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_without_a_plan_are_those_of_the_structure(mode: Any, caplog: Any) -> None:
    """On a plain Trainer; a block may change its buffers."""
    batches = DataLoader(torch.rand(24, 8, dtype=torch.float64), batch_size=4)
    try:
        wanted = train_unplanned(Unplanned, batches, [])
        with patch.object(checkpointing, "checkpoint", wraps=checkpointing.checkpoint) as used:
            got = train_unplanned(Unplanned, batches, [ActivationCheckpointing(mode)])
    finally:
        torch.set_default_dtype(torch.float32)  # other tests of this process count on it
    assert used.call_count == 4 * 6
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    assert (
        caplog.text.count(
            "The plan names no blocks, so activations of the entries of blocks are recomputed."
        )
        == 1
    )


@ranks(2)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_without_a_plan_recompute_on_shards(rank: int, world: int, mode: Any) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}
    batches = loader(ToyData(12), 4)
    kind = partial(Bare, optimizer="sgd")
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*does not say which modules are its blocks, so every step.*"
        )
        wanted, got = (
            train_unplanned(kind, batches, found, devices=2, strategy=Hybrid3DStrategy(**sizes))
            for found in ([], [ActivationCheckpointing(mode)])
        )
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
