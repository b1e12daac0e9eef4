"""What is refused before anything starts, with one message that says what to do."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par.engine.batch import batch_entry, sequence_entries
from lightning_par.engine.context.apply import check_context
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.compression.options import check_compression, GradientCompression
from lightning_par.engine.experts.apply import check_experts
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.pipeline.schedules import place_stages, SCHEDULES
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import ConfigurationError, either, nearest, PlanError, raise_problems
from lightning_par.option_fields import read_fields
from lightning_par.plan import BatchLayout, ParallelPlan
from lightning_par.resolved_plan import check_plan, ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.upstream.lightning import synchronizes_batchnorm

__all__ = [
    "check_batch",
    "check_loader",
    "check_module",
    "check_options",
    "check_trainer",
    "check_values",
    "check_whole",
    "read_context_options",
]

_PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed", "bf16-true")


class _Options(Protocol):
    sequence_parallel: bool
    stage_blocks: Any
    schedule: str
    num_microbatches: int | None
    virtual_pipeline_size: int | None
    compile_blocks: bool | dict[str, Any]
    context_options: ContextOptions
    compression_options: GradientCompression | None
    offload_options: OffloadOptions | None

    @property
    def sizes(self) -> ParallelSizes: ...


def check_options(strategy: type, options: Mapping[str, object]) -> None:
    """Refuse options that a strategy does not have.

    Args:
        strategy: Its class.
        options: Those that its constructor does not name.

    Raises:
        TypeError: With the nearest option for each.
    """
    of_lightning = list(inspect.signature(ParallelStrategy.__init__).parameters)[1:]
    unknown = [name for name in options if name not in of_lightning]
    if not unknown:
        return
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
    raise TypeError(
        f"{strategy.__name__} has no option {', '.join(named)}. Its options are {', '.join(own)}."
    )


def check_values(
    schedule: str, num_microbatches: object, stage_blocks: object, virtual_pipeline_size: object
) -> None:
    """Refuse values that no size of the mesh would allow.

    Raises:
        ConfigurationError: With every problem.
    """
    problems = []
    if schedule not in SCHEDULES and not Path(schedule).is_file():
        hint = nearest(schedule, sorted(SCHEDULES))
        valid = either([*sorted(SCHEDULES), "a file"])
        problems.append(f"schedule={schedule!r} must be {valid}{hint}")
    if virtual_pipeline_size != "auto":
        if not _is_count(virtual_pipeline_size) or virtual_pipeline_size == 1:
            problems.append(
                f"virtual_pipeline_size={virtual_pipeline_size!r} must be a whole number of 2 or "
                "more, or 'auto'."
            )
        elif schedule != "interleaved":
            problems.append(
                f"virtual_pipeline_size={virtual_pipeline_size} needs schedule='interleaved'; "
                f"schedule={schedule!r} says by itself how many stages a rank holds."
            )
    if num_microbatches != "auto" and not _is_count(num_microbatches):
        problems.append(
            f"num_microbatches={num_microbatches!r} must be a whole number of 1 or more, or 'auto'."
        )
    if stage_blocks is not None:
        listed = isinstance(stage_blocks, Sequence) and not isinstance(stage_blocks, str)
        if not listed or not all(map(_is_count, stage_blocks)):  # type: ignore[call-overload]
            problems.append(
                f"stage_blocks={stage_blocks!r} must list the number of blocks of every stage, "
                "each 1 or more, as in [3, 4, 5]."
            )
    raise_problems(ConfigurationError, problems)


def read_context_options(options: ContextOptions | Mapping[str, Any] | None) -> ContextOptions:
    """Return the options of the context axis, or the default ones.

    Args:
        options: Or its fields by name.

    Raises:
        ConfigurationError: A field does not exist, has no such value, or names a backend that this
            machine does not have.
    """
    if not isinstance(options, ContextOptions):
        options = read_fields(ContextOptions, options or {}, "context_options")
    options.check()
    return options


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_trainer(trainer: pl.Trainer, module: pl.LightningModule, sizes: ParallelSizes) -> None:
    """Refuse Trainer settings that would be wrong on this mesh.

    Args:
        trainer: As the user made it.
        module: The user's.
        sizes: Of the mesh.

    Raises:
        ConfigurationError: With every problem.
    """
    problems = []
    if sizes.pipeline > 1 and not module.automatic_optimization:
        problems.append(
            f"pipeline_parallel_size={sizes.pipeline}: {type(module).__name__} uses manual "
            "optimization, but the "
            "schedule has to run the backward. Set automatic_optimization=True, or use "
            "pipeline_parallel_size=1."
        )
    elif sizes.world_size > 1 and not module.automatic_optimization:
        problems.append(
            f"{type(module).__name__} uses manual optimization, which is not supported on {sizes}: "
            "gradients of several backwards would be reduced twice. Set "
            "automatic_optimization=True, or train on 1 device."
        )
    if sizes.world_size > 1 and trainer.precision not in _PRECISIONS:
        problems.append(
            f"precision={trainer.precision!r} is not supported on {sizes}: use "
            f"{either(_PRECISIONS)}."
        )
    if sizes.world_size > 1 and synchronizes_batchnorm(trainer.strategy):
        problems.append(
            f"sync_batchnorm=True is not supported on {sizes}: batch statistics are those of one "
            "replica's "
            "micro-batch. Use LayerNorm or RMSNorm, or sync_batchnorm=False."
        )
    if sizes.world_size > 1:
        problems += [
            f"{type(callback).__name__} copies the whole model before it is sharded, which is not "
            f"supported on {sizes}. Remove the callback, or train on 1 device."
            for callback in getattr(trainer, "callbacks", ())
            if isinstance(callback, StochasticWeightAveraging | WeightAveraging)
        ]
        problems += [
            "the batch-size finder goes on until a rank is out of memory, where the others wait "
            f"for it; it is not supported on {sizes}. Set the batch size yourself."
            for callback in getattr(trainer, "callbacks", ())
            if isinstance(callback, BatchSizeFinder)
        ]
    raise_problems(ConfigurationError, problems)


def check_module(module: nn.Module, plan: ParallelPlan | None, options: _Options) -> ResolvedPlan:
    """Check the model's plan at the sizes of the mesh.

    Args:
        module: The user's; parameters may be on meta.
        plan: What it offers, or None.
        options: The strategy.

    Raises:
        PlanError: The plan is missing a part that the sizes need, or does not fit.
        ConfigurationError: An option needs another size.
        ScheduleError: The schedule does not fit the number of pipeline ranks.
    """
    sizes = options.sizes
    if options.stage_blocks is not None and sizes.pipeline == 1:
        raise ConfigurationError(
            f"stage_blocks={list(options.stage_blocks)} needs pipeline_parallel_size="
            f"{len(options.stage_blocks)}, but it is 1; give that size or leave stage_blocks out."
        )
    if plan is None:
        needs = []
        if sizes.pipeline > 1:
            needs.append(f"pipeline_parallel_size={sizes.pipeline} (which modules are the blocks)")
        if sizes.tensor > 1:
            needs.append(f"tensor_parallel_size={sizes.tensor} (how each module is sharded)")
        if sizes.context > 1:
            needs.append(f"context_parallel_size={sizes.context} (where the tokens are)")
        if needs:
            axes = ["tensor", "pipeline", *(["context"] if sizes.context > 1 else [])]
            ones = " and ".join(f"{axis}_parallel_size=1" for axis in axes)
            raise PlanError(
                f"{type(module).__name__} offers no parallel_plan(), which {' and '.join(needs)} "
                "needs. Define "
                "parallel_plan() on the LightningModule or its model, pass plan= to the strategy, "
                "or use "
                f"{ones} (data parallelism needs no plan)."
            )
        plan = ParallelPlan()
    _check_context(module, plan, options)
    owners = place_stages(
        options.schedule,
        sizes.pipeline,
        options.virtual_pipeline_size,
        num_microbatches=options.num_microbatches or 1,
    )
    resolved = check_plan(
        module,
        plan,
        sizes,
        sequence_parallel=options.sequence_parallel,
        stage_blocks=options.stage_blocks,
        stages_per_rank=len(owners) // sizes.pipeline,
    )
    check_experts(module, resolved, sizes)
    offload = options.offload_options
    place = "device" if offload is None else offload.accumulate_on
    check_compression(options.compression_options, sizes, accumulates_on=place)
    return resolved


def _check_context(module: nn.Module, plan: ParallelPlan, options: _Options) -> None:
    degree = options.sizes.context
    options.context_options.ulysses(degree)
    check_context(module, plan, degree)
    if degree > 1 and options.compile_blocks is not False:
        raise ConfigurationError(
            f"compile_blocks={options.compile_blocks!r} is not supported with "
            f"context_parallel_size={degree}: messages between ranks cannot be compiled. Use "
            "compile_blocks=False."
        )


def check_whole(module: nn.Module) -> None:
    """Refuse a module of which another Trainer has already kept one rank's part.

    Raises:
        ConfigurationError: It holds stubs of pipeline stages, or sharded parameters.
    """
    stubs = [name for name, child in module.named_modules() if isinstance(child, StageStub)]
    shards = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    if stubs or shards:
        raise ConfigurationError(
            f"this {type(module).__name__} is already on a mesh: another Trainer left "
            f"{(stubs or shards)[0]!r} and {len(stubs) + len(shards) - 1} more here as parts of "
            "it. Use the same Trainer again, or make a new module and pass ckpt_path= to fit."
        )


def check_loader(dataloader: object, num_microbatches: int | None) -> None:
    """Refuse a data loader whose batches cannot be cut into the micro-batches that were asked for.

    Raises:
        ConfigurationError: The loader's batch size is smaller than `num_microbatches`.
    """
    if num_microbatches is None or not isinstance(dataloader, DataLoader):
        return
    size = dataloader.batch_size
    if size is not None and size < num_microbatches:
        raise ConfigurationError(
            f"num_microbatches={num_microbatches}: a batch of {size} samples cannot be cut into so "
            "many. Use "
            f"num_microbatches={size} or less, or batch_size={num_microbatches} or more."
        )


def check_batch(
    batch: Any,
    resolved: BatchLayout,
    sizes: ParallelSizes,
    sequence_parallel: bool,
    *,
    labels_needed: bool = True,
) -> None:
    """Refuse a batch whose sequences cannot be cut over the tensor-parallel ranks.

    Sequences that are divided over context-parallel ranks are padded, except in predictions.

    Args:
        batch: Of one replica.
        resolved: Where its sequence dims are.
        sizes: Of the mesh.
        sequence_parallel: Whether sequences are cut at all.
        labels_needed: False for predictions, whose batches may lack the labels.

    Raises:
        ConfigurationError: T does not divide.
        PlanError: The batch has no such entry or dim.
    """
    pads = sizes.context > 1 and labels_needed
    if sizes.tensor == 1 or not sequence_parallel or pads:
        return
    for entry, dim in sequence_entries(batch, resolved).items():
        if entry == resolved.labels and not labels_needed:
            continue
        shape = tuple(getattr(batch_entry(batch, entry), "shape", ()))
        if not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"the plan says that T is dim {dim} of the batch entry {entry!r}, but its shape is "
                f"{shape}."
            )
        tokens = shape[dim]
        if tokens % sizes.tensor:
            raise ConfigurationError(
                f"tensor_parallel_size={sizes.tensor} with sequence_parallel=True: {entry!r} has "
                f"T={tokens} tokens in "
                f"dim {dim}, not divisible by {sizes.tensor}. Pad to "
                f"{-(-tokens // sizes.tensor) * sizes.tensor}, or "
                "use sequence_parallel=False."
            )
