"""The shape of a model of the user's own, as a trace of its step found it; needs no torch.

Numbers are of one sample. A word is a number of the width of activations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from lightning_par.planner.shapes import Layout, Recompute, TransformerShape

__all__ = ["Amount", "Cut", "TracedAttention", "TracedPart", "TracedProduct", "TracedShape"]

Cut = Literal["tensor", "tokens", "whole"]
"""What divides a tensor among tensor-parallel ranks: their number; under sequence parallelism only;
nothing."""


@dataclass(frozen=True)
class Amount:
    """A number of words, by what divides them; see `Cut`."""

    tensor: float = 0.0
    tokens: float = 0.0
    whole: float = 0.0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.tensor + other.tensor, self.tokens + other.tokens, self.whole + other.whole
        )

    def times(self, factor: float) -> "Amount":
        """Return the amount, so many times."""
        return Amount(self.tensor * factor, self.tokens * factor, self.whole * factor)

    def local(self, layout: Layout) -> float:
        """Return what one rank of the tensor axis has."""
        degree = layout.sizes.tensor
        share = degree if layout.sequence_parallel else 1
        return self.tensor / degree + self.tokens / share + self.whole

    @property
    def total(self) -> float:
        """Words on one device."""
        return self.tensor + self.tokens + self.whole


@dataclass(frozen=True, kw_only=True)
class TracedProduct:
    """A matrix product [rows, inner] x [inner, columns].

    Attributes:
        rows: Of one sample.
        columns: Output features.
        inner: Input features.
        divided: What the tensor degree divides: "rows" of heads or experts, "tokens" under sequence
            parallelism only, "columns", "inner", or nothing.
        needs_input: Whether the backward computes the gradient of the input.
        needs_weight: Whether it computes that of the other factor.
    """

    rows: float
    columns: float
    inner: float
    divided: Literal["rows", "tokens", "columns", "inner", "nothing"]
    needs_input: bool
    needs_weight: bool

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward."""
        return (
            2 * self.rows * self.columns * self.inner * (1 + self.needs_input + self.needs_weight)
        )

    def local(self, layout: Layout, samples: float) -> tuple[float, float, float]:
        """Return rows, columns and inner size on one rank.

        Args:
            layout: The layout.
            samples: Of a micro-batch, on this rank.
        """
        t = layout.sizes.tensor
        rows, columns, inner = samples * self.rows, self.columns, self.inner
        if self.divided == "rows" or (self.divided == "tokens" and layout.sequence_parallel):
            rows /= t
        elif self.divided == "columns":
            columns /= t
        elif self.divided == "inner":
            inner /= t
        return rows, columns, inner


@dataclass(frozen=True, kw_only=True)
class TracedAttention:
    """A call of fused attention.

    Attributes:
        heads: Of one sample.
        kv_heads: Heads of keys and values of one sample.
        queries: Their number.
        keys: Their number.
        width: H.
        causal: Whether later keys are skipped.
        cut: As of the queries.
        needs: Whether there is a backward.
    """

    heads: float
    kv_heads: float
    queries: float
    keys: float
    width: float
    causal: bool
    cut: Cut
    needs: bool

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward with all scores, as papers count them."""
        return 4 * self.heads * self.queries * self.keys * self.width * (3 if self.needs else 1)


@dataclass(frozen=True, kw_only=True)
class TracedPart:
    """A block, or what is before the blocks, or after them.

    Attributes:
        products: Matrix products and convolutions of a forward.
        attentions: Calls of fused attention.
        traffic: Words that the other operations read and write.
        gradient_traffic: Those of them whose result needs a gradient.
        eager: Words that operators other than products and attention read and write in a forward,
            the loss included, where each runs by itself.
        eager_backward: Those of its backward.
        eager_weights: Words of gradients of weights that a backward moves besides, whatever the
            number of samples.
        operators: Number of these operators, of a forward and of a backward; zeros where the
            backward was not traced, which leaves these amounts at 0.
        saved: Words kept for the backward.
        kept: Words that products and attention give.
        entered: Words that come in.
        logits: Words that a softmax of the loss takes.
        summed: Words that are summed over the tensor axis in a forward.
        sums: In so many collectives.
        gathered: Words that are gathered over it.
        gathers: In so many collectives.
        kernels: Number of operations.
        weights: Parameters.
        trained: Those of them that are trained.
    """

    products: tuple[TracedProduct, ...] = ()
    attentions: tuple[TracedAttention, ...] = ()
    traffic: Amount = Amount()
    gradient_traffic: Amount = Amount()
    eager: Amount = Amount()
    eager_backward: Amount = Amount()
    eager_weights: Amount = Amount()
    operators: tuple[int, int] = (0, 0)
    saved: Amount = Amount()
    kept: Amount = Amount()
    entered: Amount = Amount()
    logits: Amount = Amount()
    summed: float = 0.0
    sums: int = 0
    gathered: float = 0.0
    gathers: int = 0
    kernels: int = 0
    weights: Amount = Amount()
    trained: Amount = Amount()

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of one sample."""
        return sum(p.flops for p in self.products) + sum(a.flops for a in self.attentions)

    def activations(self, layout: Layout, recompute: Recompute) -> float:
        """Return the words of a sample that are kept from forward to backward."""
        if recompute == "full":
            return min(self.entered.local(layout), self.saved.local(layout))
        whole = self.saved.local(layout)
        if recompute == "selective":
            return min(whole, (self.entered + self.kept).local(layout))
        return whole


@dataclass(frozen=True, kw_only=True)
class TracedShape(TransformerShape):
    """A model whose parts are what a trace found, in place of formulas of the sizes.

    Where a part of the planner asks for sizes of a transformer, they are those that give as many
    words: `model_dim` is what enters a block for each token.

    Attributes:
        blocks: Every block, in order; they may be unequal.
        before: What runs before the blocks.
        after: What runs after them, the loss included.
        shared: Parameters of both, as a tied table.
        shared_trained: Those of them that are trained.
        tensor_degrees: Tensor-parallel degrees that the plan allows.
    """

    blocks: tuple[TracedPart, ...]
    before: TracedPart = TracedPart()
    after: TracedPart = TracedPart()
    shared: Amount = Amount()
    shared_trained: Amount = Amount()
    tensor_degrees: tuple[int, ...] = (1,)

    def divides(self, tensor: int) -> bool:
        """Tell whether a tensor-parallel degree is possible."""
        return tensor in self.tensor_degrees

    @cached_property
    def _sums(self) -> dict[bool, list[Amount]]:
        """Whether trained -> parameters of the first 0, 1, ... blocks."""
        found = {}
        for trained in (False, True):
            each = [b.trained if trained else b.weights for b in self.blocks]
            found[trained] = list(accumulate(each, initial=Amount()))
        return found

    def block_weights(self, tensor: int = 1, expert: int = 1, *, trained: bool = False) -> float:
        """Return the mean over the blocks."""
        return self.span_weights(0, self.layers, tensor, trained=trained) / self.layers

    def span_weights(
        self, start: int, end: int, tensor: int = 1, expert: int = 1, *, trained: bool = False
    ) -> float:
        """Return the parameters of some blocks that one rank holds."""
        sums = self._sums[trained]
        divided = sums[end].tensor - sums[start].tensor
        return divided / tensor + sums[end].whole - sums[start].whole

    def end_weights(self, tensor: int, *, first: bool, last: bool, trained: bool = False) -> float:
        """Return the parameters before and after the blocks that one rank holds."""
        name = "trained" if trained else "weights"
        found: Amount = Amount()
        if first:
            found += getattr(self.before, name)
        if last:
            found += getattr(self.after, name)
        if first and last:
            both = self.shared_trained if trained else self.shared
            found += both.times(-1)
        return found.tensor / tensor + found.whole

    def shared_weights(self, tensor: int = 1) -> float:
        """Return the trained parameters that are both before and after the blocks, on one rank."""
        return self.shared_trained.tensor / tensor + self.shared_trained.whole

    @property
    def parameters(self) -> int:
        """Weights of the model."""
        ends = self.end_weights(1, first=True, last=True)
        return round(self.span_weights(0, self.layers) + ends)

    def flops(self, samples: float) -> float:
        """Return the model FLOPs of a step, without recomputation and with all T x T scores."""
        parts: Sequence[TracedPart] = (self.before, *self.blocks, self.after)
        return samples * sum(part.flops for part in parts)

    @cached_property
    def tensor_sums(self) -> float:
        """Sums of hidden states over the tensor axis in a block's forward, in the mean."""
        moved = sum(block.summed + block.gathered / 2 for block in self.blocks)
        return moved / self.layers / (self.length * self.model_dim)
