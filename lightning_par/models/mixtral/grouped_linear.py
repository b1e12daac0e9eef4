"""Grouped matrix products: one per expert, for tokens sorted by expert.

Shapes: M rows (tokens that were sent to experts), E experts here, K in, N out.
"""

from functools import cache
from typing import Literal

import torch
from torch import nn, Tensor
from torch.nn import functional as F

__all__ = ["GroupedBackend", "GroupedLinear", "RowCounts", "grouped_product", "supports_grouped"]

GroupedBackend = Literal["auto", "grouped", "loop"]
_ALIGNMENT = 16
"""Bytes of which the rows of both factors have to be a multiple for `F.grouped_mm`."""


class RowCounts:
    """Number of rows of every expert, which the host reads from the device once, if at all.

    Args:
        on_device: [E], int64.
    """

    def __init__(self, on_device: Tensor) -> None:
        self.on_device = on_device
        self._on_host: list[int] | None = None

    @property
    def on_host(self) -> list[int]:
        """The numbers; the first time, the host waits for the device."""
        if self._on_host is None:
            self._on_host = self.on_device.tolist()
        return self._on_host


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def supports_grouped(device_type: str, dtype: torch.dtype) -> bool:
    """Return whether `F.grouped_mm` works on a device and dtype, forward and backward.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: Dtype of both factors.
    """
    return _multiplies(device_type, dtype)


@cache
def _multiplies(device_type: str, dtype: torch.dtype) -> bool:
    # By trying: support depends on torch's version, the GPU and the dtype, and no query exists.
    if not hasattr(F, "grouped_mm"):
        return False
    try:
        with torch.enable_grad():
            x = torch.zeros(16, 16, device=device_type, dtype=dtype, requires_grad=True)
            w = torch.zeros(2, 16, 16, device=device_type, dtype=dtype, requires_grad=True)
            offsets = torch.tensor([0, 16], device=device_type, dtype=torch.int32)
            F.grouped_mm(x, w.transpose(1, 2), offs=offsets).square().sum().backward()
    except (RuntimeError, NotImplementedError, ValueError):
        return False
    return True


def _use_grouped_mm(x: Tensor, weight: Tensor, backend: GroupedBackend) -> bool:
    """Return whether to call `F.grouped_mm`, where it is supported and, for "auto", faster."""
    # Traced, it takes bfloat16 only.
    traced = torch.compiler.is_compiling() and x.dtype != torch.bfloat16
    if backend == "loop" or traced or not len(x):
        return False
    # On the CPU it is faster in float32 only, see benchmarks/RESULTS.md. On CUDA it has a kernel in
    # bfloat16 only, else multiplies expert by expert and reads `counts` in each call.
    fast = torch.bfloat16 if x.device.type == "cuda" else torch.float32
    if backend == "auto" and x.dtype != fast:
        return False
    rows = (weight.shape[1] * weight.element_size(), weight.shape[2] * weight.element_size())
    fits = not any(size % _ALIGNMENT for size in rows)
    return fits and x.dtype == weight.dtype and supports_grouped(x.device.type, x.dtype)


def grouped_product(
    x: Tensor, weight: Tensor, counts: RowCounts, backend: GroupedBackend = "auto"
) -> Tensor:
    """Multiply the rows of every expert by the transpose of its own weight.

    Args:
        x: [M, K], rows sorted by expert; after those of the last one there may be padding.
        weight: [E, N, K].
        counts: Number of rows of every expert; the sum is M less the padding.
        backend: ``"grouped"``: `F.grouped_mm` where it supports device, dtype and sizes (not
            float64), else the loop; ``"loop"``: one product per expert; ``"auto"``: the faster one.

    Returns:
        [M, N]; the rows of the padding have no meaning, and may be NaN.
    """
    if _use_grouped_mm(x, weight, backend):
        offsets = counts.on_device.cumsum(0).to(torch.int32)
        product: Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
        return product
    sizes = counts.on_host
    *parts, padding = x.split([*sizes, len(x) - sum(sizes)])
    products = [F.linear(p, w) for p, w in zip(parts, weight.unbind(), strict=True)]
    return torch.cat([*products, products[0].new_zeros(len(padding), weight.shape[1])])


class GroupedLinear(nn.Module):
    """E linear maps without bias, their weights stacked in one parameter [E, N, K].

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        backend: Kernel; see `grouped_product`.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, backend: GroupedBackend
    ) -> None:
        super().__init__()
        self.backend: GroupedBackend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, counts: RowCounts) -> Tensor:
        """Map [M, K], sorted by expert, to [M, N].

        Args:
            x: [M, K], rows sorted by expert.
            counts: Number of rows of every expert.
        """
        # Autocast has no rule for F.grouped_mm, so its casts are made here.
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            return grouped_product(x.to(dtype), self.weight.to(dtype), counts, self.backend)
        return grouped_product(x, self.weight, counts, self.backend)
