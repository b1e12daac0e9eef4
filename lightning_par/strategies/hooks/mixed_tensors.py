"""Functions of torch on plain tensors and DTensors, of any meshes, at once."""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.overrides import has_torch_function, TorchFunctionMode

from lightning_par.dtensor import shard_of
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.hooks.innermost_mode import asks_innermost
from lightning_par.strategies.hooks.slices import is_slice, slice_of, VIEWS, whole_of, write_slice
from lightning_par.strategies.step.absent_parameter import AbsentParameter, user_line
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import written_by

__all__ = [
    "SET_DATA",
    "MixedTensors",
    "data_of_shards",
    "entry",
    "first",
    "is_masked",
    "is_number",
    "refused_hook",
    "run",
    "told",
]

_TENSOR: Any = Tensor
SET_DATA = _TENSOR.data.__set__


def first(args: Any) -> Any:
    """Return the first argument, or the first entry of it."""
    found = args[0] if args else None
    return found[0] if isinstance(found, list | tuple) and found else found


def is_masked(name: str, args: Any) -> bool:
    """Return whether entries are chosen by their values."""
    if name == "where":
        return len(args) == 1
    indices = leaves_of(args[1:2]) if name == "__getitem__" else []
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def run(func: Callable[..., Any], target: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a function of this rank's tensors, some of which may be DTensors."""
    tensors = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
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
    args, kwargs = map_leaves(whole_of, (args, kwargs))
    return func(*args, **kwargs)


def _write(func: Callable[..., Any], target: DTensor, args: Any, kwargs: Any) -> Any:
    if _is_partial(target):
        _add_up(target)

    def like_target(value: Any) -> Any:
        if value is target or not isinstance(value, Tensor):
            return value
        if isinstance(value, DTensor) and value.device_mesh == target.device_mesh:
            return value
        value = whole_of(value)
        same = isinstance(target, DTensor) and value.shape == target.shape
        return shard_of(value.to(target.dtype), target) if same else value

    if func == SET_DATA:
        func = Tensor.copy_  # the shard is not the memory of the DTensor that stands for it
    # Plain tensors count as replicated: each rank has the same.
    with implicit_replication(), torch.no_grad():
        args, kwargs = map_leaves(like_target, (args, kwargs))
        return func(*args, **kwargs)


def _is_partial(value: Any) -> bool:
    return isinstance(value, DTensor) and any(p.is_partial() for p in value.placements)


def _add_up(target: DTensor) -> None:
    """Make a norm or sum, of which each rank has a part, one that may be written to."""
    marks = dict(vars(target))
    placements = [Replicate() if p.is_partial() else p for p in target.placements]
    detached: Any = target.detach()
    torch.utils.swap_tensors(target, detached.redistribute(placements=placements))
    vars(target).update(marks)


def entry(value: Any, index: int, count: int) -> Any:
    """Return the entry of a list of so many, as a list; anything else as it is."""
    is_list = isinstance(value, list | tuple) and len(value) == count
    return [value[index]] if is_list else value


def is_number(value: Any) -> bool:
    """Whether it is a tensor with one entry and no dims."""
    return isinstance(value, Tensor) and value.ndim == 0


_Aliases = dict[int, list["weakref.ref[DTensor]"]]
"""Id of a DTensor -> what was read as its `data`, and shares its memory."""


def _get_data(aliases: _Aliases, tensor: DTensor) -> Any:
    found = _TENSOR.data.__get__(tensor)
    if isinstance(found, DTensor):
        living = [alias for alias in aliases.get(id(tensor), ()) if alias() is not None]
        aliases[id(tensor)] = [*living, weakref.ref(found)]
    return found


def _set_data(aliases: _Aliases, tensor: DTensor, value: Any) -> None:
    """Copy the values: a DTensor would keep its shard, and nothing would change.

    What was read as `data` before keeps the values of then, as where the memory is exchanged.
    """
    for alias in aliases.pop(id(tensor), ()):
        if (kept := alias()) is not None and kept is not value:
            with torch.no_grad():  # without a graph it gives its own shard, and no view of it
                local = kept.to_local()
            local.data = local.clone()
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        SET_DATA(tensor, value)
    elif isinstance(value, DTensor) and value.device_mesh == tensor.device_mesh:
        with torch.no_grad():
            tensor.copy_(value)
    elif has_torch_function((tensor,)):  # a mode that shows whole tensors
        SET_DATA(tensor, value)
    else:
        run(SET_DATA, tensor, (tensor, value), {})


def data_of_shards() -> AbstractContextManager[None]:
    """Let users read and write `data` of a DTensor as of a plain tensor, in the context."""
    aliases = _Aliases()
    get, put = partial(_get_data, aliases), partial(_set_data, aliases)
    return replaced(DTensor, "data", property(get, put))


class MixedTensors(TorchFunctionMode):
    """Lets a hook mix plain tensors and DTensors, and write to slices of DTensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function; what DTensor computes by itself is left to it."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if asks_innermost(func):
            return args[0] is self
        if func == SET_DATA and isinstance(args[0], DTensor):
            return run(func, args[0], args, kwargs)
        # Properties; and lists, of which all entries are alike.
        if name in ("__get__", "__set__") or name.startswith("_foreach_"):
            return func(*args, **kwargs)
        tensors = [t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)]
        parts = [t for t in tensors if isinstance(t, DTensor)]
        if not parts and not any(map(is_slice, tensors)):
            return func(*args, **kwargs)
        if name == "__iter__":
            return iter(run(torch.unbind, None, args, kwargs))
        target, is_mixed = written_by(name, args, kwargs), len(parts) < len(tensors)
        is_mixed |= _is_partial(target)
        if is_mixed or is_slice(target) or name in VIEWS or name == "__setitem__":
            return run(func, target, args, kwargs)
        return func(*args, **kwargs)


def told(func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run a function that asks for no value.

    Raises:
        ConfigurationError: It hooks a shard that FSDP does not compute with.
    """
    if name.startswith("register_") and isinstance(args[0], DTensor):
        if args[0].device_mesh.mesh_dim_names != ("tp",):
            raise refused_hook(
                f"{name}(...){user_line()} registers a hook on a shard of a weight. The hook "
                "would never be called, since the weight is gathered for each step"
            )
        args = args[0], partial(_mixing, args[1]), *args[2:]
    if name.startswith("register_") and isinstance(args[0], AbsentParameter):
        rank_zero_warn(
            f"{name}(...){user_line()} registers a hook on the gradient of a weight. The hook "
            "runs only on the ranks of the pipeline stage that holds the weight, and the values "
            "that it records stay on these ranks. To record the gradients of all stages, read "
            "p.grad of module.named_parameters() in on_before_optimizer_step."
        )
        return torch.utils.hooks.RemovableHandle(OrderedDict())
    with torch.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def refused_hook(what: str) -> ConfigurationError:
    """Return the error of a hook on a weight whose gradient is not that of one process."""
    return ConfigurationError(
        "LP919",
        f"{what}. Change p.grad in on_after_backward, or register the hook on the output of a "
        "module.",
    )


def _mixing(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook on a gradient, which is this rank's part."""
    with MixedTensors():
        return hook(*args)
