"""Attributes of blocks, which change on the pipeline stage that holds the block alone.

A stub of a block answers for the plain attributes that the block had when it was cut off, such as
the number of its heads. What a forward or a hook changes later is old there: a step that reads it
would compute something else, without a word.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_par.engine.pipeline.side_effects import values_read
from lightning_par.engine.pipeline.stage import MicroBatchState, Stage, StageStub
from lightning_par.errors import PlanError
from lightning_par.strategies.components.step_attributes import StepAttributes
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["BlockAttributes"]


class BlockAttributes(StepAttributes):
    """Refuses steps that read what has changed in a block of another stage.

    Args:
        module: The user's LightningModule, which holds the stages of this rank.
        stages: Those of this rank.
        group: The ranks of the pipeline.
    """

    def __init__(
        self, module: pl.LightningModule, stages: Sequence[Stage], group: dist.ProcessGroup
    ) -> None:
        super().__init__(module)
        self._group, self._parts = group, {}
        self._stubs = dict[int, StageStub]()
        for stage in stages:
            with stage.hold(MicroBatchState()):
                for name, part in module.named_modules():
                    if isinstance(part, StageStub):
                        self._stubs[id(part)] = part
                    elif name:
                        self._parts[name] = part
        self.begin()

    def check(self, number: Sequence[int] = ()) -> None:
        """Refuse what the steps so far have read.

        Args:
            number: Of the batch of a loop, of which the first one tells; empty: it is not known.

        Raises:
            PlanError: On every stage.

        **Communicates**: names, over the ``pp`` axis, and where something was read their values.
        """
        if any(number):
            return
        here = dict[tuple[str, str], Any]()
        for stub in self._stubs.values():
            here |= values_read(stub)
        read = set().union(*self._of_stages({*here}))
        if not read:
            return
        now = dict(self._held())
        changed = {name: _plain(now.get(name)) for name in {*self.changes()} & read}
        theirs = {n: v for found in self._of_stages(changed) for n, v in found.items()}
        # A hook may have changed both alike, as it runs on every rank.
        old = {n for n in here.keys() & theirs if _plain(here[n]) != theirs[n] or theirs[n] is None}
        for fqn, name in sorted(set().union(*self._of_stages(old))):
            raise PlanError(
                "LP409",
                f"the code reads the attribute {name} of {fqn}. This block is on another pipeline "
                "stage, which has changed the attribute since the start of the run, so this stage "
                "has an old value. If the block sets it when it runs, declare "
                f"ParallelPlan(carried=({name!r},)), or let the block return it with its output. "
                "If a hook sets it, keep it in an attribute of the LightningModule. Or use "
                "pipeline_parallel_size=1.",
            )

    def _of_stages(self, own: Any) -> list[Any]:
        every: list[Any] = [own] * self._group.size()
        dist.all_gather_object(every, own, group=self._group)
        return every


def _plain(value: Any) -> str | None:
    """Return numbers and texts, also in containers, so that stages can compare them; else None."""
    leaves = tree_leaves(value)
    return repr(value) if all(isinstance(x, bool | int | float | str) for x in leaves) else None
