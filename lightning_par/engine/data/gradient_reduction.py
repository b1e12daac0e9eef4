"""Gradients over the mesh: sums and means of copies, the norm of the whole model, clipping."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.autograd.graph import get_gradient_edge, Node
from torch.distributed.tensor import DTensor, Replicate

from lightning_par.dtensor import local_part
from lightning_par.engine.annotations import Float
from lightning_par.upstream.aten import foreach_mul_, foreach_norm

__all__ = [
    "ReplicatedGradients",
    "SharedGradients",
    "clip_by_norm",
    "clip_by_value",
    "fill_buckets",
    "is_counted_here",
    "local_gradients",
    "scale_together",
    "sum_together",
    "total_norm",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedGradients:
    """Parameters that several ranks hold, each with a partial gradient; the gradients are summed.

    Attributes:
        parameters: The parameters, in the same order on every rank of the group.
        group: The ranks that hold the copies.
    """

    parameters: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup

    def begin(self) -> None:
        """A backward begins, which changes nothing."""

    def end(self) -> None:
        """A backward has ended, or failed, which changes nothing."""

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradients over the group; a missing one counts as 0.

        One that no rank has stays None, so that the optimizer leaves its parameter alone. Which
        ranks have one is sent with the gradients, and only looked at where one is missing.

        **Communicates**: one all-reduce of all these gradients for each dtype, and of a number for
        each parameter with them.
        """
        # In the order of `parameters`, which is the same on every rank of the group.
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for parameters in by_dtype.values():
            missing = [n for n, p in enumerate(parameters) if p.grad is None]
            # All ranks have to send the same bytes, also for a parameter that a rank did not use.
            for number in missing:
                parameters[number].grad = torch.zeros_like(parameters[number])
            grads = local_gradients(parameters)
            # One number for each gradient, at the end of the same message.
            held = grads[0].new_ones(len(grads))  # made there: a copy from the host would wait
            for number in missing:
                held[number].zero_()
            *totals, counts = sum_together([*grads, held], self.group)
            for grad, total in zip(grads, totals, strict=True):
                grad.copy_(total)
            # Only ranks that lack one wait for the answer; the others have nothing to take back.
            if missing:
                found = counts.tolist()
                for number in missing:
                    if not found[number]:
                        parameters[number].grad = None


@dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together.

    Attributes:
        parameters: Theirs.
        waits_for: Ids of those of which the backward that runs has not given the gradient yet.
        may_be_early: Whether a backward before this one gave each gradient at once.
    """

    parameters: list[nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    may_be_early: bool = False
    is_in_parts: bool = False
    _message: tuple[dist.Work | None, list[tuple[Tensor, Tensor]], Tensor, list[int]] | None = None

    def begin(self) -> None:
        """Expect a backward; one before it may have failed."""
        self.waits_for, self._message = set(map(id, self.parameters)), None

    def add(self, parameter: int) -> None:
        """Take note of a gradient, which the backward may give in several parts.

        Args:
            parameter: Id of its parameter.

        Raises:
            RuntimeError: The gradients are sent already.
        """
        if parameter in self.waits_for:
            self.waits_for.discard(parameter)
            return
        self.is_in_parts = True
        if self._message is not None:
            raise RuntimeError(
                "a backward added to the gradient of a weight after this gradient had been sent to "
                "the other replicas. In the steps before, the backward computed this gradient in "
                "one part. The cause may be torch.utils.checkpoint with use_reentrant=True around "
                "modules that share the weight: pass use_reentrant=False to it."
            )

    def send(self, group: dist.ProcessGroup, dtype: torch.dtype | None) -> None:
        """Begin to average the gradients; those that are plain become views of the message."""
        missing = [n for n, p in enumerate(self.parameters) if p.grad is None]
        # All ranks have to send the same bytes, also for a parameter that a rank did not use.
        for number in missing:
            self.parameters[number].grad = torch.zeros_like(self.parameters[number])
        grads = local_gradients(self.parameters)
        held = grads[0].new_ones(len(grads))  # made there: a copy from the host would wait
        for number in missing:
            held[number].zero_()
        # One copy and one message: a collective of each tensor would cost its latency each time.
        flat = torch.cat([part.reshape(-1).to(dtype or part.dtype) for part in (*grads, held)])
        # Divided first, so that what arrives is the mean.
        work = dist.all_reduce(flat.div_(group.size()), group=group, async_op=True)
        *means, counts = flat.split([*map(Tensor.numel, grads), len(held)])
        apart = list[tuple[Tensor, Tensor]]()
        for parameter, grad, mean in zip(self.parameters, grads, means, strict=True):
            own, mean = parameter.grad, mean.view_as(grad)
            # Any other stays where it is, as optimizers want the strides of the parameter.
            if type(own) is Tensor and own.is_contiguous() and own.dtype == mean.dtype:
                parameter.grad = mean
            else:
                apart.append((grad, mean))
        self._message = work, apart, counts, missing

    def receive(self) -> list[int]:
        """Wait for the averages; a gradient that no rank has is None.

        Returns:
            The ids of the parameters without one, the same on all ranks.
        """
        assert self._message is not None
        (work, apart, counts, missing), self._message = self._message, None
        if work is not None:
            work.wait()
        for grad, mean in apart:
            grad.copy_(mean)
        # Only ranks that lack one wait for the answer; the others have nothing to take back.
        found = counts.tolist() if missing else []
        unused = [self.parameters[number] for number in missing if not found[number]]
        for parameter in unused:
            parameter.grad = None
        return [*map(id, unused)]


class ReplicatedGradients:
    """Parameters that several ranks hold, each with the gradient of other tokens or samples; the
    gradients are averaged.

    Note [Early buckets]: the gradients of whole replicas travel while the backward goes on. A
    bucket is sent when its last gradient is there, and those ahead of it are sent: in one order on
    all ranks. One that lacks a gradient is sent after the backward. So no rank has to know which
    gradients another has. A reentrant checkpoint gives the gradient of a shared weight in parts:
    the first backward shows which buckets have such ones, and they are sent after it, too.
    Parameters that no rank has used in some step have the last buckets, since others would wait for
    theirs.

    Args:
        parameters: The parameters, in the same order on every rank of the group.
        group: The ranks that hold the copies.
        dtype: In which gradients are added; None: their own.
        early: Whether gradients are sent in a backward that `begin` announces. Then nothing else
            may change them before `reduce`.

    Attributes:
        parameters: As given.
        group: As given.
        early: As given.
    """

    def __init__(
        self,
        *,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        dtype: torch.dtype | None = None,
        early: bool = False,
    ) -> None:
        self.parameters, self.group = tuple(parameters), group
        self._dtype, self.early, self._is_on = dtype, early, False
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}  # by id: the hash of a tensor takes its time
        self._sent, self._unused = 0, set[int]()
        # Of each parameter what adds to its gradient: the hooks are on these, and end with them.
        self._nodes: dict[int, Node] = {}

    def messages(self) -> list[int]:
        """Return the bytes of each message of a step, in which all parameters that train have one
        entry more: whether there is a gradient.
        """
        sizes = [self._dtype or b.parameters[0].dtype for b in self._arrange()]
        entries = [sum(local_part(p).numel() + 1 for p in b.parameters) for b in self._buckets]
        return [n * dtype.itemsize for n, dtype in zip(entries, sizes, strict=True)]

    def begin(self) -> None:
        """Let the backward that follows send gradients, whose first parts it gives."""
        if self.early:
            for bucket in self._arrange():
                bucket.begin()
            self._is_on, self._sent = True, 0

    def end(self) -> None:
        """Let backwards send nothing from here on, also where that of `begin` has failed."""
        has_failed, self._is_on, self._sent = self._is_on, False, 0
        for bucket in self._buckets if has_failed else ():
            bucket.begin()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the gradients over the group.

        A gradient that no rank has stays None, so that the optimizer leaves its parameter alone;
        one that only some ranks have counts as 0 on the others.

        **Communicates**: the gradients, and with each a number, in messages of about 32 MiB.
        """
        if not self._sent:
            self._arrange()
        was_on, self._is_on = self._is_on, False
        for bucket in self._buckets[self._sent :]:
            bucket.send(self.group, self._dtype)
        self._sent = 0
        unused = set[int]()
        for bucket in self._buckets:
            unused.update(bucket.receive())
            bucket.may_be_early = was_on and not bucket.is_in_parts
        # All ranks know it of the same ones. The set only grows: a step that uses others than the
        # one before makes no new order.
        if self.early and not unused <= self._unused:
            self._unused |= unused
            self._buckets, self._bucket_of = [], {}

    def _arrange(self) -> list[_Bucket]:
        """Return the buckets, the same in every step unless other parameters train."""
        # The last ones have their gradients first.
        wanted = [p for p in reversed(self.parameters) if p.requires_grad]
        if {*map(id, wanted)} != self._bucket_of.keys():
            last = [p for p in wanted if id(p) in self._unused]
            first = [p for p in wanted if id(p) not in self._unused]
            self._buckets = [_Bucket(p) for part in (first, last) for p in fill_buckets(part)]
            self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
            for parameter in wanted if self.early else ():
                if id(parameter) not in self._nodes:
                    node = self._nodes[id(parameter)] = get_gradient_edge(parameter).node
                    node.register_hook(partial(self._add, id(parameter)))
        return self._buckets

    def _add(self, parameter: int, *_: Any) -> None:
        """Send what is complete with a gradient that the backward has given."""
        bucket = self._bucket_of.get(parameter) if self._is_on else None
        if bucket is None:
            return
        bucket.add(parameter)
        while self._sent < len(self._buckets):
            following = self._buckets[self._sent]
            if following.waits_for or not following.may_be_early:
                return
            with torch.no_grad():
                following.send(self.group, self._dtype)
            self._sent += 1


def sum_together(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Return the sums of tensors of one dtype over a group, in new memory.

    **Communicates**: one all-reduce of all of them; none if there are none.
    """
    if not tensors:
        return []
    # One copy and one message: a collective of each tensor would cost its latency each time.
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    sums = flat.split([tensor.numel() for tensor in tensors])
    return [total.view_as(tensor) for total, tensor in zip(sums, tensors, strict=True)]


_BUCKET = 2**25  # bytes


def fill_buckets(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters into buckets of one dtype, each of 32 MiB on this rank or little more."""
    full: list[list[nn.Parameter]] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        # One open bucket for each dtype; full ones keep the order in which they were filled.
        bucket, size = filling.pop(parameter.dtype, ([], 0))
        bucket.append(parameter)
        size += local_part(parameter).numel() * parameter.element_size()
        if size >= _BUCKET:
            full.append(bucket)
        else:
            filling[parameter.dtype] = bucket, size
    return full + [bucket for bucket, _ in filling.values()]


@torch.no_grad()
def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients as local plain tensors of real numbers, which share their memory."""
    found = []
    for parameter in parameters:
        if parameter.grad is not None:
            # torch may give a conjugate as a view of another tensor, which has no real view.
            if parameter.grad.is_conj():
                parameter.grad = parameter.grad.resolve_conj()
            found.append(_real_part(parameter.grad))
    return found


def _real_part(grad: Tensor) -> Tensor:
    """Return the local part of a gradient; of complex numbers, both parts in a last dim."""
    local = local_part(grad)
    return torch.view_as_real(local) if local.is_complex() else local


def is_counted_here(grad: Tensor) -> bool:
    """Return whether this rank is the first of those that hold the same shard of a gradient."""
    if not isinstance(grad, DTensor):
        return True
    place = grad.device_mesh.get_coordinate()
    assert place is not None
    pairs = zip(grad.placements, place, strict=True)
    # Along Replicate axes the first coordinate counts; along Shard axes everybody does.
    return all(at == 0 for placement, at in pairs if isinstance(placement, Replicate))


@torch.no_grad()
def total_norm(
    parameters: Sequence[Tensor],
    *,
    device: torch.device,
    elsewhere: Collection[int] = (),
    loss: Tensor | None = None,
    offloaded_norms: Sequence[tuple[Tensor, float]] = (),
    count: int = 0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the 2-norm of the gradient of the whole model, and a sum, the same on every rank.

    The norm is NaN or infinite if anything is on any rank: a gradient, a copy that is not counted,
    or the loss.

    Args:
        parameters: The local parameters; every rank of the world has to call.
        device: Where the result is to be.
        elsewhere: Ids of parameters that another rank counts.
        loss: The loss of this rank; it only matters if it is not finite.
        offloaded_norms: Norms of gradients on the host, each with weight 1, or 0 for a copy.
        count: Number of this rank that is summed.

    **Communicates**: one all-reduce of two numbers over all ranks.
    """
    # parameters without a gradient add nothing, on whatever rank.
    grads = local_gradients(parameters)
    held = [(p, p.grad) for p in parameters if p.grad is not None]
    poison = None if loss is None else loss * 0  # NaN if the loss is not finite
    # Without a process group: on one device, in a step that is called after the run.
    if not (dist.is_initialized() and dist.get_world_size() > 1) and not offloaded_norms:
        norm = torch.nn.utils.get_total_norm(grads)
        total = norm if poison is None else norm + poison.to(norm)
        return total, torch.zeros_like(total)
    double = any(g.dtype is torch.float64 for g in grads)
    dtype = torch.float64 if double else torch.float32
    norms: Any = foreach_norm(grads, 2, dtype=dtype) if grads else []
    # float64: sums of squares of float32 norms, over thousands of ranks.
    square = torch.zeros((), dtype=torch.float64, device=device)
    own: list[Tensor] = []
    copies: list[Tensor] = []
    for (parameter, grad), known in zip(held, norms, strict=True):
        counts = id(parameter) not in elsewhere and is_counted_here(grad)
        # Two lists, and one kernel for each: a product for each parameter would cost thousands.
        (own if counts else copies).append(known.to(device))
    # A copy weighs 0, which is NaN if the copy is not finite. As numbers of Python, weights need no
    # tensor that would have to be copied to the device.
    for parts, weight in ((own, 1.0), (copies, 0.0)):
        if parts:
            square += torch.stack(parts).double().square().sum() * weight
    # Added on the host first, and brought to the device once.
    on_host = torch.zeros((), dtype=torch.float64)
    for known, weight in offloaded_norms:
        total = square if known.device == square.device else on_host
        total += known.to(total).square() * weight
    square += on_host
    if poison is not None:
        square += poison.to(square)
    both = torch.stack([square, torch.full_like(square, count)])
    dist.all_reduce(both)
    return both[0].sqrt(), both[1]


@torch.no_grad()
def clip_by_norm(parameters: Sequence[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Scale the gradients so that their norm is at most `max_norm`, as
    `torch.nn.utils.clip_grad_norm_` does.

    Args:
        parameters: The local parameters.
        norm: Norm of the gradient of the whole model, from `total_norm`; may be on the CPU.
        max_norm: Upper bound of that norm.
    """
    # torch's formula, with its 1e-6; a NaN norm makes all gradients NaN, as torch does.
    scale_together(local_gradients(parameters), (max_norm / (norm + 1e-6)).clamp(max=1.0))


@torch.no_grad()
def scale_together(tensors: Iterable[Tensor], factor: Float[Tensor, ""]) -> None:
    """Multiply tensors in place by a number, in one kernel for each device and dtype.

    Args:
        tensors: Plain tensors.
        factor: The number. On the CPU it is an argument of the kernel: nothing waits for a copy.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in alike.items():
        near = factor if factor.device.type == "cpu" else factor.to(device)
        foreach_mul_(group, near.to(dtype))


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], value: float) -> None:
    """Clamp every entry of the gradients to [-value, value]."""
    for grad in local_gradients(parameters):
        grad.clamp_(-value, value)
