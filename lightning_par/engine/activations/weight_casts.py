"""Weights in mixed precision: what a backward keeps of them.

Under autocast a linear map multiplies with a 16-bit copy of its weight, which autograd saves until
the backward. A pipeline stage would hold one copy of its weights for each micro-batch that is in
flight, and under ZeRO stage 3 a rank would hold a copy of the whole model, though it gathers a
block at a time. Inside of `cast_again` autograd saves the parameter, which is in memory anyway, and
the backward casts it once more: the same values, by one pass over the weight.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.autograd import saved_tensor_hooks
from lightning_par.upstream.dtensor import TO_LOCAL_NODE
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["cast_again"]

_CAST, _LEAF = "ToCopyBackward0", "torch::autograd::AccumulateGrad"
_VIEWS = frozenset(
    {
        *("AliasBackward0", "AsStridedBackward0", "ExpandBackward0", "PermuteBackward0"),
        *("SelectBackward0", "SliceBackward0", "TBackward0", "TransposeBackward0"),
        *("UnsqueezeBackward0", "ViewBackward0"),
    }
)
"""Nodes of views of a cast, which have its memory."""


def cast_again() -> AbstractContextManager[None]:
    """Return a context in whose forwards autograd saves no cast of a parameter.

    It is for steps that change no weight between a forward and its backward.

    Raises:
        ConfigurationError: In the backward: a step has changed a weight in place since its forward.
    """
    outer = saved_tensor_hooks()
    if outer is None:
        return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)
    # Autograd calls the innermost pair alone, and somebody has asked for the other one.
    pack, unpack = outer

    def pack_both(tensor: Tensor) -> Any:
        packed = _pack(tensor)
        return pack(tensor) if packed is tensor else packed

    def unpack_both(saved: Any) -> Tensor:
        return _unpack(saved) if isinstance(saved, _Cast) else unpack(saved)

    return torch.autograd.graph.saved_tensors_hooks(pack_both, unpack_both)


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


def _pack(tensor: Tensor) -> Tensor | _Cast:
    # Most of what is saved is an activation, or not 16 bits wide: this is asked of each.
    if tensor.itemsize != 2 or type(tensor) is not Tensor:
        return tensor
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _CAST:
        return tensor
    leaf: Any = node.next_functions[0][0]
    if leaf is not None and leaf.name() == TO_LOCAL_NODE:
        leaf = leaf.next_functions[0][0]
    if leaf is None or leaf.name() != _LEAF:
        return tensor
    changes = count_of_changes(local_part(leaf.variable))
    # The memory format of a cast is that of the parameter.
    view = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _Cast(leaf.variable, changes, tensor.dtype, view)


@torch.no_grad()
def _unpack(saved: Tensor | _Cast) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    local = local_part(saved.parameter)
    if count_of_changes(local) != saved.changes:
        raise ConfigurationError(
            "LP422",
            "a step in mixed precision has used a weight of shape "
            f"{tuple(saved.parameter.shape)}, and has changed it in place before its backward. "
            "Under a pipeline or zero_stage=3 the backward casts the weight once more, and would "
            "meet the changed one. Change weights in on_train_batch_end.",
        )
    return local.to(saved.dtype).as_strided(*saved.view)
