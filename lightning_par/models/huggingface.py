"""A LightningModule for Hugging Face models, for runs that a YAML file describes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_par.errors import ConfigurationError
from lightning_par.models.language_module import group_parameters
from lightning_par.plan import BatchLayout, ParallelPlan
from lightning_par.plan_lookup import find_plan

__all__ = ["HuggingFaceModule"]


class HuggingFaceModule(L.LightningModule):
    """Trains a model of transformers with AdamW on batches that are its keyword arguments.

    Logs ``train_loss`` and ``val_loss`` (nats per label). Weights come from ``ckpt_path``: a folder
    of ``save_pretrained``, or a checkpoint; else they are drawn.

    Args:
        config: A folder with a ``config.json``, or the type of a model, such as ``"llama"``.
        overrides: Fields of the configuration that differ.
        task: What follows ``AutoModelFor``.
        shifted_labels: Whether ``labels[:, t]`` is the token after ``input_ids[:, t]``, as in the
            batches of `TextDataModule`. False: the model shifts labels by itself.
        lr: Learning rate.
        weight_decay: Of matrices and tables.

    Raises:
        ConfigurationError: transformers is not installed, or does not know the task.
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
            raise ConfigurationError("HuggingFaceModule needs transformers 5 or newer.") from error
        if not hasattr(transformers, f"AutoModelFor{task}"):
            raise ConfigurationError(
                f"task={task!r}: transformers has no AutoModelFor{task}; use CausalLM, MaskedLM, "
                "SequenceClassification or another."
            )
        self.save_hyperparameters()
        self.config, self.overrides, self.task = config, overrides or {}, task
        self.shifted_labels, self.lr, self.weight_decay = shifted_labels, lr, weight_decay

    def configure_model(self) -> None:
        """Build the model, once; a strategy may call this with the meta device as default."""
        if hasattr(self, "model"):
            return
        import transformers

        if Path(self.config).is_dir():
            config = transformers.AutoConfig.from_pretrained(self.config, **self.overrides)
        else:
            config = transformers.AutoConfig.for_model(self.config, **self.overrides)
        kind = getattr(transformers, f"AutoModelFor{self.task}")
        self.model = kind.from_config(config)

    def parallel_plan(self) -> ParallelPlan:
        """Return the plan of the model, for labels as the batches have them."""
        plan = find_plan(self.model)
        plan = (plan or ParallelPlan()).under("model")
        if not self.shifted_labels:
            return plan
        named = plan.batch
        batch = BatchLayout(
            sequence_dims={k: v for k, v in named.sequence_dims.items() if k != named.shifted},
            labels=named.labels,
            optional=tuple(name for name in named.optional if name != named.shifted),
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
        # transformers takes a view of them.
        more = {"shift_labels": batch["labels"].contiguous()} if self.shifted_labels else {}
        loss: Tensor = self.model(**batch, **more).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW; frozen parameters are left out."""
        groups = group_parameters(self.named_parameters(), weight_decay=self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr)
