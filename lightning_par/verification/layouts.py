"""The layouts that are compared: the user's, with small sizes, and one process."""

from collections.abc import Sequence
from math import prod
from typing import Any

from lightning_par.engine.batch import batch_size
from lightning_par.errors import ConfigurationError
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import Hybrid3DStrategy

__all__ = ["check_batches", "find_sizes", "shrink", "strategy_at"]

_MOST = 2
"""Ranks of an axis: faults of a layout show with two."""


def find_sizes(strategy: MeshStrategy, devices: int | None) -> ParallelSizes:
    """Return the sizes that a strategy asks for.

    Args:
        strategy: Of the user.
        devices: Number of ranks that "auto" divides; None: those of the strategy's Trainer, or else
            as many as its sizes say.

    Raises:
        MeshError: They do not fit.
    """
    if devices is None and strategy.parallel_devices:
        return strategy.sizes
    options = strategy.options
    if devices is None:
        given = (
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            options.context_parallel_size,
            options.data_parallel_size,
        )
        devices = prod(size for size in given if size != "auto")
    return options.fit_sizes(devices, devices)


def shrink(sizes: ParallelSizes) -> ParallelSizes:
    """Return the same axes with at most two ranks each."""
    replicas = min(sizes.data, _MOST)
    sharded = sizes.data_shard > 1
    return ParallelSizes(
        pipeline=min(sizes.pipeline, _MOST),
        data_replicate=1 if sharded else replicas,
        data_shard=replicas if sharded else 1,
        context=min(sizes.context, _MOST),
        tensor=min(sizes.tensor, _MOST),
        expert=min(sizes.expert, _MOST) if replicas * min(sizes.context, _MOST) > 1 else 1,
    )


def strategy_at(strategy: MeshStrategy, sizes: ParallelSizes) -> MeshStrategy:
    """Return a new strategy with the options of `strategy` at other sizes.

    Args:
        strategy: Of the user; left alone.
        sizes: Options that only make sense at the user's own sizes are left out at others.
    """
    asked, options = strategy.options, dict[str, Any]()
    if sizes.pipeline > 1:
        options["schedule"] = asked.schedule
        options["virtual_pipeline_size"] = asked.virtual_pipeline_size
        options["num_microbatches"] = asked.num_microbatches
    blocks = asked.stage_blocks
    if blocks is not None and len(blocks) == sizes.pipeline > 1:
        options["stage_blocks"] = blocks
    if sizes.context > 1:
        options["context_options"] = asked.context_options
    return Hybrid3DStrategy(
        tensor_parallel_size=sizes.tensor,
        pipeline_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        data_parallel_size=sizes.data,
        expert_parallel_size=sizes.expert,
        zero_stage=asked.zero_stage,
        sequence_parallel=asked.sequence_parallel,
        plan=asked.plan,
        on_nonfinite="ignore",
        **options,
    )


def check_batches(batches: Sequence[Any], sizes: ParallelSizes) -> None:
    """Refuse batches that cannot be divided among the replicas.

    Raises:
        ConfigurationError: A batch has too few samples, or there is none.
    """
    if not batches:
        raise ConfigurationError("verify needs a batch for every step, but got none.")
    for number, batch in enumerate(batches):
        size = batch_size(batch)
        if size % sizes.data:
            raise ConfigurationError(
                f"batch {number} has {size} samples, which {sizes.data} replicas cannot share "
                f"equally. Use {-(-size // sizes.data) * sizes.data} samples."
            )
