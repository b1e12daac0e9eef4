"""The terms of which a step makes its loss, by their values.

A loss may be a sum of means over different numbers, and one of them so small that the sum tells
nothing of it. So sums of small tensors are followed, and what is linear in them: each term is then
compared by itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.upstream.pytree import leaves_of, map_leaves

__all__ = ["LossTerms"]

_SUMS = frozenset(
    {"__add__", "__iadd__", "__isub__", "__radd__", "__rsub__", "__sub__", "add", "add_", "cat"}
    | {"rsub", "stack", "sub", "sub_", "subtract"}
)
"""Functions that are linear in all of their tensors together."""
_FACTORS = frozenset(
    {"__getitem__", "__imul__", "__itruediv__", "__mul__", "__neg__", "__rmul__", "__truediv__"}
    | {"clone", "contiguous", "div", "div_", "double", "flatten", "float", "mean", "mul", "mul_"}
    | {"neg", "reshape", "squeeze", "sum", "to", "true_divide", "type_as", "unsqueeze", "view"}
)
"""Functions that are linear in their first tensor, and in another one where they multiply."""
_QUOTIENTS = frozenset(("__itruediv__", "__truediv__", "div", "div_", "true_divide"))
_ENTRIES = 64
"""Entries of the tensors that are followed; a loss has one, those of samples or tasks have few."""
_TERMS = 32
"""Terms that are followed."""


class LossTerms:
    """Follows the sums of a step on one batch."""

    def __init__(self) -> None:
        # The sums are held, so that no other tensor can get the same `id`.
        self._known = dict[int, tuple[Tensor, list[Tensor]]]()
        self._values = dict[str, tuple[float, ...]]()

    def of(self, loss: float) -> tuple[float, ...]:
        """Return the terms of a loss with this value; itself if it is no sum that was seen."""
        return self._values.get(str(loss), (loss,))

    def before(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return the terms of what a call will give; empty if they are not followed.

        Args:
            function: What is called; it may write into its arguments.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        name = getattr(function, "__name__", "")
        is_sum = name in _SUMS
        if not is_sum and (name not in _FACTORS or not self._known):
            return []
        # Most calls of a model are of large tensors: its arguments are gone through otherwise.
        if args and type(args[0]) is Tensor and args[0].numel() > _ENTRIES:
            return []
        found = {id(t): t for t in leaves_of((args, kwargs)) if isinstance(t, Tensor)}
        if any(type(t) not in (Tensor, nn.Parameter) for t in found.values()):
            return []
        if any(t.numel() > _ENTRIES for t in found.values()):
            return []
        held = [t for t in found.values() if is_sum or id(t) in self._known]
        if not held or (not is_sum and len(held) > 1):
            return []
        if not all(tensor.is_floating_point() for tensor in held):
            return []
        if name in _QUOTIENTS and held[0] is not args[0]:
            return []
        pairs = [(tensor, term) for tensor in held for term in self._terms(tensor)]
        if len(pairs) < 2 or len(pairs) > _TERMS:
            return []

        with torch.no_grad():
            return [_apply(function, args, kwargs, *each) for each in enumerate(pairs)]

    def note(self, result: Any, terms: list[Tensor]) -> None:
        """Keep the terms of what a call gave, unless a call that is not followed has written."""
        total = sum(terms, torch.zeros(()).to(result)) if terms else None
        # A tensor on meta stands for one of another pipeline stage, and has no values.
        if total is None or result.is_meta:
            return
        if not torch.allclose(total, result.detach(), 1e-2, equal_nan=True):
            return
        self._known[id(result)] = result, terms
        if result.numel() == 1:
            self._values[str(float(result.detach()))] = tuple(map(float, terms))

    def end(self) -> None:
        """Let go of the tensors of the step."""
        self._known.clear()

    def _terms(self, tensor: Tensor) -> list[Tensor]:
        return self._known[id(tensor)][1] if id(tensor) in self._known else [tensor.detach()]


def _apply(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    number: int,
    pair: tuple[Tensor, Tensor],
) -> Tensor:
    """Call a function with a term in place of a tensor; of a sum, with 0 in place of the others."""
    is_sum, (tensor, term) = function.__name__ in _SUMS, pair

    def value(leaf: Any) -> Any:
        if leaf is tensor:
            return term.clone()  # into which the call may write
        return torch.zeros_like(leaf) if is_sum and isinstance(leaf, Tensor) else leaf

    # A number that is added belongs to the first term.
    if is_sum and number and len(args) == 2 and isinstance(args[0], Tensor):
        args = args[0], 0 if type(args[1]) in (int, float) else args[1]
    made: Tensor = function(*map_leaves(value, tuple(args)), **map_leaves(value, dict(kwargs)))
    return made
