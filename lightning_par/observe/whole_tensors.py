"""Weights and gradients of any wrapped module, whole: of DDP, FSDP, `fully_shard`, DTensors."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn, Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import full_tensors

__all__ = ["clean_name", "norms_of_copies", "whole_tensors"]

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers of torch add to the names inside of them."""


def clean_name(name: str) -> str:
    """Return the name of a parameter or buffer as it was before its module was wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _is_fsdp(module: nn.Module) -> bool:
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _summoned(module: nn.Module, *, gradients: bool) -> AbstractContextManager[None]:
    if not _is_fsdp(module):
        return nullcontext()
    summon = FullyShardedDataParallel.summon_full_params
    found: AbstractContextManager[None] = summon(module, writeback=False, with_grads=gradients)
    return found


@torch.no_grad()
def whole_tensors(
    module: nn.Module,
    *,
    within: nn.Module | None = None,
    gradients: bool = False,
    buffers: bool = False,
    keeps: bool = True,
) -> dict[str, Tensor]:
    """Return the parameters of a module, whole and copied to the CPU, by their clean names.

    Args:
        module: The user's module, of which wrappers shard parts; not in a forward or backward.
        within: The wrapper around it, if there is one, which FSDP asks for.
        gradients: Whether gradients are returned in place of the parameters that have one.
        buffers: Whether buffers are returned, too, those of this rank.
        keeps: Whether this rank gets them; else it only takes part, and gets nothing.

    **Communicates**: all-gathers of what is sharded, so every rank has to call it.
    """

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in module.named_parameters():
            tensor = parameter.grad if gradients else parameter
            if tensor is not None:
                yield clean_name(name), tensor
        if buffers:
            yield from ((clean_name(name), buffer) for name, buffer in module.named_buffers())

    with _summoned(module if within is None else within, gradients=gradients):
        found, copies = dict(named()), dict[str, Tensor]()
        for name, whole in zip(found, full_tensors(found.values()), strict=True):
            if keeps:
                copies[name] = whole.to("cpu", copy=True)
        return copies


def norms_of_copies(module: nn.Module, within: nn.Module | None = None) -> dict[str, float]:
    """Return the norms of the gradients of which every rank holds a copy; others are left out.

    Args:
        module: The user's module.
        within: The wrapper around it, if there is one.
    """
    if _is_fsdp(module if within is None else within):
        return {}
    named = ((clean_name(name), p.grad) for name, p in module.named_parameters())
    copies = {n: g for n, g in named if g is not None and not isinstance(g, DTensor)}
    return {name: float(gradient.detach().double().norm()) for name, gradient in copies.items()}
