"""Running the user's code without a trace: what it changed in a module is put back."""

import copy
import io
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn, Tensor

from lightning_par.dtensor import local_part

__all__ = ["LEFT_ALONE", "StateOfParts", "untouched"]

_COPIED = 2**30
"""Bytes of parameters that are copied, as a step may write to them."""
LEFT_ALONE = ("lightning", "lightning_par", "numpy", "pytorch_lightning", "torch")
"""Packages whose objects no step is expected to change; those of Python are, too."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold its parameters, buffers, children and hooks."""

_Name = tuple[str, str]
"""Of a buffer or attribute: the name of its module, and its own."""


@contextmanager
def untouched(module: nn.Module, but: Container[_Name] = ()) -> Iterator[None]:
    """Leave children, parameters, buffers, hooks and attributes of a module and its parts alone.

    Parameters are put back where the copy of this rank's part is small. Tensors, arrays, random
    generators, containers and objects in attributes keep their contents, at any depth.

    Args:
        module: Code that changes it may run inside.
        but: Buffers and attributes that stay as they are then; read at the end.
    """
    # Lightning evaluates in inference mode on CUDA, where a DTensor cannot be detached.
    with torch.inference_mode(False), torch.no_grad():
        parameters = [local_part(parameter.detach()) for parameter in module.parameters()]
    if sum(tensor.nbytes for tensor in parameters) > _COPIED:
        parameters = []
    seen = {id(part) for part in module.modules()}
    contents = [_restore(parameter, seen) for parameter in parameters]
    hooks = [(held, set(held)) for part in module.modules() for held in _hooks(part)]
    state = {name: (value, _restore(value, seen)) for name, value in _state(module)}
    children = [(part._modules, dict(part._modules)) for part in module.modules()]
    parts = dict(module.named_modules())
    try:
        yield
    finally:
        for held, before in children:
            if held != before:
                _refill(held, before)
        for restore in contents:
            restore()
        for held, names in hooks:
            _drop_new(held, names)
        for place, name in [key for key, _ in _state(module) if key not in state]:
            if (place, name) not in but:
                _holder(parts[place], name).pop(name, None)
        for key, (value, restore) in state.items():
            if key not in but:
                restore()
                place, name = key
                _holder(parts[place], name)[name] = value


def _state(module: nn.Module) -> Iterator[tuple[_Name, Any]]:
    """Give the buffers and attributes of a module and its children."""
    for place, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN:
                yield (place, name), value
        for name, buffer in part.named_buffers(recurse=False):
            yield (place, name), buffer


class StateOfParts:
    """The state in which the parts of a batch are looked at: each begins with the module as the
    step does, as it does on every replica.

    But what samples change in it, stays: if a loss depends on that, no rule will fit.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._ends: list[dict[_Name, Any]] = []
        self._changed: set[_Name] = set()

    @contextmanager
    def next_part(self) -> Iterator[None]:
        """Surrounds the step on the whole first, then on each part."""
        with untouched(self._module, but=self._changed):
            yield
            self._ends.append({name: _copy(value) for name, value in _state(self._module)})
            if len(self._ends) == 2:
                one, other = self._ends
                both = one.keys() & other.keys()
                self._changed |= one.keys() ^ other.keys()
                self._changed |= {name for name in both if not _equal(one[name], other[name])}


def _hooks(module: nn.Module) -> list[dict[Any, Any]]:
    """Return the dicts that hold what is called before and after a module, and how."""
    return [held for name, held in vars(module).items() if name in _OWN and "_hooks" in name]


def _drop_new(held: dict[Any, Any], before: set[Any]) -> None:
    for key in held.keys() - before:
        del held[key]


def _holder(part: nn.Module, name: str) -> dict[str, Any]:
    """Return the dict of a module in which a buffer or attribute stands."""
    held = vars(part)
    buffers: dict[str, Any] = held["_buffers"]
    return buffers if name in buffers else held


def _restore(value: Any, seen: set[int]) -> Callable[[], Any]:
    """Return a function that gives a mutable value its present contents again, at any depth.

    Args:
        value: Of an attribute, or of what is in one.
        seen: Ids of the containers and objects that have such a function, or need none.
    """
    if isinstance(value, io.IOBase):
        return _restore_file(value, seen)
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    is_weight = isinstance(value, nn.Parameter)
    is_kept = is_weight or (isinstance(value, Tensor) and (value.is_meta or value.requires_grad))
    held = value if _is_container(value) else _attributes(value)
    copied = value if is_kept else _copy(value if held is None else held)
    if copied is value or id(value) in seen:
        return lambda: None
    if isinstance(value, Tensor):
        return partial(value.data.copy_, copied)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, copied)
    if isinstance(value, np.ndarray):
        return partial(np.copyto, value, copied)
    seen.add(id(value))
    inside = copied.values() if isinstance(copied, dict) else copied
    items = [_restore(item, seen) for item in inside]

    def restore() -> None:
        _refill(held, copied)
        for restore_item in items:
            restore_item()

    return restore


def _restore_file(file: Any, seen: set[int]) -> Callable[[], Any]:
    """Return a function that takes back what is written to an open file from now on."""
    if id(file) in seen or file.closed or not (file.writable() and file.seekable()):
        return lambda: None
    seen.add(id(file))
    file.flush()
    place = file.tell()

    def restore() -> None:
        if not file.closed:
            file.seek(place)
            file.truncate()

    return restore


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object, such as a meter or metric in a list, if a step may change
    it; None for values and for what belongs to the run.
    """
    package = type(value).__module__.partition(".")[0]
    is_foreign = package in LEFT_ALONE or package in sys.stdlib_module_names
    return (
        None
        if is_foreign and not isinstance(value, nn.Module)
        else getattr(value, "__dict__", None)
    )


def _copy(value: Any) -> Any:
    """Return what a mutable value holds; any other as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.ndarray):
        return value.copy()
    return copy.copy(value) if _is_container(value) else value


def _is_container(value: Any) -> bool:
    return isinstance(value, list | deque | defaultdict) or type(value) in (dict, set, Counter)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    try:
        return one is other or bool(np.all(one == other))
    except Exception:  # of a class of the user's, or of tensors in a container
        return False


def _refill(value: Any, items: Any) -> None:
    value.clear()
    if isinstance(value, list | deque):
        value.extend(items)
    else:
        value.update(items)
