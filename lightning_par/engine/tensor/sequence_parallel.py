"""Sequence parallelism: which modules compute on T/tp tokens, and the collectives at the borders.

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
from lightning_par.errors import PlanError
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.upstream.pytree import tree_flatten, tree_unflatten

__all__ = ["SEQUENCE_DIM", "Region", "Regions", "on_first_tensor"]

SEQUENCE_DIM = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Region:
    """The tp group, and whether activations in a part of the model are sharded along T.

    Attributes:
        group: The ``tp`` ranks.
        sequence_parallel: Whether activations between sharded weights are shards along T.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def enter(self, x: Tensor) -> Tensor:
        """All-gather along T what enters sharded weights; the gradient is reduce-scattered.

        Without sequence parallelism the input is whole, and its gradient is all-reduced.
        """
        if self.sequence_parallel:
            return gather_partial(x, SEQUENCE_DIM, self.group)
        return copy_to_group(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Reduce-scatter along T, or all-reduce, the partial output of sharded weights."""
        if self.sequence_parallel:
            return reduce_to_shards(x, SEQUENCE_DIM, self.group)
        return reduce_to_whole(x, self.group)

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
        everywhere = resolved.plan.sequence_region == "model"
        self._sharded = ("",) if everywhere else tuple(f"{b}." for b in resolved.block_names)
        styles = resolved.styles.items()
        self._whole = tuple(f"{fqn}." for fqn, style in styles if TENSOR_STYLES[style].whole_inside)

    def of(self, fqn: str) -> Region:
        """Return the region of the module `fqn`."""
        inside = fqn.startswith(self._sharded) and not fqn.startswith(self._whole)
        return self.sharded if inside else self.whole


def on_first_tensor(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `function` to the first tensor of a tree: the hidden states.

    Args:
        function: Maps a tensor to a tensor.
        tree: The arguments or the output of a module.

    Returns:
        The tree with that tensor replaced.

    Raises:
        PlanError: The tree has no tensor.
    """
    # Other nodes, such as a cache of keys that the module updates in place, are not rebuilt.
    leaves, spec = tree_flatten(tree, is_leaf=_is_no_container)
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[place] = function(leaf)
            return tree_unflatten(leaves, spec)
    raise PlanError("a module with a tensor style was called without a tensor.")


def _is_no_container(node: Any) -> bool:
    return not isinstance(node, tuple | list | dict)
