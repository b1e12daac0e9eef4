"""An Adam optimizer whose states and updates are on the host.

The user's optimizer stays what schedulers and monitors see. Gradients leave for the host when they
are final, so that its own step finds none; what it would have done is done after it, here.

Note [When an update may start]: the factor of a clipped norm, the decision about an overflow and
that about a NaN need all gradients. Then gradients travel during the backward, and updates start
after it. Otherwise a bucket is updated while the backward goes on. Parameters change after the
backward only.

Note [Delayed update]: u_s is the update from the gradients of step s. Step s + 1 computes with
parameters that hold u_0 .. u_(s-1), while u_s is computed from them and the gradients; it is
published after the backward of step s + 1. What the groups say is read at the end of step s.

**Source**: Ren et al. 2101.06840 (ZeRO-Offload), sections 4 and 5.2, where the delayed update is
one-step too; here buckets stream and a step that is left out is left out before it is submitted.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.engine.offload.adam import AdamRule
from lightning_par.engine.offload.copy_stream import CopyStream
from lightning_par.engine.offload.gradient_accumulation import HostSums
from lightning_par.engine.offload.host_parameter import HostParameter, local_tensor
from lightning_par.engine.offload.host_storage import allocate, offloaded_parameters
from lightning_par.engine.offload.offloaded_gradients import OffloadedGradients
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import CheckpointError, ConfigurationError, OffloadError

__all__ = ["HostOptimizer", "check_optimizer"]

_Bucket = list[HostParameter]


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose step is not the one of the kernels.

    Raises:
        ConfigurationError: It is no plain Adam or AdamW.
    """
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigurationError(
            f"configure_optimizers gave {kind.__module__}.{kind.__name__}, but what is offloaded "
            "is torch.optim.Adam or torch.optim.AdamW. Use one of them, or a strategy without "
            "offloading, such as Hybrid3DStrategy(zero_stage=2)."
        )
    if any(group["amsgrad"] for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{kind.__name__}(amsgrad=True) is not offloaded: its kernel keeps two moments, and "
            "amsgrad needs a third. Use amsgrad=False."
        )


class HostOptimizer:
    """Keeps the states of an Adam optimizer on the host and updates its parameters from there.

    Args:
        optimizer: Adam or AdamW; its step is followed by the update.
        device: Of the parameters.
        options: How.
        worker: Runs the updates; closed with this.
        late: Ids of parameters whose gradients are not final when autograd has computed them.

    Attributes:
        departed: Norms of gradients on their way, and the factor of the update.
        early_updates: How many buckets were submitted before their backward ended.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        device: torch.device,
        options: OffloadOptions,
        worker: UpdateWorker,
        late: frozenset[int] = frozenset(),
    ) -> None:
        check_optimizer(optimizer)
        self._optimizer, self._options, self._worker = optimizer, options, worker
        self._courier = CopyStream(device)
        self._device = device
        self.departed = OffloadedGradients()
        self.early_updates = 0
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        parameters = offloaded_parameters(parameters, options.offload_fraction)
        self._held, self._storage = allocate(parameters, options, device)
        self._handles: list[Any] = [optimizer.register_step_post_hook(self._step)]
        self._handles += [
            p.register_post_accumulate_grad_hook(self._arrive)
            for p in parameters
            if id(p) not in late and not options.offload_parameters
        ]
        self._hears = self._streams = self._is_delayed = False
        self._slot, self._filling = 0, 0
        self._buckets: list[tuple[_Bucket, Any]] = []
        self._open: _Bucket = []
        self._submitted: list[tuple[_Bucket, Future[None], int]] = []
        self._gone: set[HostParameter] = set()
        self._sums = HostSums(worker)
        self._is_last, self._continues, self._adds = True, False, False

    @property
    def kernel_name(self) -> str:
        """Which kernel runs."""
        return self._worker.kernel.name

    def host_bytes(self) -> int:
        """Return the bytes that this rank holds on the host."""
        held = [t for h in self._held.values() for t in (h.master, h.mean, h.square, *h.slots)]
        return sum(t.numel() * t.element_size() for t in held) + self._sums.nbytes

    @property
    def accumulates(self) -> bool:
        """Whether gradients of several batches are added up here, not on the device."""
        return self._options.accumulate_on == "host"

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Surrounds the forward and backward of a batch that is not the last one of its step."""
        self._is_last = False
        try:
            yield
        finally:
            self._is_last = True

    @property
    def waits(self) -> bool:
        """Whether there are gradients of this step for which no update is ready, as after a last
        batch without a backward.
        """
        return self._continues or any(p.grad is not None for p in self._held)

    @property
    def leaves_gradients(self) -> bool:
        """Whether gradients stay where they are after this backward, as they are here already."""
        return self._options.offload_parameters and not self._is_last

    def begin(self, step: int, *, hears: bool, streams: bool, largest: float) -> None:
        """Prepare for the backward after which the optimizer steps, or for one `accumulating`.

        Args:
            step: Number of the step, from 0.
            hears: Whether gradients are final when autograd has computed them.
            streams: Whether an update needs nothing but its own gradient.
            largest: Bound of the gradients' entries, if it streams.

        Raises:
            OffloadError: A parameter was changed while its update was under way.
        """
        self._gone.clear()
        if not self._continues:
            self._drop()
            self._is_delayed = self._options.delays(step)
            busy = {slot for _, _, slot in self._submitted}
            self._slot = 1 if 0 in busy else 0
        self._follow_changes()
        several = self._continues or not self._is_last
        self._adds = several and not self._options.offload_parameters
        self._hears = hears and self._options.overlap == "auto"
        free = not (self._is_delayed or self._submitted or self._adds)
        self._streams = streams and self._hears and free
        self.departed.largest = largest

    def _follow_changes(self) -> None:
        """Let masters follow parameters that somebody changed since the last batch."""
        for held in self._held.values():
            if held.is_changed():
                if self._submitted:
                    raise OffloadError(
                        f"a parameter of shape {tuple(held.parameter.shape)} was changed while "
                        "its delayed update was computed. Change parameters where updates are "
                        "complete, as in on_validation_start, or use delayed_update=False."
                    )
                held.follow()

    def finish(self) -> None:
        """Let the gradients that are left leave, and publish an update that was delayed until now.

        Called when all gradients are final.
        """
        self._hears = False
        self._continues = not self._is_last
        for parameter in self._held:
            if parameter.grad is not None:
                self._depart(parameter)
        self._close_bucket()
        if self._adds:
            self._sums.settle()
        if self._continues:
            return
        self._adds = False
        self._take_sums()
        if not self._streams:
            self._publish()

    def _take_sums(self) -> None:
        """Let the sums of all batches be the gradients of this step."""
        for held, total in self._sums.take().items():
            held.total = total
            self.departed.note(held.parameter, total, held.parameter)
            self._open.append(held)
            self._filling += held.nbytes
            if self._filling >= self._options.bucket_bytes:
                self._close_bucket()
        self._close_bucket()

    def drop(self) -> None:
        """Forget the gradients of this step.

        Raises:
            OffloadError: Updates have started with them.
        """
        if self._streams and self._submitted:
            raise OffloadError("a step cannot be left out after its first updates.")
        self._drop()

    def flush(self) -> None:
        """Publish every update that was submitted, and show the states to the optimizer."""
        self._publish()
        self.show_states()

    def gradients(self) -> dict[nn.Parameter, Tensor]:
        """Return this rank's parts of the gradients that wait for their update, on the host, before
        they are multiplied by `departed.factor`; none where updates stream.
        """
        for _, ready in self._buckets:
            ready.synchronize()
        waiting = (held for bucket, _ in self._buckets for held in bucket)
        return {held.parameter: held.arrived(self._slot) for held in waiting}

    def show_states(self) -> None:
        """Put the states of all parameters that have stepped into the optimizer."""
        for parameter, held in self._held.items():
            states = held.states()
            if states:
                self._optimizer.state[parameter] = states

    def load(
        self,
        parameter: nn.Parameter,
        states: Mapping[str, Any],
        read: Callable[[Any, Tensor], None],
    ) -> bool:
        """Take the states of a parameter out of a checkpoint.

        Args:
            parameter: Of this rank.
            states: As stored.
            read: Copies this rank's part of a stored tensor.

        Returns:
            Whether the parameter's states are on the host.

        Raises:
            CheckpointError: The states are not those of Adam.
        """
        held = self._held.get(parameter)
        if held is None:
            return False
        missing = [name for name in ("step", "exp_avg", "exp_avg_sq") if name not in states]
        if missing:
            raise CheckpointError(
                f"the checkpoint's optimizer has no {', '.join(missing)} of a parameter, but "
                f"{', '.join(states)}: it was not Adam. Load weights alone, or use its optimizer."
            )
        for name, target in held.targets(states).items():
            if name in states:
                read(states[name], target)
        held.flush()
        step = states["step"]
        held.resume(step.read() if hasattr(step, "read") else step)
        return True

    def close(self) -> None:
        """Publish what was submitted, and let the optimizer be what it was."""
        try:
            self.flush()
        finally:
            for handle in self._handles:
                handle.remove()
            self._worker.close()
            self._storage.close()

    def _arrive(self, parameter: nn.Parameter) -> None:
        if self._hears:
            self._depart(parameter)

    @torch.no_grad()
    def _depart(self, parameter: nn.Parameter) -> None:
        """Send a gradient to the host and give its memory up."""
        held, grad = self._held[parameter], parameter.grad
        assert grad is not None
        parameter.grad = None
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            grad = grad.redistribute(placements=parameter.placements)
        local = local_tensor(grad)
        if held in self._gone and self._adds:
            self._close_bucket()
            self._sums.settle()
        elif held in self._gone:
            self._add(held, local, grad)
            return
        self._gone.add(held)
        if not self._streams and not self._adds:
            self.departed.note(parameter, local, grad)
        if self._options.offload_parameters:
            held.grad = local
        else:
            self._courier.to_host(local, held.slots[self._slot])
        self._open.append(held)
        self._filling += held.nbytes
        if self._filling >= self._options.bucket_bytes:
            self._close_bucket()

    def _add(self, held: HostParameter, local: Tensor, grad: Tensor) -> None:
        """Add a further part of a gradient, as reentrant checkpointing computes several."""
        if self._streams:
            raise OffloadError(
                f"the gradient of a parameter of shape {tuple(held.parameter.shape)} came in "
                "several parts, after its update had started. Use overlap='off'."
            )
        self._courier.mark().synchronize()
        slot = held.slots[self._slot]
        total = slot.to(local.device) + local
        self._courier.to_host(total, slot)
        self._courier.mark().synchronize()
        self.departed.note(held.parameter, total, grad)

    def _close_bucket(self) -> None:
        if not self._open:
            return
        bucket, self._open, self._filling = self._open, [], 0
        if self._adds:
            self._sums.add(self._courier.mark(), bucket, self._slot)
            return
        self._buckets.append((bucket, self._courier.mark()))
        if self._streams:
            self.early_updates += self._hears
            self._submit()

    def _submit(self) -> None:
        """Give the buckets that have arrived to the worker."""
        plain = type(self._optimizer) is torch.optim.AdamW
        rules = {
            p: AdamRule.of_group(group, decoupled=plain)
            for group in self._optimizer.param_groups
            for p in group["params"]
        }
        scale, largest = float(self.departed.factor), self.departed.largest
        for bucket, ready in self._buckets:
            updates = [held.update(rules[held.parameter], self._slot) for held in bucket]
            future = self._worker.submit(ready, updates, scale, largest)
            self._submitted.append((bucket, future, self._slot))
        self._buckets = []

    def _step(self, *_: Any) -> None:
        """Runs after the optimizer's own step, which found no gradients."""
        self._submit()
        self.departed.clear()
        if not self._is_delayed:
            self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Give the parameters the values that were computed, in the order of the updates."""
        submitted, self._submitted = self._submitted, []
        for bucket, future, slot in submitted:
            future.result()
            for held in bucket:
                if held.grad is None:
                    self._courier.to_device(held.slots[slot], held.local)
                held.grad = None
                held.published()
        self._courier.settle()
        self._storage.settle()

    def _drop(self) -> None:
        if self._buckets or self._open:
            self._courier.mark().synchronize()
        self._buckets, self._open, self._filling = [], [], 0
        self._sums.take()
        for held in self._held.values():
            held.total = None
        self._gone.clear()
        self.departed.clear()
