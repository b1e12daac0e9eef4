"""The command that lists the attention kernels."""

from typing import TYPE_CHECKING

from lightning_par.commands import quick_imports

if TYPE_CHECKING:
    from lightning_par.engine.context.kernels.aten import AttentionKernel

__all__ = ["backends"]


def backends() -> None:
    """List the attention kernels of context parallelism: which work here, and why others do not.

    The first column is the name for ``attention_backend``; "auto" uses the first of these that
    supports a call.
    """
    with quick_imports():
        from lightning_par.engine.context.kernels.select import KERNELS

    rows = [("backend", "here", "takes"), *(_row(kernel) for kernel in KERNELS.values())]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, here, takes in rows:
        print(f"{name:<{widths[0]}}  {here:<{widths[1]}}  {takes}")


def _row(kernel: "AttentionKernel") -> tuple[str, str, str]:
    """Return the kernel's name, "yes" or why it is missing, and the inputs that it supports."""
    import torch

    # A kernel of a device that is not here still lists its dtypes: they do not depend on it.
    device = torch.device(kernel.device_type or "cpu")
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    takes = [
        str(kind).removeprefix("torch.")
        for kind in kinds
        if kernel.refusal(device=device, dtype=kind, head_dim=64) is None  # 64: all support it
    ]
    masks = "padded keys" if kernel.takes_bias else "no padded keys"
    where = kernel.device_type or "any device"
    return kernel.name, kernel.missing() or "yes", f"{where}: {', '.join(takes)}; {masks}"
