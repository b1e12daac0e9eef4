"""Saving checkpoints of a mesh: what the Trainer's `save_checkpoint` does."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint.export import OWN_STATE
from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.save_coordinator import CheckpointSaver, SaveMetadata
from lightning_par.checkpoint.storage import write_object
from lightning_par.checkpoint.writer import make_part, Part
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.rng import collect_random_states
from lightning_par.errors import CheckpointError, ConfigurationError, raise_problems
from lightning_par.huggingface import describe_model, MODEL_STATE
from lightning_par.sizes import AXES
from lightning_par.strategies.processes.interruption import InterruptibleProcesses
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.version import __version__

__all__ = ["SavingProcesses"]

_log = logging.getLogger(__name__)


class SavingProcesses(InterruptibleProcesses):
    """Saves weights, optimizers and the state of the Trainer on a mesh.

    Args:
        save_distributed_checkpoint: A folder to which every rank writes; otherwise one file.
        async_save: Train on while a folder is written.
        **processes: Arguments of `InterruptibleProcesses`.

    Raises:
        ConfigurationError: Only folders can be written in the background.
    """

    def __init__(
        self,
        *,
        save_distributed_checkpoint: bool,
        async_save: bool,
        compression: GradientCompression | None,
        **processes: Any,
    ) -> None:
        super().__init__(**processes)
        self.compression_options = compression
        if async_save and not save_distributed_checkpoint:
            raise ConfigurationError(
                "async_save=True needs save_distributed_checkpoint=True: one file is gathered and "
                "written while all ranks wait."
            )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.async_save = async_save
        self._saver = CheckpointSaver(self._timeout)

    @property
    def parallel_model(self) -> ParallelModel:
        """The model on the mesh; made by `setup`."""
        raise NotImplementedError

    @property
    def _trainer(self) -> pl.Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @override
    def setup_environment(self) -> None:
        plugin = type(self.checkpoint_io)
        problems = []
        if self.save_distributed_checkpoint and plugin is not TorchCheckpointIO:
            problems.append(
                f"the plugin {plugin.__name__} writes checkpoints as one file: use "
                "save_distributed_checkpoint=False with it, or leave it out (async_save=True "
                "writes folders in the background)."
            )
        callbacks = self._trainer.checkpoint_callbacks if self.async_save else ()
        if any(getattr(callback, "save_last", None) == "link" for callback in callbacks):
            problems.append(
                "async_save=True with ModelCheckpoint(save_last='link'): the link would name a "
                "checkpoint that is not complete yet, and the last complete one would not be "
                "found. Use save_last=True."
            )
        raise_problems(ConfigurationError, problems)
        super().setup_environment()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return what checkpoints are made of: with `save_distributed_checkpoint` the part of this
        rank, otherwise the whole state dict on rank 0 and an empty one elsewhere.
        """
        if not self._ranks_are_together():
            return {}
        if not self.save_distributed_checkpoint:
            return self.gather_state_dict()
        self.parallel_model.sharding.release()
        return dict(self.parallel_model.module.state_dict())

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the whole model's state dict on rank 0, on the CPU; elsewhere an empty dict.

        Every rank has to call this.

        **Communicates**: all-gathers of every sharded tensor, then one gather over the pipeline
        stages.
        """
        self.parallel_model.sharding.release()
        return self.parallel_model.states.gather_weights(self.parallel_model.module)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer: with `save_distributed_checkpoint` the part of this
        rank by names, otherwise that of one process on rank 0 and nothing elsewhere.
        """
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        states, module = self.parallel_model.states, self.parallel_model.module
        if not self._ranks_are_together():
            return {}
        if not self.save_distributed_checkpoint:
            return states.gather_optimizer(module, inner)
        try:
            return states.local_optimizer(module, inner)
        except CheckpointError as error:  # the other ranks go on to `save_checkpoint`
            return {"error": str(error)}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save what the Trainer dumped; every rank has to call this.

        Args:
            checkpoint: With what `lightning_module_state_dict` and `optimizer_state` gave.
            filepath: A folder or a file, as `save_distributed_checkpoint` says.
            storage_options: For a checkpoint plugin; not for folders.

        Raises:
            CheckpointError: On every rank, if it was not saved.

        **Communicates**: see `CheckpointSaver.save`.
        """
        if not self._ranks_are_together():
            _log.error("%s is not saved: other ranks did not stop here.", filepath)
            return
        path = self.broadcast(str(filepath))
        if not self.save_distributed_checkpoint:
            self._save_file(checkpoint, path, storage_options)
            return
        if storage_options is not None or "://" in path:
            raise ConfigurationError(
                f"save_checkpoint({path!r}, storage_options={storage_options!r}): a folder is "
                "written to a path of the file system. Use save_distributed_checkpoint=False."
            )
        part = self._make_part(checkpoint)
        order = SaveMetadata(
            manifest=Manifest(
                world_size=self.world_size,
                layout=self._layout,
                step=checkpoint["global_step"],
                epoch=checkpoint["epoch"],
                versions={
                    "lightning": checkpoint["pytorch-lightning_version"],
                    "lightning_par": __version__,
                    "torch": torch.__version__,
                },
            ),
            aliases=self.parallel_model.states.aliases,
            place=self.parallel_model.states.place,
        )
        self._saver.save(Path(path), part, order, background=self.async_save)

    @property
    def _layout(self) -> dict[str, int]:
        return dict(zip(AXES, self.sizes.shape, strict=True))

    def _make_part(self, checkpoint: dict[str, Any]) -> Part:
        """Return what this rank would write; what fails here is reported by all ranks together."""
        step = checkpoint["global_step"]
        try:
            return self._encode(dict(checkpoint), step)
        except Exception as error:
            known = isinstance(error, CheckpointError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            return Part(rank=self.global_rank, world=self.world_size, step=step, error=text)

    def _encode(self, checkpoint: dict[str, Any], step: int) -> Part:
        states = self.parallel_model.states
        weights, values = states.weight_pieces(checkpoint.pop("state_dict"))
        pieces, groups = [], []
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", ())):
            if "error" in optimizer:
                raise CheckpointError(optimizer["error"])
            of_one, rest = states.optimizer_pieces(number, optimizer)
            pieces += of_one
            values |= rest
            groups.append(optimizer["param_groups"])
        if self.global_rank:  # what all ranks share is that of rank 0
            own = ("loops", type(getattr(self._trainer, "datamodule", None)).__qualname__)
            checkpoint = {key: value for key, value in checkpoint.items() if key in own}
        steps, compression = self.parallel_model.steps, self.parallel_model.compression
        checkpoint[OWN_STATE] = {
            "compression": None if compression is None else compression.state(),
            "random": collect_random_states(self.root_device),
            "seed": steps.seed,
            "evaluations": steps.evaluations,
            MODEL_STATE: describe_model(self.parallel_model.module),
        }
        return make_part(
            self.global_rank,
            self.world_size,
            step=step,
            weights=weights,
            optimizer=pieces,
            state=checkpoint,
            values=values,
            groups=groups,
        )

    def _save_file(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        problem = None
        if self.is_global_zero:
            try:
                if type(self.checkpoint_io) is TorchCheckpointIO and "://" not in path:
                    write_object(Path(path), checkpoint)
                else:
                    self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            except Exception as error:
                problem = f"{path} was not saved: {type(error).__name__}: {error}"
                _log.debug("The cause:", exc_info=True)
        problem = self.broadcast(problem)
        if problem is not None:
            raise CheckpointError(problem)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            if "://" in str(filepath):
                self.checkpoint_io.remove_checkpoint(filepath)
            else:
                self._saver.remove(Path(filepath))

    def finish_saving(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed; while an exception is being handled, that is only logged.
        """
        try:
            self._saver.wait()
        except CheckpointError as error:
            if not self._is_interrupted:
                raise
            _log.error("%s", error)
