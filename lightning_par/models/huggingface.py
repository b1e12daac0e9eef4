"""LightningModule for models of Hugging Face transformers, configurable from YAML."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_par.errors import ConfigurationError
from lightning_par.inference.lookup import find_plan
from lightning_par.models.language_module import group_parameters
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan

__all__ = ["HuggingFaceModule"]


class HuggingFaceModule(L.LightningModule):
    """Training of a transformers model with AdamW; batches are keyword arguments of the model.

    Logs ``train_loss`` and ``val_loss`` (nats per label). Pretrained weights are loaded with the
    Trainer's ``ckpt_path``: a folder of ``save_pretrained``, or a checkpoint; otherwise weights are
    initialized at random.

    Args:
        config: Folder with a ``config.json``, or a model type, such as ``"llama"``.
        overrides: Field of the model's configuration -> value.
        task: Suffix of the ``AutoModelFor`` class, such as ``"CausalLM"``.
        shifted_labels: Whether ``labels[:, t]`` is the token after ``input_ids[:, t]``, as in the
            batches of `TextDataModule`. False: the model shifts labels itself.
        lr: Learning rate, constant.
        weight_decay: Weight decay of matrices and tables; vectors are not decayed.

    Raises:
        ConfigurationError: transformers is not installed, or has no such task.

    Examples:
        >>> module = HuggingFaceModule("llama", {"num_hidden_layers": 4, "hidden_size": 256})
    """

    def __init__(
        self,
        config: str = "llama",
        overrides: dict[str, Any] | None = None,
        task: str = "CausalLM",
        shifted_labels: bool = True,
        lr: float = 3e-4,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            raise ConfigurationError(
                "LP909",
                "HuggingFaceModule needs transformers 5 or newer. Install it with: pip "
                "install -U transformers",
            ) from error
        if not hasattr(transformers, f"AutoModelFor{task}"):
            raise ConfigurationError(
                "LP902",
                f"task={task!r} is not supported, since transformers has no class "
                f"AutoModelFor{task}. Use 'CausalLM', 'MaskedLM', 'SequenceClassification' or "
                "another task that transformers has.",
            )
        self.save_hyperparameters()
        self.config, self.overrides, self.task = config, overrides or {}, task
        self.shifted_labels, self.lr, self.weight_decay = shifted_labels, lr, weight_decay

    def configure_model(self) -> None:
        """Build the model, at the first call only."""
        # Not in __init__: here a strategy can set the meta device, or build a part of it only.
        if hasattr(self, "model"):
            return
        import transformers

        if Path(self.config).is_dir():
            config = transformers.AutoConfig.from_pretrained(self.config, **self.overrides)
        else:
            config = transformers.AutoConfig.for_model(self.config, **self.overrides)
        kind = getattr(transformers, f"AutoModelFor{self.task}")
        # Not from_pretrained: weights are loaded later, by the strategy, each rank its shards.
        self.model = kind.from_config(config)

    def parallel_plan(self) -> ParallelPlan:
        """Return the plan of the model under ``model``, adapted to shifted labels."""
        plan = find_plan(self.model)
        plan = (plan or ParallelPlan()).under("model")
        if not self.shifted_labels:
            return plan
        # The plan is for models that shift labels, of which each token shard needs one label more.
        # Labels that are shifted already are sharded like tokens.
        spec = plan.batch
        batch = BatchLayout(
            sequence_dims={k: v for k, v in spec.sequence_dims.items() if k != spec.shifted},
            labels=spec.labels,
            optional=tuple(name for name in spec.optional if name != spec.shifted),
        )
        return replace(plan, batch=batch)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss per label and log it."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss``."""
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def _loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        # Contiguous: transformers calls view() on them.
        more = {"shift_labels": batch["labels"].contiguous()} if self.shifted_labels else {}
        loss: Tensor = self.model(**batch, **more).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; frozen parameters are left out."""
        groups = group_parameters(self.named_parameters(), weight_decay=self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr)
