"""Optimizers on a pipeline stage, which may hold no trainable parameter."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_par.errors import ConfigurationError

__all__ = ["check_optimizers", "optimizers_of_a_stage"]


@contextmanager
def optimizers_of_a_stage() -> Iterator[None]:
    """Inside, an optimizer may be made for no parameters: what it is to train is on other stages.

    Torch takes an empty list of parameters for a mistake, but allows a group that is empty.
    """
    original = Optimizer.__init__

    def init(self: Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if not isinstance(params, torch.Tensor):  # which torch refuses
            params = list(params) or [{"params": []}]
        original(self, params, defaults)

    Optimizer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = original  # type: ignore[method-assign]


def check_optimizers(
    optimizers: Iterable[Optimizer], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Refuse an optimizer that has no parameter on any stage.

    Args:
        optimizers: Optimizers of this stage; the others have as many.
        group: The pipeline stages.
        device: Device of the all-reduce.

    Raises:
        ConfigurationError: On every rank.

    **Communicates**: one all-reduce of a number for each optimizer.
    """
    groups = [optimizer.param_groups for optimizer in optimizers]
    # Lightning's stand-in for no optimizer at all has no groups.
    counts = [sum(len(group["params"]) for group in found) if found else 1 for found in groups]
    held = torch.tensor(counts, device=device)
    dist.all_reduce(held, group=group)
    if 0 in held.tolist():
        raise ConfigurationError(
            "configure_optimizers gave an optimizer without parameters: no pipeline stage holds "
            "one that it was given. Give it parameters of the module."
        )
