"""Point-to-point messages of ring attention: keys and values, and their gradients.

A message is one flat tensor: the keys of some tokens, then their values. K key/value heads, H head
dim, B batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.context.ring_schedule import Interval, places_in, Transfer

__all__ = ["KeyValues", "PendingExchange", "RingChannel"]


@dataclass(frozen=True, eq=False)
class KeyValues:
    """Keys and values, or their gradients, of some tokens of one member of the ring.

    Attributes:
        flat: Keys, then values, contiguous.
        intervals: Places of the owner that they belong to, in rising order.
        key: [B, K, t, H], a view of `flat`.
        value: [B, K, t, H], a view of `flat`.
    """

    flat: Tensor
    intervals: tuple[Interval, ...]
    key: Tensor
    value: Tensor

    @classmethod
    def over(
        cls, flat: Tensor, intervals: tuple[Interval, ...], shapes: Sequence[Sequence[int]]
    ) -> "KeyValues":
        """Read a flat tensor.

        Args:
            flat: As long as both need.
            intervals: Which places.
            shapes: Of keys and of values; dim 2 is replaced by the number of places.
        """
        tokens = sum(b - a for a, b in intervals)
        of_key, of_value = ((s[0], s[1], tokens, s[3]) for s in shapes)
        key, value = flat.split([prod(of_key), prod(of_value)])
        return cls(flat, intervals, key.view(of_key), value.view(of_value))

    @classmethod
    def empty(
        cls, intervals: tuple[Interval, ...], like: "KeyValues", dtype: torch.dtype | None = None
    ) -> "KeyValues":
        """Make room for other places of tensors like these.

        Args:
            intervals: Which places.
            like: Gives the other dims.
            dtype: None: that of `like`.
        """
        shapes = like.key.shape, like.value.shape
        tokens = sum(b - a for a, b in intervals)
        size = sum(s[0] * s[1] * s[3] for s in shapes) * tokens
        flat = torch.empty(size, dtype=dtype or like.flat.dtype, device=like.flat.device)
        return cls.over(flat, intervals, shapes)

    @classmethod
    def pack(cls, key: Tensor, value: Tensor) -> "KeyValues":
        """Copy whole keys [B, K, T, H] and values into one message."""
        flat = torch.cat((key.reshape(-1), value.reshape(-1)))
        return cls.over(flat, ((0, key.shape[2]),), (key.shape, value.shape))

    def at(self, intervals: tuple[Interval, ...]) -> "KeyValues":
        """Return the message of some of these places; itself, if they are all of them."""
        if intervals == self.intervals:
            return self
        # Cut out of both halves into one contiguous message.
        part = KeyValues.empty(intervals, self)
        for mine, theirs in ((self.key, part.key), (self.value, part.value)):
            chosen = [mine[:, :, a:b] for a, b in places_in(intervals, self.intervals)]
            torch.cat(chosen, 2, out=theirs)
        return part

    def to(self, dtype: torch.dtype) -> "KeyValues":
        """Return the same numbers in another dtype."""
        shapes = self.key.shape, self.value.shape
        return KeyValues.over(self.flat.to(dtype), self.intervals, shapes)

    def slice(self, interval: Interval) -> tuple[Tensor, Tensor]:
        """Return the keys and values of an interval of the owner's places, as views."""
        ((a, b),) = places_in([interval], self.intervals)
        return self.key[:, :, a:b], self.value[:, :, a:b]

    def add(self, other: "KeyValues") -> None:
        """Add numbers for some of these places."""
        start = 0
        for a, b in places_in(other.intervals, self.intervals):
            stop = start + b - a
            self.key[:, :, a:b] += other.key[:, :, start:stop]
            self.value[:, :, a:b] += other.value[:, :, start:stop]
            start = stop


@dataclass(eq=False)
class PendingExchange:
    """A send and a receive that were posted together.

    Attributes:
        received: Where the message arrives, or None.
        sent: The message that leaves; referenced until it has left.
        works: Handles to wait for.
    """

    received: KeyValues | None
    sent: KeyValues | None
    works: list[dist.Work]


class RingChannel:
    """Sends and receives between the members of a ring.

    Note [One send, one receive]: every step has at most one of each, posted as one batch, and all
    members pass through the steps in the same order; NCCL runs the batches of a group in the order
    in which they were posted, so that no two members can wait for each other.

    Args:
        group: The members of the ring, in order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)

    def post(
        self,
        send: Transfer | None,
        receive: Transfer | None,
        source: KeyValues,
        dtype: torch.dtype | None = None,
    ) -> PendingExchange:
        """Start a send and a receive.

        Args:
            send: Which keys and values to send, or None.
            receive: Which to receive, or None.
            source: Holds what is sent.
            dtype: Dtype of what is received; None: that of `source`.

        **Communicates**: the bytes of `send` to its peer.
        """
        sent = received = None
        operations = []
        if send is not None:
            # Contiguous, as a send wants it; a copy, unless all places are sent.
            sent = source.at(send.intervals)
            peer = self._ranks[send.peer]
            operations.append(dist.P2POp(dist.isend, sent.flat, peer, self._group))
        if receive is not None:
            received = KeyValues.empty(receive.intervals, source, dtype)
            peer = self._ranks[receive.peer]
            operations.append(dist.P2POp(dist.irecv, received.flat, peer, self._group))
        # One batch: NCCL groups both, so that neither waits for the other to be posted.
        works = dist.batch_isend_irecv(operations) if operations else []
        return PendingExchange(received, sent, works)

    def wait(self, pending: PendingExchange) -> KeyValues | None:
        """Wait until a send has left and a receive has arrived; return the latter."""
        for work in pending.works:
            work.wait()
        # Only now may the memory of what was sent be freed.
        pending.works, pending.sent = [], None
        return pending.received
