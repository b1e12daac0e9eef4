"""Functions that are diverted while they are diverted already, as by two runs in one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from inspect import signature

from lightning_par.upstream.functions import copied_function, diverted


def count(start: int, *, step: int = 1) -> int:
    return start + step


def adding(number: int) -> AbstractContextManager[None]:
    original: Callable[..., int] = copied_function(count)

    @wraps(original)
    def add(*args: int, **kwargs: int) -> int:
        return original(*args, **kwargs) + number

    return diverted(count, add)


def test_the_inner_one_calls_the_outer_one_and_knows_the_signature() -> None:
    with adding(10):
        with adding(100):
            assert count(1) == 112
            assert list(signature(copied_function(count)).parameters) == ["start", "step"]
        assert count(1, step=2) == 13
    assert count(1) == 2
