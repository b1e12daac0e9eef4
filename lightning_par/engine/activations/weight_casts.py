"""Mixed precision: which casts a backward keeps.

Under autocast a linear map multiplies 16-bit copies of its input and of its weight, which autograd
saves until the backward. Layers that read one tensor, as those of queries, keys and values do, each
save a copy of it: a block that `cast_again` has wrapped saves the first one for all of them.

Of weights, a pipeline stage would hold one copy for each micro-batch that is in flight, and under
ZeRO stage 3 a rank would hold a copy of the whole model, though it gathers a block at a time. There
a block saves the parameter, which is in memory anyway, and its backward casts it once more: the
same values, by one pass over the weight.

Only blocks are wrapped, as they hold most weights, and as the code of a step beside them may do
what hooks on saved tensors do not allow (`torch.func.grad`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.autograd import is_in_backward, saved_tensor_hooks
from lightning_par.upstream.dtensor import TO_LOCAL_NODE
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["cast_again", "saving_no_casts"]

_CAST, _LEAF = "ToCopyBackward0", "torch::autograd::AccumulateGrad"
_VIEWS = frozenset(
    {
        *("AliasBackward0", "AsStridedBackward0", "ExpandBackward0", "PermuteBackward0"),
        *("SelectBackward0", "SliceBackward0", "TBackward0", "TransposeBackward0"),
        *("UnsqueezeBackward0", "ViewBackward0"),
    }
)
"""Nodes of views of a cast, which have its memory."""
_COMPARED = 2
"""Forwards of a module in which casts of one activation are compared before one is saved for all:
code may have written to the activation between them, out of sight of autograd."""


def cast_again(module: nn.Module, device_type: str, *, weights: bool = True) -> None:
    """Let autograd save one cast of an activation in the forward of a module under autocast, and
    none of a parameter.

    Args:
        module: Its forward is wrapped.
        device_type: Of the autocast.
        weights: Whether to leave out casts of parameters, too. It is for steps that change no
            weight between a forward and its backward: a changed weight raises a
            `ConfigurationError` in the backward.
    """

    def around(inner: Forward) -> Forward:
        casts = _Casts(weights=weights)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # What a recomputation saves is used at once, and what is recomputed is not saved.
            saves = torch.is_grad_enabled() and not (is_in_backward() or _is_checkpointed())
            if not saves or not torch.is_autocast_enabled(device_type):
                return inner(*args, **kwargs)
            with saving_no_casts(casts):
                return inner(*args, **kwargs)

        return forward

    wrap_forward(module, around, "weight_casts")


def _is_checkpointed() -> bool:
    """Return whether a checkpoint of torch runs this code: it counts what its hooks are given, and
    has to be given as much where it runs the code again.
    """
    hooks = saved_tensor_hooks()
    return hooks is not None and hooks[0].__module__ == torch.utils.checkpoint.__name__


@dataclass(eq=False)
class _Casts:
    """The casts that a module saves.

    Attributes:
        weights: See `cast_again`.
        compared: Forwards in which casts of one activation are still compared.
        shares: Whether they have been equal so far.
        saved: Node and output that was cast, and the memory of what is saved -> the first such cast
            of the forward that runs, and what was saved of it.
    """

    weights: bool
    compared: int = _COMPARED
    shares: bool = True
    saved: dict[Any, tuple[Tensor, Any]] = field(default_factory=dict)

    def save(self, pack: Callable[[Tensor], Any], tensor: Tensor, source: Any) -> Any:
        """Save a cast of an activation, or what was saved of an equal one."""
        # A cast of the user's may have been written to.
        if not self.shares or count_of_changes(tensor):
            return pack(tensor)
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        key = source, tensor.dtype, tensor.device, view
        if key not in self.saved:
            self.saved[key] = tensor.detach(), pack(tensor)
        elif self.compared and not tensor.is_meta and type(tensor) is Tensor:
            self.shares &= torch.equal(self.saved[key][0], tensor)
        return self.saved[key][1] if self.shares else pack(tensor)


@contextmanager
def saving_no_casts(casts: _Casts | None = None) -> Iterator[None]:
    """Surrounds a forward of which autograd saves no cast of a parameter."""
    # Autograd calls the innermost pair of hooks alone, and somebody may have asked for another one.
    outer = saved_tensor_hooks() or (_keep, _kept)
    casts = casts or _Casts(weights=True)
    hooks = partial(_pack, casts, outer[0]), partial(_unpack, outer[1])
    with ExitStack() as stack:
        with suppress(RuntimeError):  # inside of torch.func, which allows no hooks
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
        try:
            yield
        finally:
            casts.saved.clear()
            casts.compared = max(0, casts.compared - 1)


@dataclass(frozen=True, eq=False)
class _Cast:
    """A cast of a parameter, or a view of one, that is made again when it is needed.

    Attributes:
        parameter: The leaf that was cast; of a DTensor, this rank's part was.
        changes: How often its memory had been changed then.
        dtype: Of the cast.
        view: Size, stride and offset of what was saved, in the memory of the cast.
    """

    parameter: Tensor
    changes: int
    dtype: torch.dtype
    view: tuple[Any, Any, Any]


def _keep(tensor: Tensor) -> tuple[Tensor, int]:
    # Detached: an output that is saved would hold its node, and the node the output, for ever.
    with torch.DisableTorchFunctionSubclass():
        return tensor.detach(), count_of_changes(tensor)


def _kept(saved: tuple[Tensor, int]) -> Tensor:
    # Where there are hooks, autograd does not look for changes itself.
    tensor, changes = saved
    if count_of_changes(tensor) != changes:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}"
        )
    return tensor


def _pack(casts: _Casts, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    # Most of what is saved is an activation, or not 16 bits wide: this is asked of each.
    is_plain = type(tensor) is Tensor or hasattr(tensor, "fake_mode")
    if tensor.itemsize != 2 or not is_plain:
        return pack(tensor)
    node: Any = tensor.grad_fn
    is_view = node is not None and node.name() in _VIEWS
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _CAST:
        return pack(tensor)
    source = node.next_functions[0]
    leaf: Any = source[0]
    if leaf is not None and leaf.name() == TO_LOCAL_NODE:
        leaf = leaf.next_functions[0][0]
    if leaf is not None and leaf.name() != _LEAF:
        return casts.save(pack, tensor, source)
    if leaf is None or not casts.weights:
        return pack(tensor)
    local = local_part(leaf.variable)
    # A cast of the user's may have another memory format, and may have been written to.
    has_its_format = local.ndim < 4 if is_view else tensor.stride() == local.stride()
    if not has_its_format or count_of_changes(tensor) or tensor.device != local.device:
        return pack(tensor)
    view = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _Cast(leaf.variable, count_of_changes(local), tensor.dtype, view)


@torch.no_grad()
def _unpack(unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    if not isinstance(saved, _Cast):
        return unpack(saved)
    local = local_part(saved.parameter)
    if count_of_changes(local) != saved.changes:
        raise ConfigurationError(
            "LP422",
            f"a step in mixed precision changed a weight of shape {tuple(saved.parameter.shape)} "
            "in place between the forward that used it and the backward. Under a pipeline or "
            "zero_stage=3 the backward casts the weight to 16 bits again, and would compute with "
            "the changed values. Change weights in on_train_batch_end.",
        )
    return local.to(saved.dtype).as_strided(*saved.view)
