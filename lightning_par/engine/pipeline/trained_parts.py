"""Which parameters of a pipeline train, as all of its stages know it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

__all__ = ["TrainedParts"]


class TrainedParts:
    """Counts how often parameters were frozen or unfrozen on any stage.

    Whether an output of a stage needs a gradient depends on all parameters before it, and stages
    agree on their messages once for each signature. So the signature holds this count. Stages ask
    each other where callbacks freeze and unfreeze: at the start of an epoch, or together with a
    change of the groups of an optimizer. A change at another time is refused (LP405).

    Args:
        module: Holds the stages of this rank.
        device: Device of this rank.
        group: The ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
        self._module, self._device, self._group = module, device, group
        self._count = 0
        self._asked: Any = None
        self._trains: list[bool] | None = None

    def count(self, epoch: int, optimizers: Iterable[Optimizer]) -> int:
        """Return the count, the same on all stages.

        Args:
            epoch: Number of the epoch.
            optimizers: Those of this rank; all ranks have as many, with as many groups.

        **Communicates**: in the first step of an epoch, and in the first one with other groups, one
        all-reduce of a number over the ``pp`` axis.
        """
        when = epoch, [len(optimizer.param_groups) for optimizer in optimizers]
        if when != self._asked:
            self._asked = when
            trains = [p.requires_grad for p in self._module.parameters()]
            vote = torch.tensor(trains != self._trains, device=self._device, dtype=torch.int)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
            self._count, self._trains = self._count + int(vote), trains
        return self._count
