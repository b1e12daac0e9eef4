"""Values are followed through the source of functions, from the expression that reads them."""

import sys
from typing import Any

import pytest

from lightning_par.strategies.setup.value_flow import attributes_made_of, places_of


class Reading:
    """Reads a number, and notes where."""

    def __init__(self) -> None:
        self.reads: Any = []
        self.options = {"world": 1, "batch": 2}

    def number(self) -> int:
        frame = sys._getframe(1)
        self.reads.append(places_of(frame))
        return 2

    def through_names(self) -> None:
        size = self.number()
        pairs = [size * each for each in (1, 2)]
        first, self.second = pairs
        with_default = max(1, int(first))
        self.total = 100 // with_default
        self.constant = 100
        self.length = len("size")

    def through_calls(self) -> None:
        self.result = 1 + _half(self.number())
        self._keep(3, self.number())
        setattr(self, "named", self.number())  # noqa: B010

    def _keep(self, constant: int, given: int) -> None:
        self.plain, self.of_argument = 1, 2 * given
        self.kept = constant

    def through_results(self) -> None:
        self.size = self._more()
        self.size += 1
        self.other = [each + 1 for each in (1, 2)]

    def _more(self) -> int:
        return max(self.number() for _ in range(2))

    def through_attributes(self) -> None:
        self.options["world"] = self.number()
        self._later()
        print_only = f"{self.number()} processes"
        self.text(print_only)

    def _later(self) -> None:
        self.of_key = self.options["world"] * 2
        self.free = self.options["batch"]

    def text(self, _: str) -> None: ...

    def through_branches(self) -> None:
        if self.number() > 1:
            self.chosen = 1
        self.beside = 2

    def to_nowhere(self) -> None:
        self.shown = 1
        self.text(f"{self.number()}")


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("through_names", {"second", "total"}),
        ("through_calls", {"result", "of_argument", "named"}),
        ("through_results", {"size"}),
        ("through_attributes", {"of_key"}),
        ("through_branches", {"chosen"}),
        ("to_nowhere", set()),
    ],
)
def test_attributes_that_get_a_value_are_named(method: str, found: set[str]) -> None:
    reading = Reading()
    getattr(reading, method)()
    assert attributes_made_of(reading.reads, []) & vars(reading).keys() == found


def _half(value: int) -> int:
    return value // 2
