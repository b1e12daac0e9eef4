"""Which parameters of a pipeline train, as all of its stages know it."""

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["TrainedParts"]


class TrainedParts:
    """Counts how often parameters were frozen or unfrozen on any stage.

    Whether an output of a stage needs a gradient depends on all parameters before it, and stages
    agree on their messages once for each signature. So the signature holds this count. Stages ask
    each other at the start of an epoch, where callbacks freeze and unfreeze. A change within an
    epoch is refused (LP405): a stage cannot see that another one has changed.

    Args:
        module: Holds the stages of this rank.
        device: Device of this rank.
        group: The ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, device: torch.device, group: dist.ProcessGroup) -> None:
        self._module, self._device, self._group = module, device, group
        self._count, self._epoch = 0, -1
        self._trains: list[bool] | None = None

    def count(self, epoch: int) -> int:
        """Return the count, the same on all stages.

        **Communicates**: in the first step of an epoch one all-reduce of a number over the ``pp``
        axis.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            trains = [p.requires_grad for p in self._module.parameters()]
            vote = torch.tensor(trains != self._trains, device=self._device, dtype=torch.int)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group)
            self._count, self._trains = self._count + int(vote), trains
        return self._count
