"""Parametrized tests of which `make test` runs some cells, and `make test-all` every cell."""

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["some"]


def some(cells: Iterable[Any], large: Container[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` leaves those in `large` out."""
    return [pytest.param(c, marks=[pytest.mark.exhaustive] if c in large else []) for c in cells]
