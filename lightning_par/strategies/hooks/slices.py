"""Views of DTensors that a hook writes to, as ``p.grad[:8].zero_()``.

A view of a plain tensor has its memory. DTensor computes a slice of a dim that is divided over
ranks as a new tensor, and what is written to that is lost without a word; other views it refuses.
So in hooks such a view remembers of which tensor it is one, and by which function. What is written
to it is written to the same view of the whole tensor, and this rank's part is copied back.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from lightning_par.dtensor import shard_of, whole
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.pytree import leaves_of, map_leaves
from lightning_par.upstream.tensor import storage_key

__all__ = ["VIEWS", "is_slice", "slice_of", "whole_of", "write_slice"]

VIEWS = frozenset(
    {
        *("__getitem__", "alias", "chunk", "detach", "diagonal", "expand", "flatten", "hsplit"),
        *("movedim", "narrow", "permute", "ravel", "reshape", "select", "split", "squeeze"),
        *("swapaxes", "swapdims", "t", "tensor_split", "transpose", "unbind", "unflatten"),
        *("unsqueeze", "view", "view_as", "vsplit"),
    }
)
"""Functions whose result has, of a plain tensor, the same memory."""
_SOURCE = "_lightning_par_view_of"
"""Attribute of a view: the tensor of which it is one, and a function that makes it."""


def is_slice(value: Any) -> bool:
    """Return whether it is a view that has other memory than its tensor."""
    return isinstance(value, Tensor) and _SOURCE in vars(value)


def slice_of(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return a view of a DTensor, or of such a view; a view that has other memory remembers it.

    **Communicates**: what DTensor does; the whole tensor where it has no rule.
    """
    source, *rest = args
    try:
        with implicit_replication():
            out = func(source, *rest, **kwargs)
    except (NotImplementedError, RuntimeError):  # it has no rule for such a view
        out = func(whole(source.detach()), *rest, **kwargs)
    others, options = map_leaves(whole_of, (rest, dict(kwargs)))
    for index, view in enumerate(leaves_of(out)):
        if isinstance(view, Tensor) and (is_slice(source) or _memory(view) != _memory(source)):
            make = partial(_made_again, func, others, options, index)
            vars(view)[_SOURCE] = source, make
    return out


def write_slice(
    func: Callable[..., Any], target: Tensor, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    """Run a function that writes to a view, or to entries of a DTensor.

    Args:
        func: The function.
        target: The tensor that it writes to, an argument.
        args: Its arguments; plain tensors are the same on every rank.
        kwargs: Its keyword arguments.

    Raises:
        ConfigurationError: It is a gradient that is not yet summed over the ranks.

    **Communicates**: the whole tensor of which the target is a view.
    """
    views, steps = [target], []
    while is_slice(views[-1]):
        source, make = vars(views[-1])[_SOURCE]
        views.append(source)
        steps.append(make)
    if isinstance(views[-1], DTensor) and any(p.is_partial() for p in views[-1].placements):
        raise ConfigurationError(
            "LP919",
            "a hook on a gradient (register_hook) writes to a slice of the gradient, but on this "
            "rank the gradient is not yet summed over the ranks. Change p.grad in "
            "on_after_backward.",
        )
    with torch.no_grad():
        # A copy: what is replicated would be this rank's own memory.
        values = [whole(views[-1].detach()).clone()]
        for make in reversed(steps):
            values.append(make(values[-1]))
        args, kwargs = map_leaves(
            lambda value: values[-1] if value is target else whole_of(value), (args, dict(kwargs))
        )
        func(*args, **kwargs)
        for view, value in zip(reversed(views), values, strict=True):
            _take(view.detach(), value)
    return target


def _take(part: Tensor, value: Tensor) -> None:
    """Copy a whole value into a tensor, of which this rank may have a part."""
    local = part.to_local() if isinstance(part, DTensor) else part
    given = shard_of(value, part)
    local.copy_(given.to_local() if isinstance(given, DTensor) else given)


def _made_again(
    func: Callable[..., Any], rest: Iterable[Any], options: Mapping[str, Any], index: int, x: Tensor
) -> Tensor:
    found: list[Tensor] = leaves_of(func(x, *rest, **options))
    return found[index]


def _memory(tensor: Tensor) -> tuple[bool, int]:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return isinstance(tensor, DTensor), storage_key(local.untyped_storage())


def whole_of(value: Any) -> Any:
    """Return the whole of a DTensor, without its graph, and anything else as it is."""
    return whole(value.detach()) if isinstance(value, DTensor) else value
