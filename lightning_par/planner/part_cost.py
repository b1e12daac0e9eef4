"""Time of a model's parts on one rank, for one micro-batch: blocks, and what is around them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from lightning_par.planner.model_parts import make_parts, ModelPart
from lightning_par.planner.operations import Clock, Collective, ranks_inside
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape

__all__ = ["PartCosts", "StageTime", "Work"]

_LOSS_BYTES, _LOSS_BYTES_BACK = 16, 10
"""Bytes that a softmax of the loss moves for each logit: float32 logits are written, and read for
their maximum, sum and labels."""


@dataclass(frozen=True)
class Work:
    """Seconds that a rank computes, and communicates by axis, and the kernels that it starts."""

    compute: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)
    kernels: float = 0.0

    def seconds(self, host: float) -> float:
        """Return the time with `host` seconds of the host for every kernel."""
        # The device waits for the host where kernels are small.
        return max(self.compute + sum(self.communication.values()), self.kernels * host)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one stage.

    Attributes:
        forward: Of the forward.
        backward: Of the whole backward, recomputation included.
        weight: Of it, what the weights' gradients take.
    """

    forward: float
    backward: float
    weight: float


class PartCosts:
    """The work of a model's parts on one rank of a layout.

    Args:
        shape: The model.
        layout: Of which sizes, micro-batch and recomputation matter here.
        code: What the training code does.
        clock: Times of operations.

    Attributes:
        tokens: Of a micro-batch on this rank.
        forward, backward, recomputed: Work of a block, in the mean over the blocks.
        weight_compute: Seconds of `backward` that gradients of weights take, in the mean.
    """

    def __init__(
        self, shape: TransformerShape, layout: Layout, code: Implementation, clock: Clock
    ) -> None:
        self.shape, self.layout, self.code, self.clock = shape, layout, code, clock
        sizes = layout.sizes
        self._samples = layout.micro_batch / sizes.context
        self.tokens = layout.micro_batch * shape.length / sizes.context
        self._inside = ranks_inside(sizes.tensor, 1, clock.device.node)
        before, blocks, after = make_parts(shape, layout, code)
        # By id: costs of equal blocks are computed once.
        alone = {id(part): part for part in blocks}  # equal ones are one object
        costs = {key: _PartCost(self, part) for key, part in alone.items()}
        self.parts = [costs[id(part)] for part in blocks]
        self.ends = [_PartCost(self, end, is_block=False) for end in (before, after)]
        counts = Counter(map(id, blocks))
        each = [(costs[key], count / len(blocks)) for key, count in counts.items()]
        self.forward = _mean([(cost.forward, share) for cost, share in each])
        self.backward = _mean([(cost.backward, share) for cost, share in each])
        self.recomputed = _mean([(cost.recomputed, share) for cost, share in each])
        self.weight_compute = sum(cost.weight * share for cost, share in each)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of a micro-batch between two blocks."""
        return self.code.stream_bytes * self.tokens * self.shape.model_dim

    @property
    def _host(self) -> float:
        return self.clock.constants.host * self.clock.crowding

    def chain(self) -> tuple[list[float], tuple[float, float]]:
        """Return the seconds of every block, and those before the first and after the last one."""
        first, last = (sum(end.times(self._host)[:2]) for end in self.ends)
        return [sum(part.times(self._host)[:2]) for part in self.parts], (first, last)

    def stages(self, blocks: Sequence[int]) -> list[StageTime]:
        """Return the times of stages with so many blocks each."""
        last = len(blocks) - 1
        each = {id(part): part.times(self._host) for part in (*self.parts, *self.ends)}
        found, ends = [], list(accumulate(blocks))
        # Table and head belong to the outer stages.
        for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            here = self.parts[start:end]
            here += self.ends[:1] * (stage == 0) + self.ends[1:] * (stage == last)
            counts = Counter(map(id, here))
            forward, backward, weight = (
                sum(count * each[i][kind] for i, count in counts.items()) for kind in range(3)
            )
            # `weight` has no kernel launches of the host, which `backward` may be made of.
            found.append(StageTime(forward, backward, min(weight, backward)))
        return found


class _PartCost:
    """Forward, backward and recomputation of one part; `weight` is what its weights' gradients
    take of the backward.
    """

    def __init__(self, costs: PartCosts, part: ModelPart, *, is_block: bool = True) -> None:
        self._costs, self._part, self._is_block = costs, part, is_block
        self._layout, self._code, self._clock = costs.layout, costs.code, costs.clock
        self._samples = costs._samples
        self.weight = self._weight_gradients()
        self.forward = self._work(backward=False)
        self.backward = self._work(backward=True)
        self.recomputed = self._recomputed() if is_block else Work()

    def times(self, host: float) -> tuple[float, float, float]:
        """Return the seconds of the forward, those of the backward with recomputation, and the part
        of the latter that computes gradients of weights.

        Args:
            host: Seconds that the host takes to start a kernel.
        """
        backward = self.backward.seconds(host) + self.recomputed.seconds(host)
        return self.forward.seconds(host), backward, self.weight

    # Computation ----------------------------------------------------------------------------------

    def _products(self, of: str) -> float:
        seconds = 0.0
        for one in self._part.products:
            rows, columns, inner = one.local(self._layout)
            # dX = dY W^T: [rows, columns] x [columns, inner]. dW^T = dY^T X: [columns, rows] x
            # [rows, inner].
            if of == "input" and one.needs_input:
                columns, inner = inner, columns
            elif of == "weight" and one.needs_weight:
                rows, columns, inner = columns, inner, rows
            elif of != "forward":
                continue
            # A head stays in 16 bits.
            fp8 = self._code.fp8 and self._is_block
            seconds += self._clock.product(rows, columns, inner, one.count, fp8=fp8)
        return seconds

    def _weight_gradients(self) -> float:
        """Return the seconds of the weights' gradients, added to those of earlier micro-batches;
        those of what is around the blocks add up beside other work.
        """
        code, trained = self._code, self._part.trained
        products = self._products("weight")
        if not trained.total or not self._is_block or self._layout.microbatches == 1:
            return products
        held = trained.tensor / self._layout.sizes.tensor + trained.whole
        # Reads and writes the sum.
        summed = 2 * code.gradient_bytes * held
        if code.fused_accumulation:
            # The product itself reads the sum and writes it, while it computes.
            return max(products, self._clock.stream(summed))
        return products + self._clock.stream(code.activation_bytes * held + summed, 4)

    def _work(self, *, backward: bool) -> Work:
        part, clock = self._part, self._clock
        compute = self.weight + self._products("input") if backward else self._products("forward")
        compute += self._attention(backward=backward)
        if clock.device.runs_eagerly and any(part.operators):
            compute += self._eager(backward=backward)
        else:
            traffic = part.backward_traffic if backward else part.traffic
            words = traffic.local(self._layout) * self._samples
            size = words * self._code.activation_bytes * self._code.fused_elementwise
            # The loss is in float32, whatever the activations are: hence bytes of its own.
            logits = part.logits.local(self._layout) * self._samples
            size += (_LOSS_BYTES_BACK if backward else _LOSS_BYTES) * logits
            compute += clock.stream(size, part.streams[backward] if size else 0)
        return Work(compute, self._exchanges(backward=backward), part.kernels[backward])

    def _eager(self, *, backward: bool) -> float:
        """Return the seconds of the operators other than products and attention."""
        part = self._part
        words = (part.eager_backward if backward else part.eager).local(self._layout)
        words *= self._samples
        if backward:
            words += part.eager_weights.local(self._layout)
        return self._clock.eager(words * self._code.activation_bytes, part.operators[backward])

    def _attention(self, *, backward: bool) -> float:
        clock, code, seconds = self._clock, self._code, 0.0
        for one in self._part.attentions:
            if backward and not one.needs:
                continue
            heads = one.heads / (self._layout.sizes.tensor if one.cut == "tensor" else 1)
            if code.fused_attention:
                flops = 4 * heads * one.queries * one.keys * one.width
                # Causal: half of the scores. FlashAttention's backward: 5 products where the
                # forward has 2.
                flops *= (0.5 if one.causal else 1.0) * (2.5 if backward else 1.0)
                rate = clock.flops * code.attention_rates[backward]
                seconds += self._samples * flops / rate + 2 * clock.kernel
                continue
            heads *= self._layout.micro_batch
            # Without a fused kernel, scores of a context rank's queries with all keys.
            queries = one.queries / self._layout.sizes.context
            products = clock.product(queries, one.keys, one.width, heads)
            products += clock.product(queries, one.width, one.keys, heads)
            # Softmax with scale and mask 2 words, dropout 2.5; backward 3 and 2.5.
            words = (3 if backward else 2) + 2.5 * one.dropout
            size = words * code.activation_bytes * heads * queries * one.keys
            seconds += products * (2 if backward else 1) + clock.stream(size, 2)
        return seconds

    def _recomputed(self) -> Work:
        kind, forward = self._layout.recompute, self.forward
        if kind == "none":
            return Work()
        if kind == "full":
            return forward
        if not self._code.fused_attention:
            # Without a fused kernel, selective recomputation computes attention again.
            return Work(self._attention(backward=False), {}, 5)
        share = self._code.selective_share
        return Work(share * forward.compute, {}, share * forward.kernels)

    # Communication --------------------------------------------------------------------------------

    def _exchanges(self, *, backward: bool) -> dict[str, float]:
        if backward and not self._part.backward_traffic.total:
            return {}
        return {
            "tensor": self._over_tensor(backward=backward),
            "context": self._over_context(backward=backward),
            "expert": self._over_experts() if self._is_block else 0.0,
        }

    def _over_context(self, *, backward: bool) -> float:
        """Return what a ring of keys and values takes beyond the attention that hides it."""
        clock, code, ranks = self._clock, self._code, self._layout.sizes.context
        # Keys and values of all tokens go round the ring, a rank's share in each hop.
        words = sum(2 * a.kv_heads * a.keys * a.width for a in self._part.attentions)
        if ranks == 1 or not words:
            return 0.0
        tensor = self._layout.sizes.tensor
        between = ranks_inside(ranks, tensor, clock.device.node) < ranks
        hop = clock.message(
            code.activation_bytes * self._samples * words / tensor, between_nodes=between
        )
        hop *= 2 if backward else 1  # the gradients go round as well
        # A hop travels while a rank attends to the keys of the hop before.
        hidden = self._attention(backward=backward) / ranks if code.async_p2p else 0.0
        return (ranks - 1) * max(0.0, hop - hidden)

    def _over_experts(self) -> float:
        """Return the seconds of sending tokens to their experts and back."""
        sizes = self._layout.sizes
        size = self._code.expert_bytes(self._costs.shape, self._layout)
        inside = ranks_inside(sizes.expert, sizes.tensor, self._clock.device.node)
        # There and back.
        return 2 * self._clock.collective("all_to_all", size, sizes.expert, inside)

    def _over_tensor(self, *, backward: bool) -> float:
        """Return the seconds of the sums and gathers over the tensor axis."""
        part, clock, ranks = self._part, self._clock, self._layout.sizes.tensor
        if ranks == 1:
            return 0.0
        # What enters divided layers, and its gradient; what leaves them, and its gradient.
        enters = self._code.stream_bytes * self._samples
        leaves = self._code.activation_bytes * self._samples

        def collectives(kind: Collective, width: float, words: float, count: int) -> float:
            each = (width * words / count, ranks, self._costs._inside) if count else None
            return count * clock.collective(kind, *each) if each else 0.0

        seconds = collectives("all_gather", leaves, part.gathered, part.gathers)
        # One sum of hidden states: all-reduce, or with sequence parallelism its two halves apart.
        if not self._layout.sequence_parallel:
            summed = enters if backward else leaves
            seconds += collectives("all_reduce", summed, part.summed, part.sums)
        else:
            gathered, scattered = (leaves, enters) if backward else (enters, leaves)
            seconds += collectives("all_gather", gathered, part.summed, part.sums)
            seconds += collectives("reduce_scatter", scattered, part.summed, part.sums)
            if clock.device.runs_eagerly:
                # Ranks cut the dim of tokens: the parts are joined before or after by a copy.
                words = part.gathered + 2 * part.summed
                seconds += clock.eager(2 * leaves * words, 2 * part.sums)
        if not self._is_block:
            return seconds
        if backward and self._code.async_tensor:
            # Beside the products of weights' gradients, which wait for nothing.
            seconds = max(0.0, seconds - self.weight)
        return seconds * (1 - self._code.fused_tensor)


def _mean(works: Sequence[tuple[Work, float]]) -> Work:
    axes = {axis for work, _ in works for axis in work.communication}
    return Work(
        sum(work.compute * share for work, share in works),
        {
            axis: sum(work.communication.get(axis, 0.0) * share for work, share in works)
            for axis in axes
        },
        sum(work.kernels * share for work, share in works),
    )
