"""A LightningModule on a mesh: its parts, and its gradients as a whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.data.compression.reduction import CompressedGradients
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.data.gradient_norm import clip_by_norm, clip_by_value, total_norm
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.mesh import ParallelMesh
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.strategies.components.state_map import StateMap
from lightning_par.strategies.step.runner import StepRunner

__all__ = ["ParallelModel"]


@dataclass(kw_only=True, eq=False)
class ParallelModel:
    """A LightningModule on a mesh.

    Attributes:
        module: The user's; it holds this rank's part.
        resolved: Its resolved plan.
        mesh: Where it is.
        bounds: First and one-past-last block of every pipeline stage.
        rank_of_stage: The pipeline rank that holds each stage.
        sharding: Over the replicas.
        steps: Runs the user's steps.
        states: Translates weights and optimizer states.
        shared: Parameters whose gradients are summed after the backward.
        groups: Name -> process group, for a `CommVolume`: the mesh axes, and the two
            directions of the pipeline.
        counted_elsewhere: Ids of parameters that another pipeline stage counts in the norm.
        compression: Averages gradients over the replicas, if FSDP does not.
        host: Where the optimizer is, if it is not on the device.
    """

    module: pl.LightningModule
    resolved: ResolvedPlan
    mesh: ParallelMesh
    bounds: tuple[tuple[int, int], ...]
    rank_of_stage: tuple[int, ...]
    sharding: Sharding
    steps: StepRunner
    states: StateMap
    shared: tuple[SharedGradients | ReplicatedGradients, ...]
    groups: Mapping[str, dist.ProcessGroup]
    counted_elsewhere: frozenset[int]
    compression: CompressedGradients | None = None
    host: HostOptimizer | None = None

    @property
    def reduced_late(self) -> frozenset[int]:
        """Ids of the parameters whose gradients autograd and FSDP leave to `finish_gradients`."""
        late = (*self.shared, *([] if self.compression is None else [self.compression]))
        return frozenset(id(p) for reduced in late for p in reduced.parameters)

    def finish_gradients(self, loss: Tensor | None = None) -> None:
        """Sum the gradients of which several ranks computed a part, unless batches are being
        accumulated; then they are final, and leave for the host if the optimizer is there.

        Args:
            loss: Of this rank, if a step is left out where it is not finite.

        **Communicates**: one all-reduce for every group that shares parameters; compressed
        gradients, over the replicas.
        """
        if self.host is not None and self.host.keeps_gradients:
            return
        if self.sharding.synchronizes:
            if self.compression is not None:
                # First, as the sums below give all their ranks the same bits.
                scaler = self.steps.scaler
                scale = 1.0 if scaler is None else scaler.get_scale()
                self.compression.reduce(scale, loss=loss)
            for shared in self.shared:
                shared.reduce()
            if self.host is not None:
                self.host.finish()

    def drop_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Leave no gradient of these parameters, wherever it is."""
        for parameter in parameters:
            parameter.grad = None
        if self.host is not None:
            self.host.drop()

    def offloaded_nonfinite(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients are on the host, and not finite."""
        return set() if self.host is None else self.host.offloaded_gradients.nonfinite()

    def gradient_norm(
        self, parameters: Sequence[nn.Parameter], loss: Tensor | None = None
    ) -> Tensor:
        """Return the norm of the gradients on all ranks, the same on every rank.

        Args:
            parameters: Those of this rank.
            loss: Of this rank; if it is not finite, neither is the norm.

        **Communicates**: one all-reduce of one number.
        """

        def counts(parameter: nn.Parameter) -> bool:
            return id(parameter) not in self.counted_elsewhere

        return total_norm(
            parameters,
            device=self.module.device,
            elsewhere=self.counted_elsewhere,
            loss=loss,
            offloaded_norms=(
                () if self.host is None else self.host.offloaded_gradients.norms(counts)
            ),
        )

    def clip_by_norm(
        self, parameters: Sequence[nn.Parameter], max_norm: float, norm: Tensor | None = None
    ) -> None:
        """Clip by the norm of the gradients on all ranks.

        Args:
            parameters: Those of this rank.
            max_norm: Of the whole model.
            norm: If it is known already.

        **Communicates**: one all-reduce of one number, unless the norm is known.
        """
        norm = self.gradient_norm(parameters) if norm is None else norm
        clip_by_norm(parameters, norm, max_norm)
        if self.host is not None:
            self.host.offloaded_gradients.clip_by_norm(norm, max_norm)

    def clip_by_value(self, parameters: Sequence[nn.Parameter], value: float) -> None:
        """Clamp every entry of the gradients to [-value, value]."""
        clip_by_value(parameters, value)
        if self.host is not None:
            self.host.offloaded_gradients.largest = value
