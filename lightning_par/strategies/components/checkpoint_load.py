"""Loading checkpoints into a mesh: what the Trainer's ``ckpt_path`` does."""

import logging
import pickle
import zipfile
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_par.checkpoint.export import OWN_STATE
from lightning_par.checkpoint.index import is_checkpoint_folder
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.safetensors_weights import find_weights, holds_weights_only
from lightning_par.engine.rng import restore_random_states
from lightning_par.errors import CheckpointError
from lightning_par.strategies.components.checkpoint_save import SavingProcesses

__all__ = ["CheckpointedProcesses"]

_log = logging.getLogger(__name__)


class CheckpointedProcesses(SavingProcesses):
    """Loads weights, optimizers and the state of the Trainer into a mesh of any layout.

    Args:
        **options: Those of `SavingProcesses`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._restores_optimizer = True
        self._random_states: dict[str, Any] | None = None

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a checkpoint: a folder of this package, a file of Lightning, or plain weights.

        Args:
            checkpoint_path: Folder or file. Weights are ``model.safetensors``, or the
                ``.index.json`` of several such files, or a folder with one of the two.
            weights_only: False if the user trusts it, so that pickles in it may be read.

        Returns:
            As Lightning has it; tensors are read when they are used.

        Raises:
            CheckpointError: It is missing, damaged (on every rank, with every damaged file) or
                needs to be trusted.
        """
        self._saver.wait()
        if weights_only is None and self.launcher is not None:
            # Lightning does not pass it on where checkpoints are restored after the setup.
            weights_only = getattr(self.launcher, "weights_only", None)
        path = Path(checkpoint_path)
        self._restores_optimizer = True
        if is_checkpoint_folder(path):
            return self._load_folder(path, unpickle=weights_only is False)
        if holds_weights_only(path):
            self._restores_optimizer = False
            version = {"pytorch-lightning_version": lightning.__version__}
            return {**version, "state_dict": find_weights(path), "lr_schedulers": []}
        if path.is_dir():
            raise CheckpointError(
                f"{path} is a folder, but no complete checkpoint: it has neither a manifest.json "
                "nor a model.safetensors."
            )
        return self._load_file(checkpoint_path, weights_only)

    def _load_file(self, path: Any, weights_only: bool | None) -> Any:
        try:
            if type(self.checkpoint_io) is TorchCheckpointIO and zipfile.is_zipfile(path):
                # Mapped into memory: a rank reads the parts that it copies.
                return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            return self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path} holds more than tensors and numbers, which could run code when it is "
                f"read. If you trust it, pass weights_only=False. ({str(error).splitlines()[0]})"
            ) from error

    def _load_folder(self, path: Path, *, unpickle: bool) -> dict[str, Any]:
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        reader = self._verify(path, optimizer=fitting)
        state = reader.state(0, unpickle=unpickle)
        own = state
        is_same_mesh = reader.manifest.layout == self._layout
        if is_same_mesh:
            own = reader.state(self.global_rank, unpickle=unpickle)
        for name in state.pop("left_out", ()):
            _log.warning("%s: %s is a pickle and was left out; see weights_only.", path, name)
        found = {**state, **own, "state_dict": reader.weights(unpickle=unpickle)}
        if "lr_schedulers" in found:
            found["optimizer_states"] = reader.optimizers(unpickle=unpickle)
        ours = found.pop(OWN_STATE)
        found.pop("left_out", None)
        if fitting:
            steps = self.parallel_model.steps
            self._random_states = ours["random"]
            steps.seed, steps.evaluations = ours["seed"], ours["evaluations"]
            compression, kept = self.parallel_model.compression, ours.get("compression")
            if compression is not None and kept is not None and is_same_mesh:
                compression.load(kept)
            elif compression is not None and kept is not None:
                rank_zero_warn(
                    f"{path}: what compression left out of gradients on another mesh is lost."
                )
        return found

    def _verify(self, path: Path, *, optimizer: bool) -> CheckpointReader:
        """Compare every file with its checksum, each on one rank, and agree on what is wrong."""
        problems: list[str] = []
        reader = None
        try:
            reader = CheckpointReader(path)
            kinds = ("weights", "state", *(("optimizer",) if optimizer else ()))
            names = sorted(reader.data_files(*kinds))
            problems = reader.problems(names[self.global_rank :: self.world_size])
        except CheckpointError as error:
            problems = [str(error)]
        everywhere: list[Any] = [problems]
        if self.world_size > 1:
            everywhere = [None] * self.world_size
            dist.all_gather_object(everywhere, problems)
        found = list(dict.fromkeys(p for some in everywhere for p in some))
        if found or reader is None:
            raise CheckpointError(f"{path} cannot be loaded: {'; '.join(found)}.")
        return reader

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """False where a fit starts from weights alone."""
        return self._restores_optimizer

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        self.parallel_model.sharding.release()
        state = checkpoint["state_dict"]
        states, module = self.parallel_model.states, self.parallel_model.module
        if not self._restores_optimizer:
            state = states.match_names(module, state)
        states.load_weights(module, state, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        module, states = self.parallel_model.module, self.parallel_model.states
        saved = checkpoint["optimizer_states"]
        if len(saved) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint holds {len(saved)} optimizers, this run has "
                f"{len(self.optimizers)}."
            )
        for optimizer, state in zip(self.optimizers, saved, strict=True):
            states.load_optimizer(module, optimizer, state)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # The first is that of training, about to be iterated: at the start of an epoch, this draws.
        if self._random_states is not None:
            restore_random_states(self._random_states, self.root_device)
            if not self._resumes_inside_epoch:
                self._random_states = None
        return dataloader

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._random_states is not None:
            restore_random_states(self._random_states, self.root_device)
            self._random_states = None

    @property
    def _resumes_inside_epoch(self) -> bool:
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return progress.current.ready > 0 and not progress.is_last_batch
