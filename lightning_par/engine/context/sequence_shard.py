"""The shard of the sequences that one rank of the context axis holds, and attention across shards.

Shapes: B batch, N query heads, K key/value heads, T tokens of the whole sequence, t = T'/cp of one
rank (T' is T with padding), H head dim.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.annotations import Float, Shaped
from lightning_par.engine.batch import (
    batch_entry,
    sequence_entries,
    shift_labels,
    tokens_of,
    with_entries,
)
from lightning_par.engine.collectives import all_gather
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.context.ring_attention import KeyMask, ring_attention
from lightning_par.engine.context.ring_p2p import RingChannel
from lightning_par.engine.context.ring_schedule import RingSchedule, TokenLayout
from lightning_par.engine.context.ulysses import gather_tokens, scatter_tokens
from lightning_par.errors import ConfigurationError
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["SequenceShard"]


@dataclass(kw_only=True, eq=False)
class SequenceShard:
    """This rank's shard of the sequences of the current batch, on the context axis.

    Attributes:
        options: Options of context parallelism.
        group: All ranks of the axis, in order.
        heads: Ranks that exchange heads (Ulysses); None: none do.
        channel: Channel to the other members of the ring; None: there are none.
        divisor: The number of tokens of a rank is padded to a multiple of it.
        layout: Which tokens every rank holds; None while sequences are whole.
        positions: [1, t], position of every token of this rank in its sequence; padding repeats the
            last one.
        calls: Number of attention calls that ran over the axis.
        fills: Number of times that positions were given to a module, or brought by its caller.
        documents: Boundaries of the documents in every row of the batch, for calls of attention
            that name none; empty: rows are one document each.
        looks: Whether blocks are watched for what else mixes tokens, as in the first step.
        checks: Called with every batch before it is sharded; raise to refuse it.
    """

    options: ContextOptions
    group: dist.ProcessGroup
    heads: dist.ProcessGroup | None = None
    channel: RingChannel | None = None
    divisor: int = 1
    layout: TokenLayout | None = None
    positions: Tensor | None = None
    calls: int = 0
    fills: int = 0
    documents: Sequence[tuple[int, ...]] = ()
    looks: bool = True
    checks: list[Callable[[Any], None]] = field(default_factory=list)
    _masks: dict[Any, tuple[Tensor, KeyMask]] = field(default_factory=dict)

    @property
    def ulysses(self) -> int:
        """Number of ranks that exchange heads."""
        return 1 if self.heads is None else self.heads.size()

    def shard_batch(self, batch: Any, batch_layout: BatchLayout) -> Any:
        """Return this rank's tokens of a batch, and set the token layout and the positions.

        Args:
            batch: The whole batch; the same on every rank of the axis.
            batch_layout: Names the entries with a sequence dim. They are padded with 0, labels with
                `ignore_index`.

        Raises:
            PlanError: The batch has no such entry or dim.
            ConfigurationError: The entries differ in T.
        """
        # Before it is cut, as a check may read whole sequences.
        for check in self.checks:
            check(batch)
        # Shifted while whole: the label of a rank's last token is the first one of another rank.
        if batch_layout.label_shift and batch_layout.shifted is not None:
            batch = shift_labels(batch, batch_layout)
        dims = sequence_entries(batch, batch_layout)
        found = {path: (batch_entry(batch, path), dim) for path, dim in dims.items()}
        # Sets the layout before anything is cut by it.
        layout = self.set_length(_common_length(found))
        labels = batch_layout.labels, batch_layout.shifted
        shards = {}
        for path, (entry, dim) in found.items():
            padding = batch_layout.ignore_index if path in labels else 0
            shards[path] = self.shard_tensor(entry, dim, padding)
        device = next(iter(found.values()))[0].device
        places = torch.arange(layout.length, device=device)[None]
        # Padding repeats the last position: a table of positions has no row for more.
        self.positions = self.shard_tensor(places, 1, layout.length - 1)
        return with_entries(batch, shards)

    def set_length(self, length: int) -> TokenLayout:
        """Set the sequence length; return the token layout.

        Args:
            length: T.
        """
        ring = self.group.size() // self.ulysses
        # Masks are known by the memory of the batch that is over.
        self._masks.clear()
        self.layout = TokenLayout(
            length=length,
            ring=ring,
            ulysses=self.ulysses,
            zigzag=self.options.layout == "zigzag" and ring > 1,
            divisor=self.divisor,
        )
        return self.layout

    def clear(self) -> None:
        """Forget the batch: attention sees whole sequences from now on."""
        self.layout = self.positions = None
        self.documents = ()
        self._masks.clear()

    def shard_tensor(self, whole: Tensor, dim: int, padding: float = 0) -> Tensor:
        """Return this rank's tokens of a tensor that every rank has.

        Args:
            whole: T entries in `dim`.
            dim: The sequence dim.
            padding: Value of the entries after the last token.
        """
        assert self.layout is not None
        chunks = []
        for a, b in self.layout.of_rank(self.group.rank()):
            # A chunk may lie beyond the last token in part, or wholly.
            stop = min(b, self.layout.length)
            start = min(a, stop)
            chunks.append(whole.narrow(dim, start, stop - start))
            missing = b - max(a, stop)
            if missing:
                shape = list(whole.shape)
                shape[dim] = missing
                chunks.append(whole.new_full(shape, padding))
        return torch.cat(chunks, dim)

    def gather_tensor(self, shard: Tensor, dim: int) -> Tensor:
        """Return the whole of a tensor of which every rank has its tokens: T entries in `dim`.

        Args:
            shard: t entries in `dim`.
            dim: The sequence dim.

        **Communicates**: one all-gather over the axis.
        """
        assert self.layout is not None
        whole: Tensor = all_gather(shard.contiguous(), dim, self.group)
        chunks = {}
        for rank, part in enumerate(whole.split(self.layout.local, dim)):
            at = 0
            for a, b in self.layout.of_rank(rank):
                chunks[a] = part.narrow(dim, at, b - a)
                at += b - a
        joined = torch.cat([chunks[a] for a in sorted(chunks)], dim)
        return joined.narrow(dim, 0, self.layout.length)  # without padding

    def attend(
        self,
        query: Float[Tensor, "B N t H"],
        key: Float[Tensor, "B K s H"],
        value: Float[Tensor, "B K s H"],
        *,
        causal: bool = False,
        visible: Shaped[Tensor, "#B s"] | None = None,
        documents: Sequence[int] = (),
        window: tuple[int, int] | None = None,
        scale: float | None = None,
        sinks: Float[Tensor, " N"] | None = None,
    ) -> Float[Tensor, "B N t H"]:
        """Attend to the tokens of all ranks.

        Args:
            query: [B, N, t, H].
            key: [B, K, s, H], where s has to be t; N is a multiple of K.
            value: [B, K, s, H].
            causal: Whether a token sees only itself and those before it in its sequence.
            visible: [B or 1, t], which keys of this rank may be seen: bool, or numbers to be added
                to the products, 0 or as good as minus infinity.
            documents: Boundaries 0, ..., T of packed documents; empty: one.
            window: How many tokens before and after itself a token sees; None: all.
            scale: Multiplies the products; None: 1 / sqrt(H).
            sinks: As in `attention`.

        Returns:
            [B, N, t, H]; 0 for a token that sees none, as padding does.

        Raises:
            ConfigurationError: The shapes do not fit the batch, or the heads the options.

        **Communicates**: see `ring_attention`, and `gather_tokens` for queries, keys, values and
        the output; the mask once for a batch.
        """
        assert self.layout is not None
        if self.documents and not documents:
            options = {"causal": causal, "window": window, "scale": scale, "sinks": sinks}
            return self._attend_documents(query, key, value, visible, options)
        # Also refuses a user's s that is not t, hence two letters in the annotations.
        self._check_shapes(query, key, value)
        self.calls += 1
        schedule = RingSchedule(
            layout=self.layout,
            causal=causal,
            documents=tuple(documents),
            window=window,
            route=self.options.route,
        )
        mask = None if visible is None else self._gather_mask(visible)
        if self.heads is not None:
            # First spread, then exchanged: each rank of the u gets heads of its own.
            key, value = (self._spread_heads(x) for x in (key, value))
            query, key, value = (gather_tokens(x, self.heads) for x in (query, key, value))
            if sinks is not None:
                sinks = sinks.chunk(self.ulysses)[self.heads.rank()]
        out = ring_attention(
            query,
            key,
            value,
            schedule=schedule,
            member=self.group.rank() // self.ulysses,
            channel=self.channel,
            scale=scale,
            mask=mask,
            sinks=sinks,
            backend=self.options.backend,
        )
        return out if self.heads is None else scatter_tokens(out, self.heads)

    def _attend_documents(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        visible: Tensor | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """Attend inside of the documents of the batch: row by row, where these differ."""
        if len(set(self.documents)) == 1:
            documents = self.documents[0]
            return self.attend(query, key, value, visible=visible, documents=documents, **options)
        if len(query) != len(self.documents):
            raise ConfigurationError(
                "LP305",
                f"attention was called with {len(query)} rows, but the batch has "
                f"{len(self.documents)} rows of several documents each. Give the model the rows of "
                "the batch, or use context_parallel_size=1.",
            )
        rows = [
            self.attend(
                *(x[i : i + 1] for x in (query, key, value)),
                visible=visible if visible is None or len(visible) == 1 else visible[i : i + 1],
                documents=bounds,
                **options,
            )
            for i, bounds in enumerate(self.documents)
        ]
        return torch.cat(rows)

    def _spread_heads(self, x: Tensor) -> Tensor:
        """Repeat key/value heads until every rank that exchanges heads gets one."""
        # The fewest copies with which the number of heads divides by u.
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
                "LP305",
                f"attention was called with shapes {shapes}. On {self.layout.ranks} "
                "context-parallel ranks the shapes of query, key and value have to be [B, heads, "
                f"{tokens}, H]: each rank holds {tokens} of the {self.layout.length} tokens. "
                "Cross-attention to other sequences (memories, caches, other modalities) is not "
                "supported with context_parallel_size > 1: use context_parallel_size=1 for it.",
            )
        heads, kv_heads = query.shape[1], key.shape[1]
        if heads % kv_heads:
            raise ConfigurationError(
                "LP305",
                f"attention was called with shapes {shapes}. The {heads} query heads have to be a "
                f"multiple of the {kv_heads} key/value heads.",
            )
        spread = kv_heads * self.ulysses // math.gcd(kv_heads, self.ulysses)
        if heads % spread:
            common = math.gcd(heads, self.group.size())
            raise ConfigurationError(
                "LP307",
                f"{heads} query and {kv_heads} key/value heads cannot be exchanged among "
                f"{self.ulysses} ranks: {heads} is not a multiple of {spread}. Use method='ring'"
                + (f", or method='hybrid' with ulysses_size={common}." if common > 1 else "."),
            )

    def _gather_mask(self, visible: Tensor) -> KeyMask:
        """Return the mask of all ranks, gathered once for all layers that pass the same tensor."""
        # By memory and version, as every layer may reshape the mask into a new tensor object.
        version = None if visible.is_inference() else count_of_changes(visible)
        # Two tensors of one batch may share memory at other times: hence version, offset and
        # strides.
        at = visible.untyped_storage().data_ptr(), visible.storage_offset(), version
        known = (*at, visible.shape, visible.stride())
        if known not in self._masks:
            # The tensor is kept with it: while it lives, its memory is nobody else's.
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
        # On all ranks of the axis, and once for a batch: all of them see the same mask object.
        whole = all_gather(own, 0, self.group)
        if visible.dtype is not torch.bool and bool((whole == _NEITHER).any()):
            raise ConfigurationError(
                "LP305",
                "attn_mask contains numbers other than 0 and minus infinity, as a position bias "
                "does. With context_parallel_size > 1 a mask can only hide keys. Use a mask of 0 "
                "and minus infinity, or context_parallel_size=1.",
            )
        # Rank = member * ulysses + place: the tokens of a member's ranks follow each other.
        by_rank = whole.view(-1, self.ulysses, *own.shape)  # [members, places, B, t]
        return KeyMask(by_rank.transpose(1, 2).flatten(2) == 1)


_NEITHER = 2


def _codes(visible: Tensor) -> Tensor:
    """Return bytes: 1 for a visible key, 0 for a hidden one, 2 for a weight that is neither."""
    if visible.dtype is torch.bool:
        return visible.to(torch.uint8)
    # Models mask by -inf or by about the least number of the dtype.
    hidden = visible <= torch.finfo(visible.dtype).min / 2
    codes = torch.full(visible.shape, _NEITHER, dtype=torch.uint8, device=visible.device)
    return codes.masked_fill_(hidden, 0).masked_fill_(visible == 0, 1)


def _common_length(found: dict[str, tuple[Any, int]]) -> int:
    """Return T, the common length of the entries of a batch.

    Args:
        found: Path -> entry and its sequence dim.
    """
    lengths = {path: tokens_of(path, entry, dim) for path, (entry, dim) in found.items()}
    if len(set(lengths.values())) != 1:
        listed = ", ".join(f"{path!r} has {length}" for path, length in lengths.items())
        raise ConfigurationError(
            "LP304",
            f"the sequences of a batch have different lengths: {listed} tokens. All entries in "
            "BatchLayout(sequence_dims=...) must have the same number of tokens, since context "
            "parallelism divides them at the same positions. Cut or pad them to one length in "
            "the collate_fn, or leave entries that are not tokens out of sequence_dims.",
        )
    length: int = next(iter(lengths.values()))
    return length
