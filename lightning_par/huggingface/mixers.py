"""Layers of transformers that mix tokens without attention, on divided sequences.

A state-space layer, a gated delta rule or a short convolution reads its tokens in order. Such a
layer is given the tokens of all ranks, and each rank keeps what it computes for its own. This is
exact for any such layer, whatever it computes. It saves neither time nor memory in these layers:
the attention and the MLPs, and what is between the layers, are divided.

Shapes: B batch, T tokens, t tokens of one rank, D features.
"""

import inspect
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from torch import nn, Tensor

from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.pytree import tree_map

__all__ = ["WholeSequences", "mixers_in"]


def mixers_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers that mix tokens by a convolution, alone or before a scan.

    Args:
        module: A block, or the whole model.
    """
    for part in module.modules():
        # Of torch's own class: the layer around it may read its weight, and does the scan.
        kernels = (m.kernel_size[0] for m in part.children() if type(m) is nn.Conv1d)
        if any(width > 1 for width in kernels):
            yield part


class WholeSequences:
    """Gives mixers the tokens of all ranks.

    Args:
        blocks: Their mixers are wrapped.
        axis: The sequence shard of this rank.

    **Communicates**: in every call of a mixer one all-gather of its inputs over the axis; the
    backward sums their gradients by as many reduce-scatters.
    """

    def __init__(self, blocks: Iterable[nn.Module], axis: SequenceShard) -> None:
        self._axis = axis
        self._padding: Tensor | None = None
        mixers = [mixer for block in blocks for mixer in mixers_in(block)]
        self.is_used = bool(mixers)
        for mixer in mixers:
            wrap_forward(mixer, partial(self._around, mixer), "whole_sequences")

    def take_padding(self, mask: Tensor | None) -> None:
        """Take the padding mask [B, t] of a forward of the model: transformers drops a mask without
        padding, which one rank may have and another not.

        **Communicates**: one all-gather of the mask over the axis.
        """
        self._padding = None
        if self.is_used and mask is not None and mask.ndim == 2:
            self._padding = self._axis.gather_tensor(mask, 1)

    def _widen(self, x: Any) -> Any:
        # [B, t, D], or [1, t] as positions.
        assert self._axis.layout is not None
        return self._axis.gather_tensor(x, 1) if _has_length(x, self._axis.layout.local) else x

    def _narrow(self, x: Any) -> Any:
        assert self._axis.layout is not None
        is_whole = _has_length(x, self._axis.layout.length)
        return self._axis.shard_tensor(x, 1) if is_whole else x

    def _around(self, mixer: nn.Module, inner: Forward) -> Forward:
        signature = inspect.signature(inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            axis = self._axis
            if axis.layout is None:
                return inner(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments
            for name in given:
                given[name] = (
                    self._padding if "mask" in name else tree_map(self._widen, given[name])
                )
            if not any(_has_length(x, axis.layout.length) for x in given.values()):
                raise ConfigurationError(
                    "LP305",
                    f"{type(mixer).__name__} mixes the tokens of a sequence, but its inputs do not "
                    f"have the {axis.layout.local} tokens of a rank in dim 1. Use "
                    "sequence_parallel=False, or context_parallel_size=1.",
                )
            axis.calls += 1
            # What mixes tokens in here has all of them.
            looks, axis.looks = axis.looks, False
            try:
                return tree_map(self._narrow, inner(*bound.args, **bound.kwargs))
            finally:
                axis.looks = looks

        return forward


def _has_length(x: Any, length: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > 1 and x.shape[1] == length
