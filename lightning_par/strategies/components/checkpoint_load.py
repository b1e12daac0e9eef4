"""Loading checkpoints into a mesh: what the Trainer's ``ckpt_path`` does."""

import zipfile
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from logging import getLogger
from pathlib import Path
from typing import Any

import lightning
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_par.checkpoint.export import OWN_STATE
from lightning_par.checkpoint.file_system import Place, place_of
from lightning_par.checkpoint.index import well_formed
from lightning_par.checkpoint.plain_file import check_state, reading_plain
from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint, no_checkpoint
from lightning_par.checkpoint.safetensors_weights import find_weights, holds_weights_only
from lightning_par.checkpoint.tensor_files import StoredTensors
from lightning_par.engine.rng import restore_random_states
from lightning_par.errors import CheckpointError
from lightning_par.strategies.components.checkpoint_save import mesh_sizes
from lightning_par.strategies.components.state_map import StateMap
from lightning_par.strategies.components.weight_averages import load_averages
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = ["CheckpointLoad"]

_log = getLogger(__name__)


class CheckpointLoad:
    """Loads weights, optimizers and the state of the Trainer into a mesh of any layout.

    Args:
        processes: The processes that load together.

    Attributes:
        restores_optimizer: False once plain weights were read, from which a fit starts anew.
    """

    def __init__(self, processes: MeshProcesses) -> None:
        self._processes = processes
        self.restores_optimizer = True
        self._own: dict[str, Any] | None = None
        self._random_states: dict[str, Any] | None = None
        self._waiting: Callable[[ParallelModel], None] | None = None

    def read(
        self,
        module: pl.LightningModule | None,
        filepath: Any,
        weights_only: bool | None,
        checkpoint_io: CheckpointIO,
    ) -> Any:
        """Read a checkpoint: of this package, a file of Lightning, or plain weights.

        Args:
            module: The user's LightningModule, if it is known yet; one device reads before it is on
                the mesh.
            filepath: Folder or file. Weights are ``model.safetensors``, or the ``.index.json`` of
                several such files, or a folder with one of the two.
            weights_only: False if the user trusts it, so that pickles in it may be read.
            checkpoint_io: Lightning's plugin, which reads a file.

        Returns:
            As Lightning has it; tensors are read when they are used.

        Raises:
            CheckpointError: It is missing, damaged (on every rank, with every damaged file) or
                needs to be trusted.
        """
        path = Path(filepath)
        # A plugin may have URLs of its own.
        place = place_of(filepath) if type(checkpoint_io) is TorchCheckpointIO else path
        self.restores_optimizer, self._own = True, None
        self._processes.check_path(str(filepath))
        if is_checkpoint(place):
            return self._read_ours(module, place, unpickle=weights_only is False)
        # What a Lightning checkpoint needs at least, so that the Trainer takes plain weights for
        # one.
        if holds_weights_only(path):
            self.restores_optimizer = False
            version = {"pytorch-lightning_version": lightning.__version__}
            return {**version, "state_dict": find_weights(path), "lr_schedulers": []}
        if place.is_dir():
            raise no_checkpoint(place)
        return _read_file(filepath, weights_only, checkpoint_io)

    def _read_ours(
        self, module: pl.LightningModule | None, path: Place, *, unpickle: bool
    ) -> dict[str, Any]:
        fitting = _is_fitting(module)
        # Without the optimizers where none is loaded: their files are the largest.
        reader = self._verify(path, optimizer=fitting)
        state = reader.state(0, unpickle=unpickle)
        own = state
        is_same_mesh = reader.manifest.layout == mesh_sizes(self._processes.sizes)
        if is_same_mesh:
            # Random states and the places in the data are those of a rank only if the mesh is the
            # same; else all ranks begin with rank 0's.
            own = reader.state(self._processes.rank, unpickle=unpickle)
        for name in state.pop("left_out", ()):
            _log.warning(
                "%s: %s is a pickle and was not loaded, since a pickle could run code. Pass "
                "weights_only=False to load it.",
                path,
                name,
            )
        found = {**state, **own, "state_dict": reader.weights(unpickle=unpickle)}
        # Lightning's sign of a full checkpoint: one of weights only has neither.
        if "lr_schedulers" in found:
            found["optimizer_states"] = reader.optimizers(unpickle=unpickle)
        check_state(found, path)
        # Taken out: the Trainer's hooks get what a checkpoint of Lightning holds.
        with well_formed(f"{path}: the state of a rank"):
            ours = _own_state(found.pop(OWN_STATE))
        found.pop("left_out", None)
        if fitting:
            self._own = {**ours, "path": path, "is_same_mesh": is_same_mesh}
        return found

    @property
    def resumes(self) -> bool:
        """Whether a checkpoint of ours was read for a fit, which has not begun."""
        return self._own is not None

    def _adopt(self, model: ParallelModel) -> None:
        """Take what our checkpoints hold besides the Trainer's state: seeds and random states.

        One device reads its checkpoint before the model is on the mesh.
        """
        # Once: a second fit without a checkpoint begins with its own seed.
        ours, self._own = self._own, None
        if ours is None:
            return
        self._random_states = ours["random"]
        model.steps.seed, model.steps.evaluations = ours["seed"], ours["evaluations"]
        model.steps.loaders.resume(ours["samples"])
        if any(ours["samples"]):
            _continue_epoch(model.module.trainer)
        compression, kept = model.compression, ours.get("compression")
        if compression is not None and kept is not None and ours["is_same_mesh"]:
            compression.load(kept)
        elif compression is not None and kept is not None:
            rank_zero_warn(
                f"{ours['path']} was saved on a mesh of other sizes, so its compression error "
                "(error feedback) is not loaded."
            )

    def _verify(self, path: Place, *, optimizer: bool) -> CheckpointReader:
        """Compare every file with its checksum, each on one rank, and agree on what is wrong."""
        rank, world_size = self._processes.rank, self._processes.world_size
        code, problems = "LP502", list[str]()
        reader = None
        try:
            reader = CheckpointReader(path)
            kinds = ("weights", "state", *(("optimizer",) if optimizer else ()))
            names = sorted(reader.data_files(*kinds))
            # Rank r reads every n-th file, so that all are read once and by all machines at once.
            problems = reader.problems(names[rank::world_size])
        except CheckpointError as error:
            code, problems = error.code, [error.message]
        except OSError as error:  # a store that one rank does not reach
            problems = [str(error)]
        everywhere: list[Any] = [(code, problems)]
        if world_size > 1:
            everywhere = [None] * world_size
            # Reached also by a rank that cannot open the checkpoint: the others wait here.
            dist.all_gather_object(everywhere, (code, problems))
        found = {text: code for code, texts in everywhere for text in texts}
        if found or reader is None:
            codes = " ".join(dict.fromkeys(found.values()))
            raise CheckpointError(codes, f"{path} cannot be loaded: {'; '.join(found)}.")
        return reader

    def load_weights(
        self,
        model: ParallelModel | None,
        module: nn.Module,
        checkpoint: dict[str, Any],
        *,
        strict: bool,
    ) -> None:
        """Copy a state dict into the module.

        As with a plain Trainer, this comes before the strategy's `setup`, so that the hooks that
        follow see the same weights. What has no memory before the module is on its mesh waits for
        `complete`: parameters on meta, and averages of weights.

        Args:
            model: The model on its mesh; None where the module is whole yet, as before `setup`.
            module: The user's module.
            checkpoint: What `read` gave.
            strict: Refuse missing and unexpected keys.

        Raises:
            CheckpointError: There are no weights, or they do not fit.
        """
        # Only here: a hook of the module may have put the weights in.
        if "state_dict" not in checkpoint:
            raise CheckpointError(
                "LP501",
                "the checkpoint has no entry 'state_dict', so it holds no weights. Use another "
                "checkpoint.",
            )
        state = checkpoint["state_dict"]
        # On meta there is nothing to copy into.
        waits = model is None and any(p.is_meta for p in module.parameters())
        if waits:
            state = copy(state)  # what callbacks change from here on is not loaded
        else:
            self._load(model, module, state, strict=strict)

        def complete(model: ParallelModel) -> None:
            if waits:
                self._load(model, module, state, strict=strict)
            load_averages(model, checkpoint, state)

        # Called also where nothing waits: averages are made only once the module is on its mesh.
        self._waiting = complete

    def _load(
        self,
        model: ParallelModel | None,
        module: nn.Module,
        state: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        if model is not None:
            # Gathered parameters would get the values, and the shards keep the old ones.
            model.sharding.release()
        # A file of Lightning on one device: nothing is to be cut.
        elif self._processes.world_size == 1 and not isinstance(state, StoredTensors):
            module.load_state_dict(state, strict=strict)
            return
        states = StateMap.of_whole(module, self._processes.mesh) if model is None else model.states
        if not self.restores_optimizer and isinstance(state, StoredTensors):
            state = states.match_names(module, state)
        states.load_weights(module, state, strict=strict)

    def complete(self, model: ParallelModel) -> None:
        """Load what `load_weights` had to leave until the module is on its mesh.

        Args:
            model: The model on its mesh, with the averages that callbacks keep.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting(model)

    def load_optimizers(
        self, model: ParallelModel, optimizers: Sequence[Optimizer], saved: Sequence[Any]
    ) -> None:
        """Load this rank's part of the states of all optimizers.

        Raises:
            CheckpointError: There is another number of them, and not none.
        """
        # A checkpoint that was saved with `save_weights_only`.
        if not saved and optimizers:
            _log.warning(
                "the checkpoint holds no states of optimizers, so the optimizers start without "
                "states."
            )
            return
        if len(saved) != len(optimizers):
            raise CheckpointError(
                "LP507",
                f"the number of optimizers in the checkpoint is {len(saved)}, but "
                f"configure_optimizers returned {len(optimizers)}. Return the same optimizers as "
                "in the run that saved the checkpoint, or load only the weights: "
                "lightning_par.load_from_checkpoint(MyModule, path).",
            )
        # A hook of Lightning may have the module whole while it restores.
        with model.in_parallel_form():
            for optimizer, state in zip(optimizers, saved, strict=True):
                model.states.load_optimizer(model.module, optimizer, state, model.host)

    def before_loader(self, model: ParallelModel) -> None:
        """Restore the random states where a data loader is about to be iterated.

        The first is that of training: at the start of an epoch, it draws the order of samples.
        """
        self._adopt(model)
        if self._random_states is not None:
            restore_random_states(self._random_states, self._processes.device)
            # Inside of an epoch the loader draws the order of its samples from this state, and
            # the step goes on from it as well: so it is restored twice.
            if not _resumes_inside_epoch(model):
                self._random_states = None

    def before_training(self) -> None:
        """Restore the random states where a fit goes on inside an epoch."""
        if self._random_states is not None:
            restore_random_states(self._random_states, self._processes.device)
            self._random_states = None


def _read_file(filepath: Any, weights_only: bool | None, checkpoint_io: CheckpointIO) -> Any:
    with reading_plain(filepath, trusts=weights_only is False):
        # Only of Lightning's own plugin, whose format is known.
        if type(checkpoint_io) is TorchCheckpointIO and zipfile.is_zipfile(filepath):
            # Mapped into memory: a rank reads the parts that it copies.
            found = torch.load(filepath, map_location="cpu", mmap=True, weights_only=weights_only)
        else:
            found = checkpoint_io.load_checkpoint(filepath, weights_only=weights_only)
    check_state(found, filepath)
    return found


def _own_state(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a strategy of this package has stored for itself, its types as they were."""
    return {
        **value,
        "random": dict(value["random"]),
        "seed": int(value["seed"]),
        "evaluations": int(value["evaluations"]),
        "samples": list(value.get("samples", [])),
    }


def _continue_epoch(trainer: pl.Trainer) -> None:
    """Let an epoch go on in which `max_steps` has ended the run: Lightning counts it as complete,
    and would take the rest of its samples for the next epoch.
    """
    progress = trainer.fit_loop.epoch_progress
    trackers: tuple[Any, ...] = progress.current, progress.total
    for counts in trackers:
        if counts.processed == counts.ready:
            counts.processed -= 1
            counts.completed -= 1


def _is_fitting(module: pl.LightningModule | None) -> bool:
    """Whether a fit reads a checkpoint; also where nobody knows what it is read for."""
    try:
        # `LightningModule.trainer` raises where there is none.
        return module is None or module.trainer.state.fn == TrainerFn.FITTING
    except RuntimeError:  # it is attached to no Trainer
        return True


def _resumes_inside_epoch(model: ParallelModel) -> bool:
    progress = model.module.trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.ready > 0 and not progress.is_last_batch
