"""Point-to-point messages between neighboring pipeline stages.

A message is a tree of tensors and other values. Shapes, dtypes and everything that is not a tensor
are sent as a header, once for every signature of the batch, which both ends know; after that only
tensors are sent, and a receive can be posted before it is needed.

Note [Two groups]: activations and gradients use separate process groups. On NCCL the messages
between two ranks of one group are executed in the order they were issued, so a stage that sends an
activation while its neighbor sends a gradient would wait forever.

Note [Open channels]: NCCL makes the communicator of two ranks at their first message, and the hosts
of both wait for each other. If that were a receive that is posted early, its host could not send
what the neighbor needs before it sends. So one number goes over each channel before all else.
"""

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.collectives import apply_function
from lightning_par.engine.tensor_tree import (
    pack,
    PackedTree,
    received_form,
    sent_form,
    TensorSpec,
    unpack,
)
from lightning_par.errors import PipelineError
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["NOTHING", "Channel", "PendingMessage"]

NOTHING, _ = pack(None)
"""Header of a message of a stage whose step has failed, while the others wait for it."""


@dataclass(eq=False)
class PendingMessage:
    """A receive that was posted and may not be complete.

    Attributes:
        buffers: Where the tensors arrive, in order.
        works: Handles to wait for.
        header: The tree around the tensors; None for bare tensors.
        held: Of gradients, which of them the sender has, on the host; None: all.
    """

    buffers: list[Tensor]
    works: list[dist.Work]
    header: PackedTree | None = None
    held: Tensor | None = None

    def wait(self) -> list[Tensor]:
        """Wait for all tensors and return them."""
        for work in self.works:
            work.wait()
        self.works = []
        return self.buffers

    def gradients(self) -> list[Tensor | None]:
        """Wait for gradients and return them; None for one that the sender does not have."""
        found = self.wait()
        if self.held is None:
            return list(found)
        return [g if held else None for g, held in zip(found, self.held.tolist(), strict=True)]

    def unpack(self, *, with_grad: bool) -> tuple[Any, list[Tensor]]:
        """Wait for a message and put its tree together.

        Args:
            with_grad: Make leaves of what required grad at the sender.

        Returns:
            The tree, and its distinct tensors in order.
        """
        assert self.header is not None
        # Also those that need no gradient: all have to have arrived before the memory is read.
        tensors = self.wait()
        given = []
        for tensor, spec in zip(tensors, self.header.specs, strict=True):
            # A leaf: the backward stops here, and the sender gets its gradient.
            tensor.requires_grad_(with_grad and spec.requires_grad)
            # A block may change what it is given in place, which a leaf does not bear.
            given.append(apply_function(_Handed, tensor) if tensor.requires_grad else tensor)
        return unpack(self.header, given), tensors


class _Handed(torch.autograd.Function):
    """The memory of a leaf, which may be changed in place: neither a leaf nor a view of one."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Channel:
    """One direction of messages between this rank and another.

    Args:
        group: Process group that is used for nothing but this direction.
        source: Global rank that this rank receives from, None if it only sends.
        target: Global rank that this rank sends to, None if it only receives.
        device: Where tensors arrive.
    """

    is_local = False

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int | None,
        target: int | None,
        device: torch.device,
    ) -> None:
        self._group, self._source, self._target, self._device = group, source, target, device
        self._sending: list[tuple[dist.Work | None, Tensor]] = []
        self._sent: dict[Hashable, PackedTree] = {}
        self._seen: dict[Hashable, PackedTree] = {}

    def open(self) -> None:
        """Make the communicator; see Note [Open channels]. Both ends have to call this.

        **Communicates**: one number to the target, on devices other than the CPU.
        """
        if self._device.type == "cpu":
            return
        number = torch.zeros(1, device=self._device)
        if self._source is None:
            dist.send(number, self._target, group=self._group)
        else:
            dist.recv(number, self._source, group=self._group)

    def knows(self, signature: Hashable) -> bool:
        """Return whether the header of this signature is known, so that a receive can be posted."""
        return signature in self._seen

    def send_message(self, message: Any, signature: Hashable) -> list[Tensor]:
        """Send a tree to the target.

        Args:
            message: Any picklable tree; tensors may appear more than once.
            signature: The same value at both ends; one header is sent for each.

        Returns:
            The distinct tensors in the order in which their gradients will come back.

        Raises:
            PipelineError: The tree differs from the one first sent under this signature.

        **Communicates**: every distinct tensor once to the target; the header at the first use.
        """
        # Pickled once for a signature: a tree of a later batch has to be the same, see
        # `_check_alike`.
        header, tensors = pack(message)
        known = self._sent.get(signature)
        if known is None:
            text = pickle.dumps(header)
            # The receiver has to know the size of a message before it can post its receive.
            # Headers are on the CPU: the group has a gloo backend for them besides NCCL.
            self._isend(torch.tensor([len(text)]))
            self._isend(torch.frombuffer(bytearray(text), dtype=torch.uint8))
            self._sent[signature] = header
        elif known != header:
            _check_alike(known, header)
        self.send_tensors([t.detach() for t in tensors])
        return tensors

    def forget(self, signature: Hashable) -> None:
        """Drop the header of a signature that does not come again."""
        self._sent.pop(signature, None)
        self._seen.pop(signature, None)

    def send_nothing(self, signature: Hashable) -> None:
        """Tell the target, which waits for a message, that there is none: the step has failed.

        Args:
            signature: As in `send_message`. Where its header is known, zeros are sent: the target
                has posted its receive.
        """
        known = self._sent.get(signature)
        if known is None:
            # The header of nothing, which must not be taken for that of later batches.
            self.send_message(None, signature)
            del self._sent[signature]
        else:
            self.send_tensors(
                [torch.zeros(s.shape, dtype=s.dtype, device=self._device) for s in known.specs]
            )

    def send_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Send bare tensors to the target, without waiting."""
        # What was sent has to stay in memory until it has left.
        self._sending = [s for s in self._sending if s[0] is not None and not s[0].is_completed()]
        for tensor in tensors:
            self._isend(sent_form(tensor))

    def send_gradients(self, grads: Sequence[Tensor | None], like: Sequence[Tensor]) -> None:
        """Send gradients to the target, without waiting, and which of them there are.

        Args:
            grads: None where autograd gave none: one process leaves what depends on it alone.
            like: The tensors that they belong to.

        **Communicates**: the gradients, with zeros for None, and a byte for each, between hosts.
        """
        # A byte for each on the host, where autograd's None can be told from zeros.
        if grads:
            self._isend(torch.tensor([g is not None for g in grads], dtype=torch.uint8))
        pairs = zip(grads, like, strict=True)
        self.send_tensors([torch.zeros_like(t) if g is None else g for g, t in pairs])

    def post_gradients(self, like: Sequence[Tensor]) -> PendingMessage:
        """Post the receives of gradients.

        Args:
            like: The tensors that they belong to.
        """
        if not like:
            return PendingMessage([], [])
        held = torch.ones(len(like), dtype=torch.uint8)  # also where a rehearsal receives nothing
        first = dist.irecv(held, self._source, group=self._group)
        pending = self.post_tensors(like)
        pending.held = held
        pending.works += [] if first is None else [first]
        return pending

    def post_message(self, signature: Hashable) -> PendingMessage:
        """Post the receives of a message; waits for the header if it is the first of its
        signature.
        """
        # Blocking, but both ends are at the same place of the same schedule.
        header = self._seen.get(signature) or self.receive_header(signature)
        if header != NOTHING:
            self._seen[signature] = header
        pending = self.post_tensors(header.specs)
        pending.header = header
        return pending

    def receive_header(self, signature: Hashable) -> PackedTree:
        """Return the tree around the tensors of a message, which is sent once.

        Args:
            signature: Not used: headers arrive in the order in which they are needed.
        """
        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, self._source, group=self._group)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, self._source, group=self._group)
        header: PackedTree = pickle.loads(text.numpy().tobytes())
        return header

    def post_tensors(self, like: Sequence[Tensor | TensorSpec]) -> PendingMessage:
        """Post the receives of bare tensors.

        Args:
            like: Of the shapes and dtypes that will arrive.
        """
        assert self._source is not None
        buffers = [torch.empty(s.shape, dtype=s.dtype, device=self._device) for s in like]
        # Complex numbers and flags travel in a form that every backend takes.
        places = map(received_form, buffers)
        works = [dist.irecv(place, self._source, group=self._group) for place in places]
        return PendingMessage(buffers, [w for w in works if w is not None])

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._sending:
            if work is not None:
                work.wait()
        self._sending.clear()

    def _isend(self, tensor: Tensor) -> None:
        assert self._target is not None
        self._sending.append((dist.isend(tensor, self._target, group=self._group), tensor))


def _check_alike(known: PackedTree, header: PackedTree) -> None:
    """Raise `PipelineError`, saying what changed, unless two messages are alike."""
    advice = (
        "Return the value that changes as a tensor that has the same shape for all batches of one "
        "shape."
    )
    cut = (
        "Cut or pad sequences in the collate_fn instead of the model, so that batches of one "
        "shape give outputs of one shape."
    )
    kinds = [[(spec.shape, spec.dtype) for spec in each.specs] for each in (known, header)]
    if known.specs != header.specs and kinds[0] == kinds[1]:
        raise PipelineError(
            "LP405",
            "the output of a pipeline stage needed a gradient in an earlier step and needs none "
            "now, or the other way round: parameters were frozen or unfrozen within an epoch. "
            "Under a pipeline, freeze and unfreeze parameters before the fit, or at the start of "
            "an epoch, in on_train_epoch_start.",
        )
    if known.specs != header.specs:
        raise PipelineError(
            "LP405",
            "the output of a pipeline stage has a different shape than before, although the batch "
            f"has the same shape: it was {kinds[0]}, and is now {kinds[1]}. {cut} A step that "
            "calls the model several times, as for text generation, needs "
            "pipeline_parallel_size=1.",
        )
    # Equal trees may have different pickles, where a value is shared in one of them only.
    before, now = (unpack(each, range(len(each.specs))) for each in (known, header))
    if before == now:
        return
    leaves = tree_leaves(before), tree_leaves(now)
    if len(leaves[0]) == len(leaves[1]):
        pairs = zip(*leaves, strict=True)
        before, now = next(((k, h) for k, h in pairs if k != h), (before, now))
    raise PipelineError(
        "LP405",
        "a non-tensor value in the output of a pipeline stage has changed, although the batch "
        f"has the same shape: it was {before!r}, and is now {now!r}. {advice}",
    )
