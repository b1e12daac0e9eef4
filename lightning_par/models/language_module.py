"""Base LightningModule of the reference models: presets, AdamW, warm-up and cosine decay."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.upstream.lightning import trainer_of

__all__ = ["LanguageModule", "group_parameters"]


class LanguageModule(L.LightningModule):
    """Base of the reference models' LightningModules: AdamW with linear warm-up and cosine decay.

    A subclass sets `config_type` and `model_type` and defines the steps.

    Args:
        preset: Name of a preset of `config_type`.
        overrides: Field of the configuration -> value in place of the preset's.
        lr: Peak learning rate, 0 or more.
        weight_decay: Weight decay of matrices and tables, 0 or more; vectors (biases, norms) are
            not decayed.
        betas: Betas of AdamW.
        warmup_steps: Number of optimizer steps of the linear warm-up, 0 or more.
        max_steps: Optimizer step at which the cosine decay reaches `min_lr_ratio * lr`. None: the
            last step of the run; a run without an end keeps the peak rate.
        min_lr_ratio: Final over peak learning rate, 0 .. 1.

    Raises:
        ConfigurationError: A value is out of range; lists every problem.
    """

    config_type: ClassVar[type[Any]]
    model_type: ClassVar[type[nn.Module]]
    model: Any

    def __init__(
        self,
        preset: str = "tiny",
        overrides: dict[str, Any] | None = None,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 10,
        max_steps: int | None = None,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        problems = [
            f"{name}={value} must be {rule}."
            for name, value, rule, fits in (
                ("lr", lr, "0 or more", lr >= 0),
                ("weight_decay", weight_decay, "0 or more", weight_decay >= 0),
                ("warmup_steps", warmup_steps, "0 or more", warmup_steps >= 0),
                ("max_steps", max_steps, "1 or more", max_steps is None or max_steps >= 1),
                ("min_lr_ratio", min_lr_ratio, "between 0 and 1", 0 <= min_lr_ratio <= 1),
            )
            if not fits
        ]
        raise_problems(ConfigurationError, "LP902", problems)
        self.save_hyperparameters()
        self.config = self.config_type.preset(preset, **(overrides or {}))
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.warmup_steps = warmup_steps
        self.max_steps = max_steps
        self.min_lr_ratio = min_lr_ratio
        self._add_metrics()

    def _add_metrics(self) -> None:
        """Create the metrics of the subclass."""

    def configure_model(self) -> None:
        """Build the network, at the first call only."""
        # Not in __init__: here a strategy can set the meta device, or build a part of it only.
        if not hasattr(self, "model"):
            self.model = self.model_type(self.config)

    def setup(self, stage: str) -> None:
        """Check that the data fits the model before anything is built.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: The data module has a larger vocabulary or longer samples than the
                model.
        """
        data = getattr(self.trainer, "datamodule", None)
        limits = {"vocab_size": self.config.vocab_size}
        # Rotary positions have no largest length.
        if getattr(self.config, "positions", "learned") == "learned":
            limits["max_length"] = self.config.max_length
        problems = []
        for name, limit in limits.items():
            value = getattr(data, name, None)
            if isinstance(value, int) and value > limit:
                problems.append(
                    f"the data has {name}={value}, but the model has {name}={limit}. Pass "
                    f"overrides={{{name!r}: {value}}} to the model."
                )
        raise_problems(ConfigurationError, "LP912", problems)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return AdamW, fused where Lightning allows it, and its schedule, updated every step."""
        groups = group_parameters(self.named_parameters(), weight_decay=self.weight_decay)
        # Lightning clips no gradients of a fused optimizer under mixed precision: it takes it for
        # one that undoes a loss scale by itself.
        trainer = trainer_of(self)
        clips = trainer is not None and bool(trainer.gradient_clip_val)
        fused = not (clips and isinstance(self.trainer.precision_plugin, MixedPrecision))
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=fused)
        scheduler = LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, step: int) -> float:
        """Return the factor of the peak rate for the next step.

        Args:
            step: Number of optimizer steps so far.
        """
        # (step + 1) / (warmup + 1): the first step is not lost to a rate of 0.
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        # LambdaLR asks for step 0 when it is made, see `_num_steps`.
        last = self._num_steps() if step else math.inf
        if math.isinf(last):
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1.0, last - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine

    def _num_steps(self) -> float:
        """Return the number of optimizer steps of the run, which may be infinite."""
        # Asked for at the second step and not in `configure_optimizers`: there, the Trainer would
        # set up the training dataloader before it reads a checkpoint's progress, and then never
        # restore the loader's position.
        if self.max_steps is not None:
            return self.max_steps
        return self.trainer.estimated_stepping_batches


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return two parameter groups: matrices and tables with weight decay, vectors without.

    Args:
        named: Parameters with their FQNs, of a whole model or of a stage; frozen ones are left out.
        weight_decay: Weight decay of the first group.
    """
    # Always two, even if one is empty: all ranks, and runs on other meshes, have the same groups.
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
