"""What the user's step leaves in attributes of the module, which every stage of a pipeline gets.

Note [Attributes of a step]: what a step does after the blocks is done on the last pipeline stage
only, and hooks on every rank read what it has left in the module, such as a list of outputs at the
end of an epoch. So the others take over what the last stage has changed. A step runs once per
micro-batch: a list gets an entry of each of them; see `attribute_values.py` for numbers and
tensors. A hyperparameter of an optimizer that the step sets, such as its learning rate, is taken
over as well, and `trainer.should_stop`.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn, Tensor
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics import Metric

from lightning_par.observe.contents import (
    copy_of,
    LEFT_ALONE,
    refill,
    restore_of,
    stayed,
    UNCHANGEABLE,
)
from lightning_par.observe.outside import (
    is_of_user,
    names_in_hooks,
    outside_scopes,
    Scope,
    scopes_of_run,
)
from lightning_par.strategies.components.sendable import is_data, is_object, NAMESPACES, sendable
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.tensor import count_of_changes

__all__ = [
    "OF_LIGHTNING",
    "StepAttributes",
    "followed_scopes",
    "kept_settings",
    "new_values",
    "settings",
    "stores_in",
]

OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
"""Attributes that every LightningModule has."""

_SETTINGS = (bool, int, float, tuple)
"""Types of those entries of a parameter group, and attributes of a Trainer, that a step may set."""
_DEPTH, _FEW = 4, 32
_WRITTEN = (Tensor, np.ndarray)
"""Types of values into which a step may write."""
_SMALL = 2**20
"""Bytes of an array whose contents are compared; a larger one is data."""


class _Held(NamedTuple):
    """A value before a step, and what tells whether it has changed in place."""

    value: Any
    content: Any

    @classmethod
    def of(cls, value: Any, depth: int = _DEPTH) -> "_Held":
        """Note a value.

        Args:
            value: Of an attribute, or of what is in one.
            depth: How far containers and objects in it are followed; they may refer to each other.
        """
        # None: a value that is compared by identity alone.
        content: Any = None
        if type(value) in UNCHANGEABLE:  # most of them, in every step
            return cls(value, None)
        if isinstance(value, list):
            # Few entries are lists or objects that go on changing, such as one list per loader;
            # many are outputs of steps, which do not.
            entries = enumerate(value) if depth > 0 and len(value) <= _FEW else ()
            followed = ((at, v) for at, v in entries if _is_open(v) or isinstance(v, _WRITTEN))
            inside = {at: cls.of(v, depth - 1) for at, v in followed}
            content = tuple(value), inside
        elif isinstance(value, deque | set):
            content = tuple(value)
        elif isinstance(value, dict) or is_object(value):
            now = value if isinstance(value, dict) else vars(value)
            is_followed = depth == _DEPTH or (depth > 0 and not is_data(now))
            content = {k: cls.of(v, depth - 1) for k, v in now.items()} if is_followed else None
        elif isinstance(value, np.ndarray) and value.nbytes <= _SMALL:
            content = value.tobytes()
        # An inference tensor counts no changes; a tensor otherwise does, also through views.
        elif isinstance(value, Tensor) and not value.is_inference():
            content = count_of_changes(value)
        return cls(value, content)


@dataclass(frozen=True)
class _Appended:
    """What came to a list, and what has changed in its entries: index -> change."""

    items: list[Any]
    changes: dict[int, Any]


@dataclass(frozen=True)
class _Moved:
    """What came to a deque or a set, and how many of its entries of before, the last ones, stay."""

    kept: int
    items: list[Any] | deque[Any]


@dataclass(frozen=True)
class _Entries:
    """What has changed in a dict: key -> change."""

    changes: dict[Any, Any]


@dataclass(frozen=True)
class _Replaced:
    """A new value.

    Attributes:
        value: The value.
        is_written: Whether it was written into the tensor or array that was there.
    """

    value: Any
    is_written: bool = False


@dataclass(frozen=True)
class _Unsent:
    """A change that cannot be sent: other stages keep what they have."""


class StepAttributes:
    """Gives the stages of a pipeline what the user's step has left in the module on the last one.

    Taken over are tensors, arrays, numbers and text in attributes and buffers of the
    LightningModule itself, in its classes and in globals and variables that their code uses, in
    lists, tuples, dicts and objects of the user's classes at any depth, and in such containers of
    its submodules. Other values stay what they are on each stage.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        # Submodules of the user's that hold no parameters of a stage, such as a store of outputs.
        self._parts: dict[str, Any] = {"": module, **stores_in(module)}
        # In angle brackets, which no submodule has in its name.
        self._parts |= {f"<{place}>": scope for place, scope in followed_scopes(module).items()}
        self._before: dict[Any, _Held] = {}
        self._module, self._told = module, set[tuple[str, str]]()
        self._trainer: pl.Trainer | None = None

    def begin(self) -> None:
        """Note what is there before a step."""
        self._trainer = self._trainer or _trainer_of(self._module)
        self._parts |= {
            place: _Settings(held) for place, held in _settings_of(self._trainer).items()
        }
        self._before = {name: _Held.of(value) for name, value in self._held()}

    def changes(self) -> dict[Any, Any]:
        """Return what the step has changed, for `take` on the other stages."""
        return _changes(self._before, dict(self._held()), {})

    def names_changed(self) -> tuple[str, ...]:
        """Return the names of what the step has changed, as code spells them: ``self.losses``."""
        return tuple(_spelled(*place) for place in self.changes())

    def take(self, changes: dict[Any, Any], *, is_source: bool, warns: bool = True) -> None:
        """Have what the last stage has, in the place of what the step did here, and forget what was
        there before. A value that a hook reads, and that cannot be sent, is named in a warning.

        Args:
            changes: Those of the last stage.
            is_source: Whether this is that stage.
            warns: Whether a warning is given.
        """
        unsent = {place for place, change in changes.items() if _has_unsent(change)}
        if warns and unsent - self._told:
            self._warn(unsent - self._told)
            self._told |= unsent
        if is_source:
            self._before = {}
            return
        held = dict(self._held()) if changes else {}
        for (place, attribute), change in changes.items():
            name = place, attribute
            if place not in self._parts:  # in a block of another stage
                continue
            value = _take(change, self._before.get(name), held.get(name))
            # Containers were changed in place: whoever refers to them sees it.
            if value is not held.get(name):
                part = self._parts[place]
                if isinstance(part, Scope):
                    part.write(attribute, value)
                else:
                    setattr(part, attribute, value)
        # The outputs of an epoch are let go when the user's code lets them go.
        self._before = {}

    def _warn(self, places: set[tuple[str, str]]) -> None:
        """Name what other stages lack, if a hook reads it."""
        names = names_in_hooks(self._module, self._trainer)
        read = [_spelled(*place) for place in sorted(places) if place[1] in names]
        if read:
            attributes = ", ".join(read)
            rank_zero_warn(
                f"a step stores values in {attributes} that cannot be sent from the last pipeline "
                "stage to the other stages. A hook on another stage finds the values from before "
                "the step. Store only numbers, text and tensors, and lists, dicts and objects of "
                "classes that are defined in a Python module."
            )

    def _held(self) -> Iterator[tuple[tuple[str, str], Any]]:
        for place, part in self._parts.items():
            if isinstance(part, Scope):
                yield from (((place, name), value) for name, value in part.entries().items())
                continue
            held = vars(part)
            if isinstance(part, _Settings):
                yield from (((place, name), value) for name, value in _plain(held).items())
                continue
            for name, value in held.items():
                if name not in OF_LIGHTNING:
                    yield (place, name), value
            if not place:
                yield from ((("", n), b) for n, b in part.named_buffers(recurse=False))


def followed_scopes(module: nn.Module) -> dict[str, Scope]:
    """Return the classes, globals and closures of the code of a LightningModule, and the callbacks
    and the data module that it refers to, in which a step may leave something; what is large there
    before the first step is data.
    """
    found = outside_scopes([module, *stores_in(module).values()])
    if (trainer := _trainer_of(module)) is not None:
        found |= scopes_of_run(module, trainer)
    for scope in found.values():
        entries = scope.entries().items()
        scope.without.update(name for name, value in entries if _is_of_others(value))
    return found


def _is_of_others(value: Any) -> bool:
    """Whether a value outside of the module is data, or an object of a package's class."""
    if is_object(value):
        is_kept = isinstance(value, NAMESPACES) or is_of_user(type(value).__module__)
        return not is_kept or any(map(is_data, (value, *vars(value).values())))
    inside = value.values() if isinstance(value, dict) else ()
    return is_data(value) or any(map(is_data, inside))


def settings(module: nn.Module) -> dict[str, Any]:
    """Return the hyperparameters of optimizers and plain attributes of the Trainer, by name."""
    return {
        f"{place}[{name!r}]": value
        for place, held in _settings_of(_trainer_of(module)).items()
        for name, value in _plain(held).items()
    }


@contextmanager
def kept_settings(module: nn.Module) -> Iterator[None]:
    """Surrounds a trial of the step; what it sets in optimizers, schedulers, callbacks and the
    Trainer is put back.
    """
    trainer = _trainer_of(module)
    seen = {id(part) for part in module.modules()}
    found: list[Any] = trainer.callbacks if trainer else []  # type: ignore[attr-defined]
    # Those of packages may have threads of their own.
    restores = [restore_of(each, seen) for each in found if is_of_user(type(each).__module__)]
    kept = [(held, _plain(held)) for held in _settings_of(trainer).values()]
    configured = [c.scheduler for c in trainer.lr_scheduler_configs] if trainer else []
    schedules = {
        id(s): s for s in (*configured, *vars(module).values()) if isinstance(s, LRScheduler)
    }
    states = [(s, {n: copy_of(v) for n, v in s.state_dict().items()}) for s in schedules.values()]
    try:
        yield
    finally:
        for held, before in kept:
            held.update(before)
        for scheduler, state in states:
            scheduler.load_state_dict(state)
        for restore in restores:
            restore()


def _trainer_of(module: nn.Module) -> pl.Trainer | None:
    return trainer_of(module) if isinstance(module, pl.LightningModule) else None


def _settings_of(trainer: pl.Trainer | None) -> dict[str, dict[str, Any]]:
    """Return the parameter groups of the optimizers of a run, and the attributes of its Trainer and
    loops, of which a step may set `should_stop` and `max_epochs`; by their names.
    """
    own = {}
    if trainer is not None:
        loop = trainer.fit_loop
        own = {"trainer": trainer, "fit_loop": loop, "epoch_loop": loop.epoch_loop}
    return {name: vars(each) for name, each in own.items()} | {
        f"optimizers[{number}].param_groups[{at}]": group
        for number, optimizer in enumerate(trainer.optimizers if trainer else ())
        for at, group in enumerate(optimizer.param_groups)
    }


class _Settings:
    """A parameter group of an optimizer, or a Trainer; its entries are attributes here."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.__dict__ = held


def _plain(held: dict[str, Any]) -> dict[str, Any]:
    """Return those entries of settings that a step may set."""
    return {
        name: value
        for name, value in held.items()
        if not name.startswith("_") and isinstance(value, _SETTINGS)
    }


def stores_in(module: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules of the user's without parameters, in which a step may keep something,
    such as a loss that counts; by their names, such as ``self.loss``.
    """
    return {
        f"self.{place}": part
        for place, part in module.named_modules()
        if place
        and _keeps(part, is_outer="." not in place)
        and next(part.parameters(), None) is None
    }


def _keeps(part: nn.Module, *, is_outer: bool) -> bool:
    """Whether a submodule is one of the user's next to the model, or keeps containers."""
    package = type(part).__module__
    if isinstance(part, Metric) or package.partition(".")[0] in LEFT_ALONE:
        return False
    kept = (value for name, value in vars(part).items() if name not in OF_LIGHTNING)
    return (is_outer and is_of_user(package)) or any(map(_is_open, kept))


def _spelled(place: str, name: str) -> str:
    """Return the name of what `StepAttributes` follows as code spells it."""
    return f"{place.strip('<>') or 'self'}.{name}"


def _changes(before: dict[Any, _Held], now: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    found = ((key, _change(before.get(key), value, memo)) for key, value in now.items())
    return {key: change for key, change in found if change is not None}


def _change(before: _Held | None, value: Any, memo: dict[int, Any]) -> Any:
    """Return what has changed in a value; `_Unsent` if that cannot be sent.

    Args:
        before: The value before the step.
        value: The value after it.
        memo: As of `sendable`.
    """
    # The same object: what has changed is inside of it. Another one is sent whole.
    if before is not None and before.value is value:
        if type(value) in UNCHANGEABLE:
            return None
        # A list of a user's class may have attributes, too, of which nothing is kept.
        if not isinstance(value, list | deque | set) and _is_open(value):
            if before.content is None:
                return None
            now = value if isinstance(value, dict) else vars(value)
            changes = _changes(before.content, now, memo)
            if sendable([*changes], {}) is None:
                return _Unsent()
            return _Entries(changes) if changes else None
        if isinstance(value, list) and len(value) >= len(before.content[0]):
            entries, inside = before.content
            return _appended(entries, inside, value, memo)
        if isinstance(value, deque | set):
            return _moved(before.content, value, memo)
        # A list that is shorter now is sent whole.
        if not isinstance(value, list) and before.content == _Held.of(value).content:
            return None
    sent = sendable([value], memo)
    is_written = before is not None and before.value is value
    is_written &= isinstance(value, Tensor | np.ndarray)
    return _Unsent() if sent is None else _Replaced(sent[0], is_written)


def _appended(
    before: tuple[Any, ...], inside: dict[int, _Held], value: list[Any], memo: dict[int, Any]
) -> Any:
    # By identity, as for attributes: to compare the entries of tensors would wait for the device.
    now = {
        at: v for at, v in enumerate(value[: len(before)]) if at in inside or v is not before[at]
    }
    changes = _changes(inside, now, memo)
    # Only what came: an epoch's outputs would be sent again at every step.
    items = sendable(value[len(before) :], memo)
    if items is None:
        return _Unsent()
    return _Appended(items, changes) if items or changes else None


def _moved(before: tuple[Any, ...], value: deque[Any] | set[Any], memo: dict[int, Any]) -> Any:
    if isinstance(value, set) and value == {*before}:
        return None
    now = [*value]
    kept = stayed(before, now) if isinstance(value, deque) else 0
    items = sendable(now[kept:], memo)
    if items is None:
        return _Unsent()
    moved = _Moved(kept, deque(items) if isinstance(value, deque) else items)
    return None if kept == len(before) == len(now) else moved


def new_values(changes: dict[Any, Any]) -> dict[str, dict[str, Any]]:
    """Return what `StepAttributes.changes` has found, by the names of scopes as in
    `attribute_paths`, without entries that came to a list.
    """
    found: dict[str, dict[str, Any]] = {}
    for (place, attribute), change in changes.items():
        if not place or place.startswith(("self.", "<")):  # no setting of the Trainer
            found.setdefault(place.strip("<>"), {})[attribute] = _new(change)
    return found


def _new(change: Any) -> Any:
    if isinstance(change, _Entries | _Appended):
        return {key: _new(entry) for key, entry in change.changes.items()}
    if isinstance(change, _Moved):
        return change.items
    return change.value if isinstance(change, _Replaced) else None


def _take(change: Any, before: _Held | None, value: Any) -> Any:
    """Return a value with the changes of the last stage; lists and dicts are changed in place."""
    if isinstance(change, _Unsent):
        return value
    if isinstance(change, _Replaced):
        is_written = change.is_written and type(value) is type(change.value)
        is_written = is_written and np.shape(value) == np.shape(change.value)
        if is_written and not getattr(value, "requires_grad", False):
            with torch.no_grad():
                value[...] = change.value  # whoever else holds it sees it
            return value
        return change.value
    if isinstance(change, _Appended):
        # Here the step has bound a new list, or none: the entries that were sent are all there
        # is.
        if before is None or before.value is not value:
            return change.items
        held, inside = before.content
        # In the place of what the step has put into it on this stage.
        value[:] = (*held, *change.items)
        for at, entry in change.changes.items():
            # Entries that cannot be sent are not here.
            if at < len(held):
                value[at] = _take(entry, inside.get(at), held[at])
        return value
    if isinstance(change, _Moved):
        held = before.content if before is not None and before.value is value else ()
        # In the place of what the step did here.
        refill(value, (*held[len(held) - change.kept :], *change.items))
        return value
    contents = {} if before is None else before.content
    # The same for a dict.
    if before is None or before.value is not value:
        value = {}
    target = value if isinstance(value, dict) else vars(value)
    for key, entry in change.changes.items():
        if not isinstance(entry, _Unsent):
            target[key] = _take(entry, contents.get(key), target.get(key))
    return value


def _has_unsent(change: Any) -> bool:
    inside = change.changes.values() if isinstance(change, _Entries | _Appended) else ()
    return isinstance(change, _Unsent) or any(map(_has_unsent, inside))


def _is_open(value: Any) -> bool:
    """Whether a step may change a value in place, without a sign that is cheap to compare."""
    return isinstance(value, list | dict | deque | set) or is_object(value)
