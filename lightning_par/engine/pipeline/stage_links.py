"""Links between neighboring pipeline stages: channels between two ranks, or within one."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.pipeline.p2p import Channel, PendingMessage
from lightning_par.engine.tensor_tree import pack

__all__ = ["ODD", "LocalChannel", "StageLink", "connect", "group_name"]

ODD = " odd"
"""Ends the names of the groups of every other pair of neighbors; see `group_name`."""


class LocalChannel:
    """A channel between two stages of one rank: a queue; no tensor is copied."""

    is_local = True

    def __init__(self) -> None:
        self._queue: deque[PendingMessage] = deque()

    def knows(self, signature: Hashable) -> bool:
        """Return False: nothing can arrive before this rank has computed it."""
        return False

    def send_message(self, message: Any, signature: Hashable) -> list[Tensor]:
        """Queue a tree for the other stage; see `Channel.send_message`."""
        header, tensors = pack(message)
        self._queue.append(PendingMessage([t.detach() for t in tensors], [], header))
        return tensors

    def send_nothing(self, signature: Hashable) -> None:
        """Queue that there is no tree; see `Channel.send_nothing`."""
        self.send_message(None, signature)

    def send_gradients(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> None:
        """Queue gradients for the other stage; see `Channel.send_gradients`."""
        held = torch.tensor([g is not None for g in grads])
        # A tensor in the place of a missing gradient is never read: `held` says so.
        found = [t if g is None else g for g, t in zip(grads, like, strict=True)]
        self._queue.append(PendingMessage(found, [], held=held))

    def post_message(self, signature: Hashable) -> PendingMessage:
        """Return the first tree of the queue."""
        return self._queue.popleft()

    def post_gradients(self, like: Sequence[Tensor]) -> PendingMessage:
        """Return the first gradients of the queue."""
        return self._queue.popleft()

    def drain(self) -> None:
        """Do nothing: what is sent has arrived."""


@dataclass(frozen=True)
class StageLink:
    """The two channels between two neighboring stages.

    Attributes:
        activations: Channel from the earlier stage to the later one.
        gradients: Channel from the later stage to the earlier one.
    """

    activations: Channel | LocalChannel
    gradients: Channel | LocalChannel


def group_name(kind: str, source: int, target: int) -> str:
    """Name the group in which a rank sends to another; see Note [Two groups] in `p2p.py`.

    Where ranks hold several stages, activations also travel against the order of the ranks. They
    then use groups of their own, since a rank that sends in one direction must not wait for what
    comes in the other. And a rank receives from one neighbor and sends to the other in two groups:
    every other pair of neighbors has its own, because all messages of a group are in one queue
    where `init_process_group` got a `device_id`.

    Args:
        kind: "activations" or "gradients".
        source: Pipeline rank that sends.
        target: Pipeline rank that receives.
    """
    # Against the order of the ranks: the V and the interleaved schedule have such links.
    usual = (source < target) == (kind == "activations")
    back, odd = "" if usual else " back", ODD if min(source, target) % 2 else ""
    return f"pp {kind}{back}{odd}"


def connect(
    rank_of_stage: Sequence[int],
    rank: int,
    group_of: Callable[[str], dist.ProcessGroup],
    global_rank_of: Callable[[int], int],
    device: torch.device,
    channel: type[Channel] = Channel,
) -> dict[int, StageLink]:
    """Return the links of one rank.

    Args:
        rank_of_stage: The pipeline rank that holds each stage.
        rank: This pipeline rank.
        group_of: Returns the process group of a `group_name`.
        global_rank_of: Returns the global rank of a pipeline rank.
        device: Where tensors arrive.
        channel: Class of the channels between two ranks.

    Returns:
        s -> the link between the stages s and s + 1, for those that touch a stage of this rank.

    **Communicates**: on devices other than the CPU, one number over each channel.
    """

    def one_way(kind: str, source: int, target: int) -> Channel:
        return channel(
            group_of(group_name(kind, source, target)),
            global_rank_of(source) if target == rank else None,
            global_rank_of(target) if source == rank else None,
            device,
        )

    links = {}
    # All pairs, in order: ranks open channels by messages, which both ends have to reach.
    for stage, (earlier, later) in enumerate(pairwise(rank_of_stage)):
        # Without a group: NCCL has no messages from a rank to itself.
        if earlier == later == rank:
            links[stage] = StageLink(LocalChannel(), LocalChannel())
        elif rank in (earlier, later):
            activations = one_way("activations", earlier, later)
            gradients = one_way("gradients", later, earlier)
            # In the order of the stages on every rank, so that no circle of ranks waits.
            activations.open()
            gradients.open()
            links[stage] = StageLink(activations, gradients)
    return links
