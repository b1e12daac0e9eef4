"""FLOP counter with the formulas of `torch.utils.flop_counter`, which tells recomputation apart.

torch's own `FlopCounterMode` also tracks the module hierarchy, and fails where a pipeline stage
enters and leaves it in the middle; and it counts what activation checkpointing recomputes as model
FLOPs.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_par.upstream.aten import flash_cpu, flash_cpu_backward
from lightning_par.upstream.autograd import is_in_backward
from lightning_par.upstream.dispatch import is_composite, TorchDispatchMode

__all__ = ["FlopCounter"]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of ``q k^T`` and of its product with v; masks save nothing, as in torch."""
    # query [B, H, T, D], key [B, H, S, D]: 2 B H T S, to be multiplied by a head's width.
    scores = 2 * query.shape[:-1].numel() * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Return the FLOPs of the recomputed scores, of dq and dk, of dv and the scores' gradient."""
    scores = 2 * query.shape[:-1].numel() * key.shape[-2]
    return scores * (3 * query.shape[-1] + 2 * value.shape[-1])


_FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        flash_cpu: _attention,
        flash_cpu_backward: _attention_backward,
        **flop_registry,
    }
)
"""Operator -> FLOP formula: those of torch, and flash attention on the CPU, which torch lacks."""


class FlopCounter(TorchDispatchMode):
    """Counter of this rank's FLOPs in matrix products, convolutions and attention, as a context.

    A product of [M, K] and [K, N] counts as 2 M K N. Compiled code is not seen.

    Attributes:
        model: FLOPs of forwards and backwards, without recomputation.
        recomputed: FLOPs of forwards that activation checkpointing runs again in the backward.

    Examples:
        >>> with FlopCounter() as counter:
        ...     model(batch).sum().backward()
        >>> counter.model
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = 0
        self.recomputed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and add its FLOPs."""
        options = kwargs or {}
        # Formulas are by packet, `aten.mm`, of all overloads.
        formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is None and hasattr(func, "decompose") and is_composite(func):
            # Composite operators such as `linear` have no formula, their parts do.
            # Inside __torch_dispatch__ the mode is off; entered again, it counts the parts.
            with self:
                return func.decompose(*args, **options)
        result = func(*args, **options)
        count = None if formula is None else formula(*args, **options, out_val=result)
        self._on_operator(func, args, options, result, count)
        if count is not None:
            # Inside a backward, grad mode is off except for what activation checkpointing
            # recomputes.
            # `torch.utils.checkpoint` recomputes under `enable_grad`, within the backward's node.
            if is_in_backward() and torch.is_grad_enabled():
                self.recomputed += count
            else:
                self.model += count
        return result

    def _on_operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, flops: int | None
    ) -> None:
        """Do nothing; a subclass looks at every operator, with its FLOPs if it has a formula."""
