"""Saving checkpoints of a mesh: what the Trainer's `save_checkpoint` does."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_par.checkpoint.export import OWN_STATE
from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.save_coordinator import CheckpointSaver, SaveMetadata
from lightning_par.checkpoint.storage import write_object
from lightning_par.checkpoint.writer import make_part, Part
from lightning_par.engine.rng import collect_random_states
from lightning_par.errors import CheckpointError, ConfigurationError, raise_problems
from lightning_par.huggingface import describe_model, MODEL_STATE
from lightning_par.sizes import AXES, ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.version import __version__

__all__ = ["CheckpointSave", "mesh_sizes"]

_log = logging.getLogger(__name__)


def mesh_sizes(sizes: ParallelSizes) -> dict[str, int]:
    """Return the size of every mesh axis by name, as manifests keep it."""
    return dict(zip(AXES, sizes.shape, strict=True))


class CheckpointSave:
    """Saves weights, optimizers and the state of the Trainer on a mesh.

    Args:
        options: Whether a checkpoint is a folder to which every rank writes, or one file, and
            whether training goes on while a folder is written.
        processes: The processes that save together.
    """

    def __init__(self, options: MeshOptions, processes: MeshProcesses) -> None:
        self._is_folder = options.save_distributed_checkpoint
        self._in_background = options.async_save
        self._processes = processes
        self._saver = CheckpointSaver(options.timeout)

    def check(self, checkpoint_io: CheckpointIO, callbacks: Iterable[Checkpoint]) -> None:
        """Refuse plugins and callbacks that the options cannot serve.

        Args:
            checkpoint_io: Lightning's plugin that writes checkpoints as files.
            callbacks: Those of the Trainer that save checkpoints.

        Raises:
            ConfigurationError: With every problem.
        """
        problems = []
        if self._is_folder and type(checkpoint_io) is not TorchCheckpointIO:
            problems.append(
                f"the plugin {type(checkpoint_io).__name__} writes checkpoints as one file: use "
                "save_distributed_checkpoint=False with it, or leave it out (async_save=True "
                "writes folders in the background)."
            )
        links = any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
        if self._in_background and links:
            problems.append(
                "async_save=True with ModelCheckpoint(save_last='link'): the link would name a "
                "checkpoint that is not complete yet, and the last complete one would not be "
                "found. Use save_last=True."
            )
        raise_problems(ConfigurationError, problems)

    def weights(self, model: ParallelModel) -> dict[str, Any]:
        """Return what checkpoints are made of: for a folder this rank's part of the state dict,
        otherwise the whole state dict on rank 0 and an empty one elsewhere.
        """
        if not self._processes.interruption.ranks_are_together():
            return {}
        if not self._is_folder:
            return model.gather_weights()
        model.sharding.release()
        return dict(model.module.state_dict())

    def optimizer(self, model: ParallelModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer: for a folder this rank's part by names, otherwise that
        of one process on rank 0 and nothing elsewhere.
        """
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self._processes.interruption.ranks_are_together():
            return {}
        if not self._is_folder:
            return model.states.gather_optimizer(model.module, inner)
        try:
            return model.states.local_optimizer(model.module, inner)
        except CheckpointError as error:  # the other ranks go on to `save`
            return {"error": str(error)}

    def save(
        self,
        model: ParallelModel,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
        checkpoint_io: CheckpointIO,
    ) -> None:
        """Save what the Trainer dumped; every rank has to call this.

        Args:
            model: The model on its mesh.
            checkpoint: With what `weights` and `optimizer` gave.
            filepath: A folder or a file, as the options say.
            storage_options: For the checkpoint plugin; not for folders.
            checkpoint_io: Lightning's plugin, which writes a file.

        Raises:
            CheckpointError: On every rank, if it was not saved.

        **Communicates**: see `CheckpointSaver.save`.
        """
        if not self._processes.interruption.ranks_are_together():
            _log.error("%s is not saved: other ranks did not stop here.", filepath)
            return
        path = self._processes.broadcast(str(filepath))
        if not self._is_folder:
            self._save_file(checkpoint, path, storage_options, checkpoint_io)
            return
        if storage_options is not None or "://" in path:
            raise ConfigurationError(
                f"save_checkpoint({path!r}, storage_options={storage_options!r}): a folder is "
                "written to a path of the file system. Use save_distributed_checkpoint=False."
            )
        part = self._make_part(model, checkpoint)
        order = SaveMetadata(
            manifest=Manifest(
                world_size=self._processes.world_size,
                layout=mesh_sizes(self._processes.sizes),
                step=checkpoint["global_step"],
                epoch=checkpoint["epoch"],
                versions={
                    "lightning": checkpoint["pytorch-lightning_version"],
                    "lightning_par": __version__,
                    "torch": torch.__version__,
                },
            ),
            aliases=model.states.aliases,
            place=model.states.place,
        )
        self._saver.save(Path(path), part, order, background=self._in_background)

    def _make_part(self, model: ParallelModel, checkpoint: dict[str, Any]) -> Part:
        """Return what this rank would write; what fails here is reported by all ranks together."""
        step = checkpoint["global_step"]
        try:
            return self._encode(model, dict(checkpoint), step)
        except Exception as error:
            known = isinstance(error, CheckpointError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            rank, world = self._processes.rank, self._processes.world_size
            return Part(rank=rank, world=world, step=step, error=text)

    def _encode(self, model: ParallelModel, checkpoint: dict[str, Any], step: int) -> Part:
        weights, values = model.states.weight_pieces(checkpoint.pop("state_dict"))
        pieces, groups = [], []
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", ())):
            if "error" in optimizer:
                raise CheckpointError(optimizer["error"])
            of_one, rest = model.states.optimizer_pieces(number, optimizer)
            pieces += of_one
            values |= rest
            groups.append(optimizer["param_groups"])
        if self._processes.rank:  # what all ranks have in common is written by rank 0
            datamodule = getattr(model.module.trainer, "datamodule", None)
            own = ("loops", type(datamodule).__qualname__)
            checkpoint = {key: value for key, value in checkpoint.items() if key in own}
        checkpoint[OWN_STATE] = {
            "compression": None if model.compression is None else model.compression.state(),
            "random": collect_random_states(self._processes.device),
            "seed": model.steps.seed,
            "evaluations": model.steps.evaluations,
            MODEL_STATE: describe_model(model.module),
        }
        return make_part(
            self._processes.rank,
            self._processes.world_size,
            step=step,
            weights=weights,
            optimizer=pieces,
            state=checkpoint,
            values=values,
            groups=groups,
        )

    def _save_file(
        self,
        checkpoint: dict[str, Any],
        path: str,
        storage_options: Any,
        checkpoint_io: CheckpointIO,
    ) -> None:
        problem = None
        if self._processes.rank == 0:
            try:
                if type(checkpoint_io) is TorchCheckpointIO and "://" not in path:
                    write_object(Path(path), checkpoint)
                else:
                    checkpoint_io.save_checkpoint(checkpoint, path, storage_options)
            except Exception as error:
                problem = f"{path} was not saved: {type(error).__name__}: {error}"
                _log.debug("The cause:", exc_info=True)
        problem = self._processes.broadcast(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def remove(self, filepath: Any, checkpoint_io: CheckpointIO) -> None:
        """Remove a checkpoint; rank 0 does it."""
        if self._processes.rank == 0:
            if "://" in str(filepath):
                checkpoint_io.remove_checkpoint(filepath)
            else:
                self._saver.remove(Path(filepath))

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed.
        """
        self._saver.wait()

    def finish(self) -> None:
        """Wait for a save in the background, at the end of a run.

        Raises:
            CheckpointError: It failed; while an exception is being handled, that is only logged.
        """
        try:
            self._saver.wait()
        except CheckpointError as error:
            if not self._processes.interruption.is_handled:
                raise
            _log.error("%s", error)
