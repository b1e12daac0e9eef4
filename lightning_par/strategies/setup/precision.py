"""Precision plugins that `MixedPrecision` brings, and what a mesh changes of Lightning's."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.master_weights import keep_dtypes, masters_in_place
from lightning_par.upstream.lightning import after_closure

__all__ = ["Float8Precision", "MasterWeightPrecision", "share_overflows"]

_FLOAT8_MULTIPLE = 16
"""Sizes of a matrix product in float8 are multiples of this."""


def share_overflows(plugin: Precision) -> MeshGradScaler | None:
    """Let a plugin that scales the loss decide together with all ranks; give its scaler."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, MeshGradScaler):
        scaler = plugin.scaler = MeshGradScaler.like(scaler)  # type: ignore[attr-defined]
    return scaler


class MasterWeightPrecision(HalfPrecision):
    """bfloat16 weights, of which the optimizer keeps and changes a float32 copy."""

    def __init__(self) -> None:
        super().__init__("bf16-true")

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            keep_dtypes(optimizer)
        connected: tuple[nn.Module, list[Optimizer], list[Any]] = super().connect(
            model, optimizers, lr_schedulers
        )
        return connected

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        result = closure()
        after_closure(self, model, optimizer)
        if result is None and model.automatic_optimization:
            return None
        with masters_in_place(optimizer):
            optimizer.step(**kwargs)
        return result


class Float8Precision(MixedPrecision):
    """bf16-mixed, with the linear maps of the blocks in float8 through torchao.

    Args:
        device: Type of the devices.
        blocks: Gives the FQNs of the blocks of a module.
    """

    def __init__(self, device: str, blocks: Callable[[nn.Module], Sequence[str]]) -> None:
        super().__init__("bf16-mixed", device)
        self._blocks = blocks

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        float8 = import_module("torchao.float8")
        for name in self._blocks(module):
            float8.convert_to_float8_training(
                module.get_submodule(name), module_filter_fn=lambda m, _: _fits_float8(m)
            )
        return module


def _fits_float8(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    sizes = module.in_features, module.out_features
    return all(size % _FLOAT8_MULTIPLE == 0 for size in sizes) and not isinstance(
        module.weight, torch.nn.UninitializedParameter
    )
