"""Steps under context parallelism: every rank sees its own tokens of the batch."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.context.mixing import CountedPositions
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.strategies.step.batch_weights import weighted_mean

__all__ = ["ShardedSequence"]


class ShardedSequence:
    """Shards the batch of every step along its sequences, except for predictions.

    What `predict_step` returns has dims of which nobody knows whether they are tokens, so it sees
    whole sequences, on every rank the same.

    So do evaluation steps that compute something else on divided sequences, see Note [Whole or
    divided] in `start/divided_step.py`.

    Args:
        shard: This rank's shard of sequences.
        plan: Says which entries of a batch have a sequence dim.
        mesh: Mesh whose ``cp`` axis shards the sequences.
    """

    def __init__(self, shard: SequenceShard, plan: ParallelPlan, mesh: ParallelMesh) -> None:
        self.shard = shard
        self._plan, self._mesh = plan, mesh
        self._is_checked = False
        self._counted: CountedPositions | None = None

    def open(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a step with this rank's tokens of the batch.

        From here to `close`, attention and positions of the model are those of sharded sequences.

        Args:
            args: The batch, and what else the step takes.
        """
        batch = self.shard.shard_batch(args[0], self._plan.batch)
        if not (self._is_checked or self._counted or self._plan.positions):
            assert self.shard.layout is not None
            self._counted = CountedPositions(self.shard.layout.local)
            # Entered by hand, as it is left in `close`: forward and backward are two calls of
            # Lightning.
            self._counted.__enter__()  # type: ignore[no-untyped-call]
        return [batch, *args[1:]]

    def mean(self, value: Tensor, weight: Tensor) -> Tensor:
        """Return the mean of a loss over the ranks that see tokens of the same samples.

        Args:
            value: Loss of this rank, any number where its weight is 0.
            weight: Weight of this rank.

        **Communicates**: one all-reduce of two numbers over the ``cp`` axis.
        """
        # In float64: the means of context ranks are weighted by up to T tokens each.
        mean, _ = weighted_mean(value.double().to(weight.device), weight, self.shard.group)
        return mean.to(value.device, value.dtype)

    def close(self) -> None:
        """End the step; sequences are whole again. Its backward comes before."""
        if self._counted is not None:
            self._counted.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._counted = None
        self.shard.clear()

    def check(self) -> None:
        """Refuse, after the first divided step, a model whose attention or positions were out of
        reach.

        Raises:
            ConfigurationError: No attention was sharded, so that every rank attended to its own
                tokens.

        **Communicates**: one all-reduce of three numbers over the replica, once.
        """
        if self._is_checked or self.shard.layout is None:
            return
        self._is_checked, self.shard.looks = True, False
        counted = None if self._counted is None else self._counted.found
        numbers = [self.shard.calls, self.shard.fills, counted is not None]
        seen = torch.tensor(numbers, dtype=torch.float64)
        seen = seen.to(self._mesh.device_type)
        # Over the whole replica: a stage may hold no attention, and only the sum tells whether
        # any rank has sharded one. All ranks raise alike.
        dist.all_reduce(seen, group=self._mesh.replica_group)
        calls, fills, counts = seen.tolist()
        degree = self._mesh.sizes.context
        if not calls:
            raise ConfigurationError(
                "LP205",
                f"context_parallel_size={degree}: the blocks {', '.join(self._plan.containers)!r} "
                "called no attention function that can be divided, so every rank would attend to "
                "its own tokens only. Call F.scaled_dot_product_attention or "
                "lightning_par.attention in the blocks.",
            )
        if counts:
            raise ConfigurationError(
                "LP205",
                f"context_parallel_size={degree}: the plan says positions={{}}, but "
                f"{counted or 'the model'} counts positions from 0 over the tokens of one rank "
                "only. Let the forward take the positions as an argument, and name this argument, "
                "as in ParallelPlan(positions={'': 'position_ids'}); or put the positions into "
                "the batch.",
            )
        if self._plan.positions and not fills:
            names = ", ".join(repr(name) for name in self._plan.positions)
            raise ConfigurationError(
                "LP205",
                f"context_parallel_size={degree}: ParallelPlan(positions=...) names {names}, but "
                "no module of that name was called. Call the module itself, as in module(x), and "
                "not module.forward(x).",
            )
