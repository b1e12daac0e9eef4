"""Mesh sizes of a verification: the user's, shrunk to two ranks per axis, and one process."""

from collections.abc import Sequence
from math import prod
from typing import Any

from lightning_par.engine.batch import batch_size
from lightning_par.errors import ConfigurationError
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import Hybrid3DStrategy

__all__ = ["check_batches", "find_sizes", "shrink", "strategy_at"]

_MAX_RANKS = 2
"""Two ranks show what is wrong with an axis, and the whole mesh runs on one machine."""


def find_sizes(strategy: MeshStrategy, devices: int | None) -> ParallelSizes:
    """Return the mesh sizes of a strategy, with "auto" resolved.

    Args:
        strategy: The user's strategy.
        devices: Number of ranks of the mesh; None: that of the strategy's Trainer, or, without a
            Trainer, the product of the sizes given.

    Raises:
        MeshError: The sizes do not divide the number of ranks.
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
    """Return the same mesh axes with at most two ranks each.

    Args:
        sizes: The user's mesh sizes.
    """
    replicas = min(sizes.data, _MAX_RANKS)
    sharded = sizes.data_shard > 1
    return ParallelSizes(
        pipeline=min(sizes.pipeline, _MAX_RANKS),
        # HSDP shrinks to plain FSDP: the shards are what differs from one process.
        data_replicate=1 if sharded else replicas,
        data_shard=replicas if sharded else 1,
        context=min(sizes.context, _MAX_RANKS),
        tensor=min(sizes.tensor, _MAX_RANKS),
        expert=min(sizes.expert, _MAX_RANKS)
        if replicas * min(sizes.context, _MAX_RANKS) > 1
        else 1,
    )


def strategy_at(strategy: MeshStrategy, sizes: ParallelSizes) -> MeshStrategy:
    """Return a new strategy with the options of another one and other mesh sizes.

    Args:
        strategy: The user's strategy, which is not changed.
        sizes: Mesh sizes. Options that hold for the user's own sizes only, such as
            `stage_blocks`, are left out where they do not fit.
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
        verify=False,  # a difference shall be looked into, not end the run
        **options,
    )


def check_batches(batches: Sequence[Any], sizes: ParallelSizes) -> None:
    """Check that every batch divides evenly among the replicas.

    Args:
        batches: Global batches, one per step.
        sizes: Mesh sizes of the parallel run.

    Raises:
        ConfigurationError: There is no batch, or the number of its samples is not a multiple of the
            number of replicas.
    """
    if not batches:
        raise ConfigurationError("LP802", "verify needs a batch for every step, but got none.")
    for number, batch in enumerate(batches):
        size = batch_size(batch)
        if size % sizes.data:
            raise ConfigurationError(
                "LP802",
                f"batch {number} has {size} samples, which {sizes.data} replicas cannot share "
                f"equally. Use {-(-size // sizes.data) * sizes.data} samples.",
            )
