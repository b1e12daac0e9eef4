"""Functions of torch on plain tensors and DTensors, of any meshes, at once."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import TorchFunctionMode

from lightning_par.dtensor import shard_of, whole
from lightning_par.strategies.hooks.innermost_mode import asks_innermost
from lightning_par.strategies.hooks.slices import is_slice, slice_of, VIEWS, write_slice
from lightning_par.upstream.pytree import tree_leaves, tree_map

__all__ = ["SET_DATA", "MixedTensors", "entry", "first", "is_masked", "is_number", "run", "written"]

_TENSOR: Any = Tensor
SET_DATA = _TENSOR.data.__set__


def first(args: Any) -> Any:
    """Return the first argument, or the first entry of it."""
    found = args[0] if args else None
    return found[0] if isinstance(found, list | tuple) and found else found


def written(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the tensor that a function writes to, if it does."""
    if isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    # `add_`, and not `__add__`.
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name in ("__setitem__", "__set__") or (
        name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    )
    return first(args) if in_place else None


def is_masked(name: str, args: Any) -> bool:
    """Return whether entries are chosen by their values."""
    if name == "where":
        return len(args) == 1
    indices = tree_leaves(args[1:2]) if name == "__getitem__" else []
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def run(func: Callable[..., Any], target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a function of this rank's tensors, some of which may be DTensors."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    parts = [t for t in tensors if isinstance(t, DTensor)]
    name = getattr(func, "__name__", "")
    if is_slice(target) or (isinstance(target, DTensor) and name == "__setitem__"):
        return write_slice(func, target, args, kwargs)
    if name in VIEWS and args and (isinstance(args[0], DTensor) or is_slice(args[0])):
        return slice_of(func, args, kwargs)
    if not parts:
        return func(*args, **kwargs)
    if target is not None:
        return _write(func, target, args, kwargs)
    # DTensor's own rules first: they compute on shards.
    try:
        if len({t.device_mesh for t in parts}) == 1:
            with implicit_replication():
                return func(*args, **kwargs)
    except (NotImplementedError, RuntimeError):  # it has no rule for such tensors
        pass
    args, kwargs = tree_map(_whole, (args, kwargs))
    return func(*args, **kwargs)


def _write(func: Callable[..., Any], target: DTensor, args: Any, kwargs: Any) -> Any:
    def like_target(value: Any) -> Any:
        if value is target or not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and value.device_mesh == target.device_mesh:
            return value
        value = _whole(value)
        same = isinstance(target, DTensor) and value.shape == target.shape
        return shard_of(value.to(target.dtype), target) if same else value

    if func == SET_DATA:
        func = Tensor.copy_  # the shard is not the memory of the DTensor that stands for it
    # Plain tensors count as replicated: each rank has the same.
    with implicit_replication(), torch.no_grad():
        args, kwargs = tree_map(like_target, (args, kwargs))
        return func(*args, **kwargs)


def _whole(value: Any) -> Any:
    return whole(value.detach()) if isinstance(value, DTensor) else value


def entry(value: Any, index: int, count: int) -> Any:
    """Return the entry of a list of so many, as a list; anything else as it is."""
    is_list = isinstance(value, list | tuple) and len(value) == count
    return [value[index]] if is_list else value


def is_number(value: Any) -> bool:
    """Whether it is a tensor with one entry and no dims."""
    return isinstance(value, Tensor) and value.ndim == 0


class MixedTensors(TorchFunctionMode):
    """Lets a hook mix plain tensors and DTensors, and write to slices of DTensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function; what DTensor computes by itself is left to it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if asks_innermost(func):
            return args[0] is self
        # Properties; and lists, of which all entries are alike.
        if name in ("__get__", "__set__") or name.startswith("_foreach_"):
            return func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        parts = [t for t in tensors if isinstance(t, DTensor)]
        if not parts and not any(map(is_slice, tensors)):
            return func(*args, **kwargs)
        if name == "__iter__":
            return iter(run(torch.unbind, None, args, kwargs))
        target, is_mixed = written(func, name, args, kwargs), len(parts) < len(tensors)
        if is_mixed or is_slice(target) or name in VIEWS or name == "__setitem__":
            return run(func, target, args, kwargs)
        return func(*args, **kwargs)
