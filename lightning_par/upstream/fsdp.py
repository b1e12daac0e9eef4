"""FSDP2 units (`torch.distributed.fsdp.FSDPModule`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.presence import names_of
from lightning_par.upstream.tensor import own_attributes

with names_of("torch"):
    _get_state = FSDPModule._get_fsdp_state
    from torch.distributed._composable_state import _module_state_mapping

__all__ = [
    "attach_states",
    "detach_states",
    "fill_missing",
    "hide_from_modes",
    "initialize",
    "keep_attributes",
    "parameters_of",
    "reduce_gradients",
    "reduction_groups",
    "skip_backward",
    "skip_forward",
    "unshard_without_streams",
    "wait_for_reductions",
    "watch_backward",
    "watch_end",
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
    # torch 2.13 holds several groups of parameters per unit, 2.11 one.
    held = (p for groups in lists for g in groups for p in getattr(g, "fsdp_params", ()))
    for each in held:
        if own_attributes(each.sharded_param):
            each.init_unsharded_param = partial(_init_with_attributes, each)


def _init_with_attributes(held: Any) -> None:
    del held.init_unsharded_param  # the method itself is seen again
    held.init_unsharded_param()
    vars(held.unsharded_param).update(own_attributes(held.sharded_param))


def hide_from_modes(unit: FSDPModule) -> None:
    """Let no `TorchFunctionMode` see how FSDP2 gathers the parameters of a unit and drops them.

    A mode follows what a step computes. FSDP2 calls many functions of torch around each unit, which
    are nothing of the step; it has no option for this.
    """
    group = _group_of(unit)
    for name in ("unshard", "wait_for_unshard", "reshard") if group is not None else ():
        setattr(group, name, _without_modes(getattr(group, name)))


def _without_modes(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.DisableTorchFunction():
            return call(*args, **kwargs)

    return run


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
        # HSDP all-reduces over replicas on a stream of its own, after the reduce-scatter.
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
    assert isinstance(root, nn.Module)
    groups = (_group_of(unit) for unit in root.modules() if isinstance(unit, FSDPModule))
    for group in groups:
        if group is not None:
            group.unshard_async_op = True


def _group_of(unit: FSDPModule) -> Any:
    """Return what FSDP2 holds of a unit's parameters; None if the unit has none."""
    state = _get_state(unit)
    with names_of("torch"):
        return state._fsdp_param_group


def parameters_of(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the shards of a unit's parameters, in the same order on every rank."""
    group = _group_of(unit)
    return [] if group is None else [held.sharded_param for held in group.fsdp_params]


def reduction_groups(unit: FSDPModule) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups of several ranks over which a unit's gradients are reduced."""
    group = _group_of(unit)
    if group is None:
        return ()
    mesh = group.mesh_info.mesh
    # One dim, or with HSDP two.
    found = (mesh.get_group(dim) for dim in range(mesh.ndim))
    return tuple(one for one in found if one.size() > 1)


def watch_backward(unit: FSDPModule, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Call functions before FSDP2 begins, and before it ends, the backward of a unit."""
    group = _group_of(unit)
    if group is None:
        return
    before, after = group.pre_backward, group.post_backward

    def pre_backward(*args: Any) -> None:
        begins()
        before(*args)

    def post_backward(*args: Any) -> None:
        ends()
        after(*args)

    # On the instance, where FSDP2 looks it up at each backward.
    group.pre_backward, group.post_backward = pre_backward, post_backward


def watch_end(unit: FSDPModule, ends: Callable[[], None]) -> None:
    """Call a function before FSDP2 ends a backward; each unit may be the one that does."""
    state: Any = _get_state(unit)
    with names_of("torch"):
        finish = state._root_post_backward_final_callback

    def last(*args: Any) -> None:
        ends()
        finish(*args)

    state._root_post_backward_final_callback = last


def skip_forward(unit: FSDPModule) -> None:
    """Do what FSDP2 does around the forward of a unit, without the forward."""
    group = _group_of(unit)
    if group is not None:
        group.pre_forward(unit, (), {})
        group.post_forward(unit, (), None)


def skip_backward(unit: FSDPModule) -> None:
    """Do what FSDP2 does around the backward of a unit; what has begun is ended."""
    group = _group_of(unit)
    if group is not None:
        group.pre_backward(True)  # gathers the unit ahead of it, too
        group.post_backward()


def fill_missing(unit: FSDPModule, *, fills: bool) -> Iterator[tuple[nn.Parameter, bool]]:
    """Give zero gradients to the parameters of a unit that have none, if FSDP2 is to reduce them.

    Args:
        unit: The unit.
        fills: Whether it does; otherwise they are passed over.

    Yields:
        The shard of every parameter that trains; whether it got a zero gradient.
    """
    group = _group_of(unit)
    if group is None or not group.reduce_grads:
        return
    found = [(held, held.unsharded_accumulated_grad) for held in group.fsdp_params]
    # Of an earlier batch, in the dtype of the reduction, which takes one dtype only.
    accumulates = any(total is not None for _, total in found)
    for held, total in found:
        # `unsharded_param` is there from the first all-gather on.
        shard, whole = held.sharded_param, getattr(held, "unsharded_param", None)
        if not shard.requires_grad or whole is None:
            continue
        missing = total is None and whole.grad is None
        if missing and not fills:
            continue
        if missing:
            whole.grad = torch.zeros_like(whole)
        # Cast to the dtype of the others: see above.
        if accumulates and total is None:
            held.to_accumulated_grad_if_needed()
        yield shard, missing
