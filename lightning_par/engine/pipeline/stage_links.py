"""The links between pipeline stages: between two ranks, or within one."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.pipeline.p2p import Channel, PendingMessage
from lightning_par.engine.tensor_tree import pack, TensorSpec

__all__ = ["LocalChannel", "StageLink", "connect", "group_name"]


class LocalChannel:
    """Hands over within one rank, in the order in which it was sent; nothing is copied."""

    is_local = True

    def __init__(self) -> None:
        self._queue: deque[PendingMessage] = deque()

    def knows(self, signature: Hashable) -> bool:
        """Whether a receive can be posted: nothing is ahead of what was computed here."""
        return False

    def send_message(self, message: Any, signature: Hashable) -> list[Tensor]:
        """Leave a tree for the other stage; see `Channel.send_message`."""
        header, tensors = pack(message)
        self._queue.append(PendingMessage([t.detach() for t in tensors], [], header))
        return tensors

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Leave bare tensors for the other stage."""
        self._queue.append(PendingMessage(list(tensors), []))

    def post_message(self, signature: Hashable) -> PendingMessage:
        """Take the tree that was left first."""
        return self._queue.popleft()

    def post_tensors(self, like: Sequence[Tensor | TensorSpec]) -> PendingMessage:
        """Take the tensors that were left first."""
        return self._queue.popleft()

    def drain(self) -> None:
        """Do nothing: what is sent has arrived."""


@dataclass(frozen=True)
class StageLink:
    """Where two stages meet.

    Attributes:
        activations: From the earlier stage to the later one.
        gradients: From the later stage to the earlier one.
    """

    activations: Channel | LocalChannel
    gradients: Channel | LocalChannel


def group_name(kind: str, source: int, target: int) -> str:
    """Name the process group in which a rank sends to another; see Note [Two groups].

    Where ranks hold several stages, activations also travel against the order of the ranks. They
    then use groups of their own, since a rank that sends in one direction must not wait for what
    comes in the other.

    Args:
        kind: "activations" or "gradients".
        source: Pipeline rank that sends.
        target: Pipeline rank that receives.
    """
    usual = (source < target) == (kind == "activations")
    return f"pp {kind}" if usual else f"pp {kind} back"


def connect(
    rank_of_stage: Sequence[int],
    rank: int,
    group_of: Callable[[str], dist.ProcessGroup],
    global_rank_of: Callable[[int], int],
    device: torch.device,
    channel: type[Channel] = Channel,
) -> dict[int, StageLink]:
    """Make the links of one rank.

    Args:
        rank_of_stage: The pipeline rank that holds each stage.
        rank: This pipeline rank.
        group_of: Gives the process group of a `group_name`.
        global_rank_of: Gives the global rank of a pipeline rank.
        device: Where tensors arrive.
        channel: What sends between two ranks.

    Returns:
        The boundary behind stage s, by s, for those that touch a stage of this rank.
    """

    def one_way(kind: str, source: int, target: int) -> Channel:
        return channel(
            group_of(group_name(kind, source, target)),
            global_rank_of(source) if target == rank else None,
            global_rank_of(target) if source == rank else None,
            device,
        )

    links = {}
    for stage, (earlier, later) in enumerate(pairwise(rank_of_stage)):
        if earlier == later == rank:
            links[stage] = StageLink(LocalChannel(), LocalChannel())
        elif rank in (earlier, later):
            activations = one_way("activations", earlier, later)
            links[stage] = StageLink(activations, one_way("gradients", later, earlier))
    return links
