"""Parameters that have a gradient on some replicas only, or on none.

Which parameters a step uses may depend on its data: a tower that is called for batches with images,
an expert without tokens. Replicas reduce gradients together, so a parameter without one takes part
with zeros. Where no replica has one, the gradient is None again afterwards, so that the optimizer
leaves the parameter alone as in one process.

Note [When replicas agree]: a rank knows which gradients it lacks, and only one that lacks some
needs to know those of the others. So the number of missing gradients travels with the norm of the
gradients, and replicas exchange more only in steps that miss some. Where hooks look at gradients
before the norm is known, where nobody computes it, and in the first step, they exchange at once.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.fsdp import (
    fill_missing,
    parameters_of,
    reduction_groups,
    watch_backward,
)

__all__ = ["AbsentGradients"]


class AbsentGradients:
    """Gradients that this rank lacks, and zeros stand for in the reduction.

    Args:
        units: FSDP units.
        in_steps: Whether `begin` announces each backward. There, what FSDP2 reduces after a
            backward is only what it has not reduced in it.

    Attributes:
        filled: Shards whose gradients were zeros on this rank in every reduction since replicas
            agreed.
        are_usual: Whether some replica lacked a gradient before.
    """

    def __init__(self, units: Sequence[FSDPModule], *, in_steps: bool = False) -> None:
        self._units, self._in_steps = tuple(units), in_steps
        self._done = set(self._units)
        self.filled: set[nn.Parameter] = set()
        self.are_usual = True
        for unit in units:
            # When the backward of a unit ends, right before FSDP2 reduces what the unit has.
            watch_backward(unit, lambda: None, partial(self._fill, unit))
            # FSDP2 makes the unsharded parameters, which zeros are given to, at the first
            # unshard.
            if in_steps:  # may be reduced before its first use
                unit.unshard()
                unit.reshard()

    def begin(self) -> None:
        """Expect a backward that reduces gradients."""
        self._done.clear()

    def _fill(self, unit: FSDPModule) -> None:
        """Give zeros to the parameters of a unit without gradient, if they are to be reduced."""
        is_first = not self._in_steps or unit not in self._done
        self._done.add(unit)
        for shard, missing in fill_missing(unit, fills=is_first):
            if not missing:
                self.filled.discard(shard)
            # Gradients of earlier batches are in the shard already: it is not without one.
            elif shard.grad is None:  # else an earlier micro-batch or batch had one
                self.filled.add(shard)

    @torch.no_grad()
    def agree(self) -> None:
        """Set the gradients that no replica has to None.

        **Communicates**: one all-reduce of a byte for each parameter, over the data axes.
        """
        together: dict[tuple[dist.ProcessGroup, ...], list[nn.Parameter]] = {}
        for unit in self._units:
            # Units may be sharded over other ranks, as experts are: one message for each set of
            # groups.
            together.setdefault(reduction_groups(unit), []).extend(parameters_of(unit))
        self.are_usual = False
        for groups, shards in together.items():
            # On the host, which knows the answers and needs them.
            held = torch.tensor([shard not in self.filled for shard in shards], dtype=torch.uint8)
            everywhere = held.clone()
            # With HSDP over both axes in turn: the result of the first is reduced over the
            # second.
            for group in groups:
                dist.all_reduce(held, dist.ReduceOp.MAX, group=group)
                dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=group)
            # Some replica lacked what another one had: then such steps are to be expected, and
            # the next agreement is not put off to the norm.
            self.are_usual |= not bool(everywhere.all())
            for shard, has_gradient in zip(shards, held.tolist(), strict=True):
                if not has_gradient:
                    shard.grad = None
        self.filled.clear()
