"""The context axis of one rank: which tokens it holds, and how it attends to those of the others.

Shapes: B batch, N query heads, K key/value heads, T tokens of the whole sequence, t = T'/cp of one
rank (T' is T with padding), H head dim.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.annotations import Float, Shaped
from lightning_par.engine.batch import (
    batch_entry,
    sequence_entries,
    shift_labels,
    with_entries,
)
from lightning_par.engine.collectives import all_gather
from lightning_par.engine.context.kernels.select import check_backend
from lightning_par.engine.context.ring_attention import KeyMask, ring_attention
from lightning_par.engine.context.ring_p2p import Mailbox
from lightning_par.engine.context.ring_schedule import RingSchedule, SequenceLayout
from lightning_par.engine.context.ulysses import gather_tokens, scatter_tokens
from lightning_par.errors import ConfigurationError, either, PlanError, raise_problems
from lightning_par.plan import BatchLayout
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["ContextOptions", "SequenceShard"]

Method = Literal["ring", "ulysses", "hybrid"]
_CHOICES = {
    "method": get_args(Method),
    "layout": ("zigzag", "contiguous"),
    "route": ("direct", "ring"),
}


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """How sequences are divided over the ranks of the context axis.

    Attributes:
        method: ``"ring"`` sends keys and values; ``"ulysses"`` exchanges tokens for heads before
            and after attention; ``"hybrid"`` does the latter in groups of `ulysses_size`
            neighboring ranks, and a ring joins the groups.
        ulysses_size: Ranks of a group under ``"hybrid"``.
        layout: ``"zigzag"`` gives all members of a ring the same work under a causal mask;
            ``"contiguous"`` gives each a run of tokens.
        route: ``"direct"`` sends to whom it concerns, ``"ring"`` to the neighbor, for machines
            whose devices share one network card.
        backend: Attention kernel; see ``lightning-par backends``.
    """

    method: Method = "ring"
    ulysses_size: int | None = None
    layout: Literal["zigzag", "contiguous"] = "zigzag"
    route: Literal["direct", "ring"] = "direct"
    backend: str = "auto"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r} must be {either([repr(v) for v in valid])}."
            for name, valid in _CHOICES.items()
            if getattr(self, name) not in valid
        ]
        size = self.ulysses_size
        if self.method == "hybrid":
            if not isinstance(size, int) or isinstance(size, bool) or size < 2:
                problems.append(
                    f"ulysses_size={size!r} must be a whole number of 2 or more with "
                    "method='hybrid'."
                )
        elif size is not None:
            problems.append(
                f"ulysses_size={size!r} needs method='hybrid'; method={self.method!r} says by "
                "itself how many ranks exchange heads."
            )
        raise_problems(ConfigurationError, problems)

    def ulysses(self, degree: int) -> int:
        """Return how many neighboring ranks exchange heads.

        Args:
            degree: Of the context axis.

        Raises:
            ConfigurationError: `ulysses_size` does not divide it.
        """
        if self.method != "hybrid":
            return degree if self.method == "ulysses" else 1
        assert self.ulysses_size is not None
        if degree % self.ulysses_size:
            fits = [n for n in range(2, degree + 1) if degree % n == 0]
            hint = f"Use {either(fits)}." if fits else "Use method='ring'."
            raise ConfigurationError(
                f"ulysses_size={self.ulysses_size} does not divide context_parallel_size={degree}. "
                + hint
            )
        return self.ulysses_size

    def check(self) -> None:
        """Refuse an attention backend that this machine does not have.

        Raises:
            ConfigurationError: With the backends that work here.
        """
        check_backend(self.backend)


@dataclass(kw_only=True, eq=False)
class SequenceShard:
    """The place of this rank on the context axis, and the batch that is divided over it.

    Attributes:
        options: How.
        group: All ranks of the axis, in order.
        heads: Ranks that exchange heads; None: nobody does.
        mailbox: To the other members of the ring; None: there are none.
        divisor: What the number of tokens of a rank has to be a multiple of.
        layout: Of the current batch; None while sequences are whole.
        positions: [1, t], place of every token of this rank in its sequence; padding repeats the
            last one.
        calls: How many attentions were divided.
        fills: How often positions were given to a module, or brought by its caller.
        checks: Called with every batch before it is divided; raise to refuse it.
    """

    options: ContextOptions
    group: dist.ProcessGroup
    heads: dist.ProcessGroup | None = None
    mailbox: Mailbox | None = None
    divisor: int = 1
    layout: SequenceLayout | None = None
    positions: Tensor | None = None
    calls: int = 0
    fills: int = 0
    checks: list[Callable[[Any], None]] = field(default_factory=list)
    _masks: dict[Any, tuple[Tensor, KeyMask]] = field(default_factory=dict)

    @property
    def ulysses(self) -> int:
        """Ranks that exchange heads."""
        return 1 if self.heads is None else self.heads.size()

    def cut(self, batch: Any, plan: BatchLayout) -> Any:
        """Return this rank's tokens of a batch, and remember which they are.

        Args:
            batch: Whole; the same on every rank of the axis.
            plan: Which entries have a sequence dim. Padding is 0, in the labels `ignore_index`.

        Raises:
            PlanError: The batch has no such entry or dim.
            ConfigurationError: The entries differ in T.
        """
        for check in self.checks:
            check(batch)
        if plan.label_shift and plan.shifted is not None:
            batch = shift_labels(batch, plan)
        dims = sequence_entries(batch, plan)
        found = {path: (batch_entry(batch, path), dim) for path, dim in dims.items()}
        layout = self.lay_out(_common_length(found))
        cuts = {}
        for path, (entry, dim) in found.items():
            padding = plan.ignore_index if path in (plan.labels, plan.shifted) else 0
            cuts[path] = self.part(entry, dim, padding)
        device = next(iter(found.values()))[0].device
        places = torch.arange(layout.length, device=device)[None]
        self.positions = self.part(places, 1, layout.length - 1)
        return with_entries(batch, cuts)

    def lay_out(self, length: int) -> SequenceLayout:
        """Say how long the sequences are that attention will see; returns who holds what.

        Args:
            length: T.
        """
        ring = self.group.size() // self.ulysses
        self._masks.clear()
        self.layout = SequenceLayout(
            length=length,
            ring=ring,
            ulysses=self.ulysses,
            zigzag=self.options.layout == "zigzag" and ring > 1,
            divisor=self.divisor,
        )
        return self.layout

    def join(self) -> None:
        """Say that sequences are whole from now on."""
        self.layout = self.positions = None
        self._masks.clear()

    def part(self, whole: Tensor, dim: int, padding: float = 0) -> Tensor:
        """Return this rank's tokens of a tensor that every rank has.

        Args:
            whole: Has T entries in `dim`.
            dim: Where the tokens are.
            padding: Stands behind the last token.
        """
        assert self.layout is not None
        parts = []
        for a, b in self.layout.of_rank(self.group.rank()):
            stop = min(b, self.layout.length)
            start = min(a, stop)
            parts.append(whole.narrow(dim, start, stop - start))
            missing = b - max(a, stop)
            if missing:
                shape = list(whole.shape)
                shape[dim] = missing
                parts.append(whole.new_full(shape, padding))
        return torch.cat(parts, dim)

    def attend(
        self,
        query: Float[Tensor, "B N t H"],
        key: Float[Tensor, "B K t H"],
        value: Float[Tensor, "B K t H"],
        *,
        causal: bool = False,
        visible: Shaped[Tensor, "#B t"] | None = None,
        documents: Sequence[int] = (),
        scale: float | None = None,
    ) -> Float[Tensor, "B N t H"]:
        """Attend to the tokens of all ranks.

        Args:
            query: [B, N, t, H].
            key: [B, K, t, H]; N is a multiple of K.
            value: [B, K, t, H].
            causal: Whether a token sees only itself and those before it in its sequence.
            visible: [B or 1, t], which keys of this rank may be seen: bool, or numbers to be added
                to the products, 0 or as good as minus infinity.
            documents: Boundaries 0, ..., T of packed documents; empty: one.
            scale: Multiplies the products; None: 1 / sqrt(H).

        Returns:
            [B, N, t, H]; 0 for a token that sees none, as padding does.

        Raises:
            ConfigurationError: The shapes do not fit the batch, or the heads the options.

        **Communicates**: see `ring_attention`, and `gather_tokens` for queries, keys, values and
        the output; the mask once for a batch.
        """
        assert self.layout is not None
        self._check_shapes(query, key, value)
        self.calls += 1
        schedule = RingSchedule(
            layout=self.layout,
            causal=causal,
            documents=tuple(documents),
            route=self.options.route,
        )
        mask = None if visible is None else self._gather_mask(visible)
        if self.heads is not None:
            key, value = (self._spread_heads(x) for x in (key, value))
            query, key, value = (gather_tokens(x, self.heads) for x in (query, key, value))
        out = ring_attention(
            query,
            key,
            value,
            schedule=schedule,
            member=self.group.rank() // self.ulysses,
            mailbox=self.mailbox,
            scale=scale,
            mask=mask,
            backend=self.options.backend,
        )
        return out if self.heads is None else scatter_tokens(out, self.heads)

    def _spread_heads(self, x: Tensor) -> Tensor:
        """Repeat key/value heads until every rank that exchanges heads gets one."""
        times = self.ulysses // math.gcd(x.shape[1], self.ulysses)
        return x if times == 1 else x.repeat_interleave(times, 1)

    def _check_shapes(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        assert self.layout is not None
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        tokens = self.layout.local
        if not query.ndim == key.ndim == value.ndim == 4 or any(
            x.shape[2] != tokens for x in (query, key, value)
        ):
            raise ConfigurationError(
                f"attention over {shapes}: on {self.layout.ranks} context-parallel ranks, query, "
                f"key and value have to be [B, heads, {tokens}, H], the {tokens} tokens that a "
                f"rank holds of {self.layout.length}. Attention to other sequences (memories, "
                "caches, other modalities) is not supported with context_parallel_size > 1."
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads:
            raise ConfigurationError(
                f"attention over {shapes}: {heads} query heads are not a multiple of {kv_heads} "
                "key/value heads."
            )
        spread = kv_heads * self.ulysses // math.gcd(kv_heads, self.ulysses)
        if heads % spread:
            common = math.gcd(heads, self.group.size())
            raise ConfigurationError(
                f"{heads} query and {kv_heads} key/value heads cannot be exchanged among "
                f"{self.ulysses} ranks: {heads} is not a multiple of {spread}. Use method='ring'"
                + (f", or method='hybrid' with ulysses_size={common}." if common > 1 else ".")
            )

    def _gather_mask(self, visible: Tensor) -> KeyMask:
        """Return the mask of all ranks; gathered once, as long as the same tensor comes again."""
        version = None if visible.is_inference() else count_of_changes(visible)
        at = visible.untyped_storage().data_ptr(), visible.storage_offset(), version
        known = (*at, visible.shape, visible.stride())
        if known not in self._masks:
            self._masks[known] = visible, self.gather_visible(visible)
        return self._masks[known][1]

    def gather_visible(self, visible: Tensor) -> KeyMask:
        """Return which keys of every member of the ring are visible.

        Args:
            visible: [B or 1, t] of this rank, bool or numbers as in `attend`.

        Raises:
            ConfigurationError: Some number is neither 0 nor as good as minus infinity.

        **Communicates**: one all-gather of a byte for every token.
        """
        own = _codes(visible)
        whole = all_gather(own, 0, self.group)
        if visible.dtype is not torch.bool and bool((whole == _NEITHER).any()):
            raise ConfigurationError(
                "attn_mask holds numbers other than 0 and minus infinity; with "
                "context_parallel_size > 1 a mask may hide keys, but not weigh them."
            )
        by_rank = whole.view(-1, self.ulysses, *own.shape)  # [members, places, B, t]
        return KeyMask(by_rank.transpose(1, 2).flatten(2) == 1)


_NEITHER = 2


def _codes(visible: Tensor) -> Tensor:
    """Return 1 for a visible key, 0 for a hidden one, 2 for what is neither; bytes."""
    if visible.dtype is torch.bool:
        return visible.to(torch.uint8)
    hidden = visible <= torch.finfo(visible.dtype).min / 2
    codes = torch.full(visible.shape, _NEITHER, dtype=torch.uint8, device=visible.device)
    return codes.masked_fill_(hidden, 0).masked_fill_(visible == 0, 1)


def _common_length(found: dict[str, tuple[Any, int]]) -> int:
    """Return T of the entries of a batch."""
    lengths = {}
    for path, (entry, dim) in found.items():
        shape = tuple(getattr(entry, "shape", ()))
        if not -len(shape) <= dim < len(shape):
            raise PlanError(
                f"the plan says that T is dim {dim} of the batch entry {path!r}, but its shape is "
                f"{shape}."
            )
        lengths[path] = shape[dim]
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{path!r} has {length}" for path, length in lengths.items())
        raise ConfigurationError(
            f"the sequences of a batch cannot be divided alike: {listed} tokens. Entries in "
            "BatchLayout(sequence_dims=...) need the same T."
        )
    length: int = next(iter(lengths.values()))
    return length
