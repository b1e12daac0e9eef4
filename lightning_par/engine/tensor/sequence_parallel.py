"""Which modules of a model compute on shards of the sequence, and how shards are entered and left.

Shapes: B batch, T tokens, D model dim; under sequence parallelism a rank holds T/tp tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.upstream.pytree import tree_flatten, tree_unflatten

__all__ = ["SEQUENCE_DIM", "Region", "Regions", "on_first_tensor"]

SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """How the modules of a part of the model compute.

    Attributes:
        group: The ``tp`` ranks.
        sequence_parallel: Whether activations between sharded weights are shards along T.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """Make the input of sharded weights whole."""
        if self.sequence_parallel:
            return gather_partial(x, SEQUENCE_DIM, self.group)
        return copy_to_group(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Sum the partial output of sharded weights."""
        if self.sequence_parallel:
            return reduce_to_shards(x, SEQUENCE_DIM, self.group)
        return reduce_to_whole(x, self.group)

    def cut(self, x: Tensor) -> Tensor:
        """Keep T/tp tokens of what every rank has whole; the gradient is whole again."""
        return slice_to_shard(copy_to_group(x, self.group), SEQUENCE_DIM, self.group)

    def gather(self, x: Tensor) -> Tensor:
        """Make T/tp tokens whole, for a computation that is the same on every rank."""
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
        everywhere = resolved.plan.sequence_region == "model"
        self._sharded = ("",) if everywhere else tuple(f"{b}." for b in resolved.block_names)
        styles = resolved.styles.items()
        self._whole = tuple(f"{fqn}." for fqn, style in styles if style == "whole_inside")

    def of(self, fqn: str) -> Region:
        """Return how the module `fqn` computes."""
        inside = fqn.startswith(self._sharded) and not fqn.startswith(self._whole)
        return self.sharded if inside else self.whole


def on_first_tensor(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `function` to the first tensor of a tree: the hidden states."""
    leaves, spec = tree_flatten(tree)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = function(leaf)
            break
    return tree_unflatten(leaves, spec)
