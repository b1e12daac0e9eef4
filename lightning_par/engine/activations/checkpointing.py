"""Activation checkpointing: blocks keep less of their forward and recompute the rest in the
backward.

B batch, T tokens, D model dim, N heads.

Note [What to keep]: the outputs of matrix products with a weight are kept, since recomputing one
costs about D operations per entry. So are those of attention kernels. Of the products of two
activations, which attention without a kernel computes, the one with the probabilities is kept, and
the scores are not: [B, N, T, T] is larger than the two factors it is computed from, and each entry
costs only the D / N operations of a head. What stands between is elementwise and nearly free.

**Source**: Korthikanti et al. 2205.05198, section 4. They keep all of a block but the attention
core; we keep products only, and so recompute norms, activation functions and dropout too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, get_args, Literal

import torch
from torch import nn, Tensor
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from lightning_par.engine.activations.cpu_offload import hold_on_host, kept_on_host
from lightning_par.engine.activations.written_buffers import WrittenBuffers
from lightning_par.engine.wrapping import Forward, wrap_forward

__all__ = [
    "MODES",
    "Mode",
    "Recomputation",
    "choose_modes",
    "recompute",
    "resolve_operations",
    "wait_on_host",
]

Mode = Literal["full", "none", "selective"]
MODES: tuple[Mode, ...] = get_args(Mode)

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear", "aten._grouped_mm", "aten._scaled_mm")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
_BATCHED = ("aten.bmm", "aten.baddbmm")

_KEPT_UNITS = {"full": 2, "selective": 22, "none": 34}
"""Bytes that a block of a decoder keeps, in units of T B D, in 16 bits with dropout and an
attention kernel; as the test of GPT-3's shape counts them."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Options of activation checkpointing.

    Attributes:
        mode: ``"full"`` keeps the inputs only, ``"selective"`` also the outputs of `operations`,
            ``"none"`` everything.
        operations: As `resolve_operations` gives them; None: see Note [What to keep].
        parts: Under ``"selective"``: names or patterns of modules inside a block that keep their
            inputs only, while the rest of the block keeps everything; ``"plan"``: those that the
            plan calls checkpointable; None: choose by operation.
        every: Checkpoint every `every`-th block: 0, every, 2 every, ...
        on_host: Whether what is kept is offloaded to the host's memory.
        stage_modes: Modes of the pipeline stages instead of `mode`; ``"auto"``: see
            `choose_modes`.
    """

    mode: Mode
    operations: frozenset[str] | None = None
    parts: tuple[str, ...] | Literal["plan"] | None = None
    every: int = 1
    on_host: bool = False
    stage_modes: tuple[Mode, ...] | Literal["auto"] | None = None


def resolve_operations(names: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """Return the full names of operations, and those of `names` that do not exist.

    Args:
        names: Such as ``"mm"``, ``"aten.mm"`` or ``"aten.mm.default"``; without an overload, all.
    """
    found, unknown = set(), []
    for name in names:
        space, _, rest = name.partition(".") if "." in name else ("aten", ".", name)
        # torch.ops gives an operator's packet by name, and raises AttributeError without one.
        packet = getattr(getattr(torch.ops, space), rest.partition(".")[0], None)
        overload = rest.partition(".")[2]
        if packet is None or (overload and overload not in packet.overloads()):
            unknown.append(name)
        else:
            found.add(f"{space}.{rest}")
    return frozenset(found), unknown


def choose_modes(in_flight: Sequence[float], blocks: Sequence[int], mode: Mode) -> list[Mode]:
    """Choose for every pipeline rank the least recomputation that needs no more memory than the
    fullest rank does in `mode`.

    Args:
        in_flight: For each rank, the most micro-batches whose activations a block holds at once.
        blocks: Number of blocks of every rank.
        mode: Upper bound of the recomputation.

    >>> choose_modes([4, 3, 2, 1], [1, 1, 1, 1], "selective")
    ['selective', 'selective', 'none', 'none']
    """
    # Memory is proportional to micro-batches in flight times blocks.
    loads = [held * count for held, count in zip(in_flight, blocks, strict=True)]
    budget = max(loads) * _KEPT_UNITS[mode]
    # From the least recomputation to the most.
    order: tuple[Mode, ...] = ("none", "selective", "full")
    allowed = order[: order.index(mode) + 1]
    return [next(m for m in allowed if load * _KEPT_UNITS[m] <= budget) for load in loads]


def recompute(
    module: nn.Module,
    mode: Mode,
    *,
    operations: frozenset[str] | None = None,
    on_host: bool = False,
) -> None:
    """Make `module` recompute its forward in the backward.

    It draws the same random numbers again, and leaves buffers alone. Hooks of the module are not
    called again, since they are outside of its forward.

    Args:
        module: Its `forward` is wrapped; what wraps it later is not recomputed.
        mode: See `Recomputation`; "none" changes nothing.
        operations: See `Recomputation`.
        on_host: Whether the outputs that are kept are offloaded; `wait_on_host` offloads the rest.
    """
    if mode == "none":
        return
    contexts = _contexts(operations, on_host) if mode == "selective" else {}
    buffers = WrittenBuffers(module)

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Evaluation keeps nothing for a backward.
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            # By position, so that checkpoint sees every tensor and the devices of them all.
            call: Callable[..., Any] = partial(_call, inner, tuple(kwargs))
            if not torch.compiler.is_compiling():  # a compiler writes to buffers once
                call = buffers.of_both(call)
            return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **contexts)

        return forward

    wrap_forward(module, around, f"recompute_{mode}")


def _call(inner: Callable[..., Any], names: Sequence[str], *values: Any) -> Any:
    count = len(values) - len(names)
    return inner(*values[:count], **dict(zip(names, values[count:], strict=True)))


def wait_on_host(module: nn.Module) -> None:
    """Offload what autograd saves in the forward of `module`, except parameters, to the host.

    Args:
        module: Its `forward` is wrapped.
    """

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with kept_on_host(module.parameters()):
                return inner(*args, **kwargs)

        return forward

    wrap_forward(module, around, "saved_on_host")


def _contexts(operations: frozenset[str] | None, on_host: bool) -> dict[str, Any]:
    keeps = partial(_keeps, operations)
    if on_host:
        return {"context_fn": partial(hold_on_host, keeps)}
    policy = partial(_policy, keeps)
    return {"context_fn": partial(create_selective_checkpoint_contexts, policy)}


def _policy(
    keeps: Callable[[Any, Sequence[Any]], bool],
    context: Any,
    operation: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    kept = keeps(operation, args)
    # MUST_SAVE also where a compiler would rather recompute.
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(names: frozenset[str] | None, operation: Any, args: Sequence[Any]) -> bool:
    """Return whether the output of an operation is kept; see Note [What to keep]."""
    full, packet = str(operation), str(operation.overloadpacket)
    if names is not None:
        return full in names or packet in names
    # baddbmm has a bias before the two factors.
    if packet in _BATCHED:
        return not _grows(args[-2:])
    return packet in _PRODUCTS or packet in _ATTENTION


def _grows(factors: Sequence[Tensor]) -> bool:
    """Return whether a batched product has more entries than both factors, as scores have."""
    left, right = factors
    product = prod(left.shape[:-1]) * right.shape[-1]
    return product > left.numel() + right.numel()
