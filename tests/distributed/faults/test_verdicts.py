"""A step that differs from one process: the software, a device, or the data is named."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import BatchLayout, Hybrid3DStrategy
from lightning_par.dtensor import local_part
from lightning_par.errors import LightningParError
from lightning_par.strategies.proof import step_proof
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.user_code import LAYOUTS, Messages, world_of

_STEP = 4
"""Is proved with ``verify="every 4"``; the fault is in it."""


class Weighted(PlainModule):
    """Each sample has a weight."""

    batch = BatchLayout(sequence_dims={"0": 1, "1": 1}, labels="1")

    def loss(self, batch: Any) -> Tensor:
        x, y, weight = batch
        each = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none").mean(1)
        return (each * weight).mean()


def _flip(tensor: Tensor) -> Tensor:
    """Flip the highest bit of the largest entry, float64."""
    flipped = local_part(tensor.detach()).clone()
    flipped.view(torch.int64).view(-1)[flipped.abs().argmax()] ^= torch.iinfo(torch.int64).min
    return flipped


class Fault(pl.Callback):
    """Lets something go wrong on one rank, in the step that is proved or from it on."""

    def __init__(self, rank: int, begin: Callable[[Any], None]) -> None:
        self._rank, self._begin = rank, begin

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (_STEP, self._rank):
            self._begin(pl_module)


def _block(module: Any) -> Any:
    """The last block that is on this rank."""
    held = own_parameters(module)
    blocks = enumerate(module.net.blocks)
    return [b for i, b in blocks if f"net.blocks.{i}.mlp.up.weight" in held][-1].mlp


def activation_once(module: Any) -> None:
    def hook(_: Any, __: Any, output: Tensor) -> Tensor:
        handle.remove()
        with torch.no_grad():
            error = _flip(output) - output
        return output + error

    handle = _block(module).register_forward_hook(hook)


def activation_always(module: Any) -> None:
    _block(module).register_forward_hook(lambda _, __, output: 1.01 * output)


def activation_gradient_once(module: Any) -> None:
    def hook(_: Any, __: Any, output: Tensor) -> None:
        handle.remove()
        output.register_hook(_flip)

    handle = _block(module).register_forward_hook(hook)


def weight_gradient_once(module: Any) -> None:
    parameter = _block(module).up.weight

    def hook(gradient: Any) -> Any:
        handle.remove()
        local_part(gradient).copy_(_flip(gradient))
        return gradient

    handle = parameter.register_hook(hook)


def weight_flips(module: Any) -> None:
    """In a weight that is not divided."""
    for name, parameter in module.named_parameters():
        if "norm" in name:
            with torch.no_grad():
                local_part(parameter).copy_(_flip(parameter))
            return


def _train(
    rank: int,
    world: int,
    layout: str,
    fault: str = "",
    at: int = 1,
    weights: dict[int, float] | None = None,
    **options: Any,
) -> tuple[str, int, list[str]]:
    """Train 7 steps of 8 samples."""
    torch.manual_seed(0)
    messages = Messages()
    logger = logging.getLogger("lightning_par.strategies.proof")
    logger.addHandler(messages)
    samples = [
        (x, y, torch.tensor((weights or {}).get(number, 1.0), dtype=torch.float64))
        for number, (x, y) in enumerate(token_pairs(64))
    ]
    chosen = {"verify": f"every {_STEP}", **options}
    more = {name: chosen.pop(name) for name in ("default_root_dir",) if name in chosen}
    replicas = 2 if layout.startswith("zero") else 1
    sampler = DistributedSampler(samples, replicas, rank, shuffle=False) if replicas > 1 else None
    trainer = quiet_trainer(
        devices=world,
        strategy=Hybrid3DStrategy(**LAYOUTS[layout], **chosen),
        precision="64-true",
        max_steps=7,
        callbacks=[Fault(at, globals()[fault])] if fault else [],
        **more,
    )
    error = ""
    try:
        trainer.fit(Weighted(), DataLoader(samples, 8 // replicas, sampler=sampler))
    except LightningParError as raised:
        error = "\n".join((str(raised), *getattr(raised, "__notes__", ())))
    finally:
        logger.removeHandler(messages)
    return error, trainer.global_step, messages.texts


def _error(layout: str, fault: str, at: int = 1, **options: Any) -> str:
    found = run_ranks(_train, world_of(layout), layout, fault, at, timeout=120, **options)
    errors = {error for error, _, _ in found}
    assert len(errors) == 1
    return errors.pop()


@pytest.mark.parametrize(
    ("layout", "fault", "named"),
    [
        ("zero3", "activation_once", "rank 1 (host"),
        ("zero3", "activation_gradient_once", "one of the ranks 0, 1 (host"),
        ("tp2", "activation_once", "one of the ranks 0, 1 (host"),
        ("tp2", "weight_gradient_once", "rank 1 (host"),
        ("pp2", "activation_once", "one of the ranks 0, 1 (host"),
        ("pp2", "weight_gradient_once", "rank 1 (host"),
    ],
)
def test_what_does_not_come_again_is_a_device(layout: str, fault: str, named: str) -> None:
    text = _error(layout, fault)
    assert f"Step {_STEP} on" in text
    assert "Repeated from the same weights, the step is equal" in text
    assert named in text
    assert "Resume from the last checkpoint without that device" in text
    assert "LP807" in text


def test_the_first_stage_is_named() -> None:
    text = _error("pp2", "weight_gradient_once", 0)
    assert "the device of rank 0 (host" in text
    assert "only gradients of its part of the model differ" in text


@pytest.mark.parametrize("layout", ["zero3", "tp2", "pp2"])
def test_what_comes_again_is_the_software(layout: str) -> None:
    text = _error(layout, "activation_always")
    assert f"step {_STEP} on" in text
    assert "differs again: the software is at fault" in text
    assert "To try:" in text
    assert "LP801" in text


@pytest.mark.parametrize("layout", ["zero0", "tp2"])
def test_copies_that_differ_name_the_weight(layout: str) -> None:
    text = _error(layout, "weight_flips")
    axis = "tp" if layout == "tp2" else "dp_replicate"
    assert f"the ranks of {axis} hold copies of " in text
    assert "norm.weight, but ranks 0, 1 hold 2" in text
    assert "code writes to them on some ranks only" in text
    assert "LP807" in text


def _train_on(
    rank: int, world: int, hosts: str, *args: Any, **options: Any
) -> tuple[str, int, list[str]]:
    """Train on hosts of these names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURMD_NODENAME", hosts.split()[rank])
        return _train(rank, world, *args, **options)


def test_a_host_that_is_to_blame_is_left_out_of_the_next_run(tmp_path: Path) -> None:
    options = {"on_difference": "evict", "default_root_dir": str(tmp_path), "timeout": 120}
    listed = tmp_path / "faulty_hosts.txt"

    def train(hosts: str, fault: str = "") -> list[tuple[str, int]]:
        found = run_ranks(_train_on, 2, hosts, "tp2", fault, **options)
        return [(error, steps) for error, steps, _ in found]

    # It may be the one or the other.
    for error, _ in train("one two", "activation_once"):
        assert "LP807" in error
        assert "(host one, two)" in error
    assert not listed.exists()
    for error, steps in train("one two", "weight_gradient_once"):
        assert "the device of rank 1 (host two)" in error
        assert f"{listed} lists the host two from now on" in error
        assert steps == _STEP + 1
    assert listed.read_text() == "two\n"
    for error, steps in train("three two"):
        assert "LP810" in error
        assert "faulty device on the host two, on which the ranks 1 of this run are" in error
        assert steps == 0
    assert train("one three") == [("", 7)] * 2


@pytest.mark.parametrize("fault", ["activation_always", "weight_gradient_once"])
def test_a_difference_that_is_a_warning_ends_no_run(fault: str) -> None:
    found = run_ranks(_train, 2, "tp2", fault, timeout=120, on_difference="warn")
    assert [(error, steps) for error, steps, _ in found] == [("", 7)] * 2
    code = "LP807" if fault.endswith("once") else "LP801"
    told = [text for text in found[0][2] if code in text]
    assert len(told) == 1
    assert 'The run goes on, because of on_difference="warn".' in told[0]
    assert "The run ends" not in told[0]


@pytest.mark.parametrize("layout", ["zero3", "tp2", "pp2"])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_rows_that_give_no_number_are_the_data(layout: str, nonfinite: str) -> None:
    weights = {8 * _STEP + 3: float("nan"), 8 * _STEP + 6: float("inf")}
    options = {"weights": weights, "on_nonfinite": nonfinite}
    found = run_ranks(_train, 2, layout, timeout=120, **options)
    for error, steps, _ in found:
        assert ("LP313" in error) == (nonfinite == "raise")
        assert steps == (_STEP if nonfinite == "raise" else 7)
    told = [text for text in found[0][2] if "Look at the data of this batch" in text]
    assert len(told) == 1
    assert f"Step {_STEP} (epoch 0, batch {_STEP}): its loss is nan" in told[0]
    assert "Computed one by one, rows 3, 6 have an unusual loss" in told[0]


@pytest.mark.parametrize("layout", ["zero3", "tp2", "pp2"])
def test_a_row_that_is_far_out_is_the_data(layout: str) -> None:
    options = {"weights": {8 * 6 + 5: 1e4}, "verify": "every 2"}
    found = run_ranks(_train, 2, layout, timeout=120, **options)
    assert [(error, steps) for error, steps, _ in found] == [("", 7)] * 2
    told = [text for text in found[0][2] if "Look at the data of this batch" in text]
    assert len(told) == 1
    assert "Step 6 (epoch 0, batch 6): its loss" in told[0]
    assert "Computed one by one, row 5 has an unusual loss" in told[0]


def test_what_one_process_does_not_compute_is_no_matter_of_the_data() -> None:
    text = _error("tp2", "nan_once")
    assert "its loss is nan" not in text
    assert "LP807" in text


def nan_once(module: Any) -> None:
    def hook(_: Any, __: Any, output: Tensor) -> Tensor:
        handle.remove()
        return output * torch.nan

    handle = _block(module).register_forward_hook(hook)


@ranks(2)
@pytest.mark.parametrize("where", ["gather_state", "agree"], ids=["start", "end"])
def test_missing_memory_of_the_proof_names_the_proof(rank: int, world: int, where: str) -> None:
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")
    batches = DataLoader(token_pairs(4), batch_size=2)
    for found in (error, RuntimeError("of another kind")):
        strategy = Hybrid3DStrategy(**LAYOUTS["tp2"], verify="first_step")
        made = quiet_trainer(strategy=strategy, devices=2, max_steps=1)
        with (
            patch.object(step_proof, where, side_effect=found),
            pytest.raises(RuntimeError, match=str(found)) as caught,
        ):
            made.fit(PlainModule(), batches)
        told = "\n".join(caught.value.__notes__)
        assert ("verify=False trains without the comparison" in told) == (found is error)
