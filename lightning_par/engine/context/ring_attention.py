"""Ring attention: exact attention over a sequence that is sharded over the members of a ring.

Shapes: B batch, N query heads, K key/value heads, T/cp tokens of this rank, H head dim.

`ring_schedule` decides what is sent when; this module carries it out with tensors. A member attends
to its own tokens while the first keys and values are being sent, then to one owner's after the
other, and merges the partial outputs by their log-sum-exp. The backward computes every block from
the log-sum-exp of the whole, so that nothing is saved but what plain attention saves.

**Source**: Liu et al. 2310.01889 (Ring Attention), Li et al. 2105.13120 (Ring Self-Attention). We
differ in what is sent (see Note [Direct schedule] in `ring_schedule.py`), and add the gradients at
their owner in the order of the steps, in float32 or wider, so that reruns are equal bit by bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_par.engine.annotations import Bool, Float
from lightning_par.engine.collectives import refuses_second_gradient
from lightning_par.engine.context.kernels.aten import AttentionKernel, BlockOptions, wide
from lightning_par.engine.context.kernels.select import choose_kernel
from lightning_par.engine.context.ring_p2p import KeyValues, PendingExchange, RingChannel
from lightning_par.engine.context.ring_schedule import (
    AttentionBlock,
    Interval,
    ring_steps,
    RingSchedule,
    RingStep,
)

__all__ = ["KeyMask", "ring_attention"]


@dataclass(frozen=True, eq=False)
class KeyMask:
    """Which keys of all members of a ring are visible.

    Attributes:
        visible: [members, B or 1, T/ring], bool, in the order in which every member holds its
            tokens.
        complete: Whether all keys of a member are visible, per member.
    """

    visible: Bool[Tensor, "R B T"]
    complete: tuple[bool, ...] = field(default=())

    def __post_init__(self) -> None:
        # Once for a mask: it waits for the device, and all layers share the mask.
        if not self.complete:
            told = self.visible.flatten(1).all(1).tolist()
            object.__setattr__(self, "complete", tuple(told))

    def bias(self, owner: int, block: AttentionBlock, dtype: torch.dtype) -> Tensor | None:
        """Return [B or 1, 1, 1, t] to be added to the products, or None if every key is visible."""
        if self.complete[owner]:
            return None
        a, b = block.keys
        seen = self.visible[owner, :, None, None, a:b]
        zeros = torch.zeros(seen.shape, dtype=wide(dtype), device=seen.device)
        return zeros.masked_fill_(~seen, -math.inf)


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of one attention, which forward and backward share."""

    schedule: RingSchedule
    member: int
    channel: RingChannel | None
    kernel: AttentionKernel
    scale: float
    mask: KeyMask | None

    @property
    def steps(self) -> Sequence[RingStep]:
        return ring_steps(self.schedule, self.member)

    def options(self, step: RingStep, block: AttentionBlock, query: Tensor) -> BlockOptions:
        """Return the kernel's options for a block."""
        dtype, device = query.dtype, query.device
        bias = None if self.mask is None else self.mask.bias(step.owner, block, dtype)
        if block.band is not None:
            band = _band_bias(block, wide(dtype), device)
            bias = band if bias is None else bias + band
        return BlockOptions(causal=block.causal, scale=self.scale, bias=bias)

    def post(self, index: int, own: KeyValues, held: KeyValues) -> PendingExchange | None:
        """Post the keys and values of a step, if there is such a step."""
        if index >= len(self.steps) or self.channel is None:
            return None
        step = self.steps[index]
        source = own if self.schedule.route == "direct" else held
        return self.channel.post(step.send, step.receive, source)

    def wait(self, pending: PendingExchange | None) -> KeyValues | None:
        """Wait for an exchange; return what arrived."""
        if pending is None or self.channel is None:
            return None
        return self.channel.wait(pending)

    def collect(self, pending: PendingExchange | None, home: KeyValues) -> None:
        """Wait for gradients, add them to `home` and free them."""
        arrived = self.wait(pending)
        if pending is not None:
            # Freed before the next exchange is posted, so that one buffer is alive at a time.
            pending.received = None
        if arrived is not None:
            home.add(arrived)


def ring_attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T H"],
    *,
    schedule: RingSchedule,
    member: int,
    channel: RingChannel | None,
    scale: float | None = None,
    mask: KeyMask | None = None,
    sinks: Float[Tensor, " N"] | None = None,
    backend: str = "auto",
) -> Float[Tensor, "B N T H"]:
    """Attend to the tokens of all members.

    Args:
        query: [B, N, T/ring, H], of this member's tokens in the order of the schedule's layout.
        key: [B, K, T/ring, H]; N is a multiple of K.
        value: [B, K, T/ring, H].
        schedule: Layout, mask and route; the same on every member.
        member: Index of this member.
        channel: Channel of the ring; None if this is its only member.
        scale: Multiplies the products; None: 1 / sqrt(H).
        mask: Which keys are visible; None: all.
        sinks: A product for each head that counts in the softmax of every query, and brings no
            value; None: there are none.
        backend: A name of `kernels.select.KERNELS`, or ``"auto"``.

    Returns:
        [B, N, T/ring, H] in the dtype of `query`; 0 for a token that sees none.

    Raises:
        ConfigurationError: The backend cannot take such tensors.

    **Communicates**: with 2 * B * K * H numbers for every token, what
    `RingSchedule.tokens_sent` says, in the keys' dtype: the first number in the forward, both in
    the backward. Under ``route="ring"`` gradients travel in float32 or wider.
    """
    masked = mask is not None and not all(mask.complete)
    takes_bias = masked or schedule.window is not None
    # Shared by forward and backward, as both have to walk through the same steps.
    call = _Call(
        schedule=schedule,
        member=member,
        channel=channel,
        kernel=choose_kernel(backend, query, masked=takes_bias),
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        mask=mask if masked else None,
    )
    out: Tensor = _RingAttention.apply(query, key, value, sinks, call)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, call: _Call
    ) -> Tensor:
        # One flat copy of keys and values: a message is contiguous, and saved once.
        own, query = KeyValues.pack(key, value), _rows(query)
        out, logsum = _forward(call, query, own)
        if sinks is not None:
            # The softmax over one product more: its logarithm is all that the backward reads.
            whole = torch.logaddexp(logsum, sinks.to(logsum.dtype)[:, None])
            out, logsum = out * (logsum - whole).exp()[..., None], whole
        out = out.to(query.dtype)
        # A row that sees nothing: any finite number keeps exp(-inf - it) at 0 in the backward.
        logsum.masked_fill_(logsum.isneginf(), 0)
        ctx.call, ctx.shapes = call, (key.shape, value.shape)
        ctx.save_for_backward(query, own.flat, out, logsum, sinks)
        return out

    @staticmethod
    @refuses_second_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, flat, out, logsum, sinks = ctx.saved_tensors
        own = KeyValues.over(flat, ((0, ctx.shapes[0][2]),), ctx.shapes)
        of_query, home = _backward(ctx.call, _Saved(_rows(grad), query, out, logsum), own)
        of_sinks = None
        if sinks is not None:
            # As of every product s: dL/ds = p (dL/dp - sum_j p_j dL/dp_j), where the value is 0.
            taken = (sinks.to(logsum.dtype)[:, None] - logsum).exp()
            of_sinks = -(taken * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return of_query, home.key.to(flat.dtype), home.value.to(flat.dtype), of_sinks, None


def _band_bias(block: AttentionBlock, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [1, 1, S, t] to be added to the products, which hides keys outside of the band."""
    assert block.band is not None
    (q, r), (k, m), (low, high) = block.queries, block.keys, block.band
    hidden = torch.ones(r - q, m - k, dtype=torch.bool, device=device)
    # band (a, b): visible for a <= i - j < b.
    hidden = hidden.tril(-high) | hidden.triu(1 - low)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -math.inf)[None, None]


def _rows(x: Tensor) -> Tensor:
    """Return `x` with heads that are contiguous in memory, as kernels want them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _forward(call: _Call, query: Tensor, own: KeyValues) -> tuple[Tensor, Tensor]:
    """Return the output, in float32 or wider, and the logarithm; -inf where nothing is seen."""
    found: tuple[Tensor, Tensor] | None = None
    # Posted before anything is computed: the first keys travel while this rank attends to its
    # own.
    pending, held = call.post(1, own, own), own
    for index, step in enumerate(call.steps):
        if index:
            # Direct: what arrived. Ring: nothing arrives where nobody further needs it.
            held = call.wait(pending) or held
            # The next exchange before this step's blocks, for the same reason.
            pending = call.post(index + 1, own, held)
        for block in step.blocks:
            a, b = block.queries
            key, value = held.slice(block.keys)
            options = call.options(step, block, query)
            part = call.kernel.forward(query[:, :, a:b], key, value, options)
            # The usual case: the first block covers all queries, and is the result so far,
            # without a copy.
            if found is None and b - a == query.shape[2]:
                found = part[0].to(wide(query.dtype)), part[1]
                continue
            found = found or _nothing(query, own.value.shape[3])
            _merge(found[0][:, :, a:b], found[1][:, :, a:b], *part)
    return found or _nothing(query, own.value.shape[3])


def _nothing(query: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Return output and logarithm of queries that have seen no key yet."""
    options: dict[str, Any] = {"dtype": wide(query.dtype), "device": query.device}
    out = torch.zeros((*query.shape[:3], value_dim), **options)
    return out, torch.full(query.shape[:3], -math.inf, **options)


def _merge(out: Tensor, logsum: Tensor, part: Tensor, part_logsum: Tensor) -> None:
    """Add a part to the output of the parts before, in place.

    Args:
        out: [B, N, S, H], normalized over the parts before.
        logsum: [B, N, S], -inf where these saw nothing.
        part: [B, N, S, H], normalized by itself.
        part_logsum: [B, N, S].
    """
    # out = sum_i exp(l_i - l) out_i with l = log(sum_i exp(l_i)); two terms at a time.
    merged = torch.logaddexp(logsum, part_logsum)
    weight = (part_logsum - merged).exp_().nan_to_num_(0)  # -inf less -inf: neither saw anything
    out.lerp_(part.to(out.dtype), weight[..., None])
    logsum.copy_(merged)


@dataclass(frozen=True, eq=False)
class _Saved:
    grad: Tensor
    query: Tensor
    out: Tensor
    logsum: Tensor

    def at(self, block: AttentionBlock) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return gradient, query, output and logarithm of a block's queries."""
        a, b = block.queries
        cut = tuple(x[:, :, a:b] for x in (self.grad, self.query, self.out, self.logsum))
        return cut[0], cut[1], cut[2], cut[3]


def _backward(call: _Call, saved: _Saved, own: KeyValues) -> tuple[Tensor, KeyValues]:
    """Return the gradients of the queries, and of this member's keys and values, which are kept in
    float32 or wider.
    """
    kind = wide(saved.query.dtype)
    of_query = torch.zeros(saved.query.shape, dtype=kind, device=saved.query.device)
    pending, held = call.post(1, own, own), own
    # In float32 or wider, as up to cp members add to it.
    home = KeyValues.empty(own.intervals, own, kind)
    _add_step(call, call.steps[0], saved, own, of_query, home)
    returning: PendingExchange | None = None
    for index, step in enumerate(call.steps[1:], 1):
        held = call.wait(pending) or held
        pending = call.post(index + 1, own, held)
        # Where gradients of this step belong, in the places of the keys' owner.
        places = () if step.send_gradients is None else step.send_gradients.intervals
        is_direct = call.schedule.route == "direct"
        # What one block finds is sent as it is, so that nothing has to be summed in float32.
        is_sent = is_direct and _is_one_block(step, places)
        part = KeyValues.empty(places, own, own.flat.dtype if is_sent else kind)
        if is_direct:
            _add_step(call, step, saved, held, of_query, part)
            part = part.to(own.flat.dtype)
            # In the order of the steps on every run, so that the sums have the same bits.
            call.collect(returning, home)
        else:
            # Ring: what earlier members found for this owner is added to on its way home.
            _add_step(call, step, saved, held, of_query, part, call.wait(returning))
        if call.channel is not None:
            ways = step.send_gradients, step.receive_gradients
            returning = call.channel.post(*ways, part)
    call.collect(returning, home)
    return of_query.to(saved.query.dtype), home


def _is_one_block(step: RingStep, places: Sequence[Interval]) -> bool:
    """Whether a step is one block, whose keys are all of these places."""
    return len(step.blocks) == 1 and (step.blocks[0].keys,) == places


def _add_step(
    call: _Call,
    step: RingStep,
    saved: _Saved,
    held: KeyValues,
    of_query: Tensor,
    total: KeyValues,
    earlier: KeyValues | None = None,
) -> None:
    """Compute the gradients of a step.

    Args:
        call: The call.
        step: Its blocks are computed.
        saved: Of the forward.
        held: Keys and values of the step's owner.
        of_query: [B, N, T/ring, H], to which those of the queries are added.
        total: Filled with those of the keys and values.
        earlier: What other members found for the same owner; counts in.
    """
    # One block that covers all of `total` can be stored; others are added to zeros.
    # Spares a pass over memory that sets zeros.
    whole = _is_one_block(step, total.intervals) and not earlier
    if not whole:
        total.flat.zero_()
    if earlier is not None:
        total.add(earlier)
    for block in step.blocks:
        a, b = block.queries
        grad, query, out, logsum = saved.at(block)
        key, value = held.slice(block.keys)
        options = call.options(step, block, query)
        parts = call.kernel.backward(grad, query, key, value, out, logsum, options)
        of_query[:, :, a:b] += parts[0]
        for room, part in zip(total.slice(block.keys), parts[1:], strict=True):
            if whole:
                room.copy_(part)
            else:
                room.add_(part)
