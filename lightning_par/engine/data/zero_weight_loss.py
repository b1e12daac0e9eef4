"""Backward of losses with weight 0 (no valid label).

Note [Zero-weight loss]: the mean over a mask without any entry is 0/0. Its weight 0 leaves its
value out, but the gradient of the division is 0 * inf = NaN, whatever the weight. The replica
cannot leave the backward out either, because the others reduce gradients with it. So the backward
runs, and every parameter takes 0 in place of the gradient that reaches it. Experts that are sharded
over the replicas compute for the tokens of the others, too: there, the gradient that this loss
sends into the experts is set to 0.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.hooks import RemovableHandle

from lightning_par.upstream.pytree import tree_leaves

__all__ = ["ZeroWeightBackward"]


class ZeroWeightBackward:
    """Hooks that give the parameters of FSDP units zero gradients for losses with weight 0.

    Args:
        units: FSDP units that have FSDP's hooks already: they hold whole parameters while they run.
        experts: Modules with experts that compute for other replicas, too.
    """

    def __init__(self, units: Sequence[nn.Module], experts: Sequence[nn.Module] = ()) -> None:
        self._units, self._experts, self._on = units, experts, False
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Context around the forwards and backwards of a step with losses of weight 0."""
        self.prepare()
        try:
            yield
        finally:
            self.release()

    def prepare(self) -> None:
        """Register the hooks, which find the parameters of every unit whose forward runs."""
        if not self._handles:
            self._handles = [u.register_forward_pre_hook(self._find) for u in self._units]
            self._handles += [m.register_forward_hook(self._answer) for m in self._experts]

    def release(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    @contextmanager
    def zero_gradients(self) -> Iterator[None]:
        """Context in which backwards give zero gradients."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def find(self, unit: nn.Module) -> None:
        """Find the whole parameters of a unit whose forward does not run."""
        if self._handles:
            self._find(unit, None)

    def _find(self, unit: nn.Module, inputs: Any) -> None:
        # Parameters of experts also get gradients of other replicas' tokens, so that they are left
        # alone; the outputs of their modules are hooked instead.
        spared = {id(p) for module in self._experts for p in module.parameters()}
        for parameter in unit.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked | spared:
                self._hooked.add(id(parameter))
                self._handles.append(parameter.register_hook(self._zero))

    def _answer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for answer in tree_leaves(output):
            if isinstance(answer, Tensor) and answer.requires_grad:
                answer.register_hook(self._zero)

    def _zero(self, grad: Tensor | None) -> Tensor | None:
        return torch.zeros_like(grad) if self._on and grad is not None else None
