"""`MixedPrecision`: fewer bits for the computation, and a log of what they lose."""

from importlib.util import find_spec
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision as Autocast
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from torch import nn
from typing_extensions import override

from lightning_par.engine.grad_scaler import MeshGradScaler, underflow_share
from lightning_par.errors import ConfigurationError, either, raise_problems
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.resolved_plan import resolve_plan
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.setup.precision import (
    Float8,
    FLOAT8_RECIPES,
    Float8Precision,
    MasterWeightPrecision,
)

__all__ = ["MixedPrecision"]

_PRECISIONS = ("16-mixed", "bf16-mixed", "bf16-true")
_REDUCTIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COMPUTES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
_FLOAT8 = (False, True, *FLOAT8_RECIPES)


class MixedPrecision(pl.Callback):
    """Computes in 16 bits, or in 8, and keeps the weights in 32.

    Leave ``Trainer(precision=...)`` out, or give the same there. Logged at the Trainer's
    ``log_every_n_steps``, the same on every rank:

    - ``precision/loss_scale`` (factor): of the loss, under ``"16-mixed"``
    - ``precision/skipped_steps`` (steps): left out since the start, under ``"16-mixed"``
    - ``precision/underflow`` (fraction): entries of the gradients that are below the smallest
      normal number of the dtype that computed them, zeros included; where offloaded updates stream,
      of what stays on the device

    Args:
        precision: ``"bf16-mixed"`` and ``"16-mixed"`` keep weights in float32 and cast what is
            multiplied; the latter scales the loss, and a gradient that overflows on any rank leaves
            the step out on every rank. ``"bf16-true"`` keeps weights in bfloat16, of which the
            optimizer holds and changes a copy in float32.
        reduce_dtype: In which replicas sum their gradients: ``"float32"``, ``"bfloat16"`` or
            ``"float16"``; None: float32 under ``"bf16-true"``, else that of the weights. Experts
            that are sharded over replicas keep that of the weights.
        float8: Compute the linear maps of the blocks in 8 bits, through torchao.
            ``"tensorwise"``, or True, has one scale for a tensor and ``"rowwise"`` one for a row,
            both under ``"bf16-mixed"``, on GPUs of compute capability 8.9 or higher; ``"mxfp8"``
            has one for 32 numbers, under ``"bf16-true"``, from 10.0 on. A rank scales what it
            holds. Maps whose shards are no multiples of 16 (of 32) stay as they are.
        init_scale: Of the loss at the start.
        growth_interval: After how many good steps the scale is doubled.

    Raises:
        ConfigurationError: A value does not exist or does not fit another one; with every problem.

    **Communicates**: at every logged step two numbers, and under ``"16-mixed"`` at every step one,
    over all ranks.

    Examples:
        >>> trainer = L.Trainer(strategy="hybrid3d", callbacks=[MixedPrecision("bf16-mixed")])
    """

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed", "bf16-true"] = "bf16-mixed",
        *,
        reduce_dtype: Literal["bfloat16", "float16", "float32"] | None = None,
        float8: bool | Literal["tensorwise", "rowwise", "mxfp8"] = False,
        init_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        _check_values(precision, reduce_dtype, float8, init_scale, growth_interval)
        self.precision = precision
        self.float8 = "tensorwise" if float8 is True else float8
        if reduce_dtype is None and precision == "bf16-true":
            self._reduce_dtype: torch.dtype | None = torch.float32
        else:
            self._reduce_dtype = None if reduce_dtype is None else _REDUCTIONS[reduce_dtype]
        self._reduce_asked = reduce_dtype
        self._scaling = {"init_scale": init_scale, "growth_interval": growth_interval}
        self._plugin: Precision | None = None
        self._underflow: float | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the strategy the precision, before it puts the model on its devices."""
        strategy = trainer.strategy
        device = strategy.root_device
        self._check_trainer(trainer, device)
        if isinstance(strategy, MeshStrategy):
            strategy.change_options(reduce_dtype=self._reduce_dtype)
        if self._plugin is None:
            self._plugin = self._make_plugin(device, strategy)
        strategy.precision_plugin = self._plugin

    def _make_plugin(self, device: torch.device, strategy: Strategy) -> Precision:
        float8 = None
        if self.float8:
            tensor = strategy.sizes.tensor if isinstance(strategy, MeshStrategy) else 1
            float8 = Float8(recipe=self.float8, blocks=_block_names, tensor=tensor)
        if self.precision == "bf16-true":
            return MasterWeightPrecision(float8)
        if float8 is not None:
            return Float8Precision(device.type, float8)
        if self.precision == "bf16-mixed":
            return Autocast("bf16-mixed", device.type)
        scaler = torch.amp.GradScaler(device.type, **self._scaling)  # type: ignore[arg-type]
        return Autocast("16-mixed", device.type, scaler)

    def _check_trainer(self, trainer: pl.Trainer, device: torch.device) -> None:
        problems = []
        if trainer.precision not in ("32-true", self.precision):
            problems.append(
                f"MixedPrecision({self.precision!r}) and Trainer(precision={trainer.precision!r}) "
                "ask for different precisions. Remove precision= from the Trainer. (On a CPU, "
                "Lightning itself changes Trainer(precision='16-mixed') to 'bf16-mixed'.)"
            )
        if self._reduce_asked is not None and not isinstance(trainer.strategy, MeshStrategy):
            problems.append(
                f"reduce_dtype={self._reduce_asked!r} needs a strategy of lightning_par, such as "
                f"'hybrid3d', but the Trainer has {type(trainer.strategy).__name__}. Use such a "
                "strategy, or leave reduce_dtype out."
            )
        if self.float8:
            problems += _float8_problems(self.float8, device)
        raise_problems(ConfigurationError, "LP607", problems)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Look at the gradients, which are not scaled any more."""
        self._underflow = None
        if (trainer.global_step + 1) % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        scaler, strategy = self._scaler(trainer), trainer.strategy
        scale = 1.0 if scaler is None else scaler.get_scale()
        elsewhere: frozenset[int] = frozenset()
        offloaded, factor = None, 1.0
        if isinstance(strategy, MeshStrategy):
            elsewhere = strategy.parallel_model.counted_elsewhere
            host = strategy.parallel_model.host
            if host is not None:
                offloaded, factor = host.gradients(), float(host.offloaded_gradients.factor)
        smallest = torch.finfo(_COMPUTES[self.precision]).tiny / scale
        device = strategy.root_device
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self._underflow = underflow_share(held, smallest, device, elsewhere, offloaded, factor)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self._underflow is None:
            return
        values, self._underflow = {"underflow": self._underflow}, None
        scaler = self._scaler(trainer)
        if scaler is not None:
            values["loss_scale"] = scaler.get_scale()
        if isinstance(scaler, MeshGradScaler):
            values["skipped_steps"] = float(scaler.skipped_steps)
        for name, value in values.items():
            pl_module.log(f"precision/{name}", value, rank_zero_only=False)

    @staticmethod
    def _scaler(trainer: pl.Trainer) -> torch.amp.GradScaler | None:
        return getattr(trainer.precision_plugin, "scaler", None)


def _block_names(module: nn.Module) -> tuple[str, ...]:
    plan = find_plan(module)
    return () if plan is None else resolve_plan(module, plan).block_names


def _check_values(
    precision: Any, reduce_dtype: Any, float8: Any, init_scale: Any, growth_interval: Any
) -> None:
    problems = []
    if precision not in _PRECISIONS:
        problems.append(
            f"precision={precision!r} must be {either([repr(p) for p in _PRECISIONS])}."
        )
    if reduce_dtype is not None and reduce_dtype not in _REDUCTIONS:
        valid = either([repr(d) for d in _REDUCTIONS])
        problems.append(f"reduce_dtype={reduce_dtype!r} must be {valid}, or None.")
    if float8 not in _FLOAT8:
        problems.append(f"float8={float8!r} must be {either([repr(f) for f in _FLOAT8])}.")
    elif float8:
        needed = FLOAT8_RECIPES["tensorwise" if float8 is True else float8].precision
        if precision != needed:
            problems.append(
                f"float8={float8!r} needs precision={needed!r}, but it is {precision!r}."
            )
    if not init_scale > 0:
        problems.append(f"init_scale={init_scale!r} must be more than 0.")
    if not isinstance(growth_interval, int) or growth_interval < 1:
        problems.append(f"growth_interval={growth_interval!r} must be a whole number of 1 or more.")
    raise_problems(ConfigurationError, "LP902", problems)


def _is_there(module: str) -> bool:
    """Whether a module can be found; packages around it are imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _float8_problems(recipe: str, device: torch.device) -> list[str]:
    problems, needed = [], FLOAT8_RECIPES[recipe]
    if find_spec("torchao") is None:
        problems.append(f"float8={recipe!r} needs torchao: pip install 'lightning-par[float8]'.")
    elif not _is_there(needed.module):
        problems.append(
            f"float8={recipe!r} needs a version of torchao that has {needed.module}, such as 0.18."
        )
    least = f"{needed.capability[0]}.{needed.capability[1]}"
    needs = f"float8={recipe!r} needs a GPU of compute capability {least} or higher"
    if device.type != "cuda":
        problems.append(f"{needs}, but the Trainer runs on {device.type}.")
    elif torch.cuda.get_device_capability(device) < needed.capability:
        major, minor = torch.cuda.get_device_capability(device)
        problems.append(f"{needs}, but this GPU has {major}.{minor}.")
    return problems
