"""What the user's code keeps outside of its module: globals, closures and class attributes.

A script often notes what happens in a list next to the module, or counts on its class. The first
look and the proof run the user's code once more than one process does; what it has changed there is
put back. Stages of a pipeline hand it on like attributes. Found are the names that the code itself
uses, and those of functions that it calls.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_par.observe.contents import (
    is_container,
    is_foreign,
    names_in,
    restore_of,
    UNCHANGEABLE,
)
from lightning_par.upstream.lightning import callbacks_of

__all__ = [
    "Scope",
    "data_of",
    "is_of_user",
    "names_in_hooks",
    "outside_kept",
    "outside_scopes",
    "outside_state",
    "scopes_of_run",
]

_OF_THE_RUN = (
    nn.Module,
    pl.Trainer,
    pl.Callback,
    pl.LightningDataModule,
    Strategy,
    DataLoader,
    Dataset,
)
"""What `untouched` and the proof take care of, or what is only read and may be large."""
_NO_STATE = (
    *(FunctionType, MethodType, BuiltinFunctionType, partial, type, ModuleType),
    *(property, staticmethod, classmethod),
    *_OF_THE_RUN,
)
"""Code, and what `_OF_THE_RUN` has: no step keeps its values in them."""
_NO_FUNCTIONS = UNCHANGEABLE | {dict, list, nn.Parameter, Tensor, tuple}
"""Classes of most attributes, in which no function is looked for."""
_SHORT = 128
"""Entries up to which a container in a data module is no data."""
_LARGEST = 100_000
"""Items up to which a container is looked into; a larger one is data."""


@dataclass(frozen=True)
class Scope:
    """Names to which the user's code binds values: attributes of an object or of a class, globals
    of a module, or variables of the function around another one.

    Attributes:
        held: What the names are bound to now.
        write: Binds a name.
        drop: Removes a name.
        names: Those that belong to the user's code; None: all but special ones.
        without: Those that are left out, such as large data.
    """

    held: Mapping[str, Any]
    write: Callable[[str, Any], Any]
    drop: Callable[[str], Any]
    names: set[str] | None = None
    without: set[str] = field(default_factory=set)

    def entries(self) -> dict[str, Any]:
        """Return what the names are bound to, without code, and what is kept elsewhere."""
        known = {*self.held} if self.names is None else self.names.intersection(self.held)
        # In one order on all ranks, which may have to gather what stands there.
        named = {name: self.held[name] for name in sorted(known - self.without)}
        return {
            name: value
            for name, value in named.items()
            if not name.startswith("__") and not isinstance(value, _NO_STATE)
        }


@contextmanager
def outside_kept(owners: Iterable[object]) -> Iterator[None]:
    """Leave alone what the methods of some objects refer to outside of these objects.

    Restored are values of global and nonlocal names, attributes of classes, and at any depth the
    contents of containers and objects that they lead to.

    Args:
        owners: The module, its parts, callbacks, and the data module.
    """
    put_back = outside_state(owners)
    try:
        yield
    finally:
        put_back()


def outside_state(owners: Iterable[object]) -> Callable[[], None]:
    """Return a function that gives what `outside_kept` restores its present state, at any time.

    Args:
        owners: The module, its parts, callbacks, and the data module.
    """
    found, owners = _References(), list(owners)
    found.add_owners(owners)
    restores = list(found.restores)
    # No run has a copy of it.
    data = (owner for owner in owners if isinstance(owner, pl.LightningDataModule))
    restores += [_restore_numbers(vars(owner)) for owner in data]

    def put_back() -> None:
        for restore in restores:
            restore()

    return put_back


def data_of(trainer: Any) -> list[Any]:
    """Return the data module of a Trainer in a list, which is empty without one."""
    data = getattr(trainer, "datamodule", None)
    return [] if data is None else [data]


def _restore_numbers(held: dict[str, Any]) -> Callable[[], None]:
    """Return a function that gives attributes their present numbers and short lists and dicts;
    what is larger is data.
    """
    before = {
        name: (value, restore_of(value, set()))
        for name, value in held.items()
        if type(value) in UNCHANGEABLE or (is_container(value) and len(value) <= _SHORT)
    }
    others = held.keys() - before.keys()

    def put_back() -> None:
        for name in held.keys() - before.keys() - others:
            del held[name]
        for name, (value, restore) in before.items():
            held[name] = value
            restore()

    return put_back


def outside_scopes(owners: Iterable[object]) -> dict[str, Scope]:
    """Return where the methods of some objects may keep values outside of these objects, by names
    that are the same on all ranks.

    Args:
        owners: The module and its parts.
    """
    found = _References(keeps=False)
    found.add_owners(owners)
    return found.scopes


def scopes_of_run(module: nn.Module, trainer: pl.Trainer) -> dict[str, Scope]:
    """Return the attributes of the user's callbacks and data module, if the code of the module
    refers to them, or the module holds them; by names that are the same on all ranks.

    Args:
        module: The LightningModule.
        trainer: That of its run.
    """
    kind = type(module)
    functions = (getattr(kind, name, None) for name in dir(kind))
    code = (f for f in functions if is_of_user(getattr(f, "__module__", None)))
    names = set[str]().union(*map(names_in, code))
    kept = {id(value) for value in vars(module).values()}
    found: dict[str, Scope] = {}
    # Ranks may have other callbacks of Lightning, such as a progress bar.
    for owner in [*callbacks_of(trainer), *data_of(trainer)]:
        word = "callbacks" if isinstance(owner, pl.Callback) else "datamodule"
        if is_of_user(type(owner).__module__) and (word in names or id(owner) in kept):
            held, number = vars(owner), sum(type(owner).__name__ in place for place in found)
            place = f"trainer.{word}: {type(owner).__name__} {number}"
            found[place] = Scope(held, held.__setitem__, held.__delitem__)
    return found


class _Closure(Mapping[str, Any]):
    """Variables of the function around another one, by their names."""

    def __init__(self, cells: dict[str, CellType]) -> None:
        self._cells = cells

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except ValueError:  # it is empty
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._cells if name in self)

    def __len__(self) -> int:
        return len([*self])

    def write(self, name: str, value: Any) -> None:
        """Bind a variable."""
        self._cells[name].cell_contents = value

    def drop(self, name: str) -> None:
        """Make a variable unbound."""
        del self._cells[name].cell_contents


class _References:
    """Values that functions and classes of the user refer to.

    Args:
        keeps: Whether their present values are kept, to be restored.

    Attributes:
        restores: Each gives one of them its present value again.
        scopes: Where the names of these values stand.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.restores: list[Callable[[], Any]] = []
        self.scopes: dict[str, Scope] = {}
        self._keeps, self._spaces = keeps, dict[int, set[str]]()
        self._seen: set[int] = set()
        self._names: set[tuple[int, str]] = set()

    def add_owners(self, owners: Iterable[object]) -> None:
        """Add the classes of objects, and functions that were put on an object."""
        # An iterator is walked through twice.
        owners = list(owners)
        for kind in dict.fromkeys(map(type, owners)):
            self.add_class(kind)
        for owner in owners:
            # Such as `model.loss = my_loss`: no method of the class.
            for value in vars(owner).values():
                if type(value) not in _NO_FUNCTIONS:
                    self.add_function(value)  # as one that was put on the object

    def _add_scope(self, place: str, scope: Scope) -> None:
        # The script is `__main__`, and `__mp_main__` where it was spawned. Two functions that were
        # made by one have one name.
        place, number = place.replace("__mp_main__", "__main__"), 1
        while place in self.scopes:
            number += 1
            place = f"{place.partition('#')[0]}#{number}"
        self.scopes[place] = scope

    def add_class(self, kind: type) -> None:
        """Add the attributes and methods of a class and of those that it is derived from."""
        for base in kind.__mro__:
            if id(base) in self._seen or not is_of_user(base.__module__):
                continue
            # Before its attributes, which may name the class again.
            self._seen.add(id(base))
            attributes = dict(vars(base))
            self.restores.append(partial(_restore_class, base, attributes))
            writes = partial(setattr, base), partial(delattr, base)
            place = f"{base.__module__}.{base.__qualname__}"
            self._add_scope(place, Scope(vars(base), *writes))
            for value in attributes.values():
                self._add(value)

    def add_function(self, value: Any) -> None:
        """Add what a function, method, property or partial refers to; nothing of another value."""
        if type(value) in UNCHANGEABLE or is_container(value):
            return
        # Of methods, partials, properties and decorated functions: what is inside of each.
        for name in ("__func__", "func", "fget", "__wrapped__"):
            inner = getattr(value, name, None) if not isinstance(value, type) else None
            if inner is not None:
                self.add_function(inner)
        if not isinstance(value, FunctionType) or id(value) in self._seen:
            return
        if not is_of_user(value.__module__):
            return
        self._seen.add(id(value))
        if value.__closure__:
            held = _Closure(dict(zip(value.__code__.co_freevars, value.__closure__, strict=True)))
            place = f"{value.__module__}.{value.__qualname__}()"
            self._add_scope(place, Scope(held, held.write, held.drop))
        names = names_in(value)
        self._add_names(value.__globals__, names)
        for cell in value.__closure__ or ():
            self._add_cell(cell)
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._add(default)

    def _add_names(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        if id(namespace) not in self._spaces:
            known = self._spaces[id(namespace)] = set()
            writes = namespace.__setitem__, namespace.__delitem__
            self._add_scope(str(namespace.get("__name__")), Scope(namespace, *writes, known))
        self._spaces[id(namespace)].update(names)
        for name in sorted(names):
            if name in namespace and (id(namespace), name) not in self._names:
                self._names.add((id(namespace), name))
                # Bound again at the end, and its contents restored if it is a container.
                value = namespace[name]
                self.restores.append(partial(namespace.__setitem__, name, value))
                self._add(value)
                # `helpers.count += 1`: the name is an attribute of a module of the user's. With
                # all names of the function, as bytecode does not say which belong to which.
                if isinstance(value, ModuleType) and is_of_user(value.__name__):
                    self._add_names(vars(value), names)

    def _add_cell(self, cell: CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty
            return
        if id(cell) not in self._seen:
            self._seen.add(id(cell))
            self.restores.append(partial(setattr, cell, "cell_contents", value))
            self._add(value)

    def _add(self, value: Any) -> None:
        if isinstance(value, type):
            # Modules are code of the model, which stages run apart.
            if self._keeps or not issubclass(value, nn.Module):
                self.add_class(value)
        elif isinstance(value, FunctionType | property | staticmethod | classmethod | partial):
            self.add_function(value)
        elif not self._keeps:
            return
        # Before the next branch: classes of torchmetrics are a package's, their states the user's.
        elif isinstance(value, Metric | random.Random):  # which steps change, although not theirs
            self.restores.append(restore_of(value, self._seen))
        elif isinstance(value, (ModuleType, *_OF_THE_RUN)) or _is_of_a_package(value):
            return
        elif not is_container(value) or len(value) <= _LARGEST:
            self.restores.append(restore_of(value, self._seen))


def _is_of_a_package(value: Any) -> bool:
    """Whether a value is an object of an installed package, such as the run of a logger, which may
    have threads of its own.
    """
    kept = isinstance(value, Tensor | SimpleNamespace | Namespace) or is_container(value)
    return not kept and hasattr(value, "__dict__") and not is_of_user(type(value).__module__)


# Asked for every value; reading `__file__` is what costs.
@cache
def is_of_user(module_name: str | None) -> bool:
    """Whether a module is no part of Python or of a package that was installed."""
    module = sys.modules.get(module_name or "")
    if module is None or module_name == "__main__":
        return module is not None
    folders = {"site-packages", "dist-packages"}.intersection(
        Path(getattr(module, "__file__", None) or "").parts
    )
    return not folders and not is_foreign(module.__name__)


def names_in_hooks(module: nn.Module, trainer: pl.Trainer | None) -> set[str]:
    """Return the names that hooks of the user's look up, those of the module and of callbacks."""
    owners = [module, *(callbacks_of(trainer) if trainer is not None else ())]
    kinds = {type(owner) for owner in owners if is_of_user(type(owner).__module__)}
    hooks = (getattr(kind, name) for kind in kinds for name in dir(kind) if name.startswith("on_"))
    return set[str]().union(*map(names_in, hooks))


def _restore_class(kind: type, attributes: dict[str, Any]) -> None:
    # What the step has put on the class.
    for name in vars(kind).keys() - attributes.keys():
        delattr(kind, name)
    for name, value in attributes.items():
        # Compared first: some attributes of a class (`__dict__`, slots) cannot be set.
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)
