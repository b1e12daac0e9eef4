"""Tensors: their memory and changes, and how a subclass of Tensor is made.

`make_wrapper` returns a tensor of a class that has a shape and no memory, from the class, the
shape, `dtype` and `device`. Torch's notes on wrapper subclasses use it; there is no public name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    make_wrapper = Tensor._make_wrapper_subclass
    _make_subclass = Tensor._make_subclass
    UNSAVED_BUFFERS = "_non_persistent_buffers_set"
    getattr(nn.Module(), UNSAVED_BUFFERS)
    # Read where they are used; looked up here so that nothing is read from a torch without them.
    _CHECKED = (Tensor._version, Tensor._backward_hooks)
    asks_for_changes: Any = _CHECKED[0].__get__  # type: ignore[attr-defined]

__all__ = [
    "UNSAVED_BUFFERS",
    "asks_for_changes",
    "count_of_changes",
    "gradient_hooks",
    "make_subclass",
    "make_wrapper",
    "mark_as_parameter",
    "memory_key",
    "own_attributes",
    "storage_key",
    "written_by",
]

T = TypeVar("T", bound=Tensor)


def count_of_changes(tensor: Tensor) -> int:
    """Return how many times the memory of `tensor` was changed in place, as autograd counts it.

    Torch's notes on autograd tell of the counter; only `torch.autograd.graph.increment_version`,
    which changes it, is public.

    Raises:
        RuntimeError: It is an inference tensor, of which torch counts nothing.
    """
    return tensor._version


def storage_key(storage: torch.UntypedStorage) -> int:
    """Return a number that no other living storage has.

    `data_ptr`, which is public, is 0 for every storage on meta and every empty one.
    """
    return int(StorageWeakRef(storage).cdata)


def memory_key(tensor: Tensor) -> int:
    """Return a number of the memory of a living tensor; a sparse one has its own, and no views."""
    is_dense = tensor.layout is torch.strided
    return storage_key(tensor.untyped_storage()) if is_dense else id(tensor)


def own_attributes(parameter: Tensor) -> dict[str, Any]:
    """Return the attributes that users have set on a parameter; torch marks some as parameters."""
    return {name: value for name, value in vars(parameter).items() if name != "_is_param"}


class _Other(Tensor):
    """A class that is not torch's, of which `nn.Parameter` marks a parameter."""


_MARKS = vars(nn.Parameter(torch.empty(0).as_subclass(_Other)))


def mark_as_parameter(tensor: Tensor) -> None:
    """Let ``isinstance(tensor, nn.Parameter)`` be true of a tensor of another class; it is marked
    as `nn.Parameter` marks one, but stays the same object.
    """
    vars(tensor).update(_MARKS)


def make_subclass(kind: type[T], data: Tensor, requires_grad: bool) -> T:
    """Return a leaf of class `kind` with the memory of `data`, without a call of its constructor.

    `nn.Parameter` does so. `Tensor.as_subclass`, which is public, would be seen by a dispatch mode.
    """
    made: T = _make_subclass(kind, data, requires_grad)
    return made


def gradient_hooks(tensor: Tensor) -> list[Callable[..., object]]:
    """Return what `Tensor.register_hook` was given; torch has no public list of it."""
    return list((tensor._backward_hooks or {}).values())


def written_by(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor that a function of torch with this name writes to; None: it writes to none.

    Of a list of tensors it is the first.
    """
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    # `add_`, and not `__add__`.
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name in ("__setitem__", "__set__") or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )
    target = args[0] if in_place and args else None
    return target[0] if isinstance(target, list | tuple) and target else target
