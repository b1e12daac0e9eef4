"""FSDP2 units (`torch.distributed.fsdp.FSDPModule`)."""

from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    _get_state = FSDPModule._get_fsdp_state
    _set_unshard_async_op = FSDPModule._set_unshard_async_op

__all__ = ["initialize", "reduce_gradients", "unshard_without_streams"]


def initialize(root: FSDPModule) -> None:
    """Initialize the units below `root`, which FSDP2 does in the first forward.

    Before that `FSDPModule.unshard` takes every unit for a root of its own.
    """
    state = _get_state(root)
    with names_of("torch"):
        lazy_init = state._lazy_init
    lazy_init()


def reduce_gradients(root: FSDPModule) -> None:
    """Do what FSDP2 does at the end of a backward: reduce the gradients that are there, reshard.

    FSDP2 queues it in autograd's engine; nothing public reduces gradients without a backward.
    """
    state = _get_state(root)
    with names_of("torch"):
        finish = state._root_post_backward_final_callback
    finish()


def unshard_without_streams(root: FSDPModule) -> None:
    """Let all-gathers of the units below `root` be started without waiting for their end.

    `FSDPModule.unshard(async_op=True)`, which is public, does so for one call and not for those
    that FSDP2 makes ahead of a forward.
    """
    _set_unshard_async_op(root, True)
