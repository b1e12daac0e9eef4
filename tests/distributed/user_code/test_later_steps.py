"""Steps that are proved after the first one: equal runs pass, later faults are caught."""

import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F

from lightning_par import Hybrid3DStrategy
from lightning_par.dtensor import local_part
from lightning_par.errors import VerificationError
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS, Messages, world_of


class Stateful(PlainModule):
    """Its loss depends on what steps and hooks have left in attributes, and on the optimizer."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.seen, self.history, self.drops = 0, list[float](), drops
        self.register_buffer("steps", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        self.seen = 0  # not to be called once more in the middle of an epoch

    def on_train_batch_start(self, *_: Any) -> None:
        self.seen += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(0.1 * self.seen)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.drops:
            loss = F.dropout(loss.expand(4), 0.5).mean()
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        return loss * (1 + 0.1 * self.seen + sum(self.history) + rate + 0.1 * self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Flipping(Callback):
    """Changes a weight of one rank, as a broken device does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                local_part(next(pl_module.parameters())).view(-1)[0] += 10


class Adaptive(Stateful):
    """Its optimizer has states; it may stop on a rank, or get gradients that are clipped there by
    a hook of the module."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        stops = self.fault == "stops" and self.global_step == 4 and dist.is_initialized()

        def run() -> Any:
            output = closure()
            if stops and dist.get_rank() == 1:
                optimizer.param_groups[0]["lr"] = 0.0
            return output

        optimizer.step(closure=run)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, 0.05, "norm")
        if self.fault == "clips" and self.global_step == 4 and dist.is_initialized():
            for parameter in self.parameters():
                if parameter.grad is not None:
                    local_part(parameter.grad).mul_(1 - 0.5 * dist.get_rank())


def _train(
    rank: int,
    world: int,
    layout: str,
    every: int,
    flips: bool,
    accumulates: int,
    drops: bool,
    fault: str | None = None,
) -> tuple[list[str], str, int]:
    torch.manual_seed(0)
    module = Stateful(drops=drops) if fault is None else Adaptive(fault)
    messages = Messages()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(messages)
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=f"every {every}")
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_steps=7,
        accumulate_grad_batches=accumulates,
        callbacks=[Flipping()] if flips else [],
        num_sanity_val_steps=0,
    )
    loader = torch.utils.data.DataLoader(token_pairs(), 4)  # type: ignore[arg-type]
    error = ""
    try:
        trainer.fit(module, loader)
    except VerificationError as raised:
        error = str(raised)
    finally:
        logger.removeHandler(messages)
    return [t for t in messages.texts if "equals that" in t], error, trainer.global_step


@pytest.mark.parametrize(
    ("layout", "accumulates"),
    [
        ("tp2", 1),
        ("zero1", 1),
        ("zero1", 2),
        ("pp2_one_microbatch", 1),
        ("zero3", 1),
        pytest.param("tp2pp2", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_healthy_runs_are_equal_at_every_proof(layout: str, accumulates: int) -> None:
    found = run_ranks(_train, world_of(layout), layout, 2, False, accumulates, False, timeout=120)
    for _, error, steps in found:
        assert (error, steps) == ("", 7)
    told = [text.split(" on ")[0] for text in found[0][0]]
    assert told == ["The first step", "Step 2", "Step 4", "Step 6"]


@pytest.mark.parametrize("accumulates", [1, 2])
def test_a_step_with_dropout_is_compared_without_it(accumulates: int) -> None:
    found = run_ranks(_train, 2, "tp2", 3, False, accumulates, True, timeout=120)
    assert [error for _, error, _ in found] == ["", ""]
    assert [text.split(" on ")[0] for text in found[0][0]] == ["The first step", "Step 3", "Step 6"]


def test_a_replica_whose_weight_flips_is_caught_at_the_next_proof() -> None:
    found = run_ranks(_train, 2, "zero0", 4, True, 1, False, timeout=120)
    for _, error, _ in found:
        assert "Step 4 on" in error
        assert "differed from the same step on one process" in error
        assert re.search(r"the ranks of dp_replicate hold copies of net\.\S+, but", error)
        assert "LP807" in error
    assert [text.split(" on ")[0] for text in found[0][0]] == ["The first step"]


_ADAPTIVE = ("tp2", "zero3", "pp2_one_microbatch")


@pytest.mark.parametrize("layout", _ADAPTIVE)
def test_states_of_optimizers_go_on_in_a_later_proof(layout: str) -> None:
    found = run_ranks(_train, 2, layout, 3, False, 1, False, "", timeout=120)
    for _, error, steps in found:
        assert (error, steps) == ("", 7)
    assert len(found[0][0]) == 3


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("stops", "after the step has the norm"),
        ("clips", ", as the optimizer gets it, has the norm"),
    ],
)
@pytest.mark.parametrize("layout", _ADAPTIVE)
def test_another_update_from_equal_gradients_is_told(layout: str, fault: str, told: str) -> None:
    found = run_ranks(_train, 2, layout, 4, False, 1, False, fault, timeout=120)
    for _, error, _ in found:
        assert "step 4 on" in error
        assert told in error
    assert [text.split(" on ")[0] for text in found[0][0]] == ["The first step"]


def test_a_cadence_that_is_none_is_refused() -> None:
    for wrong in ("every 0", "0 %", "100 %", "2"):
        with pytest.raises(ValueError, match=f"verify='{wrong}' must be .*'every 500' .* or '2 %'"):
            Hybrid3DStrategy(verify=wrong)


class ByHand(Stateful):
    """Accumulates by hand, and has weights that no optimizer has, whose gradients add up."""

    def __init__(self, *, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.automatic_optimization:
            return loss
        self.manual_backward(loss)
        optimizer: Any = self.optimizers()
        optimizer.step()
        if batch_idx % 2:
            optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.blocks.parameters(), lr=0.1)


class ByNumber(Stateful):
    """What its hooks do depends on the number of the batch."""

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        def run() -> Any:
            loss = closure()
            for parameter in self.parameters() if index == 2 else ():
                parameter.grad = None
            return loss

        optimizer.step(closure=run)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start()
        assert batch_idx == self.trainer.fit_loop.batch_idx


class Unfreezing(Stateful):
    """Trains its embedding from the third step on, and not the head from the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.net.emb.requires_grad_(False)

    def on_train_batch_start(self, *_: Any) -> None:
        super().on_train_batch_start()
        if self.global_step == 2:
            self.net.emb.requires_grad_(True)
        if self.global_step == 3:
            self.net.head.requires_grad_(False)


def _outcomes(rank: int, world: int, layout: str, name: str) -> tuple[dict[str, str], str]:
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify="every 1")
    torch.manual_seed(0)
    trainer = quiet_trainer(devices=world, strategy=strategy, precision="64-true", max_steps=5)
    try:
        trainer.fit(_MODULES[name](), torch.utils.data.DataLoader(token_pairs(), 4))  # type: ignore[arg-type]
    except VerificationError as error:
        return {}, str(error)
    return strategy.start.proof.outcomes, ""


_MODULES: dict[str, Callable[[], Any]] = {
    "unfreezes": Unfreezing,
    "by number": ByNumber,
    "by hand": partial(ByHand, automatic=False),
    "no optimizer": partial(ByHand, automatic=True),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, layout) for name in _MODULES for layout in ("tp2", "zero3")),
        ("unfreezes", "pp2_one_microbatch"),
        ("no optimizer", "pp2_one_microbatch"),
    ],
)
def test_one_process_begins_with_what_the_mesh_has_of_earlier_steps(name: str, layout: str) -> None:
    found = run_ranks(_outcomes, 2, layout, name, timeout=120)
    assert [error for _, error in found] == ["", ""]
    outcomes = found[0][0]
    assert [outcomes[f"training step {step}"] for step in range(1, 5)] == ["equal"] * 4
