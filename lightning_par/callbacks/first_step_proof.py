"""`FirstStepProof`: proves the first step of any strategy of Lightning's or of the user's."""

from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DistributedSampler
from typing_extensions import override

from lightning_par.errors import ConfigurationError, VerificationError
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.proof.causes import StepReport
from lightning_par.strategies.proof.other_strategy import StrategyProof

__all__ = ["FirstStepProof"]


class FirstStepProof(Callback):
    """Compares the first optimizer step of every fit with the same step on one process.

    Works with `DDPStrategy`, `FSDPStrategy`, `ModelParallelStrategy`, one device and strategies of
    the user's. Compared are the loss, the gradients, what clipping and hooks make of them, and the
    update. The run goes on with the same bits as without. Strategies of this package prove
    themselves, and are refused.

    Args:
        on_difference: Whether a step that differs is a warning, or a `VerificationError` (LP801)
            that ends the run on every rank.

    Attributes:
        report: What came out, the same on every rank; None before.

    **Communicates**: in the first step weights, gradients and batches, whole, to rank 0.

    Examples:
        >>> trainer = L.Trainer(strategy="ddp", callbacks=[FirstStepProof()])
    """

    def __init__(self, *, on_difference: Literal["warn", "raise"] = "warn") -> None:
        if on_difference not in ("warn", "raise"):
            raise ConfigurationError(
                "LP902", f"on_difference={on_difference!r} must be 'warn' or 'raise'."
            )
        self.on_difference = on_difference
        self.report: StepReport | None = None
        self._proof: StrategyProof | None = None
        self._world: dist.ProcessGroup | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if isinstance(trainer.strategy, MeshStrategy):
            raise ConfigurationError(
                "LP808",
                "the callback FirstStepProof is not needed with "
                f"{type(trainer.strategy).__name__}, which itself compares its steps with those of "
                "a run on one process (verify=). Remove the callback.",
            )
        if stage != "fit":
            return
        # Every rank has to call it in every fit, as torch numbers the groups on each rank.
        self._world = dist.new_group([0]) if dist.is_initialized() else None
        world = None if trainer.global_rank else self._world
        self._proof = StrategyProof(trainer, pl_module, world)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._proof is not None:
            self._proof.begin()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._proof is None or self._proof.is_accumulating:
            return
        self.report, self._proof = self._proof.end(), None
        text = str(self.report)
        if self.report.equal and not self.report.notes:
            rank_zero_info(text)
        elif self.on_difference == "raise" and self.report.differs:
            raise VerificationError("LP801", text)
        else:
            rank_zero_warn(text)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _warn_of_repeats(trainer.val_dataloaders, "validation")

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _warn_of_repeats(trainer.test_dataloaders, "test")

    @override
    def on_exception(self, *_: Any) -> None:
        self._let_go()

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        self._let_go()

    def _let_go(self) -> None:
        """Put the methods of the strategy back, of a run that ends before its first step does, and
        end the group.
        """
        if self._proof is not None:
            self._proof.close()
            self._proof = None
        if self._world is not None and dist.is_initialized():
            dist.destroy_process_group(self._world)
        self._world = None


def _warn_of_repeats(loaders: Any, stage: str) -> None:
    """Warn of loaders whose sampler repeats samples, so that all ranks have equally many."""
    held = loaders if isinstance(loaders, list | tuple) else [loaders]
    for loader in held:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            length: Any = len(sampler.dataset)  # type: ignore[arg-type]
            if sampler.total_size > length:
                rank_zero_warn(
                    f"{stage} uses {sampler.total_size - length} of {length} samples twice, so "
                    f"that all {sampler.num_replicas} replicas have the same number of samples. "
                    "A run on one process uses each sample once. Use a number of samples that is "
                    f"a multiple of {sampler.num_replicas}, or run {stage} on one device."
                )
