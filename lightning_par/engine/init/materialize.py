"""Materialization: the local parameters get their values one at a time, so that no rank ever holds
the whole model.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.checkpoint.progress import advance
from lightning_par.dtensor import buckets
from lightning_par.engine.experts.apply import ExpertParallel
from lightning_par.engine.init.deferred_init import ConstructionRecord
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.tensor.apply import TensorParallel
from lightning_par.engine.tensor.parameters import shard_parameter
from lightning_par.errors import PlanError

__all__ = ["Materializer", "broadcast_values"]


@dataclass(kw_only=True, eq=False)
class Materializer:
    """Turns recorded meta parameters, and unsharded real ones, into this rank's shards.

    Attributes:
        canonical: FQN of every parameter -> the FQN under which it is seeded; ties share one.
        record: Record of the initialization of meta parameters; None if there are none.
        seed: The same on every rank.
        device: Device of the shards.
        tensor: Placements over the ``tp`` axis; None leaves parameters unsharded.
        experts: Experts that are sharded over the ``ep`` axis; None: none.
    """

    canonical: Mapping[str, str]
    record: ConstructionRecord | None
    seed: int
    device: torch.device
    tensor: TensorParallel | None
    experts: ExpertParallel | None = None
    _visited: set[nn.Module] = field(default_factory=set)
    _done: dict[int, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict)
    _ties: Counter[str] = field(init=False)

    def __post_init__(self) -> None:
        # Only what is met again is kept: FSDP has to be able to free the others once they are cut.
        self._ties = Counter(self.canonical.values())

    def materialize(self, model: nn.Module, prefix: str = "") -> None:
        """Replace every parameter below `model`, and move its buffers to the device.

        Args:
            model: Changed in place. Modules that were visited before are skipped; ties are kept.
            prefix: FQN of `model` inside the module that `canonical` speaks of.
        """
        # Not named_parameters: each place that holds a tie has to get the new tensor.
        for name, module in model.named_modules():
            if isinstance(module, StageStub) or module in self._visited:
                continue
            self._visited.add(module)
            # `materialize` is called block by block: names are those of the whole model.
            base = ".".join(each for each in (prefix, name) if each)
            start = f"{base}." if base else ""
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = self._place(parameter, start + key)
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.is_meta:
                    raise PlanError(
                        "LP210",
                        f"the buffer {start}{key} was computed in configure_model from a "
                        "parameter, but parameters have no values there yet. Compute the buffer "
                        "from other values.",
                    )
                module._buffers[key] = buffer.to(self.device)

    @torch.no_grad()
    def _place(self, parameter: nn.Parameter, fqn: str) -> nn.Parameter:
        if id(parameter) in self._done:
            return self._done[id(parameter)][0]
        if parameter.is_meta:
            assert self.record is not None
            full: Tensor = self.record.initialize(
                parameter,
                name=self.canonical[fqn],
                seed=self.seed,
                device=self.device,
                dtype=parameter.dtype,
            )
        else:
            # Unsharded real values are the same on every rank, see `broadcast_values`.
            full = parameter.detach().to(self.device)
        advance("build", full.nbytes)
        wants_grad = parameter.requires_grad
        placement = None if self.tensor is None else self.tensor.placements[fqn]
        # Experts have a mesh of their own, with the ``ep`` axis.
        if self.experts is not None and fqn in self.experts.parameters:
            mesh, placements = self.experts.placed(placement)
            placed = shard_parameter(full, placements, mesh, requires_grad=wants_grad)
        elif self.tensor is not None and placement is not None:
            placed = shard_parameter(full, (placement,), self.tensor.mesh, requires_grad=wants_grad)
        elif parameter.is_meta:
            placed = nn.Parameter(full, requires_grad=wants_grad)
        else:  # the same object, which the user's code may hold
            placed, parameter.data = parameter, full
        # What the user set on the parameter, as marks for an optimizer.
        placed.__dict__.update(parameter.__dict__)
        if self._ties[self.canonical[fqn]] > 1:
            self._done[id(parameter)] = (placed, parameter)
        return placed


@torch.no_grad()
def broadcast_values(
    tensors: Iterable[Tensor], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Broadcast the real tensors of rank 0 to every rank.

    Args:
        tensors: Tensors in the same order on every rank; those on meta are skipped.
        device: Device that the process group can send from.
        group: All ranks; None: the default group.

    **Communicates**: over all ranks, one broadcast per tensor; small ones of a dtype go together.
    """
    receives = dist.get_rank() != 0
    # In buckets, as a message for each bias would cost its latency.
    for members in buckets(t for t in tensors if not t.is_meta and t.numel()):
        for dtype in dict.fromkeys(t.dtype for t in members):
            alike = [t for t in members if t.dtype is dtype]
            flat = [t.detach().to(device).flatten() for t in alike]
            sent = flat[0] if len(flat) == 1 else torch.cat(flat)
            dist.broadcast(sent, 0, group=group)
            for tensor, value in zip(alike, sent.split([t.numel() for t in alike]), strict=True):
                if receives:
                    tensor.copy_(value.view(tensor.shape))
