"""The module that the other cases change."""

from typing import Any

import pytest
from torch import nn
from torch.nn import functional as F

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


@CASES.add(
    equal="tp2 tp2_whole_sequence pp2 pp2_one_microbatch tp2pp2 zero0 zero1 zero3",
    refused={"cp2": "called no attention function"},
)
def plain() -> Any:
    return PlainModule(), token_pairs()


@CASES.add(equal="pp2 zero3")
def loss_in_a_criterion() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.NLLLoss()

        def loss(self, batch: Any) -> Any:
            x, y = batch
            return self.criterion(F.log_softmax(self.net(x), -1).flatten(0, 1), y.flatten())

    return Module(), token_pairs()


@CASES.add(equal="tp2 pp2")
def a_number_that_float32_would_round() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", 1e6 * loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
