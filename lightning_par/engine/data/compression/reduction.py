"""Compressed reduction: the mean of gradients over the replicas in fewer bytes.

Note [Not finite]: a gradient that is not finite is not compressed, because the error kept of it
would spoil every later step. If there is one anywhere in the world, or a loss or a norm that is not
finite, this step sends whole gradients, and nothing of it is remembered: it will be refused or left
out.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_part
from lightning_par.engine.data.compression.methods import choose_compressor, GradientBucket
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.data.gradient_reduction import fill_buckets, local_gradients
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.upstream.aten import foreach_copy_, foreach_norm

__all__ = ["CompressedGradients"]

_log = logging.getLogger(__name__)


class CompressedGradients:
    """Parameters of which every replica holds a copy; after the backward, gradients are averaged.

    Args:
        parameters: Canonical name -> parameter, in the same order on every rank of the group.
        group: Process group of the replicas.
        options: Options of compression.
        device: Device of the gradients.
        dtype: Dtype in which they are added; None: their own.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        options: GradientCompression,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters.items()}
        # The last ones have their gradients first, as in the buckets of torch.
        # The order decides the buckets, and has to be the same on every rank.
        self.parameters = tuple(parameters.values())[::-1]
        self._group, self._options, self._device, self._dtype = group, options, device, dtype
        self._buckets: list[list[nn.Parameter]] = []
        self.reset()

    def reset(self) -> None:
        """Forget the errors kept so far, and the number of steps."""
        self._compressor = choose_compressor(self._options, self._group)
        self._steps, self._scale = 0, 1.0

    @torch.no_grad()
    def reduce(self, scale: float = 1.0, *, loss: Tensor | None = None) -> None:
        """Average the gradients over the group.

        One that no rank has stays away; one that only some ranks have counts as 0 on the others.

        Args:
            scale: By which the loss was multiplied; what is remembered follows it.
            loss: Of this rank, if a step is left out where it is not finite.

        **Communicates**: one all-reduce of a number for each parameter over the group, one of a
        number over all ranks, then the gradients in buckets, see `methods.py`.
        """
        self._arrange()
        # Decided together, before anything is sent: a rank that compressed while another did not
        # would wait in another collective.
        used, finite = self._used(loss)
        compresses = finite and self._steps >= self._options.start_step
        self._steps += 1
        # With a grad scaler gradients are multiples of the scale; what is owed of earlier ones is
        # brought to the present scale.
        if compresses and scale != self._scale:
            self._compressor.rescale(scale / self._scale)
            self._scale = scale
        for number, parameters in enumerate(self._buckets):
            absent = {i for i, parameter in enumerate(parameters) if parameter not in used}
            bucket = GradientBucket(number, [self._gradient(p) for p in parameters], absent)
            if compresses:
                self._compressor.reduce(bucket)
            else:
                dist.all_reduce(bucket.buffer(), group=self._group)
                bucket.buffer().div_(self._group.size())
            pairs = zip(parameters, bucket.gradients(), strict=True)
            _put([(parameter, mean) for parameter, mean in pairs if parameter in used])

    def state(self) -> dict[str, Any]:
        """Return what this rank has to remember to go on bit for bit; tensors, not copied."""
        self._arrange()
        return {
            "kind": self._kind(),
            "steps": self._steps,
            "scale": self._scale,
            "compressor": self._compressor.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned on this rank, if it fits; otherwise begin anew.

        Args:
            state: From a run on the same mesh.
        """
        self.reset()
        self._arrange()
        if state["kind"] != self._kind():
            _warn(
                "gradient compression or the trained parameters have changed since the checkpoint "
                "was saved, so the compression error (error feedback) of the earlier steps is "
                "dropped."
            )
            return
        self._steps, self._scale = state["steps"], state["scale"]
        held = map_tensors(state["compressor"], lambda t: t.to(self._device))
        self._compressor.load(held)

    def _kind(self) -> list[Any]:
        """Return, as plain values, what the shapes and the meaning of a state depend on."""
        options = self._options
        entries = [
            [[self._names[p], str(p.dtype), *local_part(p).shape] for p in bucket]
            for bucket in self._buckets
        ]
        # start_step and density change no shape: a run may go on with others.
        return [options.method, options.rank, str(self._dtype), entries]

    def _arrange(self) -> None:
        """Fill the buckets, the same in every step unless other parameters train."""
        wanted = [p for p in self.parameters if p.requires_grad and local_part(p).numel()]
        # Layers are frozen or thawed on all ranks alike, so that all of them fill the buckets
        # anew.
        if set(wanted) == {p for bucket in self._buckets for p in bucket}:
            return
        if self._buckets:
            _warn(
                "the trained parameters have changed, so the compression error (error feedback) of "
                "the earlier steps is dropped."
            )
            self._compressor = choose_compressor(self._options, self._group)
        self._buckets = fill_buckets(wanted)

    def _used(self, loss: Tensor | None) -> tuple[set[nn.Parameter], bool]:
        """Return the parameters that have a gradient on any rank of the group, and whether loss
        and norms are finite everywhere.
        """
        wanted = [p for bucket in self._buckets for p in bucket]
        counts = torch.zeros(len(wanted), dtype=torch.float32, device=self._device)
        places = [index for index, parameter in enumerate(wanted) if parameter.grad is not None]
        if places:
            # Norms, as a step is also left out where they overflow.
            gradients = local_gradients(wanted)
            double = any(grad.dtype is torch.float64 for grad in gradients)
            dtype = torch.float64 if double else torch.float32
            norms: Any = foreach_norm(gradients, 2, dtype=dtype)
            # 1 for each gradient that is there; NaN or infinite times 0 is NaN, which the sum
            # keeps.
            counts[places] = (torch.stack(norms) * 0 + 1).float()
        dist.all_reduce(counts, group=self._group)
        finite = counts.isfinite().all()
        if loss is not None:
            finite &= loss.isfinite().all().to(self._device)
        everywhere = finite.float()
        # Over the world: a norm that is not finite on one stage leaves the step out on all of
        # them.
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        used = {p for p, count in zip(wanted, counts.tolist(), strict=True) if count}
        return used, bool(everywhere)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's gradient, sharded as its parameter; 0 if there is none."""
        grad = parameter.grad
        if grad is None:
            return torch.zeros_like(local_part(parameter), dtype=self._dtype)
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            # A gradient may come with another placement than its parameter, as Partial.
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        return local_part(grad).to(self._dtype or grad.dtype)


def _warn(text: str) -> None:
    if dist.get_rank() == 0:
        _log.warning("gradient_compression: %s", text)


def _put(means: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, _ in means:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if means:
        held = local_gradients(parameter for parameter, _ in means)
        values = [mean.view_as(part) for part, (_, mean) in zip(held, means, strict=True)]
        foreach_copy_(held, values)
