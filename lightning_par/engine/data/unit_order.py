"""The order in which replicas gather parameters and reduce gradients.

FSDP2 gathers a unit when its forward runs, and reduces its gradients when its backward ends. A step
that skips a block for the data of one replica would then gather or reduce another unit than the
other replicas do, without an error where both have the same size. So a block that was passed over
is gathered, and its gradients are reduced, when a later one is used, when the step exchanges
something else, or when it ends: every replica passes through all blocks in the order of the model.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.fsdp import (
    parameters_of,
    skip_backward,
    skip_forward,
    watch_backward,
    watch_end,
)

__all__ = ["UnitOrder"]


class UnitOrder:
    """Lets a rank pass through all blocks in their order.

    Args:
        root: The FSDP root.
        runs: The blocks of each pipeline stage of this rank, in their order.
    """

    def __init__(self, root: FSDPModule, runs: Sequence[Sequence[FSDPModule]]) -> None:
        self._runs = [list(blocks) for blocks in runs]
        self._is_on, self._is_backward = False, False
        self._used: list[list[int]] = [[] for _ in runs]  # in the forward that is running
        # The blocks of forwards that wait for their backward, oldest first.
        self._waiting: list[deque[list[int]]] = [deque() for _ in runs]
        self._left: list[int] = []  # blocks whose backward has not ended
        self._begun: set[FSDPModule] = set()  # those whose backward has begun
        self._run: int | None = None  # of the backward that is running
        assert isinstance(root, nn.Module)
        self._all = list(root.parameters())
        place = {id(shard): number for number, shard in enumerate(self._all)}
        # Block -> number of parameters that are defined before it ends.
        self._end: dict[FSDPModule, int] = {}
        watch_end(root, self._end_backward)
        for run, blocks in enumerate(self._runs):
            for number, block in enumerate(blocks):
                assert isinstance(block, nn.Module)
                own = (place[id(shard)] + 1 for shard in parameters_of(block))
                self._end[block] = max(own, default=0)
                # Before FSDP2's hook, which gathers this block: those before it come first.
                block.register_forward_pre_hook(partial(self._enter, run, number), prepend=True)
                begins = partial(self._begins, run, number)
                watch_backward(block, begins, partial(self._ends, run, number))
                watch_end(block, self._end_backward)

    def in_order(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Return a forward that passes through all blocks."""

        def run() -> Any:
            # With a pipeline, forwards of several micro-batches wait for their backwards at once.
            if len(self._runs) == 1:  # without a pipeline, where an earlier one had no backward
                self._waiting[0].clear()
            for used in self._used:
                used.clear()
            self._is_on = True
            try:
                output = step()
                self.catch_up()
                # Without gradients no backward will come.
                if torch.is_grad_enabled():
                    for waiting, used in zip(self._waiting, self._used, strict=True):
                        if used:
                            waiting.append(list(used))
            finally:
                self._is_on = False
            return output

        return run

    def begin_backward(self) -> None:
        """Prepare for a backward."""
        self._is_backward, self._run, self._left = True, None, []
        self._begun.clear()

    def forget(self) -> None:
        """Forget forwards that get no backward."""
        for waiting in self._waiting:
            waiting.clear()

    def catch_up(self) -> None:
        """Pass over the blocks that a forward has not used so far, before it ends or waits for
        other replicas.
        """
        if not self._is_on:
            return
        for run, used in enumerate(self._used):
            # Of several stages on this rank a forward runs one: blocks of the others are not
            # passed over.
            if used or len(self._runs) == 1:
                following = used[-1] + 1 if used else 0
                self._pass_over(run, following, len(self._runs[run]))

    def _enter(self, run: int, number: int, *_: Any) -> None:
        if not self._is_on:
            return
        used = self._used[run]
        following = used[-1] + 1 if used else 0
        # The blocks before are passed over to the end, as another replica may go on there.
        if number < following:  # the step passes through the blocks once more
            self._pass_over(run, following, len(self._runs[run]))
            following = 0
        self._pass_over(run, following, number)
        used.append(number)

    def _pass_over(self, run: int, first: int, end: int) -> None:
        for number in range(first, end):
            skip_forward(self._runs[run][number])
            self._used[run].append(number)

    def _begins(self, run: int, number: int) -> None:
        block = self._runs[run][number]
        if not self._is_backward or block in self._begun:
            return
        self._begun.add(block)
        # The first block whose backward begins tells of which stage it is.
        if self._run is None:
            self._take(run)
        if run == self._run and number in self._left:
            # A block that was used twice is in the list twice: the later use goes first.
            last = len(self._left) - 1 - self._left[::-1].index(number)
            self._pass_back(self._left[last + 1 :])

    def _ends(self, run: int, number: int) -> None:
        self._begun.discard(self._runs[run][number])
        if run == self._run and number in self._left:
            del self._left[len(self._left) - 1 - self._left[::-1].index(number)]

    def _end_backward(self) -> None:
        if not self._is_backward:
            return
        if self._run is None and len(self._runs) == 1:
            self._take(0)
        self._pass_back(list(self._left), ends=True)
        self._is_backward, self._run, self._left = False, None, []

    def _take(self, run: int) -> None:
        self._run, waiting = run, self._waiting[run]
        self._left = waiting.popleft() if waiting else []

    def _pass_back(self, numbers: Sequence[int], *, ends: bool = False) -> None:
        """Pass over the backward of blocks, the last first; those at work end by themselves."""
        assert self._run is not None or not numbers
        for number in reversed(numbers):
            block = self._runs[self._run or 0][number]
            if block in self._begun:
                # FSDP2's own end of the backward did not come, as no gradient reached the block's
                # input.
                if ends:
                    skip_backward(block)
            elif any(shard.requires_grad for shard in self._all[: self._end[block]]):
                skip_backward(block)  # else autograd reaches it on no rank
