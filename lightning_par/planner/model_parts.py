"""The parts of a model (its blocks, and what is around them): as a trace of its step found them, or
by formulas of a transformer's sizes. Needs no torch.

Numbers are of one sample. A word is a number of the width of activations. Shapes are those of
`shapes`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal

from lightning_par.planner.shapes import Implementation, Layout, Recompute, TransformerShape

__all__ = ["Amount", "Attention", "Cut", "ModelPart", "Product", "TracedShape", "make_parts"]

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
        # Without sequence parallelism every tensor rank has all tokens.
        share = degree if layout.sequence_parallel else 1
        return self.tensor / degree + self.tokens / share + self.whole

    @property
    def total(self) -> float:
        """Words on one device."""
        return self.tensor + self.tokens + self.whole


@dataclass(frozen=True, kw_only=True)
class Product:
    """A matrix product [rows, inner] x [inner, columns].

    Attributes:
        rows: Of one sample.
        columns: Output features.
        inner: Input features.
        divided: What the tensor degree divides: "rows" of heads or experts, "tokens" under sequence
            parallelism only, "columns", "inner", or nothing.
        needs_input: Whether the backward computes the gradient of the input.
        needs_weight: Whether it computes that of the other factor.
        count: Number of such products, as of experts.
    """

    rows: float
    columns: float
    inner: float
    divided: Literal["rows", "tokens", "columns", "inner", "nothing"]
    needs_input: bool = True
    needs_weight: bool = True
    count: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward."""
        # 2 FLOPs for a multiply-add; the backward has one product for each factor that needs it.
        times = 2 * self.count * (1 + self.needs_input + self.needs_weight)
        return times * self.rows * self.columns * self.inner

    def local(self, layout: Layout) -> tuple[float, float, float]:
        """Return rows, columns and inner size on one rank, for a micro-batch."""
        t = layout.sizes.tensor
        rows = layout.micro_batch * self.rows / layout.sizes.context
        columns, inner = self.columns, self.inner
        if self.divided == "rows" or (self.divided == "tokens" and layout.sequence_parallel):
            rows /= t
        elif self.divided == "columns":
            columns /= t
        elif self.divided == "inner":
            # Rowwise: each rank has a part of the inputs, and of the sum.
            inner /= t
        return rows, columns, inner


@dataclass(frozen=True, kw_only=True)
class Attention:
    """A call of attention.

    Attributes:
        heads: Of one sample.
        kv_heads: Heads of keys and values of one sample.
        queries: Their number.
        keys: Their number.
        width: H.
        causal: Whether later keys are skipped.
        cut: As of the queries.
        needs: Whether there is a backward.
        dropout: Whether scores are dropped, of attention that writes them.
    """

    heads: float
    kv_heads: float
    queries: float
    keys: float
    width: float
    causal: bool
    cut: Cut
    needs: bool = True
    dropout: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward with all scores, as papers count them."""
        # Two products of 2 * Q * K * H each, and four in the backward.
        return 4 * self.heads * self.queries * self.keys * self.width * (3 if self.needs else 1)


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """A block, or what is before the blocks, or after them.

    Attributes:
        products: Matrix products and convolutions of a forward.
        attentions: Calls of fused attention.
        traffic: Words that the other operations read and write in a forward.
        backward_traffic: Those in a backward; none where no gradient passes.
        streams: Number of kernels that do so, of a forward and of a backward.
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
        kernels: Number of operations, of a forward and of a backward.
        weights: Parameters.
        trained: Those of them that are trained.
        experts: Those of the weights that the expert axis divides.
        trained_experts: Those of them that are trained.
    """

    products: tuple[Product, ...] = ()
    attentions: tuple[Attention, ...] = ()
    traffic: Amount = Amount()
    backward_traffic: Amount = Amount()
    streams: tuple[float, float] = (0.0, 0.0)
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
    kernels: tuple[float, float] = (0.0, 0.0)
    weights: Amount = Amount()
    trained: Amount = Amount()
    experts: Amount = Amount()
    trained_experts: Amount = Amount()

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of one sample."""
        return sum(p.flops for p in self.products) + sum(a.flops for a in self.attentions)

    def activations(self, layout: Layout, recompute: Recompute) -> float:
        """Return the words of a sample that are kept from forward to backward."""
        if recompute == "full":
            # A part may save less than what enters it, as one without a backward.
            return min(self.entered.local(layout), self.saved.local(layout))
        whole = self.saved.local(layout)
        if recompute == "selective":
            # Selective: outputs of products and attention are kept, the rest is computed again.
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

    blocks: tuple[ModelPart, ...]
    before: ModelPart = ModelPart()
    after: ModelPart = ModelPart()
    shared: Amount = Amount()
    shared_trained: Amount = Amount()
    tensor_degrees: tuple[int, ...] = (1,)

    def divides(self, tensor: int) -> bool:
        """Tell whether a tensor-parallel degree is possible."""
        return tensor in self.tensor_degrees

    def divides_experts(self, expert: int, tensor: int) -> bool:
        """Tell whether a degree of the expert axis is possible, beside a tensor-parallel degree
        that divides the experts, too.
        """
        return expert == 1 or self.experts % (expert * tensor) == 0

    @cached_property
    def _sums(self) -> dict[str, list[Amount]]:
        """Kind of parameters -> those of the first 0, 1, ... blocks."""
        kinds = "weights", "trained", "experts", "trained_experts"
        return {
            kind: list(accumulate((getattr(b, kind) for b in self.blocks), initial=Amount()))
            for kind in kinds
        }

    def block_weights(self, tensor: int = 1, expert: float = 1, *, trained: bool = False) -> float:
        """Return the mean over the blocks."""
        return self.span_weights(0, self.layers, tensor, expert, trained=trained) / self.layers

    def span_weights(
        self, start: int, end: int, tensor: int = 1, expert: float = 1, *, trained: bool = False
    ) -> float:
        """Return the parameters of some blocks that one rank holds."""

        def held(kind: str) -> float:
            sums = self._sums[kind]
            # Differences of prefix sums: stages of any length cost the same to ask.
            divided = sums[end].tensor - sums[start].tensor
            return divided / tensor + sums[end].whole - sums[start].whole

        experts = held("trained_experts" if trained else "experts")
        return held("trained" if trained else "weights") - experts * (1 - 1 / expert)

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
            # The table that both ends have, counted twice above.
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
        parts: Sequence[ModelPart] = (self.before, *self.blocks, self.after)
        return samples * sum(part.flops for part in parts)

    @cached_property
    def tensor_sums(self) -> float:
        """Sums of hidden states over the tensor axis in a block's forward, in the mean."""
        # A gather moves half of what a sum does: it is one of the two halves of an all-reduce.
        moved = sum(block.summed + block.gathered / 2 for block in self.blocks)
        return moved / self.layers / (self.length * self.model_dim)


def make_parts(
    shape: TransformerShape, layout: Layout, code: Implementation
) -> tuple[ModelPart, tuple[ModelPart, ...], ModelPart]:
    """Return what is before the blocks, the blocks, and what is after them.

    Args:
        shape: The model.
        layout: Of which experts, and the rows that are sent to them, matter here.
        code: What the training code does.
    """
    if isinstance(shape, TracedShape):
        return shape.before, shape.blocks, shape.after
    # For one sample: the layout's rows are those of a micro-batch on one context rank.
    rows = layout.expert_rows(shape) * layout.sizes.context / layout.micro_batch
    before, block, after = _by_formulas(shape, code, layout.sizes.expert, rows)
    return before, (block,) * shape.layers, after


@lru_cache(maxsize=1 << 12)
def _by_formulas(
    m: TransformerShape, code: Implementation, expert: int, rows: float
) -> tuple[ModelPart, ModelPart, ModelPart]:
    """Return what is before the blocks, a block, and what is after them.

    Args:
        m: The model.
        code: What the training code does.
        expert: Degree of the expert axis.
        rows: Of a sample, that a rank sends to experts, those that stay included.
    """
    hidden = m.length * m.model_dim
    table = ModelPart(
        traffic=Amount(whole=4 * hidden),
        backward_traffic=Amount(whole=5 * hidden),
        streams=(4, 3),
        kernels=(6, 6),
        summed=hidden,
        sums=1,
    )
    head = ModelPart(
        products=(Product(rows=m.length, columns=m.vocab, inner=m.model_dim, divided="columns"),),
        logits=Amount(tensor=m.length * m.vocab),
        streams=(6, 4),
        kernels=(16, 16),
    )
    return table, _block(m, code, expert, rows), head


def _block(m: TransformerShape, code: Implementation, expert: int, rows: float) -> ModelPart:
    """Return a block. Its words are half of the bytes that papers count for 16 bits: the masks of
    dropout, a byte each, are widened with the rest.
    """
    T, hidden = m.length, m.length * m.model_dim
    norms = Amount(tokens=hidden)  # what sequence parallelism divides
    # Padding of experts is left out by products only.
    inner = Amount(tensor=(rows + T * m.shared_experts) * m.ff_dim)
    # Heads are moved; tokens are sorted by expert, and back.
    moved = Amount(tensor=4 / 3 * T * (m.heads + 2 * m.kv_heads) * m.head_dim)
    moved += Amount(whole=4 * rows * m.model_dim if m.experts > 1 else 0.0)
    saved, kept = _kept_words(m, code, rows, inner)
    attention = Attention(
        heads=m.heads,
        kv_heads=m.kv_heads,
        queries=T,
        keys=T,
        width=m.head_dim,
        causal=m.causal,
        cut="tensor",
        dropout=m.dropout,
    )
    return ModelPart(
        products=_products(m, expert),
        attentions=(attention,),
        # Two norms 4, two sums with dropout 7; backward: 6, 5, and two sums of gradients 6.
        traffic=norms.times(11) + inner.times(3 if m.gated else 2) + moved,
        backward_traffic=norms.times(17) + inner.times(5 if m.gated else 3) + moved,
        streams=(8, 10),
        kernels=code.kernels,
        saved=saved,
        kept=kept,
        entered=norms.times(2 if code.autocast else 1),
        summed=2 * hidden,
        sums=2,
        trained=Amount(tensor=m.block_weights(1, expert)),
    )


def _products(m: TransformerShape, expert: int) -> tuple[Product, ...]:
    """Return the matrix products of a block."""
    T, D, F = m.length, m.model_dim, m.ff_dim
    projected, joined = (m.heads + 2 * m.kv_heads) * m.head_dim, m.heads * m.head_dim
    dense = (
        Product(rows=T, columns=projected, inner=D, divided="columns"),
        Product(rows=T, columns=D, inner=joined, divided="inner"),
    )

    def mlp(rows: float, count: float) -> tuple[Product, ...]:
        up = (2 if m.gated else 1) * F
        return (
            Product(rows=rows, columns=up, inner=D, divided="columns", count=count),
            Product(rows=rows, columns=D, inner=F, divided="inner", count=count),
        )

    if m.experts == 1:
        return dense + mlp(T, 1.0)
    # Experts of this rank; the rows of all tokens that chose them.
    here = m.experts / expert
    # As many tokens arrive from other ranks as leave, if routing is even.
    routed = mlp(T * m.experts_per_token / here, here)
    return dense + routed + (mlp(T, m.shared_experts) if m.shared_experts else ())


def _kept_words(
    m: TransformerShape, code: Implementation, rows: float, inner: Amount
) -> tuple[Amount, Amount]:
    """Return what a block keeps that recomputes nothing, and what products and attention give.

    **Source**: Korthikanti et al. (2205.05198), equations 1 to 4, taken apart for grouped queries,
    gated MLPs, experts and fused attention.
    """
    T, hidden = m.length, m.length * m.model_dim
    # Inputs of the layers that the tensor axis divides, and their sums before they are scattered.
    whole = Amount(tokens=2 * hidden) if code.gathers_again else Amount(whole=2 * hidden)
    whole += Amount(tensor=T * (2 * m.heads + 2 * m.kv_heads) * m.head_dim)
    # Inputs of norms, and two dropout masks; rows sorted by expert, which may be padded, and their
    # outputs, and these weighted, which are not.
    sorted_rows = (rows + 2 * T * m.experts_per_token) * m.model_dim if m.experts > 1 else 0.0
    normed = 4 if code.autocast else 2
    saved = Amount(tokens=(normed + m.dropout) * hidden, whole=sorted_rows) + whole
    saved += inner.times(4 if m.gated else 2)
    if code.fused_attention:
        return saved, whole + inner.times(2 if m.gated else 1)
    scores = Amount(tensor=(1 + 1.5 * m.dropout) * m.heads * T**2)
    return saved + scores, saved + Amount(tokens=-normed / 2 * hidden)  # less the block's input
