"""Paths to what stands in attributes of a module, and in containers and objects in them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import nn, Tensor

from lightning_par.observe.contents import is_container, UNCHANGEABLE
from lightning_par.observe.outside import is_of_user
from lightning_par.strategies.components.step_attributes import is_object, OF_LIGHTNING
from lightning_par.strategies.components.value_kinds import is_value

__all__ = [
    "ABSENT",
    "Path",
    "around",
    "entries",
    "entries_in",
    "inside",
    "remove",
    "set_at",
    "value_at",
]

Path = tuple[str | int, ...]
"""Name of an attribute of the LightningModule, and the keys of what is inside of it."""
ABSENT: Any = object()
"""Stands where there is nothing."""
_DEPTH, _FEW = 4, 64
"""How deep values may lie, and how many entries a container of them has."""


def entries(module: nn.Module) -> Iterator[tuple[Path, Any]]:
    """Yield what stands in attributes, and in containers and objects in them, the outer first."""
    own = {name: value for name, value in vars(module).items() if name not in OF_LIGHTNING}
    return entries_in(own)


def entries_in(
    held: Mapping[Any, Any], place: Path = (), depth: int = _DEPTH
) -> Iterator[tuple[Path, Any]]:
    """Yield what stands in a dict at a place, and in containers and objects in it."""
    followed = {key: value for key, value in held.items() if isinstance(key, str | int)}
    yield from (((*place, key), value) for key, value in followed.items())
    for key, value in followed.items() if depth else ():
        found = inside(value)
        if found is not None and len(found) <= _FEW:
            inner = found if isinstance(found, dict) else dict(enumerate(found))
            yield from entries_in(inner, (*place, key), depth - 1)


def around(paths: Iterable[Path]) -> set[Path]:
    """Return what leads to the containers and objects around values."""
    return {path[:length] for path in paths for length in range(1, len(path))}


def _holder(module: nn.Module, path: Path) -> Any:
    """Return the dict, list or tuple in which an entry stands; None if it is not there."""
    held: Any = vars(module)
    for key in path[:-1]:
        value = _entry(held, key)
        is_held = isinstance(value, dict | list | tuple)
        held = value if is_held else getattr(value, "__dict__", None)
        if held is None:
            return None
    return held


def value_at(module: nn.Module, path: Path) -> Any:
    """Return what stands at a path; `ABSENT` if there is nothing."""
    return _entry(_holder(module, path), path[-1])


def set_at(module: nn.Module, path: Path, value: Any) -> bool:
    """Set an entry, if there is what holds it: a step may have taken it out of a list."""
    holder = _holder(module, path)
    if _entry(holder, path[-1]) is ABSENT and not isinstance(holder, dict):
        return False
    if not isinstance(holder, tuple):
        holder[path[-1]] = value
        return True
    items = [*holder]
    items[int(path[-1])] = value
    # A namedtuple takes its fields one by one, a tuple as one iterable.
    made = type(holder)(*items) if hasattr(holder, "_fields") else tuple(items)
    return set_at(module, path[:-1], made)


def remove(module: nn.Module, path: Path) -> None:
    """Remove an entry of a dict, or an attribute, if it is there."""
    holder = _holder(module, path)
    if isinstance(holder, dict):
        holder.pop(path[-1], None)


def inside(value: Any) -> Any:
    """Return what a container or an object of the user's holds, by its keys; None if it is none."""
    if type(value) in UNCHANGEABLE or isinstance(value, Tensor):  # most of them
        return None
    is_tuple = type(value) is tuple or hasattr(value, "_fields")
    if is_tuple or (isinstance(value, list | dict) and is_container(value)):
        return value
    if isinstance(value, dict) and is_dataclass(value):  # an output of a model of transformers
        return value
    if isinstance(value, list | dict | tuple) or not is_object(value):
        return None
    # An object of a package, such as the run of a logger, has states of its own; a meter has values
    # alone.
    held = vars(value)
    is_own = is_of_user(type(value).__module__)
    return held if is_own or all(v is None or is_value(v) for v in held.values()) else None


def _entry(holder: Any, key: Any) -> Any:
    if holder is None:
        return ABSENT
    if isinstance(holder, dict):
        # Not `holder[key]`, by which a defaultdict would make one.
        return holder.get(key, ABSENT)
    return holder[key] if isinstance(key, int) and key < len(holder) else ABSENT
