"""Attributes of blocks, which change on the pipeline stage that holds the block alone.

A stub of a block answers for the plain attributes that the block had when it was cut off, such as
the number of its heads. What a forward or a hook changes later is old there: a step that reads it
would compute something else, without a word. A hook that may read it is named in a warning.
"""

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_par.engine.pipeline.side_effects import values_read
from lightning_par.engine.pipeline.stage import MicroBatchState, Stage, StageStub
from lightning_par.errors import PlanError
from lightning_par.observe.outside import names_in_hooks
from lightning_par.strategies.components.step_attributes import OF_LIGHTNING, StepAttributes
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["BlockAttributes"]

_FOLLOWED = bool, int, float, str, Tensor
"""Types of the values of which hooks are warned."""


class BlockAttributes(StepAttributes):
    """Refuses steps that read what has changed in a block of another stage, and warns of hooks that
    may do so.

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
        self._values: dict[tuple[str, str], Any] | None = None  # before the first training step
        for stage in stages:
            with stage.hold(MicroBatchState()):
                for name, part in module.named_modules():
                    if isinstance(part, StageStub):
                        self._stubs[id(part)] = part
                    elif name:
                        self._parts[name] = part
        self.begin()

    def begin_step(self) -> None:
        """Note what hooks may read of blocks before the first training step."""
        self._values = self._read_by_hooks()

    def _read_by_hooks(self) -> dict[tuple[str, str], Any]:
        """Return the numbers, texts and tensors that modules of blocks keep under names that hooks
        look up.
        """
        module: Any = self._module
        names = names_in_hooks(module, trainer_of(module)) - OF_LIGHTNING
        return {
            (place, name): value
            for place, part in self._parts.items()
            if not isinstance(part, Metric)  # a hash of one reads its states
            for name, value in vars(part).items()
            if name in names and (value is None or isinstance(value, _FOLLOWED))
        }

    def _changed(self) -> set[tuple[str, str]]:
        """Return which of these the first training step has bound anew."""
        before, self._values = self._values, None
        if before is None:
            return set()
        missing = object()
        now = {
            name: (before.get(name, missing), value)
            for name, value in self._read_by_hooks().items()
        }
        # A tensor by identity, as a comparison may wait for a device.
        return {
            name
            for name, (old, new) in now.items()
            if old is not new
            and (isinstance(new, Tensor) or type(old) is not type(new) or old != new)
        }

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
        every = self._of_stages(({*here}, self._changed()))
        read, changed_by_step = (set().union(*found) for found in zip(*every, strict=True))
        if changed_by_step:
            self._warn_of_hooks(sorted(changed_by_step))
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

    def _warn_of_hooks(self, changed: Sequence[tuple[str, str]]) -> None:
        (fqn, name), more = changed[0], len(changed) - 1
        others = f" (and {more} more attributes of blocks)" if more else ""
        rank_zero_warn(
            f"the training step changes the attribute {name} of {fqn}{others}, and a hook uses an "
            "attribute of this name. The block is on one pipeline stage: if the hook reads the "
            "attribute of the block, the other stages have the value from before the first step. "
            f"Keep the value in a buffer, which every stage can read: call self.register_buffer("
            f"{name!r}, torch.zeros(())) in __init__ of the block, and write into it in forward "
            f"(self.{name}.copy_(value) or self.{name} += 1). Or use pipeline_parallel_size=1."
        )

    def _of_stages(self, own: Any) -> list[Any]:
        every: list[Any] = [own] * self._group.size()
        dist.all_gather_object(every, own, group=self._group)
        return every


def _plain(value: Any) -> str | None:
    """Return numbers and texts, also in containers, so that stages can compare them; else None."""
    leaves = tree_leaves(value)
    return repr(value) if all(isinstance(x, bool | int | float | str) for x in leaves) else None
