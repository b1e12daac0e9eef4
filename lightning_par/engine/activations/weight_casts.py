"""Weights in mixed precision: what a backward keeps of them.

Under autocast a linear map multiplies with a 16-bit copy of its weight, which autograd saves until
the backward. A pipeline stage would hold one copy of its weights for each micro-batch that is in
flight, and under ZeRO stage 3 a rank would hold a copy of the whole model, though it gathers a
block at a time. Inside of `cast_again` autograd saves the parameter, which is in memory anyway, and
the backward casts it once more: the same values, by one pass over the weight.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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


@contextmanager
def cast_again(context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Iterator[None]:
    """Surrounds forwards of which autograd saves no cast of a parameter.

    It is for steps that change no weight between a forward and its backward.

    Args:
        context: Entered around it, as one that casts.

    Raises:
        ConfigurationError: In the backward: a step has changed a weight in place since its forward.
    """
    # Autograd calls the innermost pair of hooks alone, and somebody may have asked for another one.
    outer = saved_tensor_hooks() or (_itself, _itself)
    hooks = partial(_pack, outer[0]), partial(_unpack, outer[1])
    with context(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        yield


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


def _itself(saved: Any) -> Any:
    return saved


def _pack(pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    # Most of what is saved is an activation, or not 16 bits wide: this is asked of each.
    if tensor.itemsize != 2 or type(tensor) is not Tensor:
        return pack(tensor)
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _CAST:
        return pack(tensor)
    leaf: Any = node.next_functions[0][0]
    if leaf is not None and leaf.name() == TO_LOCAL_NODE:
        leaf = leaf.next_functions[0][0]
    if leaf is None or leaf.name() != _LEAF:
        return pack(tensor)
    changes = count_of_changes(local_part(leaf.variable))
    # The memory format of a cast is that of the parameter.
    view = tensor.size(), tensor.stride(), tensor.storage_offset()
    return _Cast(leaf.variable, changes, tensor.dtype, view)


@torch.no_grad()
def _unpack(unpack: Callable[[Any], Tensor], saved: Any) -> Tensor:
    if not isinstance(saved, _Cast):
        return unpack(saved)
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
