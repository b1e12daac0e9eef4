"""Paths to what stands in attributes of a module, and in containers and objects in them."""

from collections import deque, UserDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from types import NoneType
from typing import Any

from torch import nn, Tensor

from lightning_par.engine.tensor_tree import rebuild
from lightning_par.observe.contents import copy_of, is_container, refill, stayed, UNCHANGEABLE
from lightning_par.observe.outside import is_of_user, Scope
from lightning_par.strategies.components.sendable import (
    is_object,
    is_rebuilt,
    NAMESPACES,
)
from lightning_par.strategies.components.step_attributes import (
    followed_scopes,
    OF_LIGHTNING,
    stores_in,
)
from lightning_par.strategies.components.value_kinds import is_value

__all__ = [
    "ABSENT",
    "FromEnd",
    "Path",
    "Scopes",
    "around",
    "came_to",
    "contents_of",
    "entries",
    "entries_in",
    "inside",
    "is_of_values",
    "name_of",
    "put_all",
    "remove",
    "scopes_of",
    "set_at",
    "value_at",
    "window_of",
]

Path = tuple[Any, ...]
"""Name of a scope, which is "" for the attributes of the LightningModule; a name in it; and the
keys of what is inside of its value.
"""


class FromEnd(int):
    """The place of an entry of a deque, counted from its end, where a step adds entries."""


_KEYS = (str, int, float, tuple, NoneType, FromEnd)
"""Types of the keys of dicts whose values are followed."""
Scopes = Mapping[str, Scope]
ABSENT: Any = object()
"""Stands where there is nothing."""
_DEPTH, _FEW = 4, 128
"""How deep values may lie, and how many entries a container of them has."""


def scopes_of(module: nn.Module) -> dict[str, Scope]:
    """Return where a step may leave something: in attributes, and outside of the module."""
    parts = {"": module, **stores_in(module)}
    own = {
        place: Scope(held, held.__setitem__, held.__delitem__, without={*OF_LIGHTNING})
        for place, held in ((place, vars(part)) for place, part in parts.items())
    }
    return {**own, **followed_scopes(module)}


def entries(scopes: Scopes) -> Iterator[tuple[Path, Any]]:
    """Yield what names are bound to, and what is in containers and objects, the outer first."""
    for name, scope in scopes.items():
        yield from entries_in(scope.entries(), (name,))


def entries_in(
    held: Mapping[Any, Any], place: Path, depth: int = _DEPTH
) -> Iterator[tuple[Path, Any]]:
    """Yield what stands in a dict at a place, and in containers and objects in it."""
    followed = {key: value for key, value in held.items() if type(key) in _KEYS}
    yield from (((*place, key), value) for key, value in followed.items())
    for key, value in followed.items() if depth else ():
        found = inside(value)
        if isinstance(found, deque):
            found = {FromEnd(-n): found[-n] for n in range(1, min(len(found), _FEW) + 1)}
        if found is not None and len(found) <= _FEW:
            inner = found if isinstance(found, dict) else dict(enumerate(found))
            yield from entries_in(inner, (*place, key), depth - 1)


def around(paths: Iterable[Path]) -> set[Path]:
    """Return what leads to the containers and objects around values."""
    return {path[:length] for path in paths for length in range(2, len(path))}


def window_of(path: Path) -> Path | None:
    """Return the path of the deque in whose entry a value is; None if it is in none."""
    return next((path[:at] for at, key in enumerate(path) if type(key) is FromEnd), None)


def name_of(path: Path) -> str:
    """Return the name of a value as code spells it: ``training_step().self.losses['val']``."""
    inner = "".join(f"[{key!r}]" for key in path[2:])
    return f"training_step().{path[0] or 'self'}.{path[1]}{inner}"


def _holder(scopes: Scopes, path: Path) -> Any:
    """Return the scope, dict, list or tuple in which an entry stands; None if it is not there."""
    held: Any = scopes.get(path[0])
    for key in path[1:-1]:
        value = _entry(held, key)
        is_held = isinstance(value, dict | list | tuple | deque)
        held = value if is_held else getattr(value, "__dict__", None)
        if held is None:
            return None
    return held


def value_at(scopes: Scopes, path: Path) -> Any:
    """Return what stands at a path; `ABSENT` if there is nothing."""
    return _entry(_holder(scopes, path), path[-1])


def set_at(scopes: Scopes, path: Path, value: Any) -> bool:
    """Set an entry, if there is what holds it: a step may have taken it out of a list."""
    holder = _holder(scopes, path)
    if isinstance(holder, Scope):
        holder.write(path[-1], value)
        return True
    now = _entry(holder, path[-1])
    if now is ABSENT and not isinstance(holder, dict):
        return False
    if not isinstance(holder, tuple):
        holder[path[-1]] = value
        return True
    items = [*holder]
    items[path[-1]] = value
    # Others may hold a tuple in which nothing is another.
    return value is now or set_at(scopes, path[:-1], rebuild(holder, [*enumerate(items)]))


def remove(scopes: Scopes, path: Path) -> None:
    """Remove an entry of a dict, or a name, if it is there."""
    holder = _holder(scopes, path)
    if _entry(holder, path[-1]) is ABSENT:
        return
    if isinstance(holder, Scope):
        holder.drop(path[-1])
    # An output of a model of transformers lets nobody remove its entries.
    elif isinstance(holder, dict) and not is_dataclass(holder):
        del holder[path[-1]]


def contents_of(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return containers among values, with copies of their contents; each container once."""
    held = {id(value): value for value in values if is_container(value)}
    return [(value, copy_of(value)) for value in held.values()]


def came_to(
    found: Mapping[Path, Any], contents: Iterable[tuple[Any, Any]]
) -> dict[Path, deque[Any]]:
    """Return what came to the deques among what was found.

    Args:
        found: What stands at each path.
        contents: Containers, with copies of what they have held before.
    """
    before = {id(held): [*items] for held, items in contents}
    deques = {path: [*held] for path, held in found.items() if isinstance(held, deque)}
    kept = {path: stayed(before.get(id(found[path]), ()), held) for path, held in deques.items()}
    return {path: deque(held[kept[path] :]) for path, held in deques.items()}


def put_all(
    scopes: Scopes, before: Mapping[Path, Any], contents: Iterable[tuple[Any, Any]]
) -> None:
    """Put back all that stood in the scopes, and remove the rest.

    Args:
        scopes: Where a step may leave something.
        before: What stood at each path.
        contents: Of containers among it, whose entries may be beyond all paths.
    """
    for held, kept in contents:
        if [*map(id, _items(held))] != [*map(id, _items(kept))]:
            refill(held, kept)
    for path in sorted({path for path, _ in entries(scopes)} - before.keys(), key=len):
        remove(scopes, path)
    for path in sorted(before, key=len):
        if value_at(scopes, path) is not before[path]:
            set_at(scopes, path, before[path])


def _items(held: Any) -> Iterable[Any]:
    return (*held, *held.values()) if isinstance(held, dict) else held


def inside(value: Any) -> Any:
    """Return what a container or an object of the user's holds, by its keys; None if it is none."""
    if type(value) in UNCHANGEABLE or isinstance(value, Tensor):  # most of them
        return None
    if isinstance(value, tuple):
        return value if is_rebuilt(type(value)) else None
    # A dataclass is an output of a model of transformers.
    if isinstance(value, list | dict | deque):
        return value if is_container(value) or is_dataclass(value) else None
    if not is_object(value):
        return None
    # An object of a package, such as the run of a logger, has states of its own; a meter has values
    # alone.
    held = vars(value)
    is_own = is_of_user(type(value).__module__) or isinstance(value, (UserDict, *NAMESPACES))
    return held if is_own or all(v is None or is_value(v) for v in held.values()) else None


def is_of_values(value: Any, depth: int = _DEPTH) -> bool:
    """Whether something is a value that is followed, or holds only such values."""
    found = inside(value)
    if found is None or not depth:
        return is_value(value)
    every = found.values() if isinstance(found, dict) else found
    return all(is_of_values(each, depth - 1) for each in every)


def _entry(holder: Any, key: Any) -> Any:
    if holder is None:
        return ABSENT
    if isinstance(holder, Scope):
        return holder.held.get(key, ABSENT)
    if isinstance(holder, dict):
        # Not `holder[key]`, by which a defaultdict would make one.
        return holder.get(key, ABSENT)
    is_there = isinstance(key, int) and -len(holder) <= key < len(holder)
    return holder[key] if is_there else ABSENT
