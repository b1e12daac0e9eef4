"""Precision plugins that `MixedPrecision` brings, and the copy of the user's that a mesh uses."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn, Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.master_weights import keep_dtypes, masters_in_place
from lightning_par.strategies.step.gradient_path import GradientPath, mesh_precision
from lightning_par.upstream.lightning import after_closure

__all__ = ["AdoptedPrecision", "Float8Precision", "MasterWeightPrecision"]

_FLOAT8_MULTIPLE = 16
"""Sizes of a matrix product in float8 are multiples of this."""


class AdoptedPrecision:
    """The strategy's own copy of the precision plugin that the user chose.

    Lightning runs the backward of one device, clips its gradients, and scales the loss for one, in
    methods of the plugin. The copy does so for the whole mesh; the user's object stays as it is.
    """

    def __init__(self) -> None:
        self._given: Precision | None = None
        self._own: Precision | None = None

    @property
    def given(self) -> Precision | None:
        """The plugin that was adopted last, as the user made it."""
        return self._given

    def adopt(self, plugin: Precision) -> Precision:
        """Return the copy of a plugin; for one that was adopted last, the same as then.

        Args:
            plugin: The user's, or the copy itself.
        """
        if self._own is None or (plugin is not self._given and plugin is not self._own):
            self._given, self._own = plugin, copy.copy(plugin)
            self._own.__class__ = mesh_precision(type(plugin))
            scaler = getattr(plugin, "scaler", None)
            if scaler is not None:
                self._own.scaler = MeshGradScaler.like(scaler)  # type: ignore[attr-defined]
        return self._own

    def connect(
        self,
        gradients: GradientPath,
        around_backward: Callable[[Tensor], AbstractContextManager[Tensor]],
    ) -> None:
        """Let the copy run backwards and clip on the mesh; norms know the scaler of the copy.

        Args:
            gradients: The path along which it clips.
            around_backward: Surrounds a backward; gives the loss that is to be differentiated.
        """
        self._own.gradients = gradients  # type: ignore[union-attr]
        self._own.around_backward = around_backward  # type: ignore[union-attr]
        gradients.scaler = getattr(self._own, "scaler", None)


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
        device: Device type, such as ``"cuda"``.
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
