"""Values that another rank can rebuild: containers, and objects of plain classes."""

import copy
import sys
from argparse import Namespace
from collections import Counter, defaultdict, deque, OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, time, timedelta
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import nn, Tensor

from lightning_par.dtensor import whole
from lightning_par.engine.tensor_tree import rebuild
from lightning_par.observe.contents import LEFT_ALONE, UNCHANGEABLE

__all__ = [
    "NAMESPACES",
    "is_data",
    "is_object",
    "is_rebuilt",
    "sendable",
    "shallow_copy",
]

_PLAIN = (
    Enum,
    PurePath,
    date,
    time,
    timedelta,
    range,
    np.ndarray,
    np.generic,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
)
"""Types whose values are sent as they are, if other ranks find their class."""
_SIZED, _DATA = (list, dict, set, deque, tuple), 1000
"""Types of containers, and how many entries one has that is data if it is no attribute."""
_OF_PICKLE = (
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getattr__",
    "__getattribute__",
    "__slots__",
    "__new__",
)
"""What classes define whose objects cannot be made from their attributes."""
NAMESPACES = (SimpleNamespace, Namespace)
"""Objects of Python that have attributes only."""


def sendable(values: list[Any], memo: dict[int, Any]) -> list[Any] | None:
    """Return values with whole tensors, or None if one of them cannot be sent.

    Args:
        values: Any values.
        memo: What was made of others that are sent with them, by the ids of these; it is filled.
    """
    try:
        return [_sent(value, memo) for value in values]
    except Exception:  # whatever a class raises that is made in another way
        return None


class _NotSendableError(Exception):
    pass


def _sent(value: Any, memo: dict[int, Any], depth: int = 8) -> Any:
    """Return a value with whole tensors.

    Args:
        value: Any value.
        memo: As of `sendable`.
        depth: How far containers and objects in it are followed; they may refer to each other.

    Raises:
        _NotSendableError: Other ranks cannot make such a value from its parts.
    """
    if type(value) in UNCHANGEABLE:
        return value
    if id(value) not in memo:
        if not depth:
            raise _NotSendableError
        memo[id(value)] = _made(value, lambda held: _sent(held, memo, depth - 1))
    return memo[id(value)]


def _made(value: Any, sent: Callable[[Any], Any]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        # A DTensor's parts are gathered; stages have no graph of each other.
        return whole(value.detach())
    if not _is_importable(kind):
        raise _NotSendableError
    if isinstance(value, _PLAIN):
        return value
    if kind in (list, set, frozenset):
        return kind(map(sent, value))
    if kind is deque:
        return deque(map(sent, value), value.maxlen)
    if isinstance(value, tuple) and is_rebuilt(kind):
        return rebuild(value, [*enumerate(map(sent, value))])
    if kind in (dict, Counter, OrderedDict):
        return kind({sent(key): sent(entry) for key, entry in value.items()})
    if isinstance(value, dict) and is_dataclass(value):  # an output of a model of transformers
        return kind(**{key: sent(entry) for key, entry in value.items()})
    if kind in NAMESPACES:
        return kind(**{name: sent(held) for name, held in vars(value).items()})
    if isinstance(value, UserDict):  # such as a batch of a tokenizer, without its encodings
        if any(
            type(held) not in UNCHANGEABLE for name, held in vars(value).items() if name != "data"
        ):
            raise _NotSendableError
        made = copy.copy(value)
        made.data = sent(value.data)
        return made
    if not is_object(value) or not _is_plain(value):
        raise _NotSendableError
    made = object.__new__(kind)
    vars(made).update({name: sent(held) for name, held in vars(value).items()})
    return made


def shallow_copy(value: Any) -> Any:
    """Return a container or an object with the same entries or attributes; one of a class that may
    need more is returned itself.
    """
    kind = type(value)
    if kind in (list, dict, Counter, OrderedDict, defaultdict) or isinstance(value, UserDict):
        return copy.copy(value)
    if kind in NAMESPACES:
        return kind(**vars(value))
    if isinstance(value, dict) and is_dataclass(value):
        return kind(**value) if value.keys() <= {each.name for each in fields(value)} else value
    if not is_object(value) or not _is_plain(value):
        return value
    made = object.__new__(kind)
    vars(made).update(vars(value))
    return made


def is_rebuilt(kind: type) -> bool:
    """Whether a kind of tuple can be made from its entries: a plain one, one with names, or that of
    a function of torch such as `max`.
    """
    return kind is tuple or hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")


def is_data(value: Any) -> bool:
    """Whether a value is a large container, which holds data rather than what a step has kept."""
    return isinstance(value, _SIZED) and len(value) > _DATA


def _is_plain(value: Any) -> bool:
    """Whether the attributes are all that an object has, and nothing is looked up in other ways."""
    kind = type(value)
    # Empty slots, as those of abstract base classes, say nothing.
    special = any(vars(each).get(name) for each in kind.__mro__[:-1] for name in _OF_PICKLE)
    is_large = any(map(is_data, vars(value).values()))  # which many objects may share
    return not special and not is_large and not isinstance(value, (*_SIZED, str, bytes))


def _is_importable(kind: type) -> bool:
    """Whether other ranks find a class by its name."""
    return getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind


def is_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's, such as a meter."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | Tensor | type)
        and not callable(value)
        and package not in LEFT_ALONE
        and (isinstance(value, NAMESPACES) or package not in sys.stdlib_module_names - {"__main__"})
    )
