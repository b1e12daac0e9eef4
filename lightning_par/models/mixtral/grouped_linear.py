"""One matrix product per expert, for tokens that are sorted by expert.

Shapes: M rows (tokens that were sent to experts), E experts here, K in, N out.
"""

from functools import cache
from typing import Literal

import torch
from torch import nn, Tensor
from torch.nn import functional as F

__all__ = ["GroupedBackend", "GroupedLinear", "grouped_product", "supports_grouped"]

GroupedBackend = Literal["auto", "grouped", "loop"]
_ALIGNMENT = 16  # bytes, of every row


@cache
def supports_grouped(device_type: str, dtype: torch.dtype) -> bool:
    """Tell by trying whether `F.grouped_mm` computes a product and its gradients.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        dtype: Of both factors.
    """
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


def _chosen(x: Tensor, weight: Tensor, backend: GroupedBackend) -> bool:
    """Whether to call `F.grouped_mm`: "auto" does where it is the faster one, which on the CPU is
    float32 only; see benchmarks/RESULTS.md.
    """
    if backend == "loop" or not len(x):
        return False
    if backend == "auto" and x.device.type != "cuda" and x.dtype != torch.float32:
        return False
    rows = (weight.shape[1] * weight.element_size(), weight.shape[2] * weight.element_size())
    fits = not any(size % _ALIGNMENT for size in rows)
    return fits and x.dtype == weight.dtype and supports_grouped(x.device.type, x.dtype)


def grouped_product(
    x: Tensor, weight: Tensor, counts: Tensor, backend: GroupedBackend = "auto"
) -> Tensor:
    """Multiply the rows of every expert with its own weight.

    Args:
        x: [M, K], the rows of expert 0 first.
        weight: [E, N, K].
        counts: [E], int64: how many rows each expert has; their sum is M.
        backend: ``"grouped"`` is `F.grouped_mm`, where it supports device, dtype and sizes (not
            float64), ``"loop"`` one product per expert; ``"auto"`` takes the faster one.

    Returns:
        [M, N].
    """
    if _chosen(x, weight, backend):
        offsets = counts.cumsum(0).to(torch.int32)
        product: Tensor = F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
        return product
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(p, w) for p, w in zip(parts, weight.unbind(), strict=True)])


class GroupedLinear(nn.Module):
    """E linear maps without bias, their weights in one parameter [E, N, K].

    Args:
        num_experts: E.
        in_features: K.
        out_features: N.
        backend: Of `grouped_product`.
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, backend: GroupedBackend
    ) -> None:
        super().__init__()
        self.backend: GroupedBackend = backend
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        nn.init.normal_(self.weight, std=in_features**-0.5)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Map [M, K], sorted by expert, to [M, N]; `counts` [E] says how many rows each has."""
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            return grouped_product(x.to(dtype), self.weight.to(dtype), counts, self.backend)
        return grouped_product(x, self.weight, counts, self.backend)
