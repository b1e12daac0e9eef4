"""Copies of weights that begin to differ are named: which weight, on which ranks."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.data import equal_copies
from lightning_par.errors import VerificationError
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import loader, quiet_trainer
from tests.support.ranks.api import ranks, run_ranks

_AXES = {
    "dp_replicate": {"zero_stage": 0, "data_parallel_size": 3},
    "tp": {"tensor_parallel_size": 2},
}


class FlipsABit(pl.Callback):
    """Flips the lowest bit of one entry of a weight, on one rank and in one step."""

    def __init__(self, rank: int, name: str) -> None:
        self._rank, self._name = rank, name

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self._rank:
            parameter: Any = dict(pl_module.named_parameters())[self._name].detach()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.view(torch.int32).view(-1)[1] ^= 1


def _train(rank: int, world: int, axis: str, flipped: str, **options: Any) -> str:
    callbacks = [FlipsABit(1, flipped)] if flipped else []
    strategy = Hybrid3DStrategy(**_AXES[axis], **options)
    given = {"devices": world, "max_steps": 40, "proves": True}
    trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **given)
    module = PlainModule()
    try:
        trainer.fit(module, loader(token_pairs() * 20, 6))
    except VerificationError as error:
        return f"{trainer.global_step} {error}"
    return ""


@pytest.mark.parametrize("axis", _AXES)
def test_a_flipped_bit_is_told_on_every_rank(axis: str) -> None:
    name = "net.blocks.1.norm.weight"
    world = 3 if axis == "dp_replicate" else 2
    told = run_ranks(_train, world, axis, name, timeout=120)
    assert len(set(told)) == 1
    found = "rank 1 holds different" if world == 3 else "ranks 0, 1 hold 2 different values"
    step, _, text = told[0].partition(" ")
    assert int(step) < 3 + 2 * 16 + 3
    assert f"the ranks of {axis} hold copies of {name}, but {found}" in text
    assert "LP805" in text
    assert text.count(" hold copies") == 1


class Shrinks(pl.Callback):
    """Shrinks a weight after each step, as a user's callback does."""

    def __init__(self, everywhere: bool) -> None:
        self._everywhere = everywhere

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._everywhere or trainer.is_global_zero:
            with torch.no_grad():
                pl_module.net.norm.weight.mul_(0.99)


def _shrink(rank: int, world: int, everywhere: bool) -> Any:
    strategy = "auto" if world == 1 else Hybrid3DStrategy(zero_stage=0, data_parallel_size=world)
    given = {"max_steps": 40, "precision": "64-true", "proves": True}
    trainer = quiet_trainer(
        strategy=strategy, devices=world, callbacks=[Shrinks(everywhere)], **given
    )
    pl.seed_everything(0, verbose=False)
    module = PlainModule()
    try:
        trainer.fit(module, loader(token_pairs() * 20, 6 // world))
    except VerificationError as error:
        return str(error)
    return module.state_dict()


def test_a_weight_is_written_on_one_rank_or_on_every_rank() -> None:
    for told in run_ranks(_shrink, 2, False, timeout=120):
        assert "`if trainer.is_global_zero`, change it to write on every rank" in told
        assert "LP805" in told
    (want,) = run_ranks(_shrink, 1, True, timeout=120)
    for got in run_ranks(_shrink, 2, True, timeout=120):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)


def test_a_run_without_a_fault_or_without_proofs_goes_to_its_end() -> None:
    assert run_ranks(_train, 2, "tp", "", timeout=120) == [""] * 2
    assert run_ranks(_train, 2, "tp", "net.norm.weight", verify=False, timeout=120) == [""] * 2


@ranks(2)
def test_gloo_has_nothing_in_flight_beside_the_step(rank: int, world: int) -> None:
    """See Note [One at a time on gloo]."""
    alone = SimpleNamespace(size=lambda: 1)
    mesh: Any = SimpleNamespace(group=lambda axis: dist.group.WORLD if axis == "tp" else alone)
    copies = equal_copies.EqualCopies(torch.nn.Linear(3, 2), mesh, torch.device("cpu"))
    with (
        patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers,
        patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sums,
    ):
        for step in range(3):
            copies.advance(step)
    calls = [*gathers.call_args_list, *sums.call_args_list]
    assert len(calls) == 2
    assert not any(call.kwargs.get("async_op") for call in calls)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_bit_and_the_order_of_entries_count(dtype: torch.dtype) -> None:
    width = torch.empty((), dtype=dtype).element_size() * 8
    bits = torch.arange(1, 5).to({64: torch.int64, 32: torch.int32, 16: torch.int16}[width])

    def checksum(tensor: torch.Tensor) -> int:
        held = tensor.view(dtype)
        return int(equal_copies._Piece(name="", tensor=held, start=0, count=4).checksum())

    assert checksum(bits) != checksum(bits.flip(0))
    for place in range(4):
        for bit in range(width):
            flipped = bits.clone()
            flipped[place] ^= torch.tensor(1, dtype=bits.dtype) << bit
            assert checksum(flipped) != checksum(bits), (place, bit)


def test_large_tensors_are_compared_in_parts_and_in_turn() -> None:
    named = {"a": torch.zeros(5), "b": torch.zeros(7), "c": torch.zeros(1)}
    turns = equal_copies._in_turn(named, 4)
    found = [[(p.name, p.start, p.count) for p in next(turns)] for _ in range(5)]
    assert found[:3] == [[("a", 0, 4)], [("a", 4, 1), ("b", 0, 3)], [("b", 3, 4)]]
    assert found[3:] == [[("c", 0, 1)], [("a", 0, 4)]]
