"""Proofs that go on within a budget change nothing in a run, and end with it."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.strategies.proof import step_proof
from lightning_par.strategies.proof.cadence import Cadence
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS, Messages


class Dropping(PlainModule):
    """Drops, and keeps what its steps have left."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = F.dropout(self.net(x), 0.1)
        return F.cross_entropy(hidden.flatten(0, 1), y.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Locked(PlainModule):
    """Cannot be copied any more after a few steps."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.global_step == 5:
            self.lock = threading.Lock()


class Sending(PlainModule):
    """Sends what nobody waits for, after a few steps."""

    def loss(self, batch: Any) -> Tensor:
        if 5 <= self.global_step < 50:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"loss", ("127.0.0.1", 9))
        return super().loss(batch)


class Stopping(Callback):
    """Ends the run between two batches of a step that is proved."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 20:
            trainer.should_stop = True


@contextmanager
def counted_time() -> Iterator[None]:
    """Inside, each look at the clock of a new proof is a second after the one before."""
    times = map(float, count())
    timed = partial(Cadence, clock=lambda: next(times))
    with mock.patch.object(step_proof, "Cadence", timed):
        yield


def _train(
    rank: int, world: int, layout: str, made: str, verify: Any, **options: Any
) -> dict[str, Any]:
    torch.manual_seed(0)
    module, messages = globals()[made](), Messages()
    loggers = [logging.getLogger("lightning.pytorch.utilities.rank_zero"), step_proof._logger]
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=verify)
    trainer = quiet_trainer(
        devices=world, strategy=strategy, proves=True, **{"max_steps": 60, **options}
    )
    for logger in loggers:
        logger.addHandler(messages)
    try:
        with counted_time():
            trainer.fit(module, DataLoader(token_pairs(160), 8))  # type: ignore[arg-type]
    finally:
        for logger in loggers:
            logger.removeHandler(messages)
    proof = strategy.start.proof
    return {
        "steps": trainer.global_step,
        "weights": {n: p.detach().clone() for n, p in module.state_dict().items()},
        "losses": getattr(module, "losses", []),
        "drawn": torch.rand(3).tolist(),
        "told": [text for text in messages.texts if "that of one process" in text],
        "outcomes": proof.outcomes,
        "next": proof._cadence.next,
        "left": "on_train_batch_end" in vars(module) or proof._model is not None,
    }


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_proofs_change_no_bit_of_a_run(layout: str) -> None:
    options: dict[str, Any] = {"max_steps": 30, "timeout": 180}
    proved = run_ranks(_train, 2, layout, "Dropping", "every 10", **options)
    plain = run_ranks(_train, 2, layout, "Dropping", False, **options)
    assert [text.split(" on ")[0] for text in proved[0]["told"]] == [
        "The first step",
        *(f"Step {number}" for number in (10, 20)),
    ]
    for one, other in zip(proved, plain, strict=True):
        assert one["weights"].keys() == other["weights"].keys()
        for name, weight in one["weights"].items():
            assert torch.equal(weight, other["weights"][name]), name
        assert (one["losses"], one["drawn"]) == (other["losses"], other["drawn"])


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_a_budget_chooses_the_same_steps_on_all_ranks(layout: str) -> None:
    found = run_ranks(_train, 2, layout, "PlainModule", "99 %", timeout=180)
    assert [each["steps"] for each in found] == [60, 60]
    first, *later = [text.split(" on ")[0] for text in found[0]["told"]]
    numbers = [int(text.removeprefix("Step ")) for text in later]
    assert first == "The first step"
    assert len(numbers) >= 3
    assert all(b - a >= 10 for a, b in pairwise([0, *numbers]))
    assert found[0]["outcomes"] == {
        "training step 0": "equal",
        "later training steps": f"{len(numbers)} equal",
    }


def test_the_default_goes_on_after_the_first_step() -> None:
    # A second for each look at the clock: 1 % of the time of 4000 looks would pay for the next.
    found = run_ranks(_train, 2, "tp2", "PlainModule", "auto", max_steps=25, timeout=180)
    assert found[0]["outcomes"] == {"training step 0": "equal"}
    assert not any(each["left"] for each in found)


@pytest.mark.parametrize(
    ("made", "reason"),
    [("Locked", "the module cannot be copied"), ("Sending", "the step failed on one process")],
)
def test_a_later_step_that_cannot_be_proved_is_told_once(made: str, reason: str) -> None:
    found = run_ranks(_train, 2, "tp2", made, "99 %", timeout=180)
    assert [each["steps"] for each in found] == [60, 60]
    first, told = found[0]["told"]
    assert first.startswith("The first step on")
    assert f"is not proved to equal that of one process: {reason}" in told
    assert f"not proved: {reason}" in found[0]["outcomes"]["later training steps"]


@pytest.mark.parametrize("verify", ["every 10", "99 %"])
def test_a_run_may_end_with_a_step_that_is_proved(verify: str) -> None:
    found = run_ranks(_train, 2, "zero3", "Dropping", verify, max_steps=11, timeout=180)
    for each in found:
        assert (each["steps"], each["left"]) == (11, False)
    assert [text.split(" on ")[0] for text in found[0]["told"]] == ["The first step", "Step 10"]


def test_a_run_may_end_within_a_step_that_is_proved() -> None:
    options = {"accumulate_grad_batches": 2, "callbacks": [Stopping()], "timeout": 180}
    found = run_ranks(_train, 2, "tp2", "Dropping", "every 10", **options)
    for each in found:
        assert (each["steps"], each["left"]) == (10, False)
    assert [text.split(" on ")[0] for text in found[0]["told"]] == ["The first step"]


def _train_twice(rank: int, world: int, gathers: bool) -> tuple[list[str], int, dict[str, str]]:
    torch.manual_seed(0)
    module, messages = Dropping(), Messages()
    strategy = Hybrid3DStrategy(**LAYOUTS["tp2"], verify="99 %", gather_after_run=gathers)
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(messages)
    with counted_time():
        trainer = quiet_trainer(devices=world, strategy=strategy, proves=True)
        for steps in (30, 60):
            trainer.fit_loop.epoch_loop.max_steps = steps
            trainer.fit(module, DataLoader(token_pairs(160), 8))  # type: ignore[arg-type]
    logger.removeHandler(messages)
    told = [text for text in messages.texts if "that of one process" in text]
    return (
        [text.split(" on ")[0] for text in told],
        trainer.global_step,
        strategy.start.proof.outcomes,
    )


@pytest.mark.parametrize("gathers", [True, False])
def test_a_second_run_is_proved_too(gathers: bool) -> None:
    found = run_ranks(_train_twice, 2, gathers, timeout=180)
    told, steps, outcomes = found[0]
    numbers = [int(text.removeprefix("Step ")) for text in told if text.startswith("Step ")]
    assert (told[0], steps) == ("The first step", 60)
    assert any(number < 30 for number in numbers)
    assert any(number > 40 for number in numbers)
    if gathers:  # the second run divides the model anew
        assert outcomes["training step 30"] == "equal"
