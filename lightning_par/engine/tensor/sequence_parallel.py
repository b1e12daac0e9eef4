"""Sequence parallelism: which modules compute on T/tp tokens, and the collectives at the borders.

Shapes: B batch, T tokens, D model dim; under sequence parallelism a rank holds T/tp tokens.
"""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.collectives import (
    copy_to_group,
    gather_from_shards,
    gather_partial,
    reduce_to_shards,
    reduce_to_whole,
    slice_to_shard,
)
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES

__all__ = ["SEQUENCE_DIM", "Region", "Regions"]

SEQUENCE_DIM = 1


class Region:
    """The tp group, and whether activations in a part of the model are sharded along T.

    Args:
        group: The ``tp`` ranks.
        sequence_parallel: Whether activations between sharded weights are shards along T.

    Attributes:
        enter: All-gathers along T what enters sharded weights; the gradient is reduce-scattered.
            Without sequence parallelism the input is whole, and its gradient is all-reduced.
        leave: Reduce-scatters along T, or all-reduces, the partial output of sharded weights.
    """

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[Tensor], Tensor]

    def __init__(self, *, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        # Bound here, not chosen in every call: every sharded layer enters and leaves.
        if sequence_parallel:
            self.enter = partial(gather_partial, dim=SEQUENCE_DIM, group=group)
            self.leave = partial(reduce_to_shards, dim=SEQUENCE_DIM, group=group)
        else:
            self.enter = partial(copy_to_group, group=group)
            self.leave = partial(reduce_to_whole, group=group)

    def cut(self, x: Tensor) -> Tensor:
        """Keep this rank's T/tp tokens of a whole tensor; the gradient is whole again."""
        return slice_to_shard(copy_to_group(x, self.group), SEQUENCE_DIM, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """All-gather T/tp tokens for a computation that every rank repeats."""
        size = x.shape[SEQUENCE_DIM] * self.group.size()
        return gather_from_shards(x, SEQUENCE_DIM, self.group, size)


class Regions:
    """The region of every module of a model.

    Args:
        resolved: The resolved plan.
        group: The ``tp`` ranks.
        sequence_parallel: Whether any activations are shards along T.
    """

    def __init__(
        self, resolved: ResolvedPlan, group: dist.ProcessGroup, *, sequence_parallel: bool
    ) -> None:
        self.whole = Region(group=group, sequence_parallel=False)
        self.sharded = Region(group=group, sequence_parallel=sequence_parallel)
        blocks = tuple(f"{name}." for name in resolved.block_names)
        places = {"model": ("",), "blocks": blocks, "none": ()}
        self._sharded = places[resolved.plan.sequence_region]
        styles = resolved.styles.items()
        self._whole = tuple(f"{fqn}." for fqn, style in styles if TENSOR_STYLES[style].whole_inside)

    def of(self, fqn: str) -> Region:
        """Return the region of the module `fqn`."""
        # A block is in the region itself; a module that is whole inside borders on it.
        inside = f"{fqn}.".startswith(self._sharded) and not fqn.startswith(self._whole)
        return self.sharded if inside else self.whole
