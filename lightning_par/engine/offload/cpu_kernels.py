"""CPU kernels of the Adam step that `adam` defines.

=========  ===========================================================================
kernel     what runs
=========  ===========================================================================
native     a C++ loop, compiled on first use; one pass over memory, any dtype
torch      torch's fused Adam, tile by tile, between conversions of dtypes
=========  ===========================================================================

"auto" is native, or torch where no C++ compiler works.

Moments in bfloat16 are rounded at random, to the same bits in every kernel; see Note [Stochastic
rounding].
"""

import logging
import math
from ctypes import byref, c_double, c_int, c_int64, c_uint32, c_void_p, CDLL, Structure
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from lightning_par.engine.offload.adam import AdamRule, AdamTensors
from lightning_par.engine.offload.cpp_build import build_library
from lightning_par.engine.offload.rounding import entry_index, mixed, random_bits, round_to_bfloat16
from lightning_par.errors import ConfigurationError, either, OffloadError
from lightning_par.upstream.aten import fused_adam_, fused_adamw_

__all__ = ["KERNELS", "AdamKernel", "choose_kernel", "kernel_source"]

KERNELS = ("native", "torch", "auto")
"""Values of `cpu_kernel`."""

_TILE = 2**18
"""Entries that the torch kernel converts at once: its temporary copies stay in the cache."""

_log = logging.getLogger(__name__)


class AdamKernel(Protocol):
    """Computes one Adam step of flat tensors, in place.

    Attributes:
        name: Value of `cpu_kernel` that selects it.
        is_parallel: Whether it uses several threads by itself, so that the caller need not split.
    """

    name: str
    is_parallel: bool

    def __call__(
        self,
        rule: AdamRule,
        tensors: AdamTensors,
        *,
        step: int,
        scale: float = 1.0,
        largest: float = math.inf,
    ) -> None:
        """Update `tensors` in place; the gradient is only read.

        Args:
            rule: Hyperparameters of the step.
            tensors: Master weight, moments, gradient and output of one parameter.
            step: Number of this step, from 1.
            scale: Factor of the gradient.
            largest: Largest absolute value of the scaled gradient; entries beyond are clamped.
        """


def kernel_source() -> Path:
    """Return the C++ file of the native kernel."""
    return Path(__file__).with_name("adam.cpp")


def choose_kernel(name: str, cache: Path) -> AdamKernel:
    """Return a kernel that works on this machine; log it if "auto" has to take the slower one.

    Args:
        name: One of `KERNELS`.
        cache: Folder of compiled libraries.

    Raises:
        ConfigurationError: `name` is not one of `KERNELS`.
        OffloadError: `name` is "native", and it cannot be compiled or loaded.
    """
    if name not in KERNELS:
        raise ConfigurationError(
            "LP902", f"cpu_kernel={name!r} must be {either([repr(k) for k in KERNELS])}."
        )
    if name == "torch":
        kernel: AdamKernel = _TorchKernel()
    else:
        try:
            kernel = _NativeKernel(build_library(kernel_source(), cache))
        except OffloadError as error:
            if name == "native":
                raise
            kernel = _TorchKernel()
            _log.warning(
                "cpu_kernel='auto' falls back to the slower 'torch', as 'native' failed: %s", error
            )
    return kernel


class _Rule(Structure):
    """`LightningParAdam` of adam.cpp: the same fields in the same order."""

    _fields_ = [
        *[(name, c_double) for name in ("lr", "beta1", "beta2", "eps", "decay", "l2")],
        *[(name, c_double) for name in ("correction1", "root_correction2", "scale", "largest")],
        ("seed", c_uint32),
    ]


# The enum `Kind` of adam.cpp.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}


@dataclass(eq=False)
class _NativeKernel:
    library: Path
    name: str = "native"
    is_parallel: bool = False
    _function: Any = field(init=False)

    def __post_init__(self) -> None:
        try:
            self._function = CDLL(str(self.library)).lightning_par_adam
        except (OSError, AttributeError) as error:
            raise OffloadError(
                "LP601",
                f"the compiled kernel {self.library} cannot be loaded ({error}). Remove this "
                "file, so that it is compiled again, or use cpu_kernel='torch'.",
            ) from error
        self._function.argtypes = [c_void_p] * 6 + [c_int64] * 2 + [c_int] * 4
        self._function.restype = c_int

    def __call__(
        self,
        rule: AdamRule,
        tensors: AdamTensors,
        *,
        step: int,
        scale: float = 1.0,
        largest: float = math.inf,
    ) -> None:
        first, second = rule.betas
        given = _Rule(
            lr=rule.lr,
            beta1=first,
            beta2=second,
            eps=rule.eps,
            # One formula for both kinds: decoupled decay, and L2, which is 0 for the other.
            decay=rule.weight_decay if rule.decoupled else 0.0,
            l2=0.0 if rule.decoupled else rule.weight_decay,
            correction1=1 - first**step,
            root_correction2=math.sqrt(1 - second**step),
            # The bound is symmetric, so that ascending is descending along -g.
            scale=-scale if rule.maximize else scale,
            largest=largest,
            seed=mixed(step),
        )
        used = (tensors.master, tensors.mean, tensors.square, tensors.grad, tensors.out)
        # The library gets bare addresses: a stride or a short tensor would corrupt memory.
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in used)
        assert len({t.numel() for t in used}) == 1
        master, mean, _, grad, out = (_KINDS[t.dtype] for t in used)
        failed = self._function(
            byref(given),
            *(t.data_ptr() for t in used),
            tensors.master.numel(),
            tensors.first,
            master,
            mean,
            grad,
            out,
        )
        if failed:
            raise _unknown(tensors)


def _unknown(tensors: AdamTensors) -> OffloadError:
    return OffloadError(
        "LP604",
        "the offloaded Adam step of cpu_kernel='native' does not support gradients of "
        f"{tensors.grad.dtype} with moments of {tensors.mean.dtype}, master weights of "
        f"{tensors.master.dtype} and parameters of {tensors.out.dtype}. Use cpu_kernel='torch'.",
    )


@dataclass(eq=False)
class _TorchKernel:
    name: str = "torch"
    is_parallel: bool = True

    @torch.no_grad()
    def __call__(
        self,
        rule: AdamRule,
        tensors: AdamTensors,
        *,
        step: int,
        scale: float = 1.0,
        largest: float = math.inf,
    ) -> None:
        for low in range(0, tensors.master.numel(), _TILE):
            self._tile(rule, tensors.part(low, low + _TILE), step, scale, largest)

    def _tile(
        self, rule: AdamRule, tile: AdamTensors, step: int, scale: float, largest: float
    ) -> None:
        wide, short = tile.master.dtype, tile.mean.dtype != tile.master.dtype
        # In the order of the rule: scale, then bound.
        grad = tile.grad.to(wide).mul(scale).clamp_(-largest, largest)
        # torch's kernel wants one dtype, and would round short moments to the nearest.
        mean, square = (m.to(wide) if short else m for m in (tile.mean, tile.square))
        fused = fused_adamw_ if rule.decoupled else fused_adam_
        fused(
            [tile.master],
            [grad],
            [mean],
            [square],
            [],
            [torch.tensor(float(step))],
            lr=rule.lr,
            beta1=rule.betas[0],
            beta2=rule.betas[1],
            weight_decay=rule.weight_decay,
            eps=rule.eps,
            amsgrad=False,
            maximize=rule.maximize,
        )
        # torch's kernel has written the wide copies; the short ones are rounded from them.
        if short:
            index = entry_index(mean.shape, [tile.first], [0], mean.device)
            random = random_bits(index, mixed(step))
            # One hash serves both moments: 16 bits each, as many as bfloat16 cuts off.
            round_to_bfloat16(mean, random, tile.mean)
            round_to_bfloat16(square, random >> 16, tile.square)
        tile.out.copy_(tile.master)
