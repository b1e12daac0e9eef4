"""Time of a transformer's block, embedding, head and loss on one rank, for one micro-batch.

Shapes: n tokens of a micro-batch on this rank, D, F, H, T, V, E as in `shapes`; t, c and e are the
degrees of the tensor, context and expert axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_par.planner.operations import Clock, ranks_inside
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape

__all__ = ["BlockCost", "StageTime", "Work", "ring_seconds"]


@dataclass(frozen=True)
class Work:
    """Seconds that a rank computes, and communicates by axis, and the kernels that it starts."""

    compute: float = 0.0
    communication: Mapping[str, float] = field(default_factory=dict)
    kernels: float = 0.0

    def seconds(self, host: float) -> float:
        """Return the time with `host` seconds of the host for every kernel."""
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


def ring_seconds(
    clock: Clock, code: Implementation, layout: Layout, size: float, work: float, *, backward: bool
) -> float:
    """Return what a ring of keys and values takes beyond the attention that hides it.

    Args:
        clock: Times of operations.
        code: What the training code does.
        layout: The layout.
        size: Bytes of the keys and values of a rank.
        work: Seconds of a rank's attention.
        backward: Their gradients go round as well.
    """
    c, t = layout.sizes.context, layout.sizes.tensor
    if c == 1:
        return 0.0
    between = ranks_inside(c, t, clock.device.node) < c
    hop = clock.message(size, between_nodes=between) * (2 if backward else 1)
    hidden = work / c if code.async_p2p else 0.0
    return (c - 1) * max(0.0, hop - hidden)


class BlockCost:
    """The work of a model's parts on one rank of a layout.

    Args:
        shape: The model.
        layout: Of which sizes, micro-batch and recomputation matter here.
        code: What the training code does.
        clock: Times of operations.

    Attributes:
        forward, backward, recomputed: Work of a block. Their gradients of weights take
            `weight_compute` seconds of `backward`.
    """

    def __init__(
        self, shape: TransformerShape, layout: Layout, code: Implementation, clock: Clock
    ) -> None:
        self.shape, self.layout, self.code, self.clock = shape, layout, code, clock
        sizes, node = layout.sizes, clock.device.node
        self.tokens = layout.micro_batch * shape.length / sizes.context
        self.tensor, self.context = sizes.tensor, sizes.context
        self._tensor_inside = ranks_inside(self.tensor, 1, node)
        self._expert_inside = ranks_inside(sizes.expert, self.tensor, node)
        self.weight_compute = self._weight_gradients()
        self.forward = self._block(backward=False)
        self.backward = self._block(backward=True)
        self.recomputed = self._recomputed()
        self._ends = self._edges()

    # Matrix products ------------------------------------------------------------------------------

    def _matrices(self) -> list[tuple[float, float, float, float]]:
        """Return tokens, output and input features, and number of the products of a forward."""
        m, t, n = self.shape, self.tensor, self.tokens
        gates = 2 if m.gated else 1
        heads, local = (m.heads + 2 * m.kv_heads) * m.head_dim / t, m.heads * m.head_dim / t
        dense = [(n, heads, m.model_dim, 1.0), (n, m.model_dim, local, 1.0)]
        mlp = [(gates * m.ff_dim / t, m.model_dim), (m.model_dim, m.ff_dim / t)]
        if m.experts == 1:
            return dense + [(n, out, into, 1.0) for out, into in mlp]
        here = m.experts / self.layout.sizes.expert
        # As many tokens arrive from other ranks as leave, if routing is even.
        routed = [(n * m.experts_per_token / here, out, into, here) for out, into in mlp]
        shared = [(n, out, into, float(m.shared_experts)) for out, into in mlp]
        return dense + routed + (shared if m.shared_experts else [])

    def _products(self, part: str) -> float:
        product, fp8 = self.clock.product, self.code.fp8
        if part == "forward":
            return sum(product(n, out, into, b, fp8=fp8) for n, out, into, b in self._matrices())
        if part == "input":
            return sum(product(n, into, out, b, fp8=fp8) for n, out, into, b in self._matrices())
        return sum(product(out, into, n, b, fp8=fp8) for n, out, into, b in self._matrices())

    def _weight_gradients(self) -> float:
        """Return the seconds of the weights' gradients, added to those of earlier micro-batches."""
        code, held = self.code, self.shape.block_weights(self.tensor, self.layout.sizes.expert)
        products = self._products("weight")
        if self.layout.microbatches == 1:
            return products
        summed = 2 * code.gradient_bytes * held
        if code.fused_accumulation:
            # The product itself reads the sum and writes it, while it computes.
            return max(products, self.clock.stream(summed))
        return products + self.clock.stream(code.activation_bytes * held + summed, 4)

    # The rest of a block --------------------------------------------------------------------------

    def _block(self, *, backward: bool) -> Work:
        if backward:
            compute = self._products("input") + self.weight_compute
        else:
            compute = self._products("forward")
        compute += self._attention(backward=backward) + self._elementwise(backward=backward)
        tensor = self._tensor_exchange()
        if backward and self.code.async_tensor:
            tensor = max(0.0, tensor - self.weight_compute)
        parts = {
            "tensor": tensor * (1 - self.code.fused_tensor),
            "context": self._context_exchange(backward=backward),
            "expert": self._expert_exchange(),
        }
        return Work(compute, parts, self.code.kernels[backward])

    def _attention(self, *, backward: bool) -> float:
        m, clock, t, c = self.shape, self.clock, self.tensor, self.context
        heads, length = m.heads / t * self.layout.micro_batch, m.length / c
        if self.code.fused_attention:
            flops = 4 * heads * length * m.length * m.head_dim * (0.5 if m.causal else 1.0)
            share = self.code.attention_rates[backward]
            return flops * (2.5 if backward else 1.0) / (clock.flops * share) + 2 * clock.kernel
        scores = heads * length * m.length
        products = clock.product(length, m.length, m.head_dim, heads)
        products += clock.product(length, m.head_dim, m.length, heads)
        # In 16 bits, softmax with scale and mask 4, dropout 5; backward 6 and 5.
        size = ((6 if backward else 4) + 5 * m.dropout) * scores * self._wider
        return products * (2 if backward else 1) + clock.stream(size, 2)

    @property
    def _wider(self) -> float:
        """Bytes of an element over those of 16 bits, in which traffic is counted."""
        return self.code.activation_bytes / 2

    def _elementwise(self, *, backward: bool) -> float:
        """Return the time of norms, residual sums, dropout, activation and changes of layout."""
        m, n, t = self.shape, self.tokens, self.tensor
        between = n / (t if self.layout.sequence_parallel else 1) * m.model_dim
        # Padding of experts is left out by products only.
        rows = self.layout.expert_rows(m)
        words = (10 if m.gated else 6) if backward else (6 if m.gated else 4)
        inner = (rows + n * m.shared_experts) / t * m.ff_dim * words
        heads = 8 * n / t * (m.heads + 2 * m.kv_heads) / 3 * m.head_dim
        # Two norms 8, two sums with dropout 14; backward: 12, 10, and two sums of gradients 12.
        norms = (34 if backward else 22) * between
        # Tokens are sorted by expert, and back.
        moved = 8 * rows * m.model_dim if m.experts > 1 else 0
        size = (norms + inner + heads + moved) * self.code.fused_elementwise * self._wider
        return self.clock.stream(size, 10 if backward else 8)

    # Communication --------------------------------------------------------------------------------

    @property
    def hidden_bytes(self) -> float:
        """Bytes of the hidden states of a micro-batch."""
        return self.code.activation_bytes * self.tokens * self.shape.model_dim

    def _tensor_exchange(self) -> float:
        """Return the seconds of a forward's, or of a backward's, two sums over the tensor axis."""
        group = (self.hidden_bytes, self.tensor, self._tensor_inside)
        if not self.layout.sequence_parallel:
            return 2 * self.clock.collective("all_reduce", *group)
        gathered = self.clock.collective("all_gather", *group)
        return 2 * (gathered + self.clock.collective("reduce_scatter", *group))

    def _context_exchange(self, *, backward: bool) -> float:
        """Return what a ring of keys and values takes beyond the attention that hides it."""
        m, width = self.shape, self.code.activation_bytes
        block = 2 * width * self.tokens * m.kv_heads * m.head_dim / self.tensor
        work = self._attention(backward=backward)
        return ring_seconds(self.clock, self.code, self.layout, block, work, backward=backward)

    def _expert_exchange(self) -> float:
        """Return the seconds of sending tokens to their experts and back."""
        size = self.code.expert_bytes(self.shape, self.layout)
        group = (self.layout.sizes.expert, self._expert_inside)
        return 2 * self.clock.collective("all_to_all", size, *group)

    # Recomputation and the edges ------------------------------------------------------------------

    def _recomputed(self) -> Work:
        kind, forward = self.layout.recompute, self.forward
        if kind == "full":
            return forward
        if kind == "none":
            return Work()
        if not self.code.fused_attention:
            return Work(self._attention(backward=False), {}, 5)
        share = self.code.selective_share
        return Work(share * forward.compute, {}, share * forward.kernels)

    def _edges(self) -> tuple[Work, Work, Work, Work, float]:
        """Return embedding and head, forward and backward, and the head's weight gradient."""
        m, n, clock = self.shape, self.tokens, self.clock
        group = (self.tensor, self._tensor_inside)
        local, hidden = m.vocab / self.tensor, n * m.model_dim
        summed = {"tensor": clock.collective("all_reduce", self.hidden_bytes, *group)}
        weight = clock.product(local, m.model_dim, n)
        table = Work(clock.stream(8 * hidden, 4), summed, 6)
        table_back = Work(clock.stream(10 * hidden, 3), {}, 6)
        # The loss: float32 logits are written, and read for their maximum, sum and labels.
        loss = clock.stream(16 * n * local, 6)
        head = Work(clock.product(n, local, m.model_dim) + loss, {}, 16)
        back = clock.product(n, m.model_dim, local) + weight + clock.stream(10 * n * local, 4)
        return table, table_back, head, Work(back, summed, 16), weight

    def chain(self, layers: int) -> tuple[list[float], tuple[float, float]]:
        """Return the seconds of every block, and those before the first and after the last one."""
        block, first, last = (
            sum((one.forward, one.backward))
            for one in (
                self.stage(1, first=ends[0], last=ends[1])
                for ends in ((False, False), (True, False), (False, True))
            )
        )
        return [block] * layers, (first - block, last - block)

    def stages(self, blocks: Sequence[int]) -> list[StageTime]:
        """Return the times of stages with so many blocks each."""
        last = len(blocks) - 1
        kinds = [(count, i == 0, i == last) for i, count in enumerate(blocks)]
        # Most stages are alike: each kind is computed once.
        made = {k: self.stage(k[0], first=k[1], last=k[2]) for k in set(kinds)}
        return [made[kind] for kind in kinds]

    def stage(self, blocks: int, *, first: bool, last: bool) -> StageTime:
        """Return the times of a stage with so many blocks, with embedding or head."""
        host = self.clock.constants.host * self.clock.crowding
        forward = blocks * self.forward.seconds(host)
        again = self.recomputed.seconds(host)
        backward = blocks * (self.backward.seconds(host) + again)
        weight = blocks * self.weight_compute
        table, table_back, head, head_back, head_weight = self._ends
        if first:
            forward += table.seconds(host)
            backward += table_back.seconds(host)
        if last:
            forward += head.seconds(host)
            backward += head_back.seconds(host)
            weight += head_weight
        return StageTime(forward, backward, min(weight, backward))
