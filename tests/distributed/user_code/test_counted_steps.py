"""Losses that follow from how many steps there were, beside what steps keep of their samples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
_REFUSAL = r"(?s)depends on values that an earlier .*self\.kept.*data_parallel_size=1"


class _Counting(PlainModule):
    """Counts its steps, and keeps its last loss."""

    calls, kept = 0, torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls, loss = self.calls + 1, self.scaled(loss)
        self.kept = loss.detach()
        return loss

    def scaled(self, loss: Tensor) -> Tensor:
        return loss * (1 + 0.1 * (self.calls % 3))


@CASES.add(equal="pp2 zero1 zero1pp2", large="zero3")
def a_count_that_scales_the_loss() -> Any:
    return _Counting(), token_pairs()


@CASES.add(equal="pp2", refused={"zero1pp2": _REFUSAL}, strategy={"verify": False})
def a_loss_that_is_read_from_the_second_step_on() -> Any:
    class Module(_Counting):
        kept: Any = None

        def scaled(self, loss: Tensor) -> Tensor:
            return loss if not self.calls else loss * (1 + 0.1 * self.kept)

    return Module(), token_pairs()


@CASES.add(refused={"zero1pp2": _REFUSAL}, strategy={"verify": False})
def a_loss_that_all_samples_share_at_first() -> Any:
    class Module(_Counting):
        def scaled(self, loss: Tensor) -> Tensor:
            return loss * (1 + 0.1 * self.kept)

    module = Module()
    torch.nn.init.zeros_(module.net.head.weight)
    return module, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
