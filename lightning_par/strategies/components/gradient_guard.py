"""Gradients before an optimizer step: refused together on every rank if they are not finite, then
clipped by the norm of the whole model.
"""

import logging
from collections.abc import Container, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn, Tensor
from torch.optim import Optimizer

from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError, either, NonFiniteError
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.upstream.lightning import replace_gradient_clipping

__all__ = ["GradientGuard", "check_nonfinite_choice"]

_CHOICES = ("raise", "skip", "ignore")
_NAMED = 3
"""How many parameters and ranks a message names."""
_logger = logging.getLogger(__name__)


def check_nonfinite_choice(choice: str) -> str:
    """Return a value of `on_nonfinite`, if it exists.

    Raises:
        ConfigurationError: It is none of "raise", "skip" and "ignore".
    """
    if choice not in _CHOICES:
        raise ConfigurationError(
            f"on_nonfinite={choice!r} must be {either([repr(c) for c in _CHOICES])}."
        )
    return choice


class GradientGuard:
    """Judges and clips the gradients of the whole model where Lightning clips those of one device.

    The loss and the norm that clipping needs anyway are judged together, so that every rank comes
    to the same decision before the optimizer changes a weight.

    Args:
        parallel_model: The model on its mesh.
        plugin: Clips through this guard from now on. A plugin that scales the loss judges
            overflows itself, hence nothing is judged here.
        on_nonfinite: "raise" raises on every rank, "skip" leaves the step out on every rank,
            "ignore" judges nothing.
    """

    def __init__(self, parallel_model: ParallelModel, plugin: Precision, on_nonfinite: str) -> None:
        self._parallel_model, self._plugin, self._choice = parallel_model, plugin, on_nonfinite
        self._loss: Tensor | None = None
        self._norm: Tensor | None = None
        plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]
        self._clip = replace_gradient_clipping(plugin, self._judge_and_clip)

    @property
    def loss(self) -> Tensor | None:
        """The sum of the losses seen for the next step; None if it does not matter."""
        return self._loss

    def see(self, loss: Tensor, counts: Tensor | None = None) -> None:
        """Take note of the loss of one backward; those of accumulated batches add up.

        Args:
            loss: Scalar.
            counts: Whether it does: the mean over no valid entry is NaN by itself.
        """
        if self._choice != "ignore":
            loss = loss.detach()
            if counts is not None:
                loss = torch.where(counts.to(loss.device), loss, 0)
            self._loss = loss if self._loss is None else self._loss + loss

    def _judge_and_clip(
        self, model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        loss, self._loss = self._loss, None
        scales_loss = getattr(self._plugin, "scaler", None) is not None
        module = self._parallel_model.module
        if self._choice != "ignore" and not scales_loss and module.automatic_optimization:
            self._judge(optimizer, loss)
        try:
            self._clip(model, optimizer, clip_val, gradient_clip_algorithm)
        finally:
            self._norm = None

    def _judge(self, optimizer: Optimizer, loss: Tensor | None) -> None:
        """Raise, or leave the step out, if the loss or a gradient is not finite on any rank.

        **Communicates**: one all-reduce of one number over all ranks, which clipping then spares.
        """
        parameters = list(self._plugin.main_params(optimizer))
        norm = self._parallel_model.gradient_norm(parameters, loss)
        if bool(norm.isfinite()):
            module = self._parallel_model.module
            if not is_overridden("configure_gradient_clipping", module, pl.LightningModule):
                self._norm = norm
            return
        text = self._explain(norm, loss)
        if self._choice == "raise":
            raise NonFiniteError(
                f"{text} No weight was changed. Trainer(detect_anomaly=True) names the operation; "
                "on_nonfinite='skip' leaves such steps out, on_nonfinite='ignore' takes them."
            )
        self._parallel_model.drop_gradients(parameters)
        if dist.get_rank() == 0:
            _logger.warning("%s The step is left out.", text)

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self._plugin.main_params(optimizer))
        self._parallel_model.clip_by_norm(parameters, clip_val, self._norm)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        self._parallel_model.clip_by_value(list(self._plugin.main_params(optimizer)), clip_val)

    def _explain(self, norm: Tensor, loss: Tensor | None) -> str:
        """Say on which ranks what is not finite, the same on every rank.

        **Communicates**: a few names, between all ranks.
        """
        module, sizes = self._parallel_model.module, self._parallel_model.mesh.sizes
        bad_loss = None if loss is None or bool(loss.isfinite().all()) else float(loss)
        found: list[Any] = [None] * sizes.world_size
        offloaded = self._parallel_model.offloaded_nonfinite()
        mine = bad_loss, _nonfinite_names(module.named_parameters(), offloaded)
        dist.all_gather_object(found, mine)
        with_loss = [rank for rank, (bad, _) in enumerate(found) if bad is not None]
        ranks = with_loss or [rank for rank, (_, names) in enumerate(found) if names]
        said = [_say(sizes.describe(rank), *found[rank]) for rank in ranks[:_NAMED]]
        if len(ranks) > _NAMED:
            said.append(f"and {len(ranks) - _NAMED} more ranks")
        step = module.trainer.global_step
        return f"step {step}: the norm of loss and gradients is {float(norm)}: {'; '.join(said)}."


def _say(rank: str, loss: float | None, names: Sequence[str]) -> str:
    parts = [] if loss is None else [f"a loss of {loss}"]
    if names:
        more = "" if len(names) <= _NAMED else f" and {len(names) - _NAMED} more"
        parts.append(f"a gradient of {', '.join(names[:_NAMED])}{more} that is not finite")
    return f"{rank} has {' and '.join(parts)}"


@torch.no_grad()
def _nonfinite_names(
    named: Iterable[tuple[str, nn.Parameter]], offloaded: Container[nn.Parameter]
) -> list[str]:
    found = []
    for name, parameter in named:
        grad = None if parameter.grad is None else local_part(parameter.grad)
        bad = parameter in offloaded or (grad is not None and not bool(grad.isfinite().all()))
        if bad:
            found.append(name)
    return found
