"""Checks of the options, the Trainer, the module and its loaders, before anything starts."""

import inspect
from collections.abc import Mapping

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    GradientAccumulationScheduler,
    ModelPruning,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from lightning_par.engine.context.apply import check_context
from lightning_par.engine.data.compression.options import check_compression
from lightning_par.engine.experts.apply import check_experts
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import (
    ConfigurationError,
    either,
    nearest,
    PlanError,
    Problem,
    raise_problems,
    UnknownOptionError,
)
from lightning_par.inference.lookup import find_plan
from lightning_par.observe.contents import names_in
from lightning_par.observe.outside import is_of_user
from lightning_par.plan.parallel_plan import match_pattern, ParallelPlan
from lightning_par.plan.resolved_plan import check_plan, resolve_plan, ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.averaging_checks import averaging_problems
from lightning_par.strategies.setup.inferred_plan import lacks_parts, plan_of_run
from lightning_par.upstream.lightning import callbacks_of

__all__ = [
    "check_module",
    "check_options",
    "check_trainer",
    "check_whole",
    "divides_nothing",
]

_WHOLE = {"replicated", "replicated_inside"}
_READ_GRADIENTS = {"clip_grad_norm_", "clip_grad_value_", "get_total_norm", "grad", "grad_norm"}
_PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true")


def check_options(strategy: type, options: Mapping[str, object]) -> None:
    """Refuse options that a strategy does not have.

    Args:
        strategy: Class of the strategy.
        options: Options that its constructor does not name.

    Raises:
        UnknownOptionError: With the nearest option for each.
    """
    of_lightning = list(inspect.signature(ParallelStrategy.__init__).parameters)[1:]
    unknown = [name for name in options if name not in of_lightning]
    if not unknown:
        return
    # Each class of the hierarchy adds options and passes the others on by `**options`.
    own = list(
        dict.fromkeys(
            name
            for kind in strategy.__mro__
            if hasattr(kind, "strategy_name") and "__init__" in vars(kind)
            for name, given in inspect.signature(kind).parameters.items()
            if given.kind is given.KEYWORD_ONLY
        )
    )
    form = " (did you mean {!r}?)"
    named = [f"{n!r}{nearest(n, own, cutoff=0.6, form=form, otherwise='')}" for n in unknown]
    raise UnknownOptionError(
        "LP901",
        f"{strategy.__name__} has no option {', '.join(named)}. Its options are {', '.join(own)}.",
    )


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, sizes: ParallelSizes) -> None:
    """Refuse Trainer settings that would be wrong on this mesh.

    Args:
        trainer: The user's Trainer.
        module: The user's LightningModule.
        sizes: Sizes of the mesh.

    Raises:
        ConfigurationError: With every problem.
    """
    problems: list[Problem] = []
    if sizes.pipeline > 1 and not module.automatic_optimization:
        problems.append(
            f"pipeline_parallel_size={sizes.pipeline}: {type(module).__name__} uses manual "
            "optimization, but the "
            "schedule has to run the backward. Set automatic_optimization=True, or use "
            "pipeline_parallel_size=1."
        )
    reads = names_in(type(module).backward) & _READ_GRADIENTS
    if reads and sizes.world_size > sizes.data:
        problems.append(
            f"{type(module).__name__}.backward reads gradients ({', '.join(sorted(reads))}), but "
            f"on {sizes} gradients are complete only after this method has returned. Read or "
            "change gradients in on_after_backward."
        )
    problems += _accumulation_problems(trainer, module, sizes)
    # One device runs any plugin as Lightning does; a mesh needs one whose backward it knows.
    if sizes.world_size > 1 and trainer.precision not in _PRECISIONS:
        valid = either(_PRECISIONS)
        text = f"precision={trainer.precision!r} is not supported on {sizes}: use {valid}."
        problems.append(("LP607", text))
    if sizes.world_size > 1:
        problems += [("LP916", text) for text in _compiled_problems(module, sizes)]
        problems += [("LP611", text) for text in averaging_problems(trainer, module, sizes)]
        problems += [
            f"the batch-size finder is not supported on {sizes}: it runs until one rank is out of "
            "memory, and the other ranks would wait for this rank for ever. Set the batch size "
            "yourself: lightning-par rehearse prints the memory that a step needs."
            for callback in getattr(trainer, "callbacks", ())
            if isinstance(callback, BatchSizeFinder)
        ]
        problems += [
            f"{type(callback).__name__} replaces parameters by new ones, which is not supported "
            f"for parameters that are sharded over {sizes}. Multiply the parameters by masks in "
            "on_train_batch_end of a callback instead: for name, p in module.named_parameters(): "
            "p.data.mul_(masks[name])."
            for callback in getattr(trainer, "callbacks", ())
            if isinstance(callback, ModelPruning)
        ]
    raise_problems(ConfigurationError, "LP913", problems)


def _accumulation_problems(
    trainer: pl.Trainer, module: pl.LightningModule, sizes: ParallelSizes
) -> list[str]:
    """Refuse hooks that would find no gradients while those of several batches add up."""
    callbacks = callbacks_of(trainer)
    batches = trainer.accumulate_grad_batches
    accumulates = batches > 1 or any(
        isinstance(c, GradientAccumulationScheduler) for c in callbacks
    )
    if sizes.data_shard == 1 or not accumulates:
        return []
    owners = [type(each) for each in (module, *callbacks) if is_of_user(type(each).__module__)]
    reads = {kind: names_in(kind.on_after_backward) & _READ_GRADIENTS for kind in owners}
    return [
        f"{kind.__name__}.on_after_backward reads gradients ({', '.join(sorted(names))}), but on "
        f"{sizes} gradients are sharded, and while the gradients of several batches are "
        "accumulated, they are complete only after the last of these batches: after the others, "
        "p.grad is None. Read or change gradients in on_before_optimizer_step, or use "
        "accumulate_grad_batches=1."
        for kind, names in reads.items()
        if names
    ]


def _compiled_problems(module: pl.LightningModule, sizes: ParallelSizes) -> list[str]:
    """Refuse outputs of torch.compile: a mesh would change modules that are traced already.

    Lightning itself refuses ``torch.compile`` of the whole LightningModule.
    """
    wraps = "._orig_mod"  # how the names of what is compiled end
    found = [n.removesuffix(wraps) for n, _ in module.named_modules() if n.endswith(wraps)]
    if not found:
        return []
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"{found[0]!r}{more} was compiled with torch.compile, which is not supported on {sizes}, "
        "since the modules are split and sharded after that. Remove torch.compile, and pass "
        "compile_blocks=True to the strategy, which compiles each block after sharding. "
        "Checkpoints then have the parameter names of the module without torch.compile."
    ]


def check_module(
    module: nn.Module, options: MeshOptions, sizes: ParallelSizes, *, infers: bool = True
) -> ResolvedPlan:
    """Check the plan of the options, or the module's own, or the inferred one, at the mesh's sizes.

    Args:
        module: The user's module; parameters may be on meta.
        options: The options of the strategy.
        sizes: Sizes of the mesh.
        infers: False before the data is known: then a missing plan is left for later.

    Raises:
        PlanError: The plan is missing a part that the sizes need, or does not fit.
        ConfigurationError: An option needs another size.
        ScheduleError: The schedule does not fit the number of pipeline ranks.
    """
    _check_offload(options, sizes)
    _check_parameters(module, sizes)
    if infers:
        plan = plan_of_run(module, options.plan, sizes)
    else:
        # Inference starts the loaders of the user, which is left to the processes of the run.
        plan = options.plan if options.plan is not None else find_plan(module)
        if lacks_parts(plan, sizes):
            return resolve_plan(module, plan or ParallelPlan())
    if options.stage_blocks is not None and sizes.pipeline == 1:
        raise ConfigurationError(
            "LP107",
            f"stage_blocks={list(options.stage_blocks)} needs "
            f"pipeline_parallel_size={len(options.stage_blocks)}, but pipeline_parallel_size is "
            f"1. Use pipeline_parallel_size={len(options.stage_blocks)}, or leave stage_blocks "
            "out.",
        )
    if plan is None and sizes.context > 1:
        raise PlanError(
            "LP201",
            f"context_parallel_size={sizes.context} needs a parallel_plan(), which says where in "
            f"a batch the tokens are, but {type(module).__name__} defines none. Define "
            "parallel_plan() on the LightningModule or its model, pass plan= to the strategy, or "
            "use context_parallel_size=1, since only context parallelism needs a plan.",
        )
    plan = plan or ParallelPlan()
    _check_context(module, plan, options, sizes.context)
    owners = options.place_stages(sizes.pipeline)
    resolved = check_plan(
        module,
        plan,
        sizes,
        sequence_parallel=options.sequence_parallel,
        stage_blocks=options.stage_blocks,
        # One rank may hold several stages; the numbers of blocks are checked for each stage.
        stages_per_rank=len(owners) // sizes.pipeline,
    )
    _check_batch(module, plan, options, sizes)
    check_experts(module, resolved, sizes)
    _check_compression(module, options, sizes)
    if infers:
        _warn_of_copies(module, resolved, sizes)
    return resolved


def _warn_of_copies(module: nn.Module, resolved: ResolvedPlan, sizes: ParallelSizes) -> None:
    """Warn where tensor-parallel ranks would all compute the same, or stages most of the model."""
    plan = resolved.plan
    if sizes.pipeline > 1:
        divided, copied = _sizes_of_parts(module, resolved)
        if copied > divided:
            rank_zero_warn(
                f"pipeline_parallel_size={sizes.pipeline} divides only a small part of "
                f"{type(module).__name__}. The blocks {plan.blocks} hold {divided} parameters, "
                f"but {', '.join(plan.replicated)} hold {copied}, and every stage computes these. "
                "Use pipeline_parallel_size=1; or move most of the model into one list of blocks, "
                "where each block needs only the output of the block before."
            )
    if sizes.tensor > 1 and divides_nothing(plan):
        rank_zero_warn(
            f"tensor_parallel_size={sizes.tensor} shards no layer of {type(module).__name__}, "
            "since no layers were found that can be sharded. The tensor-parallel ranks all compute "
            "the same. Use tensor_parallel_size=1, which turns them into replicas, or define "
            "parallel_plan() with tensor styles."
        )


def _sizes_of_parts(module: nn.Module, resolved: ResolvedPlan) -> tuple[int, int]:
    """Return the numbers of parameters that stages divide, and that each of them computes with;
    a look-up in an embedding is no work.
    """
    divided = copied = 0
    blocks, replicated = resolved.block_names, resolved.plan.replicated
    for name, child in module.named_modules():
        own = sum(p.numel() for p in child.parameters(recurse=False))
        # Every FQN above the module, and its own: a pattern may name any of them.
        parents = [".".join(name.split(".")[:n]) for n in range(1, name.count(".") + 2)]
        if any(parent in blocks for parent in parents):
            divided += own
        elif not isinstance(child, nn.Embedding):
            is_copied = any(match_pattern(p, parent) for p in replicated for parent in parents)
            copied += own * is_copied
    return divided, copied


def divides_nothing(plan: ParallelPlan) -> bool:
    """Whether tensor-parallel ranks would all compute the same under a plan."""
    return bool(plan.tensor) and {*plan.tensor.values()} <= _WHOLE


def _check_offload(options: MeshOptions, sizes: ParallelSizes) -> None:
    """Refuse to offload parameters that are not sharded block by block."""
    if options.offload_options is None or not options.offload_options.offload_parameters:
        return
    if options.zero_stage != 3 or sizes.data_shard == 1 or sizes.expert > 1:
        raise ConfigurationError(
            "LP605",
            f"offload_parameters=True with zero_stage={options.zero_stage} on {sizes} "
            "is not supported: it needs weights that ZeRO stage 3 shards over 2 or more replicas. "
            "Use zero_stage=3, data_parallel_size=2 or more, and expert_parallel_size=1; or use "
            "offload_parameters=False.",
        )


def _check_compression(module: nn.Module, options: MeshOptions, sizes: ParallelSizes) -> None:
    offload = options.offload_options
    place = "device" if offload is None else offload.accumulate_on
    check_compression(options.gradient_compression, sizes, accumulates_on=place)
    is_manual = isinstance(module, pl.LightningModule) and not module.automatic_optimization
    if options.gradient_compression is not None and is_manual:
        raise ConfigurationError(
            "LP609",
            "gradient_compression is not supported with manual optimization, which "
            f"{type(module).__name__} uses: the error of a compressed gradient is added to the "
            "gradient of the next step, but with manual optimization the next step is not known. "
            "Set automatic_optimization=True, or use gradient_compression=None.",
        )


def _check_parameters(module: nn.Module, sizes: ParallelSizes) -> None:
    """Refuse what holds parameters in a way that a mesh cannot take over."""
    if sizes.world_size == 1:
        return
    # FSDP and DTensor put other tensors in the places of parameters; their hooks and subclasses
    # are lost with the old ones.
    replaced = dict(module.named_parameters()) if sizes.data > 1 or sizes.tensor > 1 else {}
    hooked = [n for n, p in replaced.items() if p._backward_hooks or p._post_accumulate_grad_hooks]
    plain = nn.Parameter, UninitializedParameter, DTensor
    # A rehearsal makes fake tensors, which become shards as those do that they stand for.
    others = {n: p for n, p in replaced.items() if not hasattr(p, "fake_mode")}
    kinds = {n: type(p).__name__ for n, p in others.items() if type(p) not in plain}
    lazy, sparse, scripted = list[str](), list[str](), list[str]()
    for name, part in module.named_modules():
        held = [*part.parameters(recurse=False)]
        if any(isinstance(parameter, UninitializedParameter) for parameter in held):
            lazy.append(name)
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            sparse.append(name)
        if isinstance(part, torch.jit.ScriptModule) and held and sizes.data > 1:
            scripted.append(name)
    # Made in any case: each text is used where its list has names.
    texts = (
        f"{', '.join(lazy)} is a lazy module whose parameters have no shapes yet. Call the model "
        "once on a batch before trainer.fit, or use a module with explicit sizes instead of the "
        "lazy one.",
        f"{', '.join(hooked)} has a hook (register_hook), which would be lost on {sizes}, since "
        "sharding replaces the parameters by new tensors. Change p.grad in on_after_backward, or "
        "register the hook on the output of a module.",
        f"{', '.join(sparse)} has sparse=True, but on {sizes} only dense gradients can be reduced "
        "over the ranks. Use sparse=False.",
        f"{', '.join(scripted)} was compiled with torch.jit.script, and parameters of such a "
        "module cannot be sharded. Train the module without torch.jit.script, and script it after "
        "the run.",
        _of_other_kinds(kinds, sizes),
    )
    found = zip((lazy, hooked, sparse, scripted, kinds), texts, strict=True)
    problems: list[Problem] = [text for names, text in found if names]
    raise_problems(ConfigurationError, "LP919", problems)
    _check_entries(module, sizes)


def _of_other_kinds(kinds: Mapping[str, str], sizes: ParallelSizes) -> str:
    """Say what is wrong with parameters of a subclass, such as packed numbers of 4 bits."""
    name, kind = next(iter(kinds.items()), ("", ""))
    more = f" and {len(kinds) - 1} more are" if len(kinds) > 1 else " is"
    return (
        f"{name}{more} of the class {kind}, a subclass of nn.Parameter. On {sizes} plain shards "
        "replace the parameters, so the subclass would be lost. To mark a weight, set an "
        "attribute, which the shards keep (parameter.no_decay = True). Keep packed or quantized "
        "values and their scales in buffers (register_buffer), and train separate adapter weights."
    )


def _check_entries(module: nn.Module, sizes: ParallelSizes) -> None:
    """Refuse to average the gradient of a parameter without entries, which FSDP cannot do."""
    named = module.named_parameters() if sizes.data > 1 else ()
    empty = [name for name, p in named if p.requires_grad and not p.numel()]
    if empty:
        raise ConfigurationError(
            "LP915",
            f"data_parallel_size={sizes.data}: {', '.join(empty)} has no entries (0 elements), "
            "so it cannot be sharded. Call requires_grad_(False) on it, or remove it.",
        )


def _check_context(
    module: nn.Module, plan: ParallelPlan, options: MeshOptions, degree: int
) -> None:
    options.context_options.ulysses(degree)
    check_context(module, plan, degree)
    if degree > 1 and options.compile_blocks is not False:
        raise ConfigurationError(
            "LP916",
            f"compile_blocks={options.compile_blocks!r} is not supported with "
            f"context_parallel_size={degree}: messages between ranks cannot be compiled. Use "
            "compile_blocks=False.",
        )


def _check_batch(
    module: nn.Module, plan: ParallelPlan, options: MeshOptions, sizes: ParallelSizes
) -> None:
    """Refuse to divide a batch whose loss is no mean over its samples."""
    count = options.microbatches(sizes.pipeline) if sizes.pipeline > 1 else 1
    replicas = [f"data_parallel_size={sizes.data}"] if sizes.data > 1 else []
    parts = [f"pipeline_parallel_size={sizes.pipeline} with num_microbatches={count}"] * (
        # A single micro-batch is the whole batch, whatever the loss is.
        count > 1
    )
    for key, asked in (("batch", replicas + parts), ("microbatches", parts)):
        if key in plan.refusals and asked:
            raise PlanError("LP211", f"{' and '.join(asked)}: {plan.refusals[key]}")


def check_whole(module: nn.Module) -> None:
    """Refuse a module that another Trainer has already put on a mesh.

    Raises:
        ConfigurationError: It holds stubs of pipeline stages, or sharded parameters.
    """
    stubs = [name for name, child in module.named_modules() if isinstance(child, StageStub)]
    shards = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if stubs or shards:
        raise ConfigurationError(
            "LP914",
            f"this {type(module).__name__} is still sharded by another Trainer: "
            f"{(stubs or shards)[0]!r} and {len(stubs) + len(shards) - 1} more are only parts of "
            "the module. The other run failed, or the whole module did not fit into memory after "
            "it (see gather_after_run). Use the same Trainer again, or make a new module and pass "
            "ckpt_path= to fit.",
        )
