"""Runs without a fault, in which no checker may find anything."""

from typing import Any

import torch

from benchmarks.zoo.comm import Layout

__all__ = ["HEALTHY", "Case"]

Case = tuple[Layout, dict[str, Any], int, bool]
"""Layout, options of the configuration, seed, and whether it goes on from a file."""

_LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, zero=True),
    Layout(dp=2, micro=4),
    Layout(tp=2),
    Layout(tp=2, sequence=True),
    Layout(pp=2, micro=2),
    Layout(cp=2),
    Layout(dp=2, tp=2, zero=True, sequence=True),
    Layout(pp=2, dp=2, zero=True, micro=2),
    Layout(cp=2, tp=2, sequence=True),
]
_EXPERTS = [Layout(ep=2), Layout(ep=2, micro=2), Layout(dp=2, ep=2, zero=True)]
_EXPERTS += [Layout(ep=2, tp=2, sequence=True), Layout(ep=2, cp=2), Layout(tp=2, sequence=True)]
_EXPERTS += [Layout(pp=2, micro=2)]
_DROPS: dict[str, Any] = {"dropout": 0.2, "recompute": True}
_SINGLE: dict[str, Any] = {"dtype": torch.float32}

HEALTHY: list[Case] = [
    *((layout, {}, 1, False) for layout in _LAYOUTS),
    *((layout, _DROPS, 2, True) for layout in _LAYOUTS),
    *((layout, _SINGLE, 3, False) for layout in _LAYOUTS[:6]),
    *((layout, {"experts": 4}, 4, False) for layout in _EXPERTS),
    *((layout, {"experts": 4, **_DROPS}, 5, True) for layout in _EXPERTS),
]
"""40 of them."""
