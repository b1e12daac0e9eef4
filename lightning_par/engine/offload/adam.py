"""The Adam step on the host: what a step is, and the kernels that can take it.

=========  ===========================================================================
kernel     what runs
=========  ===========================================================================
native     a C++ loop, compiled on first use; one pass over memory, any dtype
compile    the same loop as torch.compile makes it
torch      torch's fused Adam, tile by tile, between conversions of dtypes
=========  ===========================================================================

"auto" is native, else torch: where no compiler works for the first, none does for torch.compile.

For the gradient g, its scale s, the bounds +-c and the step number t:

    g <- clamp(s g, -c, c);   L2: g <- g + wd p;   decoupled: p <- p - lr wd p
    m <- m + (1 - b1)(g - m);   v <- b2 v + (1 - b2) g^2
    p <- p - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

Note [Short moments]: moments in bfloat16 are rounded up or down at random, so that they keep their
expectation: with b2 = 0.999 a step changes v by less than its last digit. The random bits are a
hash of the entry's number and the step, hence the same in every run and on every kernel.

**Source**: Kingma and Ba 1412.6980, algorithm 1; Loshchilov and Hutter 1711.05101 (decoupled).
"""

import logging
import math
from collections.abc import Callable, Mapping
from ctypes import byref, c_double, c_int, c_int64, c_uint32, c_void_p, CDLL, Structure
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_par.engine.offload.cpp_build import build_library
from lightning_par.engine.offload.stochastic_rounding import mixed, round_randomly
from lightning_par.errors import ConfigurationError, either, OffloadError
from lightning_par.upstream.aten import fused_adam_, fused_adamw_

__all__ = ["KERNELS", "AdamKernel", "AdamRule", "AdamTensors", "choose_kernel", "kernel_source"]

KERNELS = ("native", "compile", "torch", "auto")
"""Values of `cpu_kernel`."""

_TILE = 2**18
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """What a parameter group says about a step, at the time when the step was asked for.

    Attributes:
        lr: Learning rate.
        betas: Of the two means.
        eps: Added to the root.
        weight_decay: Factor of the parameter.
        decoupled: Whether the decay leaves the moments alone (AdamW).
        maximize: Whether to climb.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    maximize: bool = False

    @classmethod
    def of_group(cls, group: Mapping[str, Any], *, decoupled: bool) -> "AdamRule":
        """Read a group of `torch.optim.Adam` or `AdamW`.

        Args:
            group: Its lr and betas may be tensors.
            decoupled: Of the optimizer's class, if the group does not say.
        """
        first, second = group["betas"]
        return cls(
            lr=float(group["lr"]),
            betas=(float(first), float(second)),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", decoupled)),
            maximize=bool(group["maximize"]),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class AdamTensors:
    """Flat tensors of n entries each on the host, or the same part of each.

    Attributes:
        master: float32; float64 where everything is.
        mean: Of the gradients; like `master`, or bfloat16.
        square: Mean of the squared gradients; like `mean`.
        grad: float32, bfloat16 or float16; float64 where everything is.
        out: Where the parameter goes; may share the memory of `grad`.
        first: Number of the first entry in the whole tensor.
    """

    master: Tensor
    mean: Tensor
    square: Tensor
    grad: Tensor
    out: Tensor
    first: int = 0

    def part(self, low: int, high: int) -> "AdamTensors":
        """Return the entries low .. high - 1."""
        tensors = (self.master, self.mean, self.square, self.grad, self.out)
        master, mean, square, grad, out = (t[low:high] for t in tensors)
        first = self.first + low
        return AdamTensors(master=master, mean=mean, square=square, grad=grad, out=out, first=first)


class AdamKernel(Protocol):
    """Takes one Adam step of flat tensors, in place.

    Attributes:
        name: As in `KERNELS`.
        is_parallel: Whether it uses several threads by itself.
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
        """Take the step.

        Args:
            rule: Of the parameter's group.
            tensors: Changed in place, but for the gradient.
            step: Number of this step, from 1.
            scale: Factor of the gradient.
            largest: Bound of the scaled gradient's entries.
        """


def kernel_source() -> Path:
    """Return the C++ file of the native kernel."""
    return Path(__file__).with_name("adam.cpp")


def choose_kernel(name: str, cache: Path) -> AdamKernel:
    """Return a kernel that works here, and log which one.

    Args:
        name: As in `KERNELS`.
        cache: Folder of compiled libraries.

    Raises:
        ConfigurationError: There is no such kernel.
        OffloadError: The native one was asked for, and cannot be compiled.
    """
    if name not in KERNELS:
        raise ConfigurationError(
            f"cpu_kernel={name!r} must be {either([repr(k) for k in KERNELS])}."
        )
    if name == "torch":
        kernel: AdamKernel = _TorchKernel()
    elif name == "compile":
        kernel = _CompiledKernel()
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
    _fields_ = [
        *[(name, c_double) for name in ("lr", "beta1", "beta2", "eps", "decay", "l2")],
        *[(name, c_double) for name in ("correction1", "root_correction2", "scale", "largest")],
        ("seed", c_uint32),
    ]


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
                f"{self.library} cannot be loaded ({error}). Remove it, so that it is compiled "
                "again, or use cpu_kernel='torch'."
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
            decay=rule.weight_decay if rule.decoupled else 0.0,
            l2=0.0 if rule.decoupled else rule.weight_decay,
            correction1=1 - first**step,
            root_correction2=math.sqrt(1 - second**step),
            scale=-scale if rule.maximize else scale,
            largest=largest,
            seed=_seed(step),
        )
        used = (tensors.master, tensors.mean, tensors.square, tensors.grad, tensors.out)
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


def _seed(step: int) -> int:
    return mixed(step)


def _unknown(tensors: AdamTensors) -> OffloadError:
    return OffloadError(
        f"no Adam step takes a gradient of {tensors.grad.dtype}, moments of {tensors.mean.dtype} "
        f"and a master of {tensors.master.dtype} to a parameter of {tensors.out.dtype}."
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
        grad = tile.grad.to(wide).mul(scale).clamp_(-largest, largest)
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
        if short:
            round_randomly(mean, square, tile.mean, tile.square, tile.first, _seed(step))
        tile.out.copy_(tile.master)


class _CompiledKernel:
    """Compiles when it is first called, once for each combination of dtypes."""

    def __init__(self) -> None:
        self.name, self.is_parallel = "compile", True
        self._function: Callable[..., None] = torch.compile(_one_pass, dynamic=True)

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
        if tensors.mean.dtype != tensors.master.dtype:
            raise OffloadError(
                "cpu_kernel='compile' keeps moments in the dtype of the master; use 'native' or "
                f"'torch' for state_dtype={tensors.mean.dtype}."
            )
        first, second = rule.betas
        numbers = (
            -scale if rule.maximize else scale,
            largest,
            0.0 if rule.decoupled else rule.weight_decay,
            1 - (rule.lr * rule.weight_decay if rule.decoupled else 0.0),
            1 - first,
            second,
            rule.lr / (1 - first**step),
            math.sqrt(1 - second**step),
            rule.eps,
        )
        used = (tensors.master, tensors.mean, tensors.square, tensors.grad, tensors.out)
        # Numbers in a tensor do not become a part of the compiled code.
        self._function(*used, torch.tensor(numbers, dtype=torch.float64))


def _one_pass(
    master: Tensor, mean: Tensor, square: Tensor, grad: Tensor, out: Tensor, numbers: Tensor
) -> None:
    scale, largest, l2, keep, rest1, beta2, length, root2, eps = numbers.unbind()
    wide = grad.to(master.dtype) * scale
    wide = torch.minimum(torch.maximum(wide, -largest), largest) + l2 * master
    m = mean + rest1 * (wide - mean)
    v = beta2 * square + (1 - beta2) * wide * wide
    p = master * keep - length * m / (v.sqrt() / root2 + eps)
    mean.copy_(m)
    square.copy_(v)
    master.copy_(p)
    out.copy_(p)
