"""Which attention kernel to use: by name, or ``"auto"`` by device, dtype, head dim and mask."""

from functools import cache

from torch import Tensor

from lightning_par.engine.context.kernels.aten import (
    AtenCpuKernel,
    AtenCudnnKernel,
    AtenEfficientKernel,
    AtenFlashKernel,
    AttentionKernel,
    EagerKernel,
)
from lightning_par.engine.context.kernels.flash_attn import (
    FlashAttn3Kernel,
    FlashAttn4Kernel,
    FlashAttnKernel,
)
from lightning_par.errors import ConfigurationError, either, nearest

__all__ = ["KERNELS", "check_backend", "choose_kernel"]

KERNELS: dict[str, AttentionKernel] = {
    kernel.name: kernel
    for kernel in (
        AtenCudnnKernel(),
        AtenFlashKernel(),
        AtenEfficientKernel(),
        AtenCpuKernel(),
        EagerKernel(),
        FlashAttnKernel(),
        FlashAttn3Kernel(),
        FlashAttn4Kernel(),
    )
}
"""Every kernel by its name. ``"auto"`` takes the first of `_AUTOMATIC` that can."""

_AUTOMATIC = ("aten_cudnn", "aten_flash", "aten_efficient", "aten_cpu", "eager")


def check_backend(name: str) -> None:
    """Refuse a backend that does not exist, or that this machine does not have.

    Raises:
        ConfigurationError: With the nearest name, or what is missing and the backends that work.
    """
    if name == "auto":
        return
    names = ["auto", *KERNELS]
    if name not in names:
        text = f"attention_backend={name!r} must be {either(names)}{nearest(name, names)}"
        raise ConfigurationError("LP308", text)
    missing = _missing(name)
    if missing is not None:
        here = either(["auto", *(n for n in KERNELS if _missing(n) is None)])
        raise ConfigurationError("LP308", f"attention_backend={name!r} {missing}. Use {here}.")


@cache
def _missing(name: str) -> str | None:
    return KERNELS[name].missing()


def choose_kernel(name: str, query: Tensor, *, masked: bool) -> AttentionKernel:
    """Return the kernel for a call.

    Args:
        name: A key of `KERNELS`, or ``"auto"``.
        query: [B, N, T, H]; its device, dtype and H decide.
        masked: Whether keys are masked.

    Raises:
        ConfigurationError: The named kernel cannot take this call.
    """
    if name == "auto":
        return KERNELS[next(n for n in _AUTOMATIC if _refusal(n, query, masked=masked) is None)]
    refusal = _refusal(name, query, masked=masked)
    if refusal is not None:
        fits = [n for n in KERNELS if _refusal(n, query, masked=masked) is None]
        kind = str(query.dtype).removeprefix("torch.")
        raise ConfigurationError(
            "LP308",
            f"attention_backend={name!r} {refusal} (this call has head dim {query.shape[-1]}, "
            f"{kind}, on {query.device.type}). Use {either(['auto', *fits])}.",
        )
    return KERNELS[name]


def _refusal(name: str, query: Tensor, *, masked: bool) -> str | None:
    kernel = KERNELS[name]
    refusal = _missing(name) or kernel.refusal(
        device=query.device, dtype=query.dtype, head_dim=query.shape[-1]
    )
    if refusal is None and masked and not kernel.takes_bias:
        return "does not support a mask of padded keys"
    return refusal
