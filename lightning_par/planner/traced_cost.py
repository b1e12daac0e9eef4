"""Time of the parts of a traced model on one rank, for one micro-batch, as `BlockCost` gives it."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from lightning_par.planner.block_cost import BlockCost, ring_seconds, StageTime, Work
from lightning_par.planner.operations import Clock, Collective, ranks_inside
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.planner.traced_shape import TracedPart, TracedShape

__all__ = ["TracedCost", "cost_of_parts"]

_BACKWARD_TRAFFIC = 34 / 22
"""Words of element-wise work in a backward to those of its forward, as of a block of a transformer:
two norms 12 to 8, two sums with dropout 10 to 14, and two sums of gradients 12, in bytes."""
_BACKWARD_KERNELS = 40 / 22
_LOSS_BYTES, _LOSS_BYTES_BACK = 16, 10
"""Bytes that a softmax of the loss moves for each logit, as in `BlockCost`."""


class TracedCost:
    """The work of a traced model's parts on one rank of a layout.

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
        self, shape: TracedShape, layout: Layout, code: Implementation, clock: Clock
    ) -> None:
        self.shape, self.layout, self.code, self.clock = shape, layout, code, clock
        sizes = layout.sizes
        self._samples = layout.micro_batch / sizes.context
        self.tokens = self._samples * shape.length
        self._inside = ranks_inside(sizes.tensor, 1, clock.device.node)
        costs: dict[int, _PartCost] = {}
        for part in shape.blocks:
            if id(part) not in costs:
                costs[id(part)] = _PartCost(self, part)
        self.parts = [costs[id(part)] for part in shape.blocks]
        self.ends = [_PartCost(self, end, is_block=False) for end in (shape.before, shape.after)]
        self.forward = _mean([p.forward for p in self.parts])
        self.backward = _mean([p.backward for p in self.parts])
        self.recomputed = _mean([p.recomputed for p in self.parts])
        self.weight_compute = sum(p.weight for p in self.parts) / len(self.parts)

    @property
    def hidden_bytes(self) -> float:
        """Bytes of what a block of a micro-batch takes."""
        return self.code.activation_bytes * self.tokens * self.shape.model_dim

    def chain(self, layers: int) -> tuple[list[float], tuple[float, float]]:
        """Return the seconds of every block, and those before the first and after the last one."""
        host = self.clock.constants.host * self.clock.crowding
        first, last = (sum(end.times(host)[:2]) for end in self.ends)
        return [sum(part.times(host)[:2]) for part in self.parts], (first, last)

    def stages(self, blocks: Sequence[int]) -> list[StageTime]:
        """Return the times of stages with so many blocks each."""
        host, last = self.clock.constants.host * self.clock.crowding, len(blocks) - 1
        each = {id(part): part.times(host) for part in (*self.parts, *self.ends)}
        found, ends = [], list(accumulate(blocks))
        for stage, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            here = self.parts[start:end]
            here += self.ends[:1] * (stage == 0) + self.ends[1:] * (stage == last)
            counts = Counter(map(id, here))
            forward, backward, weight = (
                sum(count * each[i][kind] for i, count in counts.items()) for kind in range(3)
            )
            found.append(StageTime(forward, backward, min(weight, backward)))
        return found


class _PartCost:
    """Forward, backward and recomputation of one part; `weight` is what its weights' gradients
    take of the backward.
    """

    def __init__(self, cost: TracedCost, part: TracedPart, *, is_block: bool = True) -> None:
        self._cost, self._part = cost, part
        # As in `BlockCost`, what is around the blocks is not recomputed, and adds up its gradients
        # beside other work.
        self._adds = is_block and cost.layout.microbatches > 1
        self.weight = self._weight_gradients()
        self.forward = self._work(backward=False)
        self.backward = self._work(backward=True)
        self.recomputed = self._recomputed() if is_block else Work()

    def times(self, host: float) -> tuple[float, float, float]:
        """Return the seconds of forward, of backward with recomputation, and of it of the weights'
        gradients, with `host` seconds for every kernel.
        """
        backward = self.backward.seconds(host) + self.recomputed.seconds(host)
        return self.forward.seconds(host), backward, self.weight

    def _products(self, of: str) -> float:
        cost, seconds = self._cost, 0.0
        for one in self._part.products:
            rows, columns, inner = one.local(cost.layout, cost._samples)
            if of == "input" and one.needs_input:
                columns, inner = inner, columns
            elif of == "weight" and one.needs_weight:
                rows, columns, inner = columns, inner, rows
            elif of != "forward":
                continue
            seconds += cost.clock.product(rows, columns, inner, fp8=cost.code.fp8)
        return seconds

    def _weight_gradients(self) -> float:
        cost, code, trained = self._cost, self._cost.code, self._part.trained
        products = self._products("weight")
        if not trained.total or not self._adds:
            return products
        held = trained.tensor / cost.layout.sizes.tensor + trained.whole
        summed = 2 * code.gradient_bytes * held
        if code.fused_accumulation:  # as in `BlockCost`
            return max(products, cost.clock.stream(summed))
        return products + cost.clock.stream(code.activation_bytes * held + summed, 4)

    def _work(self, *, backward: bool) -> Work:
        cost, part = self._cost, self._part
        factor, traffic, count = 1.0, part.traffic, float(part.kernels)
        if backward:
            factor, traffic = _BACKWARD_TRAFFIC, part.gradient_traffic
            count *= _BACKWARD_KERNELS * bool(part.gradient_traffic.total or part.trained.total)
        compute = self.weight + self._products("input") if backward else self._products("forward")
        compute += self._attention(backward=backward)
        if cost.clock.device.runs_eagerly and any(part.operators):
            compute += self._eager(backward=backward)
            return Work(compute, self._exchanges(backward=backward), count)
        words = factor * traffic.local(cost.layout) * cost._samples
        size = words * cost.code.activation_bytes * cost.code.fused_elementwise
        logits = part.logits.local(cost.layout) * cost._samples
        size += (_LOSS_BYTES_BACK if backward else _LOSS_BYTES) * logits
        # Products and attention have counted their own kernels.
        small = max(0, part.kernels - len(part.products) - len(part.attentions))
        compute += cost.clock.stream(size, small * (factor if size else 0))
        return Work(compute, self._exchanges(backward=backward), count)

    def _eager(self, *, backward: bool) -> float:
        """Return the seconds of the operators other than products and attention."""
        cost, part = self._cost, self._part
        words = (part.eager_backward if backward else part.eager).local(cost.layout)
        words *= cost._samples
        if backward:
            words += part.eager_weights.local(cost.layout)
        return cost.clock.eager(words * cost.code.activation_bytes, part.operators[backward])

    def _attention(self, *, backward: bool) -> float:
        cost, seconds = self._cost, 0.0
        for one in self._part.attentions:
            if backward and not one.needs:
                continue
            heads = one.heads / (cost.layout.sizes.tensor if one.cut == "tensor" else 1)
            flops = 4 * heads * one.queries * one.keys * one.width * (0.5 if one.causal else 1.0)
            rate = cost.clock.flops * cost.code.attention_rates[backward]
            seconds += cost._samples * flops * (2.5 if backward else 1.0) / rate
            seconds += 2 * cost.clock.kernel
        return seconds

    def _exchanges(self, *, backward: bool) -> dict[str, float]:
        if backward and not self._part.gradient_traffic.total:
            return {}
        return {
            "tensor": self._over_tensor(backward=backward),
            "context": self._over_context(backward=backward),
        }

    def _over_context(self, *, backward: bool) -> float:
        """Return the seconds in which keys and values go round the context axis."""
        cost, sizes = self._cost, self._cost.layout.sizes
        words = sum(2 * a.kv_heads * a.keys * a.width for a in self._part.attentions)
        size = cost.code.activation_bytes * cost._samples * words / sizes.tensor
        work = self._attention(backward=backward)
        return ring_seconds(cost.clock, cost.code, cost.layout, size, work, backward=backward)

    def _over_tensor(self, *, backward: bool) -> float:
        """Return the seconds of the sums and gathers over the tensor axis."""
        cost, part, clock = self._cost, self._part, self._cost.clock
        if cost.layout.sizes.tensor == 1:
            return 0.0
        width = cost.code.activation_bytes * cost._samples

        def collectives(kind: Collective, words: float, count: int) -> float:
            ranks = (cost.layout.sizes.tensor, cost._inside)
            return count and count * clock.collective(kind, width * words / count, *ranks)

        gathered = collectives("all_gather", part.gathered, part.gathers)
        if not cost.layout.sequence_parallel:
            return gathered + collectives("all_reduce", part.summed, part.sums)
        whole = collectives("all_gather", part.summed, part.sums)
        summed = collectives("reduce_scatter", part.summed, part.sums)
        seconds = gathered + whole + summed
        if clock.device.runs_eagerly:
            # Ranks cut the dim of tokens: the parts are joined before or after by a copy.
            seconds += clock.eager(2 * width * (part.gathered + 2 * part.summed), 2 * part.sums)
        if backward and cost.code.async_tensor:
            seconds = max(0.0, seconds - self.weight)
        return seconds

    def _recomputed(self) -> Work:
        kind, forward = self._cost.layout.recompute, self.forward
        if kind == "none":
            return Work()
        if kind == "full":
            return forward
        share = self._cost.code.selective_share
        return Work(share * forward.compute, {}, share * forward.kernels)


def _mean(works: Sequence[Work]) -> Work:
    count = len(works)
    axes = {axis for work in works for axis in work.communication}
    return Work(
        sum(w.compute for w in works) / count,
        {a: sum(w.communication.get(a, 0.0) for w in works) / count for a in axes},
        sum(w.kernels for w in works) / count,
    )


def cost_of_parts(
    shape: TransformerShape, layout: Layout, code: Implementation, clock: Clock
) -> BlockCost | TracedCost:
    """Return the work of a model's parts: by formulas of its sizes, or as traced.

    Args:
        shape: The model.
        layout: The layout.
        code: What the training code does.
        clock: Times of operations.
    """
    if isinstance(shape, TracedShape):
        return TracedCost(shape, layout, code, clock)
    return BlockCost(shape, layout, code, clock)
