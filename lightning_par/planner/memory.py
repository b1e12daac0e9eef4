"""Memory of a training step, by pipeline rank: states, activations in flight, logits, buffers.

Ranks that differ in another axis than ``pp`` hold as much as each other. Shapes: n tokens of a
micro-batch on a rank, D, F, H, T, V as in `shapes`; t is the tensor degree.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf

from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.engine.tensor.chunks import chunk_tokens
from lightning_par.planner.model_parts import make_parts, ModelPart
from lightning_par.planner.shapes import Implementation, Layout, Recompute, TransformerShape

__all__ = ["MemoryPrediction", "block_activations", "in_flight", "peak_bytes", "predict_memory"]


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Bytes on the device of every pipeline rank, by kind.

    Attributes:
        ranks: For each pipeline rank: ``weights``, ``gradients``, ``states``, ``activations``,
            ``moment`` (what only the block or the loss at work needs) and ``buffers``.
        host: Bytes on the host of one device's optimizer, where it is offloaded.
    """

    ranks: tuple[Mapping[str, float], ...]
    host: float = 0.0

    @property
    def peak_rank(self) -> int:
        """The pipeline rank that needs most; the first of several."""
        return max(range(len(self.ranks)), key=lambda r: (sum(self.ranks[r].values()), -r))

    @property
    def peak(self) -> float:
        """Bytes of that rank."""
        return sum(self.ranks[self.peak_rank].values())


def block_activations(
    shape: TransformerShape, layout: Layout, code: Implementation, *, whole: bool = False
) -> float:
    """Return the bytes that a block keeps of one micro-batch from its forward to its backward, in
    the mean over the blocks.

    Args:
        shape: The model.
        layout: The layout.
        code: What the training code does.
        whole: Return what a block needs that recomputes nothing.
    """
    recompute = "none" if whole else layout.recompute
    _, blocks, _ = make_parts(shape, layout, code)
    # Blocks of a transformer are one object many times: each is computed once.
    counts = Counter(map(id, blocks))  # equal ones are one object
    alone = {id(b): b for b in blocks}
    kept = (n * _kept(alone[key], layout, code, recompute) for key, n in counts.items())
    return sum(kept) / shape.layers


def _kept(part: ModelPart, layout: Layout, code: Implementation, recompute: Recompute) -> float:
    """Return the bytes that a part keeps of a micro-batch."""
    # Context ranks share the tokens of a sample evenly.
    samples = layout.micro_batch / layout.sizes.context
    return code.activation_bytes * samples * part.activations(layout, recompute)


@lru_cache(maxsize=1 << 12)
def in_flight(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> tuple[float, ...]:
    """Return the most micro-batches that each rank holds at once, in parts of all its stages.

    In closed form, equal to `Simulation.peak_per_rank` for at least 2 p micro-batches, and not less
    for fewer.

    Args:
        schedule: A key of `SCHEDULES`.
        ranks: p.
        microbatches: m.
        virtual: Stages of a rank.
    """
    if ranks == 1:
        return (1.0,)
    peak = SCHEDULES[schedule].peak_in_flight
    # No rank holds more micro-batches than there are.
    return tuple(min(float(microbatches), peak(r, ranks, virtual)) for r in range(ranks))


def predict_memory(
    shape: TransformerShape, layout: Layout, code: Implementation | None = None
) -> MemoryPrediction:
    """Predict the bytes on the device of every pipeline rank.

    The device's context and the allocator's gaps come on top, some 10 %.

    Args:
        shape: The model.
        layout: The layout.
        code: What the training code does; None: this package.
    """
    made = _RankMemory(shape, layout, code or Implementation())
    ranks = tuple(made.rank(r) for r in range(layout.sizes.pipeline))
    host = 0.0
    if layout.offload:
        # The states and a copy of the gradients, of the fullest rank's shard.
        most = max(made.weights(r, trained=True, sharded=True) for r in range(len(ranks)))
        host = most * (made.code.state_bytes + made.code.reduce_bytes)
    return MemoryPrediction(ranks=ranks, host=host)


def peak_bytes(shape: TransformerShape, layout: Layout, code: Implementation) -> float:
    """Return `MemoryPrediction.peak` from the few ranks that can have it.

    Of ranks with as many blocks, that with the most micro-batches; the last one holds the logits.
    """
    made = _RankMemory(shape, layout, code)
    # The rank of each number of blocks with the most micro-batches in flight: the last entry wins.
    by_flight = sorted(range(len(made.counts)), key=lambda rank: made.flight[rank])
    fullest = {made.counts[rank]: rank for rank in by_flight}
    ranks = {0, layout.sizes.pipeline - 1, *fullest.values()}
    return max(sum(made.rank(r).values()) for r in ranks)


class _RankMemory:
    """The bytes of each pipeline rank of a layout, by kind."""

    def __init__(self, shape: TransformerShape, layout: Layout, code: Implementation) -> None:
        self.shape, self.layout, self.code = shape, layout, code
        sizes = layout.sizes
        self.spans = layout.spans(shape.layers)
        self.counts = [sum(end - start for start, end in spans) for spans in self.spans]
        self.flight = in_flight(
            layout.schedule, sizes.pipeline, layout.microbatches, layout.stages_per_rank
        )
        self.kept = block_activations(shape, layout, code)
        self.before, blocks, _ = make_parts(shape, layout, code)
        alone = {id(b): b for b in blocks}  # equal ones are one object
        each = {key: _kept(b, layout, code, layout.recompute) for key, b in alone.items()}
        # Bytes kept of the first 0, 1, ... blocks.
        self.first_blocks = list(accumulate((each[id(b)] for b in blocks), initial=0.0))
        self.whole = block_activations(shape, layout, code, whole=True)
        # The block at work: what recomputation brings back, for one block at a time.
        self.moment = self.whole - self.kept

    def rank(self, rank: int) -> dict[str, float]:
        """Return the bytes of a pipeline rank."""
        shape, layout, code = self.shape, self.layout, self.code
        first, last = layout.owners[0] == rank, layout.owners[-1] == rank
        loss = logit_bytes(shape, layout, code) if last else 0.0
        buffers = _buffers(shape, layout, code)
        # The root unit of FSDP2 is not resharded between forward and backward.
        if layout.zero_stage == 3 and code.fsdp and code.shards(layout) > 1:
            # What is around the blocks stays gathered.
            ends = shape.end_weights(layout.sizes.tensor, first=first, last=last)
            buffers += code.gather_bytes * ends
        return {
            **self._states(rank),
            "activations": self._held_activations(rank, first),
            # Not at the same time: the loss is over when the first block's backward begins.
            "moment": max(self.moment, loss),
            "buffers": buffers,
        }

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are divided over the replicas when most is needed."""
        layout, code = self.layout, self.code
        if not code.fsdp:
            # Megatron-LM and DeepSpeed: stage 2 reduces gradients as they come, stage 1 whole
            # ones.
            return layout.zero_stage >= 2
        # Stages below 2 sum whole gradients, unless the first ones are the last.
        alone = layout.microbatches == 1 and layout.zero_stage > 0
        return alone or code.reduces_each(layout)

    def _states(self, rank: int) -> dict[str, float]:
        layout, code, stage = self.layout, self.code, self.layout.zero_stage
        held, trained = (self.weights(rank, trained=t) for t in (False, True))
        # ZeRO (1910.02054, section 5): what a stage shards is divided by the ranks that share it.
        held_shard, trained_shard = (
            self.weights(rank, trained=t, sharded=True) for t in (False, True)
        )
        weights = code.weight_bytes * (held_shard if stage == 3 else held)
        if code.fsdp and code.shards(layout) > 1 and stage < 3:
            # FSDP2 below stage 3: the shard, and the weights gathered for the whole step beside
            # it.
            weights = code.weight_bytes * held_shard + code.gather_bytes * held
        casts_again = layout.sizes.pipeline > 1 or (stage == 3 and code.shards(layout) > 1)
        if code.autocast and layout.recompute == "none" and not casts_again:
            # The 16-bit copies that products have made wait for the backward.
            weights += code.activation_bytes * held
        gradients = trained_shard if self.shards_gradients else trained
        if code.fsdp and layout.sizes.pipeline > 1:
            # Those of the last step stay until the pipeline has computed the new ones.
            gradients += trained_shard
        # Only of what is trained: frozen weights have no moments.
        states = trained_shard if stage >= 1 else trained
        return {
            "weights": weights,
            "gradients": code.gradient_bytes * gradients,
            "states": 0.0 if layout.offload else code.state_bytes * states,
        }

    def _held_activations(self, rank: int, first: bool) -> float:
        """Return the bytes that the micro-batches in flight keep."""
        layout, flight, kept = self.layout, self.flight[rank], self._kept(rank, first)
        p = layout.sizes.pipeline
        # Kept by each micro-batch in flight, of all blocks that the rank holds.
        if not layout.splits_backward or layout.recompute == "none":
            return kept * flight
        # Gradients of weights that wait need the inputs of products, computed again, and the
        # gradients of their outputs: about what a block keeps that recomputes nothing.
        waiting = min(layout.microbatches, flight - p + rank + 1)
        return kept * min(flight, p - rank) + self.whole * self.counts[rank] * max(0, waiting)

    def weights(self, rank: int, *, trained: bool, sharded: bool = False) -> float:
        """Return the number of weights of a pipeline rank.

        Args:
            rank: The rank.
            trained: Count those that are trained.
            sharded: Count a rank's share of those whose states ranks share.
        """
        layout, code, tensor = self.layout, self.code, self.layout.sizes.tensor
        first, last = layout.owners[0] == rank, layout.owners[-1] == rank
        ends = self.shape.end_weights(tensor, first=first, last=last, trained=trained)

        def held(expert: float) -> float:
            spans = self.spans[rank]
            span = self.shape.span_weights
            return ends + sum(span(s, e, tensor, expert, trained=trained) for s, e in spans)

        found, others = held(layout.sizes.expert), held(inf)
        if not sharded:
            return found
        return others / code.shards(layout) + (found - others) / code.expert_shards(layout)

    def _kept(self, rank: int, first: bool) -> float:
        """Return the bytes that the rank's blocks keep of a micro-batch."""
        # What the table makes is kept by the first stage only.
        before = _kept(self.before, self.layout, self.code, "none") if first else 0.0
        return before + sum(
            self.first_blocks[e] - self.first_blocks[s] for s, e in self.spans[rank]
        )


def logit_bytes(shape: TransformerShape, layout: Layout, code: Implementation) -> float:
    """Return the bytes of all copies of a micro-batch's logits at the peak of the loss."""
    _, blocks, after = make_parts(shape, layout, code)
    samples = layout.micro_batch / layout.sizes.context
    kept = _kept(after, layout, code, "none")
    # A model of which no blocks are known is one block, with its loss.
    logits = samples * sum(part.logits.local(layout) for part in (blocks[-1], after))
    # Copies of the logits: see `Implementation.logit_bytes`; divided over the vocabulary by t.
    if not shape.chunked_loss:
        return kept + code.logit_bytes * logits
    # Those of a chunk, in float32 and as they are multiplied, and gradients of hidden states and of
    # the head's weight in float32.
    tokens, dim = round(samples * shape.length), shape.model_dim
    columns = logits / max(1, tokens)
    chunk = chunk_tokens(tokens, round(columns), dim)
    width = 4 + (code.activation_bytes if code.activation_bytes < 4 else 0)
    return kept + width * chunk * columns + 4 * (tokens + columns) * dim


def _buffers(shape: TransformerShape, layout: Layout, code: Implementation) -> float:
    """Return the bytes of messages on their way, of gathered blocks and of reduced gradients."""
    n = layout.micro_batch * shape.length / layout.sizes.context
    # Tensor ranks each send their part of the hidden states, or all of them the whole.
    split = layout.sequence_parallel or code.sharded_p2p
    hidden = code.stream_bytes * n * shape.model_dim / (layout.sizes.tensor if split else 1)
    # Sent and received, of activations and of gradients: 4 buffers of hidden states.
    messages = 4 * hidden if layout.sizes.pipeline > 1 else 0.0
    if layout.sizes.expert > 1:
        # The parts that are sent to experts, and those that arrived.
        messages += 2 * code.expert_bytes(shape, layout)
    if layout.sizes.shares == 1:
        return messages
    degrees = layout.sizes.tensor, layout.sizes.expert
    # One block's gradients in the dtype of the reduction, while its reduce-scatter runs.
    reduced = code.reduce_bytes * shape.block_weights(*degrees, trained=True)
    if layout.zero_stage == 3:
        # The block at work, and the next one, which is gathered beside it.
        return messages + 2 * code.gather_bytes * shape.block_weights(*degrees) + reduced
    return messages + reduced
