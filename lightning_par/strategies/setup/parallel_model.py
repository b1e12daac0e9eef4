"""A LightningModule on a mesh: its parts, its steps, and the path of its gradients."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import whole
from lightning_par.engine.data.compression.reduction import CompressedGradients
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.errors import ConfigurationError, nearest
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.strategies.components.module_forms import ModuleForms
from lightning_par.strategies.components.state_map import named_tensors, StateMap
from lightning_par.strategies.step.gradient_path import GradientPath
from lightning_par.strategies.step.runner import StepRunner

__all__ = ["ParallelModel"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelModel:
    """A LightningModule on a mesh.

    Attributes:
        module: The user's LightningModule; it holds this rank's part.
        forms: Exchanges that part and the whole module.
        resolved: Resolved plan of the whole model.
        mesh: Mesh of this run.
        bounds: First and one-past-last block of every pipeline stage.
        rank_of_stage: The pipeline rank that holds each stage.
        sharding: Shards parameters over the replicas.
        steps: Runs the user's steps.
        gradients: The path of a gradient from the backward to the optimizer.
        states: Translates weights and optimizer states.
        groups: Name -> process group, for a `CommVolume`: the mesh axes; ``data``, ``replica`` and
            ``tokens``; ``dp gradients``; ``pp activations`` and ``pp gradients``, and, where ranks
            hold several stages, those with `` back``, which go against the order of the ranks;
            with `` odd``, which count as those without.
    """

    module: pl.LightningModule
    forms: ModuleForms
    resolved: ResolvedPlan
    mesh: ParallelMesh
    bounds: tuple[tuple[int, int], ...]
    rank_of_stage: tuple[int, ...]
    sharding: Sharding
    steps: StepRunner
    gradients: GradientPath
    states: StateMap
    groups: Mapping[str, dist.ProcessGroup]

    @property
    def shared(self) -> tuple[SharedGradients | ReplicatedGradients, ...]:
        """Parameters whose gradients are summed, or averaged, after the backward."""
        return self.gradients.shared

    @property
    def counted_elsewhere(self) -> frozenset[int]:
        """Ids of parameters that another rank counts in the norm."""
        return self.gradients.counted_elsewhere

    @property
    def compression(self) -> CompressedGradients | None:
        """Averages gradients over the replicas, if FSDP does not."""
        return self.gradients.compression

    @property
    def host(self) -> HostOptimizer | None:
        """The optimizer, if it is on the host."""
        return self.gradients.host

    def gather_weights(self) -> dict[str, Any]:
        """Return the whole model's state dict on rank 0, on the CPU; elsewhere an empty dict.

        **Communicates**: all-gathers of every sharded tensor, then one gather over the pipeline
        stages.
        """
        self.steps.reads.agree("gather_state_dict")
        # The state of a stage has names and shards of the parallel form only.
        with self.in_parallel_form():
            # While FSDP has gathered a parameter, its place in the module holds the whole one.
            self.sharding.release()
            return self.states.gather_state(self.module.state_dict())

    def gather_tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers likewise, whatever the module's state dict leaves out.

        **Communicates**: as `gather_weights`.
        """
        self.sharding.release()
        named, parameters = named_tensors(self.module), self.resolved.canonical
        # A buffer under the name of a parameter stands for that of another stage.
        return self.states.gather_state(
            {n: t for n, t in named.items() if isinstance(t, nn.Parameter) or n not in parameters}
        )

    @contextmanager
    def in_parallel_form(self) -> Iterator[None]:
        """Inside, the module has its parallel form, with the weights that it has now."""
        if not self.forms.is_whole:
            with self.steps.reads.paused():
                yield
            return
        tensors = named_tensors(self.module)
        self.forms.show_parallel()
        try:
            # A hook may have written to the whole form: its values are the present ones.
            self.states.copy_tensors(self.module, tensors)
            yield
        finally:
            self.forms.show_whole({})

    def gradient_norms(self, norm_type: float) -> dict[str, Tensor]:
        """Return FQN -> norm of each gradient; see `MeshStrategy.gradient_norms`."""
        self.steps.reads.agree("gradient_norms")
        with self.steps.reads.paused():
            return self.gradients.norms.of_parameters(norm_type)

    def full_parameter(self, name: str) -> Tensor:
        """Return a whole parameter on every rank; see `MeshStrategy.full_parameter`."""
        known = self.resolved.canonical
        if name not in known:
            raise ConfigurationError(
                "LP203",
                f"full_parameter({name!r}): the model has no such parameter{nearest(name, known)}",
            )
        if self.forms.is_whole:
            # In the whole form each rank has all of it, and nothing has to be sent.
            return self.module.get_parameter(name).detach().clone()
        self.steps.reads.agree(f"full_parameter({name!r})")
        with self.steps.reads.paused():
            return self._full_parameter(name, known)

    def _full_parameter(self, name: str, known: Mapping[str, str]) -> Tensor:
        self.sharding.release()
        named = dict(self.module.named_parameters(remove_duplicate=False))
        # A tied weight may be held here under another of its names.
        here = next((named[n] for n, c in known.items() if c == known[name] and n in named), None)
        # Of another layout, as channels_last, other stages would take the entries in another order.
        plain = torch.contiguous_format
        value = None if here is None else whole(here.detach()).detach().clone(memory_format=plain)
        if self.mesh.sizes.pipeline == 1:
            assert value is not None
            return value
        group = self.mesh.group("pp")
        stages: list[Any] = [None] * group.size()
        about = None if value is None else (tuple(value.shape), value.dtype)
        # A stage that lacks the parameter learns its shape and dtype first, to make room for it.
        dist.all_gather_object(stages, about, group=group)
        owner = next(stage for stage, found in enumerate(stages) if found is not None)
        if value is None:
            shape, dtype = stages[owner]
            value = torch.empty(shape, dtype=dtype, device=self.module.device)
        dist.broadcast(value, self.mesh.rank_at("pp", owner), group=group)
        return value
