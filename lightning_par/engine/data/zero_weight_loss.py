"""Backwards of losses that weigh nothing.

Note [Zero-weight loss]: the mean over a mask without any entry is 0/0. Its weight 0 leaves its
value out, but the gradient of the division is 0 * inf = NaN, whatever the weight. The replica
cannot leave the backward out either, because the others reduce gradients with it. So the backward
runs, and every parameter takes 0 in place of what reaches it. Experts that are divided among the
replicas compute for the tokens of the others, too: there, what the silent loss sends into the
experts is 0.
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
    """Gives the parameters of FSDP units zero gradients where a loss weighs nothing.

    Args:
        units: FSDP has its hooks on them already: they hold whole parameters while they run.
        divided: Modules whose parameters compute for other replicas, too.
    """

    def __init__(self, units: Sequence[nn.Module], divided: Sequence[nn.Module] = ()) -> None:
        self._units, self._divided, self._on = units, divided, False
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Surrounds the forwards and backwards of a step some of whose losses weigh nothing."""
        self.prepare()
        try:
            yield
        finally:
            self.release()

    def prepare(self) -> None:
        """Find the parameters of the units whose forward runs from now on."""
        if not self._handles:
            self._handles = [u.register_forward_pre_hook(self._find) for u in self._units]
            self._handles += [m.register_forward_hook(self._answer) for m in self._divided]

    def release(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The backwards inside give zero gradients."""
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _find(self, unit: nn.Module, inputs: Any) -> None:
        spared = {id(p) for module in self._divided for p in module.parameters()}
        for parameter in unit.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked | spared:
                self._hooked.add(id(parameter))
                self._handles.append(parameter.register_hook(self._zero))

    def _answer(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for answer in tree_leaves(output):
            if isinstance(answer, Tensor) and answer.requires_grad:
                answer.register_hook(self._zero)

    def _zero(self, grad: Tensor) -> Tensor | None:
        return torch.zeros_like(grad) if self._on else None
