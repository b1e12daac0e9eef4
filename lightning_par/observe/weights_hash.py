"""The hash of its weights that a run leaves in its certificate."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["WeightsHash"]


class WeightsHash:
    """SHA-256 and norm of weights that are given one after another, whole: the same weights have
    the same, whatever the layout that computed them.
    """

    def __init__(self) -> None:
        self._digest, self._squares, self._count = hashlib.sha256(), 0.0, 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a weight; the order of the names is the caller's, and counts."""
        # Row-major bytes: strides are a matter of the layout, and must not change the hash.
        flat = value.detach().cpu().contiguous().reshape(-1)
        kind = str(value.dtype).removeprefix("torch.")
        # Name, dtype and shape, too: bytes alone would not tell two weights from one of their sum.
        self._digest.update(f"{name} {kind} {list(value.shape)}\n".encode())
        self._digest.update(flat.view(torch.uint8).numpy().data)
        # In float64: a sum of a billion squares in the weights' own dtype would lose its digits.
        self._squares += float(flat.double().square().sum())
        self._count += flat.numel()

    def result(self) -> dict[str, Any]:
        """Return the field `weights` of a certificate."""
        # A text where it is NaN or infinite, which JSON cannot hold.
        norm = math.sqrt(self._squares) if math.isfinite(self._squares) else str(self._squares)
        return {"parameters": self._count, "sha256": self._digest.hexdigest(), "norm": norm}
