"""Counts the floating-point operations of a step, with the formulas of `torch.utils.flop_counter`.

torch's own `FlopCounterMode` also tracks the hierarchy of modules, which a pipeline stage leaves in
the middle; and it cannot tell what activation checkpointing computes a second time.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_par.upstream.aten import flash_cpu, flash_cpu_backward
from lightning_par.upstream.autograd import is_in_backward
from lightning_par.upstream.dispatch import TorchDispatchMode

__all__ = ["FlopCounter"]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, then values; a mask saves nothing, as in torch's formulas for GPUs."""
    scores = 2 * query.shape[:-1].numel() * key.shape[-2]
    return scores * (query.shape[-1] + value.shape[-1])


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    """Scores again, then two gradients of the scores' product and two of the values'."""
    scores = 2 * query.shape[:-1].numel() * key.shape[-2]
    return scores * (3 * query.shape[-1] + 2 * value.shape[-1])


_FORMULAS: Mapping[Any, Callable[..., int]] = MappingProxyType(
    {
        flash_cpu: _attention,
        flash_cpu_backward: _attention_backward,
        **flop_registry,
    }
)
"""torch's, and attention on the CPU, which it leaves out."""


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of this rank's matrix products, convolutions and attention while entered.

    A product of [M, K] and [K, N] counts as 2 M K N. Compiled code is not seen.

    Attributes:
        model: What the model needs: forwards and backwards.
        recomputed: What was computed a second time in a backward, to save memory.

    Example:
        >>> with FlopCounter() as counter:
        ...     model(batch).sum().backward()
        >>> counter.model
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = 0
        self.recomputed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count it."""
        options = kwargs or {}
        formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is None and hasattr(func, "decompose"):
            with self:
                result = func.decompose(*args, **options)
            if result is not NotImplemented:
                return result
        result = func(*args, **options)
        if formula is not None:
            count = formula(*args, **options, out_val=result)
            # A backward runs without grad; what it recomputes needs one.
            if is_in_backward() and torch.is_grad_enabled():
                self.recomputed += count
            else:
                self.model += count
        return result
