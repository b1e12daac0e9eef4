"""What the LightningModules of the reference models share: sizes by name, optimizer, its rate."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_par.errors import ConfigurationError, raise_problems

__all__ = ["LanguageModule", "group_parameters"]


class LanguageModule(L.LightningModule):
    """Builds a model from a preset and trains it with AdamW, linear warm-up and cosine decay.

    A subclass sets `config_type` and `model_type` and defines the steps.

    Args:
        preset: Name of a preset of `config_type`.
        overrides: Fields of the configuration that differ from the preset.
        lr: Peak learning rate.
        weight_decay: Of matrices and tables; vectors (biases, norms) are not decayed.
        betas: Of AdamW.
        warmup_steps: Optimizer steps over which the rate rises linearly.
        max_steps: Optimizer steps after which the rate has fallen, along a cosine, to
            `min_lr_ratio * lr`. None: those of the run; a run without an end keeps the peak rate.
        min_lr_ratio: 0 .. 1.

    Raises:
        ConfigurationError: A value is out of range.
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
        raise_problems(ConfigurationError, problems)
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
        """Make the metrics of the subclass."""

    def configure_model(self) -> None:
        """Build the network, once; a strategy may call this with the meta device as default."""
        if not hasattr(self, "model"):
            self.model = self.model_type(self.config)

    def setup(self, stage: str) -> None:
        """Check that the data fits the model before anything is built.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

        Raises:
            ConfigurationError: The data module has more tokens in its vocabulary, or in a sample,
                than the model.
        """
        data = getattr(self.trainer, "datamodule", None)
        limits = {"vocab_size": self.config.vocab_size}
        if getattr(self.config, "positions", "learned") == "learned":
            limits["max_length"] = self.config.max_length
        problems = []
        for name, limit in limits.items():
            value = getattr(data, name, None)
            if isinstance(value, int) and value > limit:
                problems.append(
                    f"the data has {name}={value}, but the model has {name}={limit}; "
                    f"pass overrides={{{name!r}: {value}}} to the model."
                )
        raise_problems(ConfigurationError, problems)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return fused AdamW, and a linear warm-up and cosine decay that step per step."""
        groups = group_parameters(self.named_parameters(), weight_decay=self.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, fused=True)
        scheduler = LambdaLR(optimizer, self._lr_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def _lr_factor(self, step: int) -> float:
        """Return the share of the peak rate that the step after `step` steps uses."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        last = self._num_steps() if step else math.inf
        if math.isinf(last):
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1.0, last - self.warmup_steps))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine

    def _num_steps(self) -> float:
        """Return the optimizer steps of the run.

        Asked for at the second step and not in `configure_optimizers`: there, the Trainer would set
        up the training dataloader before it reads a checkpoint's progress, and then never restore
        the loader's position.
        """
        if self.max_steps is not None:
            return self.max_steps
        return self.trainer.estimated_stepping_batches


def group_parameters(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float
) -> list[dict[str, Any]]:
    """Return two optimizer groups: matrices and tables with weight decay, vectors without.

    Always two, even if one is empty, so that every rank and every layout has the same groups.

    Args:
        named: Any part of the parameters of a model; frozen ones are left out.
        weight_decay: Of the first group.
    """
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
