"""Whether devices and hosts can hold a run, before it starts: an estimate, and the refusal."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.memory.estimate import estimate_memory, MemoryEstimate, misfits
from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.pipeline.schedules import place_stages
from lightning_par.errors import ConfigurationError
from lightning_par.plan import ParallelPlan
from lightning_par.plan_lookup import find_plan
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.setup.checks import check_module

__all__ = ["check_memory", "explain_misfit", "memory_estimate"]


class _Strategy(Protocol):
    zero_stage: int
    schedule: str
    virtual_pipeline_size: int | None
    stage_blocks: Any
    sequence_parallel: bool
    num_microbatches: int | None
    compile_blocks: bool | dict[str, Any]
    context_options: Any
    offload_options: OffloadOptions | None
    compression_options: GradientCompression | None
    plan: ParallelPlan | None

    @property
    def sizes(self) -> ParallelSizes: ...
    @property
    def precision_plugin(self) -> Any: ...
    @property
    def root_device(self) -> torch.device: ...
    @property
    def num_processes(self) -> int: ...


def memory_estimate(model: nn.Module, strategy: _Strategy) -> MemoryEstimate:
    """Return the bytes that the fullest rank will hold, on its device and on its host, by kind.

    Args:
        model: Whole, as the user made it; parameters may be on meta.
        strategy: A `MeshStrategy` that a Trainer has, so that it knows the devices.

    Raises:
        PlanError: The model does not fit the mesh.
    """
    plan = strategy.plan if strategy.plan is not None else find_plan(model)
    return _estimate(model, check_module(model, plan, strategy), strategy)


def _estimate(
    model: nn.Module,
    resolved: ResolvedPlan,
    strategy: _Strategy,
    *,
    zero_stage: int | None = None,
    offload: OffloadOptions | None = None,
) -> MemoryEstimate:
    ranks, chunks = strategy.sizes.pipeline, strategy.virtual_pipeline_size
    stage, sizes = strategy.zero_stage if zero_stage is None else zero_stage, strategy.sizes
    if stage and not strategy.zero_stage:  # whole replicas would share
        sizes = replace(sizes, data_replicate=1, data_shard=sizes.data)
    short = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    return estimate_memory(
        model,
        resolved,
        sizes,
        zero_stage=stage,
        rank_of_stage=place_stages(strategy.schedule, ranks, chunks),
        stage_blocks=strategy.stage_blocks,
        offload=strategy.offload_options if offload is None else offload,
        dtype=short.get(strategy.precision_plugin.precision),
        compression=None if stage else strategy.compression_options,
    )


def check_memory(model: nn.Module, resolved: ResolvedPlan, strategy: _Strategy) -> None:
    """Refuse a run that cannot fit, where the device is a GPU or the optimizer is offloaded; warn
    of one that is to shard its parameters and has to gather all of them at once.

    Raises:
        ConfigurationError: With what is needed, what there is, and the option that would fit.
    """
    if strategy.zero_stage == 3 and strategy.sizes.data_shard > 1 and not resolved.block_names:
        rank_zero_warn(
            f"zero_stage=3: the plan of {type(model).__name__} names no blocks, so every step "
            "gathers all parameters at once. Return ParallelPlan(blocks=...) from its "
            "parallel_plan() to gather them block by block."
        )
    device = strategy.root_device
    if device.type != "cuda" and strategy.offload_options is None:
        return
    memory = torch.cuda.get_device_properties(device).total_memory if _is_gpu(device) else None
    said = explain_misfit(model, resolved, strategy, device=memory, host=available_memory())
    if said is not None:
        raise ConfigurationError(said)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def explain_misfit(
    model: nn.Module,
    resolved: ResolvedPlan,
    strategy: _Strategy,
    *,
    device: int | None,
    host: int | None,
) -> str | None:
    """Return why a run cannot fit and which options would, or None if it may.

    Args:
        model: Whole; parameters may be on meta.
        resolved: Its resolved plan.
        strategy: Knows the devices.
        device: Bytes of one; None if the devices are the host.
        host: Bytes that the host can give; None: unknown.
    """

    def problems(**changes: Any) -> list[str]:
        return misfits(
            _estimate(model, resolved, strategy, **changes),
            device=device,
            host=host,
            ranks_per_host=strategy.num_processes,
            shared=device is None,
        )

    found = problems()
    if not found:
        return None
    fitting = (words for words, changes in _alternatives(strategy) if not problems(**changes))
    hint = next(fitting, "more devices, or a smaller model")
    return f"{strategy.sizes} cannot hold the model: {', and '.join(found)}. Use {hint}."


def _alternatives(strategy: _Strategy) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give options that need less, the ones that cost least first."""
    offload = strategy.offload_options
    stages = [strategy.zero_stage]
    if strategy.sizes.data > 1 and strategy.zero_stage < 3:
        stages.append(3)
    for stage in stages:
        without = "" if strategy.compression_options is None else ", gradient_compression=None"
        words = [] if stage == strategy.zero_stage else [f"zero_stage={stage}{without}"]
        if words:
            yield words[0], {"zero_stage": stage}
        kinds: list[tuple[str, OffloadOptions]] = []
        if offload is None:
            kinds.append(("offload_options={} (the optimizer on the host)", OffloadOptions()))
        elif offload.delayed_update is not False:
            kinds.append(("delayed_update=False", replace(offload, delayed_update=False)))
        if offload is not None and offload.state_dtype == "float32":
            smaller = replace(offload, state_dtype="bfloat16", delayed_update=False)
            off = "delayed_update=False and " if offload.delayed_update is not False else ""
            kinds.append((f'{off}state_dtype="bfloat16"', smaller))
        for text, options in kinds:
            yield " and ".join([*words, text]), {"zero_stage": stage, "offload": options}
