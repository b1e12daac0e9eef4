"""Steps whose batch is divided along its sequences."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan import ParallelPlan

__all__ = ["DividedSteps"]


class DividedSteps:
    """Divides the batch of every step, except for predictions.

    What `predict_step` returns has dims of which nobody knows whether they are tokens, so it sees
    whole sequences, on every rank the same.

    Args:
        axis: Of this rank; None: sequences are whole, and nothing happens here.
        plan: Says which entries have a sequence dim.
        mesh: Of the axis.
    """

    def __init__(self, axis: SequenceShard | None, plan: ParallelPlan, mesh: ParallelMesh) -> None:
        self.axis = axis
        self._plan, self._mesh = plan, mesh
        self._is_checked = False

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Ranks that see other tokens of the same samples; None: this one sees them all."""
        return None if self.axis is None else self.axis.group

    def open(self, name: str, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a step, with this rank's tokens of the batch.

        Args:
            name: Of the step.
            args: The batch, and what else the step takes.
        """
        if self.axis is None:
            return args
        if name == "predict_step":
            self.axis.clear()
            return args
        return [self.axis.shard_batch(args[0], self._plan.batch), *args[1:]]

    def mean(self, value: Tensor, weight: Tensor) -> Tensor:
        """Return the mean of a loss over the ranks that see tokens of the same samples.

        Args:
            value: Of this rank, any number where it weighs nothing.
            weight: Of this rank.

        **Communicates**: one all-reduce of two numbers over these ranks.
        """
        if self.axis is None:
            return value
        counted = torch.where(weight.to(value.device) > 0, value.double(), 0)
        sums = torch.stack([counted.to(weight.device) * weight, weight])
        dist.all_reduce(sums, group=self.axis.group)
        return (sums[0] / sums[1]).to(value.device, value.dtype)

    def close(self) -> None:
        """Say that the step, with its backward, is over."""
        if self.axis is not None:
            self.axis.clear()

    def check(self, name: str) -> None:
        """Refuse, after the first step, a model whose attention or positions were out of reach.

        Args:
            name: Of the step.

        Raises:
            ConfigurationError: Nothing was divided, so that every rank attended to its own tokens.

        **Communicates**: one all-reduce of two numbers over the replica, once.
        """
        if self.axis is None or self._is_checked or name == "predict_step":
            return
        self._is_checked = True
        seen = torch.tensor([self.axis.calls, self.axis.fills], dtype=torch.float64)
        seen = seen.to(self._mesh.device_type)
        dist.all_reduce(seen, group=self._mesh.replica_group)
        calls, fills = seen.tolist()
        degree = self._mesh.sizes.context
        if not calls:
            raise ConfigurationError(
                f"context_parallel_size={degree}: no attention of the blocks "
                f"{self._plan.blocks!r} was seen, so every rank would attend to its own tokens "
                "only. Call F.scaled_dot_product_attention or lightning_par.attention in the "
                "blocks."
            )
        if self._plan.positions and not fills:
            names = ", ".join(repr(name) for name in self._plan.positions)
            raise ConfigurationError(
                f"context_parallel_size={degree}: the plan gives positions to {names}, but no "
                "such module was called. Call the module, not its forward."
            )
