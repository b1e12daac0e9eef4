"""The one order in which parallelism is applied to a model.

cut stages -> experts -> tensor -> context -> defer -> recompute -> compile -> materialize and
shard, unit by unit (whole replicas that compress gradients: materialize) -> optimizer
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lightning_par.engine.activity import Activity
from lightning_par.engine.context.apply import apply_context_parallel, build_axis
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.data.compression.reduction import CompressedGradients
from lightning_par.engine.data.fsdp import shard_model, Sharding
from lightning_par.engine.data.replicated_parameters import find_copies
from lightning_par.engine.experts.apply import (
    apply_expert_parallel,
    apply_replica_sums,
    ExpertParallel,
)
from lightning_par.engine.init.deferred_init import ConstructionRecord
from lightning_par.engine.init.materialize import broadcast_values, Materializer
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.pipeline.actions import Schedule
from lightning_par.engine.pipeline.executor import PipelineExecutor
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.schedules import build_schedule, place_stages
from lightning_par.engine.pipeline.split_backward import WeightGradients
from lightning_par.engine.pipeline.stage import Stage
from lightning_par.engine.pipeline.stage_links import connect, group_name, StageLink
from lightning_par.engine.tensor.apply import apply_tensor_parallel, TensorParallel
from lightning_par.huggingface import divide_attention
from lightning_par.mesh import ParallelMesh
from lightning_par.resolved_plan import balance_blocks, ResolvedPlan
from lightning_par.strategies.components.state_map import StateMap
from lightning_par.strategies.setup.block_wrapping import BlockOptions, prepare_blocks
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.batch_broadcast import bind_metrics
from lightning_par.strategies.step.runner import StepRunner
from lightning_par.strategies.step.sharded_sequence import DividedSteps

__all__ = ["parallelize"]


class _Options(BlockOptions, Protocol):
    zero_stage: int
    stage_blocks: Sequence[int] | None
    sequence_parallel: bool
    activity: Activity
    context_options: ContextOptions
    reduce_dtype: torch.dtype | None
    offload_options: OffloadOptions | None
    compression_options: GradientCompression | None

    @property
    def root_device(self) -> torch.device: ...


def parallelize(
    module: pl.LightningModule,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    record: ConstructionRecord | None,
    options: _Options,
) -> ParallelModel:
    """Put a LightningModule on a mesh.

    Args:
        module: Whole, on the CPU or on meta; changed in place.
        resolved: Checked at the sizes of `mesh`.
        mesh: Where to.
        record: How parameters on meta are initialized.
        options: The strategy.

    **Communicates**: a seed, and the values of parameters that are not on meta, from rank 0 to all.
    """
    device = options.root_device
    seed = _agree_on_seed(device)
    _share_values(module, mesh, device)
    names = [name for name, _ in module.named_parameters()]
    states = StateMap(mesh, list(module.state_dict()), names, resolved.canonical)
    parts = _divide(module, resolved, mesh, options)
    stages, bounds, owners = parts.stages, parts.bounds, parts.rank_of_stage
    sharding = _fill(module, resolved, mesh, parts, record, seed, options)
    groups = mesh.named_groups()
    boundaries = _connect(mesh, owners, device, groups)
    executor = PipelineExecutor(stages, boundaries, sharding, parts.gradients, options.activity)
    shared, elsewhere = find_copies(
        module, resolved, mesh, bounds, owners, parts.tensor, parts.experts
    )
    compression = _compress(module, resolved, mesh, options)
    steps = StepRunner(
        module=module,
        mesh=mesh,
        layout=resolved.plan.batch,
        sharding=sharding,
        executor=executor if stages else None,
        num_microbatches=options.num_microbatches,
        schedule=_schedules(options, mesh.sizes.pipeline),
        rank_of_stage=owners,
        sequence=parts.sequence,
        seed=seed,
        activity=options.activity,
    )
    bind_metrics(module, mesh, owners, lambda: steps.in_step)
    return ParallelModel(
        module=module,
        resolved=resolved,
        mesh=mesh,
        bounds=bounds,
        rank_of_stage=owners,
        sharding=sharding,
        steps=steps,
        states=states,
        shared=shared,
        groups=groups,
        counted_elsewhere=elsewhere | _of_other_replicas(module, mesh, compression),
        compression=compression,
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """How a model is divided, before its parameters get values."""

    stages: tuple[Stage, ...]
    bounds: tuple[tuple[int, int], ...]
    rank_of_stage: tuple[int, ...]
    experts: ExpertParallel | None
    tensor: TensorParallel | None
    gradients: WeightGradients
    sequence: DividedSteps


def _divide(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: _Options
) -> _Parts:
    """Cut the model and change its modules; the parameters are still whole, or on meta."""
    stages, bounds, owners = _cut(module, resolved, mesh, options)
    apply_replica_sums(module, resolved, mesh.token_group)
    experts = apply_expert_parallel(module, resolved, mesh)
    tensor = _apply_tensor(module, resolved, mesh, sequence_parallel=options.sequence_parallel)
    sequence = _divide_sequences(module, resolved, mesh, options)
    return _Parts(
        stages=stages,
        bounds=bounds,
        rank_of_stage=owners,
        experts=experts,
        tensor=tensor,
        gradients=prepare_blocks(module, resolved, bounds, owners, options),
        sequence=sequence,
    )


def _fill(
    module: nn.Module,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    parts: _Parts,
    record: ConstructionRecord | None,
    seed: int,
    options: _Options,
) -> Sharding:
    """Give the parameters their values, and the replicas their shares of them."""
    materializer = Materializer(
        canonical=resolved.canonical,
        record=record,
        seed=seed,
        device=options.root_device,
        tensor=parts.tensor,
        experts=parts.experts,
    )
    return shard_model(
        module,
        resolved,
        mesh,
        zero_stage=options.zero_stage,
        materialize=materializer.materialize,
        bounds=parts.bounds,
        experts=parts.experts,
        reduce_dtype=options.reduce_dtype,
        offload=_parameter_policy(options),
        reduces=options.compression_options is None,
    )


def _compress(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: _Options
) -> CompressedGradients | None:
    chosen = options.compression_options
    if chosen is None or mesh.sizes.data == 1:
        return None
    return CompressedGradients(
        {resolved.canonical[name]: p for name, p in module.named_parameters()},
        mesh.data_group,
        chosen,
        options.root_device,
        options.reduce_dtype,
    )


def _of_other_replicas(
    module: nn.Module, mesh: ParallelMesh, compression: CompressedGradients | None
) -> frozenset[int]:
    """Return the ids of the parameters that the first replica counts; of DTensors, FSDP's tell."""
    if compression is None or mesh.data_rank == 0:
        return frozenset()
    return frozenset(id(p) for p in module.parameters())


def _parameter_policy(options: _Options) -> OffloadPolicy:
    offload = options.offload_options
    if offload is None or not offload.offload_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=offload.pins(options.root_device))


def _share_values(module: nn.Module, mesh: ParallelMesh, device: torch.device) -> None:
    """Give every rank the values of rank 0, where there are some."""
    if mesh.sizes.world_size > 1:
        values = {id(t): t for t in (*module.parameters(), *module.buffers())}
        broadcast_values(values.values(), device)


def _schedules(options: _Options, ranks: int) -> Callable[[int], Schedule]:
    """Give the schedule for a number of micro-batches; each is made, or read, once."""

    @cache
    def of(num_microbatches: int) -> Schedule:
        chunks = options.virtual_pipeline_size
        return build_schedule(options.schedule, ranks, num_microbatches, chunks)

    return of


def _cut(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: _Options
) -> tuple[tuple[Stage, ...], tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Cut the model, if there are several stages; return those of this rank, and the blocks and
    the rank of every stage.
    """
    owners = place_stages(options.schedule, mesh.sizes.pipeline, options.virtual_pipeline_size)
    bounds = balance_blocks(resolved, len(owners), options.stage_blocks)
    if len(owners) == 1:
        return (), bounds, owners
    held = [stage for stage, rank in enumerate(owners) if rank == mesh.place["pp"]]
    return cut_stages(module, resolved, held, bounds), bounds, owners


def _apply_tensor(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, *, sequence_parallel: bool
) -> TensorParallel | None:
    if mesh.sizes.tensor == 1:
        return None
    axis = mesh.device_mesh["tp"]
    return apply_tensor_parallel(module, resolved, axis, sequence_parallel=sequence_parallel)


def _divide_sequences(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: _Options
) -> DividedSteps:
    if mesh.sizes.context == 1:
        return DividedSteps(None, resolved.plan, mesh)
    divisor = mesh.sizes.tensor if options.sequence_parallel else 1
    axis = build_axis(mesh, options.context_options, divisor=divisor)
    apply_context_parallel(module, resolved, axis)
    divide_attention(module, resolved.plan.batch, axis)
    return DividedSteps(axis, resolved.plan, mesh)


def _agree_on_seed(device: torch.device) -> int:
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(seed, 0)
    return int(seed)


def _connect(
    mesh: ParallelMesh,
    owners: Sequence[int],
    device: torch.device,
    groups: dict[str, dist.ProcessGroup],
) -> dict[int, StageLink]:
    """Make the groups of the pipeline, the same on every rank, and this rank's boundaries."""
    ranks = [list(range(mesh.sizes.pipeline))]
    for earlier, later in pairwise(owners):
        ways = (("activations", earlier, later), ("gradients", later, earlier))
        for name in (group_name(*way) for way in ways if earlier != later):
            if name not in groups:
                group = mesh.subgroup(("pp",), ranks)
                assert group is not None
                groups[name] = group
    neighbor = partial(mesh.neighbor, "pp")
    return connect(owners, mesh.place["pp"], groups.__getitem__, neighbor, device)
