"""Backwards of losses that weigh nothing.

Note [Silence]: the mean over a mask without any entry is 0/0. Its value is left out by its weight
0, but the gradient of the division is 0 * inf = NaN, whatever the weight. The replica cannot leave
the backward out either, because the others reduce gradients with it. So the backward runs, and
every parameter takes 0 in place of what reaches it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.utils.hooks import RemovableHandle

__all__ = ["Silence"]


class Silence:
    """Gives the parameters of FSDP units zero gradients where a loss weighs nothing.

    Args:
        units: FSDP has its hooks on them already: they hold whole parameters while they run.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units, self._on = units, False
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
        for parameter in unit.parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._handles.append(parameter.register_hook(self._zero))

    def _zero(self, grad: Tensor) -> Tensor | None:
        return torch.zeros_like(grad) if self._on else None
