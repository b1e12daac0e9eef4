"""Running the user's code without a trace: what it changed in a module is put back."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_part
from lightning_par.engine.rng import fork_all_rng
from lightning_par.observe.contents import copy_of, is_iterator, refill, restore_of
from lightning_par.observe.outside import data_of, outside_kept
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.tensor import memory_key

__all__ = ["StateOfParts", "is_equal", "isolated", "untouched"]

_COPIED = 2**30
"""Bytes of parameters that are copied, as a step may write to them."""
_OWN = frozenset(vars(nn.Module()))
"""Attributes of every module, which hold its parameters, buffers, children and hooks."""

_Name = tuple[str, str]
"""Of a buffer or attribute: the name of its module, and its own."""


@contextmanager
def isolated(module: nn.Module) -> Iterator[None]:
    """Run a step of a module inside, and leave nothing of it behind.

    The step begins without gradients. Afterwards gradients, random generators and all that
    `untouched` names are as before; optimizers are not part of a module, so do not step them.

    Args:
        module: A module, or LightningModule, whose step runs inside.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> with isolated(layer):
        ...     layer(torch.ones(1, 2)).sum().backward()
        >>> layer.weight.grad is None
        True
    """
    parameters = list(module.parameters())
    # The tensors themselves, not copies: none is there while the step runs, so none is changed.
    kept = [parameter.grad for parameter in parameters]
    device = next((parameter.device for parameter in parameters), torch.device("cpu"))
    with fork_all_rng(device), untouched(module):
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient


@contextmanager
def untouched(module: nn.Module, but: Container[_Name] = ()) -> Iterator[None]:
    """Leave children, parameters, buffers, hooks, attributes, modes and flags of a module and its
    parts alone.

    Parameters get their memory again, and their values where the copy of this rank's part is small.
    Tensors, arrays, random generators, containers and objects in attributes keep their contents, at
    any depth; so does what the code of the module keeps outside of it, see `outside_kept`.

    Args:
        module: Code that changes it may run inside.
        but: Buffers and attributes that stay as they are then; read at the end.
    """
    # Submodules are restored by name below, and not as objects in attributes.
    parts = dict(module.named_modules())
    parameters = list(module.parameters())
    seen = {id(part) for part in parts.values()}
    contents = _restores_of_parameters(parameters, seen)
    hooks = [(held, set(held)) for part in parts.values() for held in _hooks(part)]
    # Restores are made before the step, as each takes its copy now.
    state = {name: (value, restore_of(value, seen)) for name, value in _state(parts)}
    children = [(part._modules, dict(part._modules)) for part in parts.values()]
    settings = list(_settings(parts.values(), parameters))
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    # What an iterator has given inside comes once more afterwards.
    given: dict[_Name, list[Any]]
    given = {key: [] for key, (value, _) in state.items() if is_iterator(value)}
    for (place, name), items in given.items():
        _holder(parts[place], name)[name] = _noted(state[place, name][0], items)
    try:
        with outside_kept([*parts.values(), *data_of(trainer)]):
            yield
    finally:
        for held, before in children:
            if held != before:
                refill(held, before)
        for owner, setting, value in settings:
            setattr(owner, setting, value)
        for restore in contents:
            restore()
        for held, names in hooks:
            _drop_new(held, names)
        # A list, since the dicts are changed while their names are gone through.
        for place, name in [key for key, _ in _state(parts) if key not in state]:
            if (place, name) not in but:
                _holder(parts[place], name).pop(name, None)
        for key, items in given.items():
            if items:
                source, restore = state[key]
                state[key] = chain(items, source), restore
        for key, (value, restore) in state.items():
            if key not in but:
                # Contents, then the name: the step may have bound it to something else.
                restore()
                place, name = key
                _holder(parts[place], name)[name] = value


def _restores_of_parameters(
    parameters: Sequence[nn.Parameter], seen: set[int]
) -> list[Callable[[], Any]]:
    """Return what puts parameters back, see `untouched`."""
    # Lightning evaluates in inference mode on CUDA, and what is made in it is written only there.
    with torch.inference_mode(False), torch.no_grad():
        parts = [local_part(parameter) for parameter in parameters]
    # A shard is no matter of the step, which gets something gathered in its place.
    held = zip(parameters, parts, strict=True)
    restores: list[Callable[[], Any]]
    restores = [partial(_give_memory, *one) for one in held if not isinstance(one[0], DTensor)]
    # A large model's weights would not fit twice; a step that writes to them is then not undone.
    if sum(tensor.nbytes for tensor in parts) <= _COPIED:
        restores += [restore_of(part, seen) for part in parts]
    return restores


def _give_memory(parameter: nn.Parameter, memory: Tensor) -> None:
    if memory_key(parameter) != memory_key(memory):  # after `parameter.data = ...`
        parameter.data = memory


def _state(parts: Mapping[str, nn.Module]) -> Iterator[tuple[_Name, Any]]:
    """Give the buffers and attributes of modules, by their names; also a buffer that is None."""
    for place, part in parts.items():
        held = vars(part)
        for name, value in (*held.items(), *held["_buffers"].items()):
            if name not in _OWN:
                yield (place, name), value


def _settings(
    parts: Iterable[nn.Module], parameters: Iterable[nn.Parameter]
) -> Iterator[tuple[Any, str, bool]]:
    """Give the modes of modules, and which parameters are trained."""
    yield from ((part, "training", part.training) for part in parts)
    yield from ((held, "requires_grad", held.requires_grad) for held in parameters)


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
            # Inside of `untouched`, or all ends would be equal to the beginning.
            # An iterator is another object each time.
            held = _state(dict(self._module.named_modules()))
            self._ends.append({name: copy_of(v) for name, v in held if not is_iterator(v)})
            # The whole and the first part begin alike. What differs at their ends depends on the
            # samples, and stays from then on as the step leaves it.
            if len(self._ends) == 2:
                one, other = self._ends
                both = one.keys() & other.keys()
                self._changed |= one.keys() ^ other.keys()
                self._changed |= {name for name in both if not is_equal(one[name], other[name])}


def _noted(source: Iterator[Any], given: list[Any]) -> Iterator[Any]:
    """Give the items of an iterator, and put each of them into a list, too."""
    for item in source:
        given.append(item)
        yield item


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


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are the same, or arrays of the same entries."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (one, other)]
        # Meta tensors have no values that could differ.
        return kinds[0] == kinds[1] and (one.is_meta or torch.equal(one, other))
    try:
        return one is other or bool(np.all(one == other))
    except Exception:  # of a class of the user's, or of tensors in a container
        return False
