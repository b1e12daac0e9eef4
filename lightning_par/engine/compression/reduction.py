"""The mean of gradients over the replicas, compressed.

Note [Not finite]: a gradient that is not finite is not compressed, because what is remembered of it
would spoil every later step. If one is anywhere in the world, this step sends whole gradients and
remembers what it did, as the step will be refused or left out.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_par.checkpoint.pieces import local_part
from lightning_par.engine.compression.methods import choose_compressor, GradientBucket
from lightning_par.engine.compression.options import GradientCompression
from lightning_par.engine.gradients import fill_buckets, local_gradients

__all__ = ["CompressedGradients"]

_log = logging.getLogger(__name__)


class CompressedGradients:
    """Parameters of which every replica holds a copy; after the backward, gradients are averaged.

    Args:
        parameters: In the same order on every rank of the group.
        group: The replicas.
        options: How.
        dtype: In which gradients are added; None: in their own.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        options: GradientCompression,
        dtype: torch.dtype | None = None,
    ) -> None:
        # The last ones have their gradients first, as in the buckets of torch.
        self.parameters = tuple(reversed(parameters))
        self._group, self._options, self._dtype = group, options, dtype
        self._buckets: list[list[nn.Parameter]] = []
        self._compressor = choose_compressor(options, group)
        self._steps, self._scale = 0, 1.0

    @torch.no_grad()
    def reduce(self, scale: float = 1.0) -> None:
        """Average the gradients over the group.

        One that no rank has stays away; one that only some ranks have counts as 0 on the others.

        Args:
            scale: By which the loss was multiplied; what is remembered follows it.

        **Communicates**: one all-reduce of a number for each parameter over the group, one of a
        number over all ranks, then the gradients in buckets, see `engine.compression.methods`.
        """
        self._arrange()
        used, finite = self._used()
        compresses = finite and self._steps >= self._options.start_step
        self._steps += 1
        if compresses and scale != self._scale:
            self._compressor.rescale(scale / self._scale)
            self._scale = scale
        for number, parameters in enumerate(self._buckets):
            gradients = [self._gradient(p) for p in parameters]
            bucket = GradientBucket(number, gradients, is_last=number == len(self._buckets) - 1)
            if compresses:
                self._compressor.reduce(bucket)
            else:
                dist.all_reduce(bucket.buffer(), group=self._group)
                bucket.buffer().div_(self._group.size())
            pairs = zip(parameters, bucket.gradients(), strict=True)
            _put([(parameter, mean) for parameter, mean in pairs if parameter in used])

    def state(self) -> dict[str, Any]:
        """Return what this rank has to remember to go on bit for bit; tensors, not copied."""
        return {
            "method": self._options.method,
            "entries": _entries(self._buckets),
            "steps": self._steps,
            "scale": self._scale,
            "compressor": self._compressor.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned on this rank, if it fits; otherwise begin anew.

        Args:
            state: From a run with the same mesh and parameters.
        """
        self._arrange()
        kept = state["method"], state["entries"]
        if kept != (self._options.method, _entries(self._buckets)):
            _log.warning("Gradients were compressed in another way before; their errors are lost.")
            return
        self._steps, self._scale = state["steps"], state["scale"]
        device = local_part(self.parameters[0]).device
        held = tree_map_only(Tensor, lambda t: t.to(device), state["compressor"])
        self._compressor.load(held)

    def _arrange(self) -> None:
        """Divide the parameters into buckets, the same in every step unless others train."""
        wanted = [p for p in self.parameters if p.requires_grad and local_part(p).numel()]
        if set(wanted) == {p for bucket in self._buckets for p in bucket}:
            return
        if self._buckets:
            self._compressor = choose_compressor(self._options, self._group)
        self._buckets = fill_buckets(wanted)

    def _used(self) -> tuple[set[nn.Parameter], bool]:
        """Return the parameters that have a gradient on any rank of the group, and whether all
        gradients of the world are finite.
        """
        wanted = [p for bucket in self._buckets for p in bucket]
        device = local_part(self.parameters[0]).device
        counts = torch.zeros(len(wanted), dtype=torch.float32, device=device)
        places = [index for index, parameter in enumerate(wanted) if parameter.grad is not None]
        if places:
            norms: Any = torch._foreach_norm(local_gradients(wanted), torch.inf)
            counts[places] = torch.stack([norm.float() for norm in norms]) * 0 + 1
        dist.all_reduce(counts, group=self._group)
        finite = counts.isfinite().all().float()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        used = {p for p, count in zip(wanted, counts.tolist(), strict=True) if count}
        return used, bool(finite)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return what this rank computed, 0 if that is nothing; divided as the parameter is."""
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(local_part(parameter), dtype=self._dtype)
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        return local_part(grad).to(self._dtype or grad.dtype)


def _entries(buckets: Sequence[Sequence[nn.Parameter]]) -> list[int]:
    return [sum(local_part(p).numel() for p in bucket) for bucket in buckets]


def _put(means: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, _ in means:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if means:
        held = local_gradients(parameter for parameter, _ in means)
        values = [mean.view_as(part) for part, (_, mean) in zip(held, means, strict=True)]
        torch._foreach_copy_(held, values)
