"""What the user's step leaves in attributes of the module, the same on every pipeline stage.

Note [Attributes of a step]: what a step does after the blocks is done on the last stage only, and
hooks on every rank read what it has left in the module, such as a list of outputs at the end of an
epoch. So the others take over what the last stage has changed. A step runs once per micro-batch: a
list gets an entry of each of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn, Tensor

from lightning_par.dtensor import whole
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["StepAttributes"]

_OWN = frozenset(vars(nn.Module()))
_PLAIN = (np.ndarray, np.generic, bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class _Held:
    """A value before a step, and what tells whether it has changed in place."""

    value: Any
    content: Any

    @classmethod
    def of(cls, value: Any) -> "_Held":
        content: Any = None
        if isinstance(value, list):
            content = len(value)
        elif isinstance(value, dict):
            content = {key: cls.of(entry) for key, entry in value.items()}
        elif isinstance(value, Tensor) and not value.is_inference():
            content = count_of_changes(value)
        return cls(value, content)


@dataclass(frozen=True)
class _Appended:
    """What came to a list."""

    items: list[Any]


@dataclass(frozen=True)
class _Entries:
    """What has changed in a dict: key -> change."""

    changes: dict[Any, Any]


@dataclass(frozen=True)
class _Replaced:
    """A new value."""

    value: Any


class StepAttributes:
    """Gives the stages of a pipeline what the user's step has left in the module on the last one.

    Taken over are tensors, arrays, numbers and text in attributes and buffers of the
    LightningModule itself, and lists, tuples and dicts of them. Other values stay what they are on
    each stage.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, _Held] = {}

    def begin(self) -> None:
        """Note what is there before a step."""
        self._before = {name: _Held.of(value) for name, value in self._held()}

    def changes(self) -> dict[str, Any]:
        """Return what the step has changed, for `take` on the other stages."""
        return _changes(self._before, dict(self._held()))

    def take(self, changes: dict[str, Any]) -> None:
        """Have what the last stage has, in the place of what the step did here.

        Args:
            changes: Those of the last stage.
        """
        held = dict(self._held())
        for name, change in changes.items():
            value = _take(change, self._before.get(name), held.get(name))
            if value is not held.get(name):
                setattr(self._module, name, value)

    def _held(self) -> Iterator[tuple[str, Any]]:
        yield from self._module.named_buffers(recurse=False)
        for name, value in vars(self._module).items():
            if name not in _OWN and not name.startswith("_"):
                yield name, value


def _changes(before: dict[Any, _Held], now: dict[Any, Any]) -> dict[Any, Any]:
    found = ((key, _change(before.get(key), value)) for key, value in now.items())
    return {key: change for key, change in found if change is not None}


def _change(before: _Held | None, value: Any) -> Any:
    """Return what has changed in a value, if that can be sent."""
    if before is not None and before.value is value:
        if isinstance(value, dict):
            changes = _changes(before.content, value)
            return _Entries(changes) if changes else None
        if before.content == _Held.of(value).content:
            return None
        if isinstance(value, list) and len(value) > before.content:
            items = _sendable(value[before.content :])
            return None if items is None else _Appended(items)
    sent = _sendable([value])
    return None if sent is None else _Replaced(sent[0])


def _sendable(values: list[Any]) -> list[Any] | None:
    """Return values with whole tensors, or None if one of them cannot be sent."""
    found = []
    for value in values:
        made: Any
        if isinstance(value, Tensor):
            made = whole(value.detach())
        elif isinstance(value, _PLAIN):
            made = value
        elif type(value) in (list, tuple):
            made = _sendable(list(value))
            made = made if made is None else type(value)(made)
        elif type(value) is dict:
            entries = _sendable(list(value.values()))
            made = None if entries is None else dict(zip(value, entries, strict=True))
        else:
            return None
        if made is None and value is not None:
            return None
        found.append(made)
    return found


def _take(change: Any, before: _Held | None, value: Any) -> Any:
    """Return a value with the changes of the last stage; lists and dicts are changed in place."""
    if isinstance(change, _Replaced):
        return change.value
    if isinstance(change, _Appended):
        if before is None or before.value is not value:
            return change.items
        value[before.content :] = change.items
        return value
    contents = {} if before is None else before.content
    target = {} if before is None or before.value is not value else value
    for key, entry in change.changes.items():
        target[key] = _take(entry, contents.get(key), target.get(key))
    return target
