"""An Adam optimizer whose states and updates are on the host (ZeRO-Offload).

The user's optimizer stays what schedulers and monitors see. Its gradients are sent to the host, so
that its own `step` finds none and changes nothing; a hook after that `step` runs the update here.

Note [When an update may start]: the clip factor, the decision about an overflow and that about a
NaN need all gradients. Then gradients are sent during the backward, and updates start after it.
Otherwise a bucket is updated while the backward goes on. Parameters change after the backward only.

Note [Deferral]: hooks of users between backward and step read or change `grad` of parameters. For
them gradients stay where they are, and are sent when the optimizer steps. That costs the device the
memory of all gradients, and the overlap of copies with the backward.

Note [Delayed update]: u_s is the update from the gradients of step s. Step s + 1 computes with
parameters that hold u_0 .. u_(s-1), while the host computes u_s; it is published after the backward
of step s + 1. Learning rates are those of the end of step s.

**Source**: Ren et al. 2101.06840 (ZeRO-Offload), sections 4 and 5.2, where the delayed update is
one step late, too; here buckets stream, and a step is skipped before its update is submitted.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.engine.offload.adam import AdamRule, check_optimizer
from lightning_par.engine.offload.copy_stream import CopyStream
from lightning_par.engine.offload.gradient_accumulation import HostSums
from lightning_par.engine.offload.host_parameter import HostParameter, local_tensor, PendingStates
from lightning_par.engine.offload.host_storage import allocate, offloaded_parameters
from lightning_par.engine.offload.offload_state import NEXT_STATES, OffloadState
from lightning_par.engine.offload.offloaded_gradients import OffloadedGradients
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import CheckpointError, OffloadError

__all__ = ["HostOptimizer"]

_Bucket = list[HostParameter]
_COMPARED_STEPS = 3
"""First steps before which parameters are compared with their masters, which reads them once."""


class HostOptimizer:
    """Keeps the states of an Adam optimizer on the host and updates its parameters from there.

    A step is `begin`, the backward, `finish`, and the optimizer's own `step`. What is held where in
    between is told by `OffloadState`.

    Args:
        optimizer: Adam or AdamW; the update follows its `step`.
        device: Device of the parameters.
        options: What is offloaded, and how.
        worker: Runs the updates; `close` closes it, too.
        late: Ids of parameters whose gradients change after autograd has computed them.
        unsure: Parameters whose gradients may become None after the backward.

    Attributes:
        state: Where the step is.
        offloaded_gradients: Norms of the gradients on the host, and the factor of the update.
        early_updates: How many buckets were submitted before their backward ended.
        defers: Whether gradients stay until the optimizer steps; see Note [Deferral].
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        options: OffloadOptions,
        worker: UpdateWorker,
        late: frozenset[int] = frozenset(),
        unsure: Container[nn.Parameter] = (),
    ) -> None:
        check_optimizer(optimizer)
        self._unsure = unsure
        self._optimizer, self._options, self._worker = optimizer, options, worker
        self._copy_stream = CopyStream(device)
        self.state = OffloadState.IDLE
        self.offloaded_gradients = OffloadedGradients()
        self.early_updates, self.defers = 0, False
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        # The last ones, as their gradients come first.
        parameters = offloaded_parameters(parameters, options.offload_fraction)
        self._held, self._storage = allocate(parameters, options, device)
        # After the user's `step`, which finds no gradients, and before hooks that follow it.
        self._handles: list[Any] = [optimizer.register_step_post_hook(self._after_step)]
        if options.overlap == "auto" and not options.offload_parameters:
            self._handles += [
                p.register_post_accumulate_grad_hook(self._send_early)
                for p in parameters
                if id(p) not in late
            ]
        self._step, self._slot, self._is_written_to = 0, 0, False
        # A bucket is filled, closed (with the event after which it is on the host), and submitted
        # (with the future of its update, and the slot that holds the result).
        self._filling, self._filled_bytes = _Bucket(), 0
        self._closed: list[tuple[_Bucket, Any]] = []
        self._submitted: list[tuple[_Bucket, Future[None], int]] = []
        self._sent: set[HostParameter] = set()
        self._sums = HostSums(worker)

    def host_bytes(self) -> int:
        """Return the bytes that this rank holds on the host."""
        held = [t for h in self._held.values() for t in (h.master, h.mean, h.square, *h.slots)]
        return sum(t.numel() * t.element_size() for t in held) + self._sums.nbytes

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several batches are added up on the host, not on the device."""
        return self._options.accumulate_on == "host" and not self.defers

    @property
    def shows_update(self) -> bool:
        """Whether the first update is complete, and that of `torch.optim.Adam`, after its step."""
        exact = self._options.state_dtype == "float32" and not self._options.delays(0)
        return exact and self._options.accumulate_on == "device"

    @property
    def has_unfinished_gradients(self) -> bool:
        """Whether earlier batches of this step left gradients for which `finish` has not run, as
        where the last batch has no backward.
        """
        if self.defers and self.state is OffloadState.COLLECTING:
            return False  # `finish_deferred` follows
        partial = self.state is OffloadState.PARTIAL
        return partial or any(p.grad is not None for p in self._held)

    @property
    def keeps_gradients(self) -> bool:
        """Whether this batch leaves its gradients on the parameters, which are on the host."""
        return self._options.offload_parameters and self.state is OffloadState.ACCUMULATING

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Surround the forward and backward of a batch that is not the last one of its step."""
        before = self.state
        if before is not OffloadState.PARTIAL:
            self._start_step()
        self._sent.clear()
        self._enter(OffloadState.ACCUMULATING)
        try:
            yield
        finally:
            # `finish` has not run: the batch had no loss, or its gradients stay where they are.
            if self.state is OffloadState.ACCUMULATING:
                resumes = before in (OffloadState.PARTIAL, OffloadState.DELAYED)
                self._enter(before if resumes else OffloadState.IDLE)

    def begin(self, step: int, *, streams: bool, largest: float) -> None:
        """Prepare for a backward: of a batch within `accumulating`, or the last one of a step.

        Args:
            step: Number of the step, from 0.
            streams: Whether an update needs no gradient but its own.
            largest: Largest absolute value of a gradient's entries if it streams; others are
                clamped.

        Raises:
            OffloadError: A parameter was changed while its update was under way.
        """
        if self.state not in (OffloadState.ACCUMULATING, OffloadState.PARTIAL):
            # Sums of earlier batches of the step have to stay.
            self._start_step()
        self._refresh_masters(step)
        self._step = step
        self.offloaded_gradients.largest = largest
        if self.state is OffloadState.ACCUMULATING:
            return
        self._sent.clear()
        overlaps = self._options.overlap == "auto"
        if self.state is OffloadState.PARTIAL:
            self._enter(OffloadState.COMPLETING)
        # With an update under way the slots of that one are busy until the end of the backward.
        elif streams and overlaps and not (self._options.delays(step) or self._submitted):
            self._enter(OffloadState.STREAMING)
        else:
            self._enter(OffloadState.COLLECTING)

    def finish(self, *, hooks_follow: bool = False) -> None:
        """Send the gradients that are left, and publish the delayed update of the step before.

        Called when all gradients are final.

        Args:
            hooks_follow: Hooks may still change them; see Note [Deferral].
        """
        if hooks_follow and self.defers:
            return
        for parameter in self._held:
            if parameter.grad is not None:
                self._send(parameter)
        self._close_bucket()
        match self.state:
            case OffloadState.ACCUMULATING:
                self._sums.wait()
                self._enter(OffloadState.PARTIAL)
            case OffloadState.STREAMING:
                self._enter(OffloadState.SUBMITTED)
            # COLLECTING, or COMPLETING after the last of several batches.
            case state:
                self._enter(OffloadState.COLLECTED)
                if state is OffloadState.COMPLETING:
                    self._take_sums()
                # The backward has read the old parameters to its end.
                self._publish()

    def finish_deferred(self) -> None:
        """Send the gradients that stayed for hooks, which have all run."""
        if self.defers and self.state is OffloadState.COLLECTING:
            self.offloaded_gradients.clear()  # they are scaled and clipped already
            self.finish()

    def drop(self) -> None:
        """Discard the gradients of this step, of which no update has started."""
        assert not (self.state.streams and self._submitted)
        self._discard()
        if self.state is not OffloadState.DELAYED:
            self._enter(OffloadState.IDLE)

    def flush(self) -> None:
        """Apply pending updates, and put the states of all parameters into the optimizer.

        Raises:
            OffloadError: A parameter was changed while its update was under way.
        """
        # A change behind a delayed update would be overwritten by its result.
        for bucket, _, _ in self._submitted:
            for held in bucket:
                if held.is_changed():
                    raise held.changed_behind_update()
        self._complete()

    def _complete(self) -> None:
        self._publish()
        if self.state is OffloadState.DELAYED:
            self._enter(OffloadState.IDLE)
        for held in self._held.values():
            self._take_states(held)
        self.show_states()

    def show_states(self) -> None:
        """Put the states of all parameters into the user's optimizer, as after `load`."""
        for held in self._held.values():
            if held.step:
                self._show_states(held)

    def _take_states(self, held: HostParameter) -> None:
        """Follow user code that has put other states of a parameter into its optimizer."""
        if held.take_states(self._optimizer.state.get(held.parameter, {})):
            self._show_states(held)

    def _show_states(self, held: HostParameter) -> None:
        """Put the states of a parameter into the user's optimizer, where hooks read them."""
        states = held.states()
        if self._options.delayed_update is not False:
            states = PendingStates(states, self._wait)
        self._optimizer.state[held.parameter] = states

    def _wait(self) -> None:
        """Wait until the submitted updates are computed; they are not published."""
        for _, future, _ in self._submitted:
            future.result()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's shards of the gradients that wait for their update, on the host.

        `offloaded_gradients.factor` is not applied yet. Empty where updates stream.
        """
        for _, copied in self._closed:
            copied.synchronize()
        waiting = (held for bucket, _ in self._closed for held in bucket)
        return {held.parameter: held.gradient(self._slot) for held in waiting}

    def load(
        self,
        parameter: nn.Parameter,
        states: Mapping[str, Any],
        read: Callable[[Any, Tensor], None],
    ) -> bool:
        """Load the states of a parameter from a checkpoint.

        Args:
            parameter: A parameter of this rank.
            states: Its states by name, as they were stored.
            read: Copies this rank's shard of a stored tensor to a tensor.

        Returns:
            Whether the parameter's states are on the host; nothing was loaded if not.

        Raises:
            CheckpointError: The states are not those of Adam.
        """
        held = self._held.get(parameter)
        if held is None:
            return False
        missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in states]
        if missing:
            raise CheckpointError(
                "LP507",
                "the optimizer of the checkpoint was not Adam: its states lack "
                f"{', '.join(missing)}. Use that optimizer without offloading, or load only the "
                "weights: lightning_par.load_from_checkpoint(MyModule, path).",
            )
        for name, target in held.targets(states).items():
            if name in states:
                read(states[name], target)
        held.flush()
        step = states["step"]
        held.restore_step(step.read() if hasattr(step, "read") else step)
        return True

    def close(self) -> None:
        """Apply pending updates, remove the hooks, stop the worker."""
        try:
            self._complete()
        finally:
            for handle in self._handles:
                handle.remove()
            self._worker.close()
            self._storage.close()

    def _enter(self, state: OffloadState) -> None:
        assert state is OffloadState.IDLE or state in NEXT_STATES[self.state], (self.state, state)
        self.state = state

    def _start_step(self) -> None:
        """Discard what a skipped or failed step left behind, and choose the slots of this one."""
        if self.state.streams:
            # Masters have taken these updates already, so that the parameters have to follow.
            self._publish()
        self._discard()
        if self.state is not OffloadState.DELAYED:
            self._enter(OffloadState.IDLE)
        # The slots of a delayed update hold results that are not published yet.
        busy = {slot for _, _, slot in self._submitted}
        self._slot = 1 if 0 in busy else 0

    def _refresh_masters(self, step: int) -> None:
        """Copy parameters that were changed since the last batch to their masters.

        A change through `parameter.data` leaves no mark: values are compared where there may be
        some, after each of the first updates and, once one was found, after all.
        """
        compares = not self._submitted and (step < _COMPARED_STEPS or self._is_written_to)
        for held in self._held.values():
            is_marked = held.is_changed()
            is_written = compares and not is_marked and held.differs()
            # Once a write without a mark was seen, there may be more.
            self._is_written_to = self._is_written_to or is_written
            if is_marked or is_written:
                if self._submitted:
                    raise held.changed_behind_update()
                held.refresh_master()

    def _send_early(self, parameter: nn.Parameter) -> None:
        """Send a gradient that autograd has just computed."""
        early = self.state.is_backward and not self.defers
        if early and parameter not in self._unsure:
            before = len(self._submitted)
            self._send(parameter)
            self.early_updates += len(self._submitted) - before

    @torch.no_grad()
    def _send(self, parameter: nn.Parameter) -> None:
        """Send a gradient to the host and free its memory on the device."""
        held, grad = self._held[parameter], parameter.grad
        assert grad is not None
        # Frees the device's memory once the copy is over; the optimizer's own step finds nothing.
        parameter.grad = None
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            # Autograd may leave it replicated or partial; the states are sharded as the parameter.
            grad = grad.redistribute(placements=parameter.placements)
        local = local_tensor(grad)
        if held in self._sent and self.state.adds:
            # The slot is free for a further part once the first one is added to the sum.
            self._close_bucket()
            self._sums.wait()
        elif held in self._sent:
            self._add_to_slot(held, local, grad)
            return
        self._sent.add(held)
        if not self.state.streams and not self.state.adds:
            self.offloaded_gradients.record(parameter, local, grad)
        if self._options.offload_parameters:
            held.grad = local
        else:
            self._copy_stream.to_host(local, held.slots[self._slot])
        self._put_in_bucket(held)

    def _add_to_slot(self, held: HostParameter, local: Tensor, grad: Tensor) -> None:
        """Add a further part of a gradient, as reentrant checkpointing computes several."""
        if self.state.streams:
            raise OffloadError(
                "LP603",
                f"the gradient of a parameter of shape {tuple(held.parameter.shape)} was computed "
                "in several parts, one of them after its update had started. Use overlap='off'.",
            )
        # This is rare enough to wait for both copies: the slot is read here, and then overwritten.
        self._copy_stream.record_event().synchronize()
        slot = held.slots[self._slot]
        total = slot.to(local.device) + local
        self._copy_stream.to_host(total, slot)
        self._copy_stream.record_event().synchronize()
        self.offloaded_gradients.record(held.parameter, total, grad)

    def _put_in_bucket(self, held: HostParameter) -> None:
        self._filling.append(held)
        self._filled_bytes += held.nbytes
        if self._filled_bytes >= self._options.bucket_bytes:
            self._close_bucket()

    def _close_bucket(self) -> None:
        if not self._filling:
            return
        bucket, self._filling, self._filled_bytes = self._filling, [], 0
        # One event for all copies of the bucket, recorded behind the last of them.
        copied = self._copy_stream.record_event()
        if self.state.adds:
            self._sums.add(copied, bucket, self._slot)
            return
        self._closed.append((bucket, copied))
        if self.state.streams:
            self._submit()

    def _take_sums(self) -> None:
        """Make the sums over all batches the gradients of this step."""
        for held, total in self._sums.take().items():
            held.total = total
            self.offloaded_gradients.record(held.parameter, total, held.parameter)
            self._put_in_bucket(held)
        self._close_bucket()

    def _submit(self) -> None:
        """Submit the closed buckets to the worker."""
        # What groups without the key `decoupled_weight_decay` mean.
        plain = type(self._optimizer) is torch.optim.AdamW
        rules = {
            p: AdamRule.of_group(group, decoupled=plain)
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        # The factor may be on the device: reading it waits for the norm, once a step.
        scale, largest = float(self.offloaded_gradients.factor), self.offloaded_gradients.largest
        for bucket, copied in self._closed:
            for held in bucket:
                self._take_states(held)
            updates = [held.next_update(rules[held.parameter], self._slot) for held in bucket]
            future = self._worker.submit(copied, updates, scale, largest)
            self._submitted.append((bucket, future, self._slot))
            for held in bucket:
                if not self._optimizer.state.get(held.parameter):
                    self._show_states(held)
        self._closed = []

    def _after_step(self, *_: Any) -> None:
        """Update; the optimizer's own step, which found no gradients, has just returned."""
        state = self.state
        if state is OffloadState.COLLECTED:
            self._submit()
        self.offloaded_gradients.clear()
        if state is OffloadState.COLLECTED and self._options.delays(self._step):
            self._enter(OffloadState.DELAYED)
        elif state in (OffloadState.COLLECTED, OffloadState.SUBMITTED):
            # First the state, then what may raise: the next step has to be able to begin.
            self._enter(OffloadState.IDLE)
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Wait for the updates and copy their results to the parameters, in order."""
        submitted, self._submitted = self._submitted, []
        for bucket, future, slot in submitted:
            future.result()
            for held in bucket:
                if held.grad is None:
                    self._copy_stream.to_device(held.slots[slot], held.local)
                held.grad = None
                held.mark_published()
        # The next forward must read the new parameters, and the next backward reuses the slots.
        self._copy_stream.wait()
        self._storage.wait_for_writes()

    def _discard(self) -> None:
        """Discard gradients and sums that no update was submitted for."""
        if self._closed or self._filling:
            # Copies that are under way would write to slots that the next step uses.
            self._copy_stream.record_event().synchronize()
        self._closed, self._filling, self._filled_bytes = [], [], 0
        self._sums.take()
        for held in self._held.values():
            held.total = None
        self._sent.clear()
        self.offloaded_gradients.clear()
