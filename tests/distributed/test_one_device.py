"""A mesh of one device computes what a plain Trainer computes, bit for bit."""

from typing import Any

import pytest

from tests.support.one_device import differences
from tests.support.ranks.api import run_ranks


def compare(rank: int, world: int, precision: str) -> Any:
    return differences(precision, "cpu")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_one_device_equals_a_plain_trainer_bit_for_bit(precision: str) -> None:
    assert run_ranks(compare, 1, precision) == [[]]
