"""When Python's garbage collector runs."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["few_collections", "no_collections"]

_NEVER = 2**30


@contextmanager
def few_collections() -> Iterator[None]:
    """Inside, no collection of the oldest generation starts by itself.

    One walks over every object of torch and Lightning, some 0.3 s, and starts whenever objects have
    grown by a quarter, which set-up and first step of a model with many modules do several times.
    Younger generations are collected as always, so that tensors in reference cycles are freed.

    Examples:
        >>> before = gc.get_threshold()
        >>> with few_collections():
        ...     gc.get_threshold() == before
        False
        >>> gc.get_threshold() == before
        True
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, no collection starts by itself.

    For short work that makes many objects and frees them: those that a collection meets while they
    live count as old ever after, so that one of the oldest generation comes sooner.

    Examples:
        >>> with no_collections():
        ...     gc.isenabled()
        False
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
