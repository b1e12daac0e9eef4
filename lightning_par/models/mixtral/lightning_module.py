"""LightningModule of the reference mixture of experts; it runs under any strategy."""

from typing import Any

import torch
from torch import Tensor

from lightning_par.models.gpt.lightning_module import Batch, GPTModule, model_inputs
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.models.mixtral.model import Mixtral
from lightning_par.models.mixtral.moe import Router

__all__ = ["MixtralModule"]

_IGNORE_INDEX = -100


class MixtralModule(GPTModule):
    """Causal language modeling of a `Mixtral`: `GPTModule` with the router losses.

    The training loss is the mean cross-entropy per token plus ``auxiliary_weight`` times the
    balance loss plus ``z_weight`` times the z-loss; validation and test report the cross-entropy
    only. Also logs ``train_balance_loss`` (1 for an even load) and ``train_z_loss``, each step. The
    arguments are those of `LanguageModule`.

    Examples:
        >>> module = MixtralModule(preset="tiny", overrides={"num_experts": 8})
    """

    config_type = MixtralConfig
    model_type = Mixtral  # type: ignore[assignment]
    model: Mixtral  # type: ignore[assignment]
    config: MixtralConfig

    def forward(self, input_ids: Tensor, **packed: Tensor) -> Tensor:
        """Return logits [B, T, V].

        Args:
            input_ids: [B, T], int64.
            packed: `position_ids` and `cu_seqlens`, see `Mixtral.forward`.
        """
        logits: Tensor = self.model(input_ids, **packed)[0]
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the total loss; log it and the router losses."""
        logits, losses = self.model(counted=batch["labels"] != _IGNORE_INDEX, **model_inputs(batch))
        config = self.config
        # By numbers: a tensor of them would be a copy to the device, which the host waits for.
        router_loss = losses[0] * config.auxiliary_weight + losses[1] * config.z_weight
        loss: Tensor = self._token_loss(logits, batch["labels"]) + router_loss
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_balance_loss", losses[0])
        self.log("train_z_loss", losses[1])
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Run the optimizer step, then update the routers' biases."""
        super().optimizer_step(*args, **kwargs)
        # Here and not in the router's forward: the load of all accumulated micro-batches counts.
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, Router):
                    module.finish_step()
