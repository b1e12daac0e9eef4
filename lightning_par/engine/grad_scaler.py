"""Loss scaling for float16 on a mesh: an overflow on any rank skips the step on all.

A gradient below 6e-8 is zero in float16. The loss is therefore multiplied by a scale before its
backward, and the gradients are divided by it afterwards. Where a gradient is then not finite, the
step is skipped and the scale is halved; after many good steps it is doubled.

**Source**: Micikevicius et al. 1710.03740, section 3.2 (dynamic scaling); `torch.amp.GradScaler`,
which decides for the gradients of one process.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.data.gradient_reduction import is_counted_here, local_gradients
from lightning_par.engine.offload.offloaded_gradients import OffloadedGradients
from lightning_par.upstream.aten import unscale_and_check_
from lightning_par.upstream.autograd import OverridableGradScaler

__all__ = ["MeshGradScaler", "underflow_share"]


class MeshGradScaler(OverridableGradScaler):
    """A `GradScaler` whose decision is that of all ranks of the world.

    Where gradients are DTensors, each rank looks at its own part.

    Attributes:
        offloaded_gradients: Those on the host, unscaled when they are used; None: there are none.
    """

    offloaded_gradients: OffloadedGradients | None = None

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        # On the device, so that counting does not synchronize.
        self._skipped: Tensor | None = None

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, device: str) -> "MeshGradScaler":
        """Return a scaler with the settings of `scaler`, for devices of a type."""
        state = scaler.state_dict()
        made = cls(
            device,
            # And the state below: a scaler of a resumed run is in the middle of its growth
            # interval.
            init_scale=state["scale"],
            growth_factor=state["growth_factor"],
            backoff_factor=state["backoff_factor"],
            growth_interval=state["growth_interval"],
        )
        made.load_state_dict(state)
        return made

    @property
    def skipped_steps(self) -> int:
        """Number of skipped steps; reading it synchronizes with the device."""
        return 0 if self._skipped is None else int(self._skipped)

    def current(self, device: torch.device) -> Tensor:
        """Return the scale, a number on `device`."""
        # By `scale` itself, which makes the number on the device when it is first asked for.
        one: Tensor = self.scale(torch.ones((), device=device))
        return one

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients; return whether one on any rank is not finite.

        **Communicates**: one all-reduce of one number over all ranks.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in local_gradients(held):
            by_dtype.setdefault(grad.dtype, []).append(grad)
        if torch.float16 in by_dtype and not allow_fp16:
            raise ValueError("Attempting to unscale FP16 gradients.")
        # By dtype, as the kernel takes lists of one dtype.
        for grads in by_dtype.values():
            unscale_and_check_(grads, found_inf, inv_scale)
        if self.offloaded_gradients is not None:
            self.offloaded_gradients.unscale(inv_scale, found_inf)
        # Every rank has to come here once for an optimizer step, also one without gradients.
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        self._skipped = found_inf.clone() if self._skipped is None else self._skipped + found_inf
        return {found_inf.device: found_inf}


@torch.no_grad()
def underflow_share(
    parameters: Iterable[nn.Parameter],
    smallest: float,
    device: torch.device,
    counted_elsewhere: frozenset[int] = frozenset(),
    offloaded: Mapping[nn.Parameter, Tensor] | None = None,
    factor: float = 1.0,
) -> float:
    """Return the share of the gradients' entries that are smaller than `smallest`, zeros included.

    Args:
        parameters: Those of this rank; every rank of the world has to call.
        smallest: The smallest number that is not rounded to fewer digits.
        device: On which ranks meet.
        counted_elsewhere: Ids of parameters that another pipeline stage counts.
        offloaded: This rank's shards of the gradients on the host.
        factor: Factor that is not applied to those yet.

    **Communicates**: one all-reduce of two numbers over all ranks, if there are several.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    offloaded = offloaded or {}
    for parameter in parameters:
        on_host = parameter in offloaded
        grad = parameter if on_host else parameter.grad
        if grad is None or id(parameter) in counted_elsewhere or not is_counted_here(grad):
            continue
        local = offloaded[parameter] if on_host else local_part(grad)
        bound = smallest / factor if on_host else smallest
        counts[0] += (local.abs() < bound).sum().to(device)
        counts[1] += local.numel()
    if dist.is_initialized():
        dist.all_reduce(counts)
    small, entries = counts.tolist()
    return float(small / max(1.0, entries))
