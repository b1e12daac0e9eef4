"""Sequence parallelism: which modules compute on T/tp tokens, and the collectives at the borders.

Shapes: B batch, T tokens, D model dim; under sequence parallelism a rank holds T/tp tokens.
"""

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
from lightning_par.engine.pipeline.stage import TokenCount
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES

__all__ = ["SEQUENCE_DIM", "Region", "Regions"]

SEQUENCE_DIM = 1


class Region:
    """The tp group, and whether activations in a part of the model are sharded along T.

    Where T does not divide by the ranks, later ranks hold fewer tokens, or none, as of the single
    token of a step of generation. A shard does not tell T, so it is kept from where the whole was
    last seen; a pipeline stage gets it from the one before.

    Args:
        group: The ``tp`` ranks.
        sequence_parallel: Whether activations between sharded weights are shards along T.

    Attributes:
        tokens: T.
    """

    def __init__(self, *, group: dist.ProcessGroup, sequence_parallel: bool) -> None:
        self.group, self.sequence_parallel = group, sequence_parallel
        self._ranks = group.size()
        self.tokens = TokenCount()

    def enter(self, x: Tensor) -> Tensor:
        """All-gather along T what enters sharded weights; the gradient is reduce-scattered. Without
        sequence parallelism the input is whole, and its gradient is all-reduced.
        """
        if not self.sequence_parallel:
            return copy_to_group(x, self.group)
        # Backward: a reduce-scatter, which sums the parts of the gradient and cuts them along T.
        return gather_partial(x, SEQUENCE_DIM, self.group, self.tokens.whole)

    def leave(self, x: Tensor) -> Tensor:
        """Reduce-scatter along T, or all-reduce, the partial output of sharded weights."""
        if not self.sequence_parallel:
            return reduce_to_whole(x, self.group)
        # The whole was here: T is noted before it is cut.
        self._see(x)
        return reduce_to_shards(x, SEQUENCE_DIM, self.group)

    def keep_own(self, x: Tensor) -> Tensor:
        """Keep this rank's tokens of a whole tensor; its gradient is 0 outside of them."""
        self._see(x)
        return slice_to_shard(x, SEQUENCE_DIM, self.group)

    def cut(self, x: Tensor) -> Tensor:
        """Keep this rank's tokens of a whole tensor; the gradient is whole again."""
        # The gradient of each rank's tokens is summed over the ranks before it goes on: so it is
        # whole.
        return self.keep_own(copy_to_group(x, self.group))

    def gather(self, x: Tensor) -> Tensor:
        """All-gather the tokens of all ranks for a computation that every rank repeats."""
        # None where T divides by the ranks: then the shard tells it.
        size = self.tokens.whole or x.shape[SEQUENCE_DIM] * self._ranks
        return gather_from_shards(x, SEQUENCE_DIM, self.group, size)

    def _see(self, whole: Tensor) -> None:
        size = whole.shape[SEQUENCE_DIM]
        length = size if size % self._ranks else None
        if length != self.tokens.whole:  # compared first: a write is a side effect of compiled code
            self.tokens.whole = length


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
        specs = {fqn: TENSOR_STYLES[style] for fqn, style in resolved.styles.items()}
        # Modules that are whole inside border on a region of shards, and convert at their own
        # edges.
        self._whole = tuple(f"{fqn}." for fqn, spec in specs.items() if spec.inside == "whole")

    def of(self, fqn: str) -> Region:
        """Return the region of the module `fqn`."""
        # A block is in the region itself; a module that is whole inside borders on it.
        inside = f"{fqn}.".startswith(self._sharded) and not fqn.startswith(self._whole)
        return self.sharded if inside else self.whole
