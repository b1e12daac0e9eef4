"""Contents of values that can change: kept, and put back in place."""

import copy
import inspect
import io
import random
import sys
from argparse import Namespace
from collections import Counter, deque, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn, Tensor

__all__ = [
    "LEFT_ALONE",
    "UNCHANGEABLE",
    "copy_of",
    "is_container",
    "is_foreign",
    "is_iterator",
    "is_written_to",
    "names_in",
    "names_in_method",
    "refill",
    "restore_of",
    "stayed",
]

LEFT_ALONE = ("lightning", "lightning_par", "numpy", "pytorch_lightning", "torch")
"""Packages whose objects no step is expected to change; those of Python are, too."""
UNCHANGEABLE = frozenset(
    {bool, bytes, complex, float, int, NoneType, str, torch.device, torch.dtype, torch.Size}
)
"""Classes of values that nothing can change, which most attributes hold."""
_KEPT = 2**24
"""Bytes of a file of which a copy is kept."""


def is_foreign(module_name: str) -> bool:
    """Return whether a module is part of Python or of a package of `LEFT_ALONE`."""
    # By its first part: submodules have their package's name before the dot.
    package = module_name.partition(".")[0]
    return package in LEFT_ALONE or package in sys.stdlib_module_names


def names_in(function: Any) -> set[str]:
    """Return the names that a function looks up: attributes, globals, and those of functions in it.

    Args:
        function: Any callable, perhaps decorated; one that is not written in Python looks up none.
    """
    # What the user has written, below a decorator such as `functools.wraps`.
    unwrapped = inspect.unwrap(function) if callable(function) else function
    found, codes = set[str](), [getattr(unwrapped, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            found.update(code.co_names)
            # Nested functions, lambdas and comprehensions are constants of the code around them.
            codes += code.co_consts
    return found


def names_in_method(kind: type, name: str) -> set[str]:
    """Return the names that a method of a class looks up, and those methods of the class that it
    names, at any depth.

    Args:
        kind: The class; what is not written in Python, or not there, looks up none.
        name: Of the method.
    """
    found, places, seen = set[str](), [name], {name}
    while places:
        names = names_in(getattr(kind, places.pop(), None))
        found |= names
        own = {n for n in names - seen if inspect.isfunction(getattr(kind, n, None))}
        places += own
        seen |= own
    return found


def restore_of(value: Any, seen: set[int]) -> Callable[[], Any]:
    """Return a function that gives a mutable value its present contents again, at any depth.

    Args:
        value: Of an attribute, or of what is in one.
        seen: Ids of the containers and objects that have such a function, or need none.
    """
    if type(value) in UNCHANGEABLE:
        return _nothing
    if isinstance(value, Tensor):
        return _nothing if id(value) in seen else _restore_tensor(value)
    # Before objects: a file has a `__dict__` and would be taken for one.
    if isinstance(value, io.IOBase):
        return _restore_file(value, seen)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    held = value if is_container(value) else _attributes(value)
    copied = copy_of(value if held is None else held)
    # Nothing mutable, or in work already: objects may refer to each other in a circle.
    if copied is value or id(value) in seen:
        return _nothing
    if isinstance(value, torch.Generator):
        return partial(value.set_state, copied)
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, copied) if value.flags.writeable else _nothing
    # Before its items, which may hold it.
    seen.add(id(value))
    inside = copied.values() if isinstance(copied, dict) else copied
    items = [restore_of(item, seen) for item in inside]
    if held is value and (own := _attributes(value)) is not None:
        items.append(restore_of(own, seen))  # of a list of a user's class

    def restore() -> None:
        # The container first: the items that were put into it again are those restored below.
        refill(held, copied)
        for restore_item in items:
            restore_item()

    return restore


def _restore_tensor(value: Tensor) -> Callable[[], Any]:
    # Weights are kept or not by the caller, who knows their size; what has a graph is no state.
    has_graph = value.requires_grad and not value.is_leaf
    if isinstance(value, nn.Parameter) or has_graph or value.is_meta or not is_written_to(value):
        return _nothing
    # `.data`, so that neither autograd nor the version counter of a saved tensor notices.
    return partial(value.data.copy_, copy_of(value))


def _nothing() -> None:
    """What has no contents has nothing to put back."""


def is_written_to(value: Tensor) -> bool:
    """Whether anyone can write to a tensor: torch lets nobody write to one that was expanded."""
    # What stands for a parameter of another stage would take it for a use of its values.
    with torch.DisableTorchFunctionSubclass():
        if value.layout != torch.strided:
            return True
        # A stride of 0 means many entries in one place (`expand`).
        return all(step or size < 2 for step, size in zip(value.stride(), value.shape, strict=True))


def _restore_file(file: Any, seen: set[int]) -> Callable[[], Any]:
    """Return a function that gives an open file its present place, size and contents again.

    Contents are kept of a file that may be read, and has `_KEPT` bytes at most; of any other what
    is written beyond its end is cut off.
    """
    if id(file) in seen or file.closed or not file.seekable():
        return _nothing
    seen.add(id(file))
    # Of text the bytes are changed, in which a size is one number and any place can be read.
    below = file.buffer if isinstance(file, io.TextIOWrapper) else file
    try:
        place = file.tell()
        if not file.writable():
            return partial(_go_back, file, place)
        # What was written before is the run's, and must not wait in a buffer beyond the place.
        file.flush()
        size = below.seek(0, io.SEEK_END)
        kept = None
        if file.readable() and size <= _KEPT:
            below.seek(0)
            kept = below.read(size)
        file.seek(place)
    # Text between two lines of a loop has no place, a compressed file that is written no size.
    except (OSError, ValueError):
        return _nothing

    def restore() -> None:
        if file.closed:
            return
        file.flush()
        below.seek(0)
        if kept and below.read(size) != kept:
            # Cut off first: a file that is open to append writes at its end only.
            below.truncate(0)
            below.seek(0)
            below.write(kept)
        # Never longer: that would fill a file with zeros.
        if below.seek(0, io.SEEK_END) > size:
            below.truncate(size)
        file.seek(place)

    return restore


def _go_back(file: Any, place: int) -> None:
    if not file.closed:
        file.seek(place)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, such as a meter or metric in a list, if a step may change
    it; None for values and for what belongs to the run.
    """
    if isinstance(value, type):
        return None
    # Made of torch or Python, but what they hold is the user's.
    of_user = isinstance(value, nn.Module | SimpleNamespace | Namespace)
    if not of_user and is_foreign(type(value).__module__):
        return None
    return getattr(value, "__dict__", None)


def copy_of(value: Any) -> Any:
    """Return what a mutable value holds; any other as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict) and is_container(value):
        return dict(value)
    return copy.copy(value) if is_container(value) else value


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator that cannot be put back, such as a generator.

    A file can be, as can an iterator of a user's class, by its attributes.
    """
    return (
        type(value) not in UNCHANGEABLE
        and isinstance(value, Iterator)
        and not isinstance(value, io.IOBase)
        and _attributes(value) is None
    )


def is_container(value: Any) -> bool:
    """Return whether a value is a container of Python whose contents can be put back."""
    # Subclasses of list are refilled in place like it. Of dicts only those whose `update` replaces
    # items, as Lightning's for hyperparameters: that of a user's class may do anything.
    if isinstance(value, dict) and type(value).update is dict.update:
        return True
    kinds = (set, Counter, OrderedDict)
    return isinstance(value, list | deque) or type(value) in kinds


def refill(value: Any, items: Any) -> None:
    """Give a container these items and no others."""
    value.clear()
    if isinstance(value, list | deque):
        value.extend(items)
    else:
        value.update(items)


def stayed(before: Sequence[Any], now: Sequence[Any]) -> int:
    """Return how many entries of a deque have stayed.

    Args:
        before: Its entries before a step.
        now: Those after it.
    """
    most = min(len(before), len(now))
    # It drops entries in front: the longest end of before with which it now begins has stayed.
    ends = ((n, zip(before[len(before) - n :], now, strict=False)) for n in range(most, 0, -1))
    return next((n for n, pairs in ends if all(a is b for a, b in pairs)), 0)
