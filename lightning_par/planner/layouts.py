"""Every valid layout of a model over a number of devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.errors import MeshError, raise_problems
from lightning_par.planner.shapes import Layout, Recompute, TransformerShape
from lightning_par.sizes import ParallelSizes

__all__ = ["LayoutSpace", "divisors"]

_CHUNKS = (2, 3, 4, 6)
"""Stages of a rank that a search tries, where a schedule lets it choose."""


@dataclass(frozen=True, kw_only=True)
class LayoutSpace:
    """What a search may choose from.

    Attributes:
        devices: Of all nodes.
        node: Devices of a node.
        samples: Sequences of an optimizer step, of all replicas.
        schedules: Of those that a pipeline may have; None: all that a search tries.
        recompute: What blocks may compute again.
        zero_stages: What replicas may shard.
        largest_micro_batch: Samples of a micro-batch, at most.
        shortest_context: Tokens of a sequence that a rank must keep under context parallelism.
        most_gathering_nodes: Nodes over which ZeRO stage 3 may shard: no measurement of more was at
            hand that the model could be held against.
        offload: Whether the optimizer is on the host.
        expert_max_rows: See `Layout`; layouts for which it is too small are left out.
        sequence_parallel: Whether the parts between tensor-parallel layers are sharded, too, where
            the tokens divide.
        fixed: Name of a size of `ParallelSizes`, or "data" -> its only value.
        accumulated: Batches of a replica in a step, which only a pipeline cuts into micro-batches;
            0: without a pipeline, too, a step may be cut in any way.
        pieces: Micro-batches into which a pipeline cuts such a batch; 0: any number.
        accepts: Of a mesh with a ZeRO stage, whether it may be chosen.

    Raises:
        MeshError: A number is less than 1, or a fixed size is unknown.
    """

    devices: int
    samples: int
    node: int = 8
    schedules: tuple[str, ...] | None = None
    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    zero_stages: tuple[int, ...] = (1, 2, 3)
    largest_micro_batch: int = 16
    shortest_context: int = 2048
    most_gathering_nodes: int = 32
    offload: bool = False
    expert_max_rows: int | None = None
    sequence_parallel: bool = True
    fixed: tuple[tuple[str, int], ...] = ()
    accumulated: int = 0
    pieces: int = 0
    accepts: Callable[[ParallelSizes, int], bool] = lambda sizes, zero: True

    def __post_init__(self) -> None:
        counts = ("devices", "samples", "node", "largest_micro_batch")
        problems = [
            f"{name}={getattr(self, name)} must be 1 or more."
            for name in counts
            if getattr(self, name) < 1
        ]
        known = {*ParallelSizes.__dataclass_fields__, "data"}
        problems += [
            f"{n!r} is no axis of the mesh. The axes are {', '.join(sorted(known))}."
            for n, _ in self.fixed
            if n not in known
        ]
        raise_problems(MeshError, "LP101", problems)

    def sizes(self, shape: TransformerShape) -> Iterator[tuple[ParallelSizes, int]]:
        """Yield every mesh with a ZeRO stage that shards over it.

        Args:
            shape: Its heads, blocks, experts and tokens have to divide.
        """
        fixed = dict(self.fixed)
        kept = {name: size for name, size in fixed.items() if name != "data"}
        for tensor, pipeline, context, data in self._degrees(shape):
            if fixed.get("data", data) != data:
                # "data" follows from the other sizes, so that it is checked and not chosen.
                continue
            for zero, copies in self._replicas(data, tensor * context):
                shard = data // copies
                for expert in divisors(shard * context):
                    if not shape.divides_experts(expert, tensor):
                        continue
                    found = ParallelSizes(
                        pipeline=pipeline,
                        data_replicate=copies,
                        data_shard=shard,
                        context=context,
                        tensor=tensor,
                        expert=expert,
                    )
                    is_kept = all(getattr(found, name) == size for name, size in kept.items())
                    if is_kept and self.accepts(found, zero):
                        yield found, zero

    def _degrees(self, shape: TransformerShape) -> Iterator[tuple[int, int, int, int]]:
        """Yield tensor, pipeline, context and data degrees."""
        for tensor in divisors(self.node):
            if self.devices % tensor or not shape.divides(tensor):
                continue
            for pipeline in divisors(self.devices // tensor):
                # Divisors come in ascending order: larger ones have too few blocks as well.
                if pipeline > shape.layers:
                    break
                left = self.devices // tensor // pipeline
                for context in divisors(left):
                    # Ring messages of few tokens are not hidden; larger degrees leave fewer.
                    if context > 1 and shape.length // context < self.shortest_context:
                        break
                    # Zigzag cuts T into 2 cp chunks.
                    if context > 1 and shape.length % (2 * context):
                        continue
                    # Replicas get equal numbers of samples.
                    if self.samples % (left // context) == 0:
                        yield tensor, pipeline, context, left // context

    def _replicas(self, data: int, inner: int) -> Iterator[tuple[int, int]]:
        """Yield ZeRO stages, each with the number of whole copies."""
        if data == 1:
            # Nothing to shard: one stage is enough, the one that does least.
            yield min(self.zero_stages), 1
            return
        for zero in self.zero_stages:
            # Stage 3 gathers over all of them; what was measured ends at so many nodes.
            if zero < 3 or data * inner <= self.most_gathering_nodes * self.node:
                yield zero, data if zero == 0 else 1
            # Shards inside a node, copies between nodes.
            # HSDP: inner axes and shards fill a node.
            shard = self.node // inner if self.node % inner == 0 else 1
            if zero >= 2 and 1 < shard < data and data % shard == 0:
                yield zero, data // shard

    def layouts(self, shape: TransformerShape) -> Iterator[Layout]:
        """Yield every layout, those that recompute less first.

        Args:
            shape: The model.
        """
        for sizes, zero in self.sizes(shape):
            cuts = self._cuts(sizes)
            for (micro, count), (schedule, virtual) in product(cuts, self._schedules(shape, sizes)):
                # Interleaved schedules need rounds of p micro-batches.
                if SCHEDULES[schedule].chosen and count % sizes.pipeline:
                    continue
                for recompute in self.recompute:
                    found = Layout(
                        sizes=sizes,
                        micro_batch=micro,
                        microbatches=count,
                        zero_stage=zero,
                        schedule=schedule,
                        virtual=virtual,
                        recompute=recompute,
                        sequence_parallel=self.sequence_parallel
                        # Sequence parallelism of unequal shards is possible, but not what the
                        # formulas describe.
                        and shape.length // sizes.context % sizes.tensor == 0,
                        offload=self.offload,
                        expert_max_rows=self.expert_max_rows,
                    )
                    if found.holds_choices(shape):
                        yield found

    def _cuts(self, sizes: ParallelSizes) -> list[tuple[int, int]]:
        """Return samples of a micro-batch, and micro-batches of a step of a replica."""
        of_replica = self.samples // sizes.data
        if not self.accumulated:
            micros = [x for x in divisors(of_replica) if x <= self.largest_micro_batch]
            return [(micro, of_replica // micro) for micro in micros]
        batch = of_replica // self.accumulated
        if sizes.pipeline == 1:
            return [(batch, self.accumulated)]
        # Rounded up: the batch of a replica may not divide by the pieces.
        counts = [min(self.pieces, batch)] if self.pieces else divisors(batch)
        return [(-(-batch // count), count * self.accumulated) for count in counts]

    def _schedules(
        self, shape: TransformerShape, sizes: ParallelSizes
    ) -> Iterator[tuple[str, int]]:
        p = sizes.pipeline
        if p == 1:
            yield "1f1b", 1
            return
        tried = self.schedules or [name for name, row in SCHEDULES.items() if row.searched]
        for name in tried:
            row = SCHEDULES[name]
            for v in _CHUNKS if row.chosen else (row.stages_per_rank,):
                if shape.layers >= v * p:
                    yield name, v if row.chosen else 1


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]
