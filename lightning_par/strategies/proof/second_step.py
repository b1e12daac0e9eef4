"""Forward and backward of a step once more on the mesh, which leave no trace."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.rng import restore_random_states
from lightning_par.observe.isolate import isolated
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.gathering import gather_gradients, global_loss
from lightning_par.strategies.proof.silence import silent
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.pipelined_step import loss_of
from lightning_par.strategies.step.step_traces import logs_off
from lightning_par.upstream.functions import replaced

__all__ = ["MeshStep", "copy_parts"]


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshStep:
    """The first batch of a step, which the mesh can take again, and what it computed.

    Attributes:
        model: The model on the mesh.
        plugin: Precision plugin, whose context surrounds the batch.
        options: Of the strategy.
        device: That of this rank.
        args: What `training_step` is given on this rank.
        random_states: Of the generators of this rank, at the start of the batch.
        step: `global_step` as the module shall see it.
        drops: Whether dropout is on.
        parts: From `copy_parts`, when the step began.
        is_present: Whether the batch is taken with the present weights, not with `parts`.
        tensors: On rank 0, name -> whole value of the parameters and buffers it is taken with.
        record: What the mesh computed in the step, if it did; gradients are whole, on rank 0.
        own_loss: The weighted loss of this rank.
    """

    model: ParallelModel
    plugin: Precision
    options: MeshOptions
    device: torch.device
    args: Sequence[Any]
    random_states: dict[str, Any]
    step: int
    drops: bool
    parts: Sequence[Tensor]
    is_present: bool = False
    tensors: Mapping[str, Tensor]
    record: StepRecord = field(default_factory=StepRecord)
    own_loss: float = 0.0

    @property
    def can_repeat(self) -> bool:
        """Whether another forward and backward leaves no trace, and computes the same."""
        options = self.options
        return (
            self.model.module.automatic_optimization
            # The host would take a weight that is put back for one that the user has changed.
            and (self.is_present or self.model.host is None)
            and options.gradient_compression is None
            and (self.drops or options.compile_blocks is False)
            # Taken alone, a batch does not add its gradients to those of others.
            and len(self.record.losses) <= 1
        )

    def rehearsal(self, tensors: Mapping[str, Tensor]) -> "MeshStep":
        """Return the batch, to be taken with the present weights, and without dropout.

        Args:
            tensors: Those weights, on rank 0.
        """
        return replace(
            self, drops=False, is_present=True, tensors=tensors, record=StepRecord(), own_loss=0.0
        )

    def take(self) -> "MeshStep":
        """Take the batch, and return what it gives.

        Logs and hooks of the user's are left out, and afterwards everything is as before.

        **Communicates**: as a training step does, then the loss, and the gradients to rank 0.
        """
        begin = nullcontext() if self.is_present else self.at_begin()
        with begin, self.taken() as weighted:
            loss = global_loss(self.model, weighted, self.device)
            record = StepRecord(losses=[loss], gradients=[gather_gradients(self.model)])
            return replace(self, record=record, own_loss=float(weighted))

    @contextmanager
    def at_begin(self) -> Iterator[None]:
        """Inside, parameters and buffers have the values with which the step began."""
        sharding, module = self.model.sharding, self.model.module
        sharding.release()
        held = copy_parts(module)
        try:
            _fill(module, self.parts)
            yield
        finally:
            sharding.release()
            _fill(module, held)

    @contextmanager
    def taken(self) -> Iterator[Tensor]:
        """Give the weighted loss of the batch, taken with the present weights, while its gradients
        are in place; these are scaled where the plugin scales the loss.

        **Communicates**: as a training step does.
        """
        model, module = self.model, self.model.module
        quiet = logs_off(module), silent(module.trainer.loggers)
        isolated_step = isolated(module), *quiet, _at_step(module.trainer, self.step)
        with ExitStack() as stack:
            for each in (*isolated_step, torch.enable_grad()):
                stack.enter_context(each)
            if model.host is not None:  # gradients stay, so that they can be read
                stack.enter_context(replaced(model.host, "defers", True))
            restore_random_states(self.random_states, self.device)
            with nullcontext() if self.drops else WithoutDropout():
                output, begun = model.steps.training(self.plugin, self.args)
                with closing(begun):
                    # Lightning divides the loss of each of the batches that it accumulates.
                    loss = loss_of(output) / module.trainer.accumulate_grad_batches
                    weighted = begun.weigh(loss)
                    model.steps.before_backward()
                    scaler: Any = getattr(self.plugin, "scaler", None)
                    with model.steps.backward(begun):
                        (weighted if scaler is None else scaler.scale(weighted)).backward()
            model.gradients.after_backward()
            yield weighted.detach()


@contextmanager
def _at_step(trainer: pl.Trainer, step: int) -> Iterator[None]:
    """Inside, `global_step` is that of a step that has been taken, in automatic optimization."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    total = loop.optim_progress.optimizer.step.total
    taken, total.completed = total.completed, step
    try:
        yield
    finally:
        total.completed = taken


def _parts(module: nn.Module) -> list[Tensor]:
    return [local_part(t.detach()) for t in (*module.parameters(), *module.buffers())]


def copy_parts(module: nn.Module) -> list[Tensor]:
    """Return what this rank holds of parameters and buffers, copied to the CPU; gathered weights
    have to be released before.

    Args:
        module: The module on the mesh.
    """
    return [part.to("cpu", copy=True) for part in _parts(module)]


@torch.no_grad()
def _fill(module: nn.Module, values: Sequence[Tensor]) -> None:
    for part, value in zip(_parts(module), values, strict=True):
        part.copy_(value)
