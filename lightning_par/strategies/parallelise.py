"""The one order in which parallelism is applied to a model.

cut stages -> tensor -> compile -> materialise and shard, unit by unit -> optimizer
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_par.engine.gradients import (
    clip_by_norm,
    clip_by_value,
    SharedGradients,
    total_norm,
)
from lightning_par.engine.initialise import ConstructionRecord
from lightning_par.engine.materialise import broadcast_values, Materialiser
from lightning_par.engine.pipeline import PipelineExecutor
from lightning_par.engine.shard import shard_model, Sharding
from lightning_par.engine.stages import cut_stage, Stage, StageStub
from lightning_par.engine.tensor import apply_tensor_parallel, TensorParallel
from lightning_par.engine.transport import Channel
from lightning_par.layout import balance_blocks, ModelLayout
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.sharing import bind_metrics
from lightning_par.strategies.state import StateMap
from lightning_par.strategies.steps import StepRunner

__all__ = ["Parallelised", "parallelise"]


class _Options(Protocol):
    zero_stage: int
    schedule: str
    num_microbatches: int | None
    stage_blocks: Sequence[int] | None
    sequence_parallel: bool
    compile_blocks: bool | dict[str, Any]

    @property
    def root_device(self) -> torch.device: ...


@dataclass(kw_only=True, eq=False)
class Parallelised:
    """A LightningModule on a mesh.

    Attributes:
        module: The user's; it holds this rank's part.
        layout: Its resolved plan.
        mesh: Where it is.
        bounds: First and one-past-last block of every pipeline stage.
        sharding: Over the replicas.
        steps: Runs the user's steps.
        states: Translates weights and optimizer states.
        shared: Parameters whose gradients are summed after the backward.
        groups: Name -> process group, for a `Ledger`: the mesh axes, and the two directions of the
            pipeline.
        counted_elsewhere: Ids of parameters that another pipeline stage counts in the norm.
    """

    module: pl.LightningModule
    layout: ModelLayout
    mesh: ParallelMesh
    bounds: tuple[tuple[int, int], ...]
    sharding: Sharding
    steps: StepRunner
    states: StateMap
    shared: tuple[SharedGradients, ...]
    groups: Mapping[str, dist.ProcessGroup]
    counted_elsewhere: frozenset[int]

    def finish_gradients(self) -> None:
        """Sum the gradients of which several ranks computed a part, unless batches are being
        accumulated.

        **Communicates**: one all-reduce for every group that shares parameters.
        """
        if self.sharding.synchronises:
            for shared in self.shared:
                shared.reduce()

    def clip_by_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Clip by the norm of the gradients on all ranks.

        **Communicates**: one all-reduce of one number.
        """
        norm = total_norm(
            parameters,
            device=self.module.device,
            counts=lambda p: id(p) not in self.counted_elsewhere,
        )
        clip_by_norm(parameters, norm, max_norm)

    def clip_by_value(self, parameters: Sequence[nn.Parameter], value: float) -> None:
        """Clamp every entry of the gradients to [-value, value]."""
        clip_by_value(parameters, value)


def parallelise(
    module: pl.LightningModule,
    layout: ModelLayout,
    mesh: ParallelMesh,
    record: ConstructionRecord | None,
    options: _Options,
) -> Parallelised:
    """Put a LightningModule on a mesh.

    Args:
        module: Whole, on the CPU or on meta; changed in place.
        layout: Checked at the sizes of `mesh`.
        mesh: Where to.
        record: How parameters on meta are initialised.
        options: The strategy.

    **Communicates**: a seed, and the values of parameters that are not on meta, from rank 0 to all.
    """
    device = options.root_device
    seed = _agree_on_seed(device)
    if mesh.sizes.world_size > 1:
        values = {id(t): t for t in (*module.parameters(), *module.buffers())}
        broadcast_values(values.values(), device)
    names = [name for name, _ in module.named_parameters()]
    states = StateMap(mesh, list(module.state_dict()), names, layout.canonical)
    stage, bounds = _cut(module, layout, mesh, options.stage_blocks)
    tensor = _apply_tensor(module, layout, mesh, sequence_parallel=options.sequence_parallel)
    if options.compile_blocks is not False:
        _compile_blocks(module, layout, options.compile_blocks)
    materialiser = Materialiser(
        canonical=layout.canonical, record=record, seed=seed, device=device, tensor=tensor
    )
    sharding = shard_model(
        module, layout, mesh, zero_stage=options.zero_stage, materialise=materialiser.materialise
    )
    groups = mesh.named_groups()
    executor = None if stage is None else _executor(stage, mesh, sharding, device, groups)
    shared, elsewhere = _shared_gradients(module, layout, mesh, bounds, tensor)
    steps = StepRunner(
        module=module,
        mesh=mesh,
        layout=layout.plan.batch,
        sharding=sharding,
        executor=executor,
        num_microbatches=options.num_microbatches,
        schedule=options.schedule,
        seed=seed,
    )
    bind_metrics(module, mesh, lambda: steps.in_step)
    return Parallelised(
        module=module,
        layout=layout,
        mesh=mesh,
        bounds=bounds,
        sharding=sharding,
        steps=steps,
        states=states,
        shared=shared,
        groups=groups,
        counted_elsewhere=elsewhere,
    )


def _cut(
    module: nn.Module, layout: ModelLayout, mesh: ParallelMesh, stage_blocks: Sequence[int] | None
) -> tuple[Stage | None, tuple[tuple[int, int], ...]]:
    stages = mesh.sizes.pipeline
    if stages == 1:
        return None, ()
    bounds = balance_blocks(layout, stages, stage_blocks)
    return cut_stage(module, layout, mesh.place["pp"], bounds), bounds


def _apply_tensor(
    module: nn.Module, layout: ModelLayout, mesh: ParallelMesh, *, sequence_parallel: bool
) -> TensorParallel | None:
    if mesh.sizes.tensor == 1:
        return None
    axis = mesh.device_mesh["tp"]
    return apply_tensor_parallel(module, layout, axis, sequence_parallel=sequence_parallel)


def _agree_on_seed(device: torch.device) -> int:
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(seed, 0)
    return int(seed)


def _compile_blocks(module: nn.Module, layout: ModelLayout, options: bool | dict[str, Any]) -> None:
    """Compile the forward of every block; hooks of sharding and of the pipeline stay outside."""
    chosen = options if isinstance(options, dict) else {}
    for fqn in layout.block_names:
        block = module.get_submodule(fqn)
        if not isinstance(block, StageStub):
            block.forward = torch.compile(block.forward, **chosen)


def _executor(
    stage: Stage,
    mesh: ParallelMesh,
    sharding: Sharding,
    device: torch.device,
    groups: dict[str, dist.ProcessGroup],
) -> PipelineExecutor:
    before = None if stage.is_first else mesh.neighbour("pp", stage.index - 1)
    after = None if stage.is_last else mesh.neighbour("pp", stage.index + 1)
    stages = [list(range(stage.count))]
    forward, backward = (mesh.subgroup(("pp",), stages) for _ in range(2))
    assert forward is not None
    assert backward is not None
    groups |= {"pp activations": forward, "pp gradients": backward}
    activations = Channel(forward, before, after, device)
    gradients = Channel(backward, after, before, device)
    return PipelineExecutor(stage, activations, gradients, sharding)


def _shared_gradients(
    module: nn.Module,
    layout: ModelLayout,
    mesh: ParallelMesh,
    bounds: Sequence[tuple[int, int]],
    tensor: TensorParallel | None,
) -> tuple[tuple[SharedGradients, ...], frozenset[int]]:
    """Find the parameters that several stages hold, and those that tensor parallelism computes in
    parts.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    shared: list[SharedGradients] = []
    elsewhere: set[int] = set()
    if tensor is not None:
        partial = [p for n, p in named.items() if n in tensor.partial]
        unique = tuple({id(p): p for p in partial}.values())
        if unique:
            shared.append(SharedGradients(parameters=unique, group=mesh.group("tp")))
    for stages, names in _by_owners(layout, bounds).items():
        group = mesh.subgroup(("pp",), [sorted(stages)])
        if mesh.place["pp"] not in stages:
            continue
        assert group is not None
        held = {layout.canonical[n]: p for n, p in named.items()}
        parameters = tuple(held[name] for name in names)
        shared.append(SharedGradients(parameters=parameters, group=group))
        if mesh.place["pp"] != min(stages):
            elsewhere |= {id(p) for p in parameters}
    return tuple(shared), frozenset(elsewhere)


def _by_owners(
    layout: ModelLayout, bounds: Sequence[tuple[int, int]]
) -> dict[frozenset[int], list[str]]:
    """Return the canonical names of parameters that several stages hold, by the stages that do."""
    owners: dict[str, frozenset[int]] = {}
    for name, canonical in layout.canonical.items():
        held = layout.stages_of(name, bounds) if bounds else frozenset({0})
        owners[canonical] = owners.get(canonical, frozenset()) | held
    found: dict[frozenset[int], list[str]] = {}
    for name, stages in owners.items():
        if len(stages) > 1:
            found.setdefault(stages, []).append(name)
    return found
