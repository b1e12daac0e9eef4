"""FSDP2 units (`torch.distributed.fsdp.FSDPModule`)."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.presence import names_of
from lightning_par.upstream.tensor import own_attributes

with names_of("torch"):
    _get_state = FSDPModule._get_fsdp_state
    _set_unshard_async_op = FSDPModule._set_unshard_async_op
    from torch.distributed._composable_state import _module_state_mapping

__all__ = [
    "attach_states",
    "detach_states",
    "initialize",
    "keep_attributes",
    "reduce_gradients",
    "unshard_without_streams",
    "wait_for_reductions",
]


def detach_states(modules: Iterable[nn.Module]) -> dict[nn.Module, Any]:
    """Let FSDP2 forget modules, which `fully_shard` could not take again otherwise.

    Nothing public undoes `fully_shard`. The state itself lives on in the hooks of the module.

    Returns:
        What `attach_states` needs to undo this.
    """
    found = [module for module in modules if module in _module_state_mapping]
    return {module: _module_state_mapping.pop(module) for module in found}


def attach_states(states: Mapping[nn.Module, Any]) -> None:
    """Undo `detach_states`."""
    _module_state_mapping.update(states)


def initialize(root: FSDPModule) -> None:
    """Initialize the units below `root`, which FSDP2 does in the first forward.

    Before that `FSDPModule.unshard` takes every unit for a root of its own.
    """
    state = _get_state(root)
    with names_of("torch"):
        lazy_init = state._lazy_init
    lazy_init()


def keep_attributes(unit: FSDPModule) -> None:
    """Give gathered parameters of a unit the attributes that users have set on the shards.

    FSDP2 makes a gathered parameter once, in its first all-gather; nothing public says when.
    """
    lists = (v if isinstance(v, list) else [v] for v in vars(_get_state(unit)).values())
    held = (p for groups in lists for g in groups for p in getattr(g, "fsdp_params", ()))
    for each in held:
        if own_attributes(each.sharded_param):
            each.init_unsharded_param = partial(_init_with_attributes, each)


def _init_with_attributes(held: Any) -> None:
    del held.init_unsharded_param  # the method itself is seen again
    held.init_unsharded_param()
    vars(held.unsharded_param).update(own_attributes(held.sharded_param))


def reduce_gradients(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward: reduce the gradients that are there, reshard.

    FSDP2 queues it in autograd's engine; nothing public reduces gradients without a backward.
    """
    state = _get_state(root)
    with names_of("torch"):
        finish = state._root_post_backward_final_callback
    finish()


def wait_for_reductions(root: FSDPModule, waits: Literal["stream", "host"] = "stream") -> None:
    """Wait for the reductions of gradients that were started below `root`.

    FSDP2 does so at the end of a backward; nothing public does within one.

    Args:
        root: The root of the units.
        waits: The current stream, or the host, which needs the results in its own memory.
    """
    state = _get_state(root)
    with names_of("torch"):
        context = state._comm_ctx
        streams = context.reduce_scatter_stream, context.all_reduce_stream
    for stream in streams:
        if waits == "host":
            stream.synchronize()
        else:
            context.device_handle.current_stream().wait_stream(stream)


def unshard_without_streams(root: FSDPModule) -> None:
    """Let all-gathers of the units below `root` be started without waiting for their end.

    `FSDPModule.unshard(async_op=True)`, which is public, does so for one call and not for those
    that FSDP2 makes ahead of a forward.
    """
    _set_unshard_async_op(root, True)
