"""The one order in which parallelism is applied to a model.

split stages -> sums over replicas inside the forward, as of expert loads -> experts -> tensor ->
context -> defer weight gradients -> recompute -> compile -> tensors kept by recomputation to the
host -> materialize and shard, unit by unit (whole replicas that compress gradients, or have no
other axis: materialize) -> optimizer
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from lightning_par.checkpoint.progress import counted
from lightning_par.engine.context.apply import apply_context_parallel, build_axis
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
from lightning_par.engine.memory.garbage import few_collections
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.split_backward import WeightGradients
from lightning_par.engine.pipeline.stage import Stage
from lightning_par.engine.pipeline.stage_links import connect, group_name, StageLink
from lightning_par.engine.tensor.apply import apply_tensor_parallel, TensorParallel
from lightning_par.engine.tensor.styles import copy_first_gradients
from lightning_par.errors import PlanError
from lightning_par.huggingface import divide_attention
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import balance_blocks, ResolvedPlan
from lightning_par.strategies.components.module_forms import ModuleForms
from lightning_par.strategies.components.state_map import StateMap
from lightning_par.strategies.hooks.outer_forward import wrap_outer_forwards
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.proof.evaluation_proof import EvaluationProof
from lightning_par.strategies.proof.on_difference import refuse_faulty_hosts
from lightning_par.strategies.proof.skeleton import Skeleton, take_skeleton
from lightning_par.strategies.proof.step_proof import StepProof
from lightning_par.strategies.setup.block_wrapping import prepare_blocks
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.start.start import RunStart
from lightning_par.strategies.step.absent_parameter import About, describe_tensors
from lightning_par.strategies.step.gradient_norms import GradientNorms
from lightning_par.strategies.step.gradient_path import GradientPath
from lightning_par.strategies.step.manual_step import ManualSteps
from lightning_par.strategies.step.parameter_reads import ParameterReads
from lightning_par.strategies.step.runner import StepRunner
from lightning_par.strategies.step.sharded_sequence import ShardedSequence

__all__ = ["parallelize"]


@few_collections()
def parallelize(  # house: the order, in one place
    module: pl.LightningModule,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    device: torch.device,
    record: ConstructionRecord | None,
    options: MeshOptions,
    processes: MeshProcesses,
) -> tuple[ParallelModel, RunStart]:
    """Put a LightningModule on a mesh; return it, and what looks at its steps and proves the first.

    Args:
        module: Whole LightningModule, on the CPU or on meta; changed in place.
        resolved: Its resolved plan, checked at the sizes of `mesh`.
        mesh: Mesh of this run.
        device: Device of this rank.
        record: How parameters on meta are initialized.
        options: The options of the strategy.
        processes: Hold the other ranks, decisions, and where steps and actions of the pipeline are
            written down.

    Raises:
        PlanError: On every rank, if some have another plan.
        VerificationError: On every rank, if some are on a host that `on_difference` has left out.

    **Communicates**: a number made of the plan, over all ranks; a seed, and the values of
    parameters that are not on meta, from rank 0 to all.
    """
    refuse_faulty_hosts(module.trainer, options.on_difference)
    _check_agreement(module, resolved, device)
    # Notes the plain module, which the user gets back after the run, before anything is changed.
    forms = ModuleForms(module)
    if record is not None and mesh.sizes.world_size > 1 and not module.trainer.ckpt_path:
        rank_zero_info(
            f"{type(module).__name__}.configure_model creates weights. On a mesh each weight is "
            "initialized with random numbers that depend on its name, so they are the same on "
            "every mesh, but differ from those of a Trainer without lightning_par. To get the "
            "weights of such a Trainer, create the model in __init__, or load a checkpoint."
        )
    # The proof runs the plain module: it is copied while there is one.
    skeleton = take_skeleton(module, options.verify, mesh.sizes.world_size, mesh.rank)
    if resolved.plan.sequence_region == "none":
        options = replace(options, sequence_parallel=False)
    seed = _agree_on_seed(device)
    # Before stages are cut: every rank still has the same tensors in the same order.
    _broadcast_values(module, mesh, device)
    # Likewise: stubs know nothing of the parameters that they stand for.
    states, known = StateMap.of_whole(module, mesh), describe_tensors(module)
    parts = _apply(module, resolved, mesh, options)
    sharding = _materialize(module, resolved, mesh, parts, device, record, seed, options)
    # A compiled forward passes over the hooks by which `local_parameter` copies first gradients.
    if options.compile_blocks is not False:
        copy_first_gradients(module)
    world = processes.world
    # A collective: every rank makes the groups of all links, also of those that it has no part
    # in.
    links = _connect(mesh, parts.rank_of_stage, device, world.channel)
    hooks = None if sharding.is_plain else sharding
    executor = world.executor(
        parts.stages, links, hooks, parts.weight_gradients, processes.activity
    )
    # After `_materialize`: it names parameters by identity, and FSDP has made them.
    gradients = _gradient_path(module, resolved, mesh, parts, sharding, device, options)
    steps = StepRunner(
        module=module,
        mesh=mesh,
        batch_layout=resolved.plan.batch,
        sharding=sharding,
        sequence=parts.sequence,
        executor=executor if parts.stages else None,
        rank_of_stage=parts.rank_of_stage,
        options=options,
        device=device,
        seed=seed,
        activity=processes.activity,
        world=world,
        reads=_watch_reads(module, resolved, mesh, known, parts, device, sharding, options),
        manual=ManualSteps(module, gradients.norms),
    )
    proof = StepProof(skeleton, options, device, seed)
    why_not = proof.why_not(module, module.trainer.precision_plugin, resolved.plan.batch)
    evaluations = EvaluationProof(skeleton, options, device, proof.outcomes)
    # A step whose gradients overflow is not compared.
    is_proved = why_not == "" and getattr(module.trainer.precision_plugin, "scaler", None) is None
    start = RunStart(steps, processes.decisions, proof, evaluations, is_proved=is_proved)
    # After the runner, which the forwards around the blocks ask whether a step is running.
    if mesh.sizes.world_size > 1:
        wrap_outer_forwards(module, resolved, steps, sharding, options)
    gradients.form, gradients.norms.reads = steps.form, steps.reads
    steps.balances = parts.balances
    # Last: what the module has now is its parallel form, to which a later run returns.
    forms.become_parallel()
    if isinstance(skeleton, Skeleton):
        skeleton.note(module)
    model = ParallelModel(
        module=module,
        forms=forms,
        resolved=resolved,
        mesh=mesh,
        bounds=parts.bounds,
        rank_of_stage=parts.rank_of_stage,
        sharding=sharding,
        steps=steps,
        gradients=gradients,
        states=states,
        groups={**mesh.named_groups(), **mesh.links},
    )
    return model, start


def _watch_reads(
    module: pl.LightningModule,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    known: Mapping[str, About],
    parts: "_Parts",
    device: torch.device,
    sharding: Sharding,
    options: MeshOptions,
) -> ParameterReads:
    return ParameterReads(
        module,
        resolved.block_names,
        mesh,
        known,
        parts.stages,
        _partial_parameters(module, parts.tensor),
        device,
        sharding,
        is_compiled=options.compile_blocks is not False,
    )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What was applied to a model before its parameters get values."""

    stages: tuple[Stage, ...]
    bounds: tuple[tuple[int, int], ...]
    rank_of_stage: tuple[int, ...]
    experts: ExpertParallel | None
    tensor: TensorParallel | None
    weight_gradients: WeightGradients
    sequence: ShardedSequence | None
    balances: bool


def _apply(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: MeshOptions
) -> _Parts:
    """Split the model into stages and change its modules; parameters are still whole, or on
    meta.
    """
    # First: everything below leaves out what is a stub, as it has no parameters and no forward.
    stages, bounds, rank_of_stage = _split_stages(module, resolved, mesh, options)
    balances = apply_replica_sums(module, resolved, mesh.token_group)
    # Experts before tensor styles: what wraps a forward later is outside, see Note [Order of
    # wrappers], and a style gives the experts its tokens.
    experts = apply_expert_parallel(module, resolved, mesh, options.expert_max_rows)
    tensor = _apply_tensor(module, resolved, mesh, sequence_parallel=options.sequence_parallel)
    for stage in stages:
        stage.tokens = None if tensor is None else tensor.tokens
    sequence = _apply_context(module, resolved, mesh, options)
    return _Parts(
        stages=stages,
        bounds=bounds,
        rank_of_stage=rank_of_stage,
        experts=experts,
        tensor=tensor,
        # Last: recomputation and compilation have to enclose all that changes a block's forward.
        weight_gradients=prepare_blocks(module, resolved, bounds, rank_of_stage, mesh, options),
        sequence=sequence,
        balances=balances,
    )


def _materialize(
    module: pl.LightningModule,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    parts: _Parts,
    device: torch.device,
    record: ConstructionRecord | None,
    seed: int,
    options: MeshOptions,
) -> Sharding:
    """Give the parameters their values and shard them over the replicas, unit by unit."""
    materializer = Materializer(
        canonical=resolved.canonical,
        record=record,
        seed=seed,
        device=device,
        tensor=parts.tensor,
        experts=parts.experts,
    )
    with counted("build", "building the model", sum(p.nbytes for p in module.parameters())):
        return shard_model(
            module,
            resolved,
            mesh,
            zero_stage=options.zero_stage,
            materialize=materializer.materialize,
            bounds=parts.bounds,
            experts=parts.experts,
            reduce_dtype=options.reduce_dtype,
            offload=_parameter_policy(options, device),
            reduces=options.gradient_compression is None and not _are_whole(mesh, options),
            in_steps=not module.automatic_optimization,
        )


def _are_whole(mesh: ParallelMesh, options: MeshOptions) -> bool:
    """Return whether each rank holds all of the model and of the optimizer, which need no FSDP."""
    is_alone = mesh.sizes.data == mesh.sizes.world_size > 1 == mesh.sizes.expert
    return is_alone and options.zero_stage == 0 and options.offload_options is None


def _gradient_path(
    module: pl.LightningModule,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    parts: _Parts,
    sharding: Sharding,
    device: torch.device,
    options: MeshOptions,
) -> GradientPath:
    compression = _compress(module, resolved, mesh, device, options)
    averaged = compression is None and _are_whole(mesh, options)
    shared, elsewhere = find_copies(
        module,
        resolved,
        mesh,
        parts.bounds,
        parts.rank_of_stage,
        parts.tensor,
        parts.experts,
        tuple(module.parameters()) if averaged else sharding.copies,
        dtype=options.reduce_dtype,
    )
    # Compressed gradients are plain tensors, whose placements do not tell who counts them.
    elsewhere |= _of_other_replicas(module, mesh, compression)
    return GradientPath(
        module=module,
        mesh=mesh,
        sharding=sharding,
        shared=shared,
        compression=compression,
        counted_elsewhere=elsewhere,
        options=options,
        norms=GradientNorms(module, mesh, resolved.canonical, elsewhere, device),
    )


def _compress(
    module: nn.Module,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    device: torch.device,
    options: MeshOptions,
) -> CompressedGradients | None:
    chosen = options.gradient_compression
    if chosen is None or mesh.sizes.data == 1:
        return None
    return CompressedGradients(
        {resolved.canonical[name]: p for name, p in module.named_parameters()},
        mesh.data_group,
        chosen,
        device,
        options.reduce_dtype,
    )


def _of_other_replicas(
    module: nn.Module, mesh: ParallelMesh, compression: CompressedGradients | None
) -> frozenset[int]:
    """Return the ids of the parameters that the first replica counts in the norm.

    Without compression, gradients of replicas are DTensors, which tell that by their placements.
    """
    if compression is None or mesh.data_rank == 0:
        return frozenset()
    return frozenset(id(p) for p in module.parameters())


def _partial_parameters(module: nn.Module, tensor: TensorParallel | None) -> list[nn.Parameter]:
    """Return the parameters of whose gradient each tensor rank computes a part."""
    partial = frozenset() if tensor is None else tensor.partial
    named = module.named_parameters(remove_duplicate=False)
    return [p for name, p in named if name in partial]


def _parameter_policy(options: MeshOptions, device: torch.device) -> OffloadPolicy:
    offload = options.offload_options
    if offload is None or not offload.offload_parameters:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=offload.pins(device))


def _broadcast_values(module: nn.Module, mesh: ParallelMesh, device: torch.device) -> None:
    """Broadcast the values of rank 0, where parameters are not on meta."""
    if mesh.sizes.world_size > 1:
        # By identity, so that a tied tensor is sent once.
        values = {id(t): t for t in (*module.parameters(), *module.buffers())}
        broadcast_values(values.values(), device)


def _split_stages(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: MeshOptions
) -> tuple[tuple[Stage, ...], tuple[tuple[int, int], ...], tuple[int, ...]]:
    """Split the model, if there are several stages; return those of this rank, and the blocks and
    the rank of every stage.
    """
    rank_of_stage = options.place_stages(mesh.sizes.pipeline)
    bounds = balance_blocks(resolved, len(rank_of_stage), options.stage_blocks)
    if len(rank_of_stage) == 1:
        return (), bounds, rank_of_stage
    held = [stage for stage, rank in enumerate(rank_of_stage) if rank == mesh.place["pp"]]
    return cut_stages(module, resolved, held, bounds), bounds, rank_of_stage


def _apply_tensor(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, *, sequence_parallel: bool
) -> TensorParallel | None:
    if mesh.sizes.tensor == 1:
        return None
    axis = mesh.device_mesh["tp"]
    return apply_tensor_parallel(module, resolved, axis, sequence_parallel=sequence_parallel)


def _apply_context(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: MeshOptions
) -> ShardedSequence | None:
    if mesh.sizes.context == 1:
        return None
    divisor = mesh.sizes.tensor if options.sequence_parallel else 1
    shard = build_axis(mesh, options.context_options, divisor=divisor)
    apply_context_parallel(module, resolved, shard)
    blocks = map(module.get_submodule, resolved.block_names)
    divide_attention(module, resolved.plan.batch, shard, blocks)
    return ShardedSequence(shard, resolved.plan, mesh)


def _check_agreement(
    module: pl.LightningModule, resolved: ResolvedPlan, device: torch.device
) -> None:
    """Refuse plans that differ between ranks: each infers its own from a step of the user's."""
    plan = resolved.plan
    parts = plan.blocks, plan.first, plan.last, plan.replicated, plan.sequence_region
    text = repr((parts, sorted(plan.tensor.items()), sorted(plan.refusals)))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    # One maximum finds the largest number and, by its negative, the smallest.
    found = torch.tensor([number, -number], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    largest, smallest = found.tolist()
    if largest != -smallest:
        raise PlanError(
            "LP211",
            f"the ranks have different plans for {type(module).__name__}: each rank infers the "
            "plan from the first samples of its own data, and the step calls different layers for "
            "them. Declare parallel_plan() on the model (`lightning-par plan` prints the inferred "
            "one), or let the step call the same layers on all ranks.",
        )


def _agree_on_seed(device: torch.device) -> int:
    # Rank 0's: the processes of a run may have been seeded unequally, or not at all.
    seed = torch.tensor(torch.initial_seed() % 2**63, device=device)
    dist.broadcast(seed, 0)
    return int(seed)


def _connect(
    mesh: ParallelMesh, rank_of_stage: Sequence[int], device: torch.device, channel: type[Channel]
) -> dict[int, StageLink]:
    """Make the groups of the pipeline, the same on every rank, and this rank's links."""
    ranks = [list(range(mesh.sizes.pipeline))]
    for earlier, later in pairwise(rank_of_stage):
        ways = (("activations", earlier, later), ("gradients", later, earlier))
        for name in (group_name(*way) for way in ways if earlier != later):
            # Several pairs of stages share a group, where ranks hold several stages.
            if name not in mesh.links:
                group = mesh.subgroup(("pp",), ranks)
                assert group is not None
                mesh.links[name] = group
    given = mesh.place["pp"], mesh.links.__getitem__, partial(mesh.rank_at, "pp"), device
    return connect(rank_of_stage, *given, channel)
