"""Precision plugins that `MixedPrecision` brings, and the copy of the user's that a mesh uses."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeGuard

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

__all__ = [
    "FLOAT8_RECIPES",
    "AdoptedPrecision",
    "Float8",
    "Float8Precision",
    "Float8Recipe",
    "MasterWeightPrecision",
]


class AdoptedPrecision:
    """The strategy's own copy of the precision plugin that the user chose.

    Lightning runs the backward of one device, clips its gradients, and scales the loss for one, in
    methods of the plugin. The copy does so for the whole mesh; the user's object stays as it is.
    """

    def __init__(self) -> None:
        self._own: Any = None

    @property
    def given(self) -> Precision | None:
        """The plugin that was adopted last, as the user made it."""
        return getattr(self._own, "given", None)

    def adopt(self, plugin: Precision) -> Precision:
        """Return the copy of a plugin; for one that was adopted last, the same as then.

        Args:
            plugin: The user's, or the copy itself.
        """
        # Adopted once, as a second copy would lose the state of the scaler.
        if self._own is None or (plugin is not self._own.given and plugin is not self._own):
            # Shallow: scaler, device and whatever the plugin holds are shared with the user's
            # object, whose class and methods stay as they are.
            self._own = copy.copy(plugin)
            self._own.__class__ = mesh_precision(type(plugin))
            self._own.given = plugin
            scaler = getattr(plugin, "scaler", None)
            if scaler is not None:
                device = getattr(plugin, "device", "cuda")  # for which torch makes a scaler
                self._own.scaler = MeshGradScaler.like(scaler, device)
        own: Precision = self._own
        return own

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
        self._own.gradients = gradients
        self._own.around_backward = around_backward
        gradients.scaler = getattr(self._own, "scaler", None)


class MasterWeightPrecision(HalfPrecision):
    """bfloat16 weights, of which the optimizer keeps and changes a float32 copy.

    Args:
        float8: Converts linear maps to products in 8 bits; None: leaves them as they are.
    """

    def __init__(self, float8: "Float8 | None" = None) -> None:
        super().__init__("bf16-true")
        self.float8 = float8

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.float8 is not None:
            self.float8.convert(module)
        return super().convert_module(module)

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        for optimizer in optimizers:
            # Before the states of a checkpoint are loaded, which torch casts to the dtype of the
            # weights.
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
        # Before the masters stand in: forward and backward run in bfloat16.
        result = closure()
        after_closure(self, model, optimizer)
        # As Lightning does for a step that returned None: nothing is updated.
        if result is None and model.automatic_optimization:
            return None
        with masters_in_place(optimizer):
            optimizer.step(**kwargs)
        return result


class Float8Precision(MixedPrecision):
    """bf16-mixed, with linear maps in float8.

    Args:
        device: Device type, such as ``"cuda"``.
        float8: Converts the linear maps.
    """

    def __init__(self, device: str, float8: "Float8") -> None:
        super().__init__("bf16-mixed", device)
        self.float8 = float8

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self.float8.convert(module)
        return module


@dataclass(frozen=True, kw_only=True)
class Float8:
    """Converts the linear maps of the blocks to products in 8 bits, through torchao.

    Attributes:
        recipe: One of `FLOAT8_RECIPES`.
        blocks: Gives the FQNs of the blocks of a module.
        tensor: Ranks over which the maps will be sharded: their shards have to fit, too.
        emulate: Round to 8 bits, and multiply in more: on devices without such products.
    """

    recipe: str
    blocks: Callable[[nn.Module], Sequence[str]]
    tensor: int = 1
    emulate: bool = False

    def convert(self, module: nn.Module) -> None:
        """Replace the linear maps whose sizes fit; their parameters stay the same objects.

        Args:
            module: Whole; parameters may be on meta.
        """
        convert = self._to_mxfp8 if self.recipe == "mxfp8" else self._to_float8
        for name in self.blocks(module):
            convert(module.get_submodule(name))

    def _to_float8(self, block: nn.Module) -> None:
        float8 = import_module("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        float8.convert_to_float8_training(
            block,
            config=replace(config, emulate=self.emulate),
            module_filter_fn=lambda module, _: self._fits(module),
        )

    def _to_mxfp8(self, block: nn.Module) -> None:
        linear = import_module("torchao.prototype.moe_training.mxfp8_linear")
        kernels = import_module("torchao.quantization.quantize_.common").KernelPreference
        kernel = kernels.EMULATED if self.emulate else kernels.AUTO
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if self._fits(child):
                    # Without memory for weights, which the new map takes from the old one.
                    with torch.device("meta"):
                        made = linear.MXFP8Linear(
                            child.in_features,
                            child.out_features,
                            bias=child.bias is not None,
                            kernel_preference=kernel,
                        )
                    # The same objects: the plan, ties and the optimizer know them by identity.
                    made.weight, made.bias = child.weight, child.bias
                    parent.register_module(name, made)

    def _fits(self, module: nn.Module) -> TypeGuard[nn.Linear]:
        """Whether a module is a linear map of which every shard has whole blocks of numbers."""
        if not isinstance(module, nn.Linear):
            return False
        # Of a shard: tensor parallelism divides one of the two sizes by `tensor`.
        multiple = FLOAT8_RECIPES[self.recipe].multiple * self.tensor
        return (
            module.in_features % multiple == 0
            and module.out_features % multiple == 0
            and not isinstance(module.weight, nn.UninitializedParameter)
        )


@dataclass(frozen=True, kw_only=True)
class Float8Recipe:
    """What a way to compute in 8 bits needs.

    Attributes:
        module: Of torchao, which has it.
        capability: Compute capability of the device, or higher.
        precision: Of the Trainer.
        multiple: Of which the sizes of a matrix have to be multiples.
    """

    module: str
    capability: tuple[int, int]
    precision: str
    multiple: int


_FLOAT8 = Float8Recipe(
    module="torchao.float8", capability=(8, 9), precision="bf16-mixed", multiple=16
)
FLOAT8_RECIPES: Mapping[str, Float8Recipe] = {
    "tensorwise": _FLOAT8,
    "rowwise": _FLOAT8,
    "mxfp8": Float8Recipe(
        module="torchao.prototype.moe_training.mxfp8_linear",
        capability=(10, 0),
        precision="bf16-true",
        multiple=32,
    ),
}
"""By their names in `MixedPrecision`: a scale for each tensor, for each row, or for 32 numbers."""
