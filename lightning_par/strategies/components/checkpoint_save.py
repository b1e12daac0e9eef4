"""Saving checkpoints of a mesh: what the Trainer's `save_checkpoint` does."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from lightning_par.checkpoint.export import OWN_STATE
from lightning_par.checkpoint.file_system import holds_one_file, Place, place_of, UrlPath
from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.part import make_part, Part
from lightning_par.checkpoint.save_coordinator import CheckpointSaver
from lightning_par.checkpoint.storage import NAME_LENGTH
from lightning_par.checkpoint.writer import SaveMetadata
from lightning_par.engine.memory.garbage import no_collections
from lightning_par.engine.rng import collect_random_states
from lightning_par.errors import CheckpointError, ConfigurationError, describe, raise_problems
from lightning_par.huggingface import describe_model, MODEL_STATE
from lightning_par.sizes import AXES, ParallelSizes
from lightning_par.strategies.components.optimizer_forms import WholeOptimizer, with_parts
from lightning_par.strategies.components.requeue import link_requeue_checkpoint
from lightning_par.strategies.components.weight_averages import LocalWeights
from lightning_par.strategies.hooks.shown_checkpoint import named_states
from lightning_par.strategies.hooks.tied_names import stored_names
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.processes.shared_folders import checkpoint_folders
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.upstream.pytree import tree_map
from lightning_par.version import __version__

__all__ = ["CheckpointSave", "mesh_sizes"]

_log = logging.getLogger(__name__)
_PLAIN_WRITERS = torch.save, TorchCheckpointIO.save_checkpoint


def _too_long(callback: Checkpoint) -> str | None:
    """Return why no file can have the name that a callback gives its checkpoints, if so."""
    template = getattr(callback, "filename", None)
    if not isinstance(template, str):
        return None
    # What is put in for a metric has one letter at least; with its name it is longer.
    shortest = re.sub(r"\{.*?\}", "0", template) + getattr(callback, "FILE_EXTENSION", ".ckpt")
    longest = max(len(os.fsencode(part)) for part in shortest.split("/"))
    if longest <= NAME_LENGTH:
        return None
    return (
        f"ModelCheckpoint(filename=...) has {len(template)} letters, so names of checkpoints have "
        f"at least {longest} bytes, but a file system allows {NAME_LENGTH}. Use a shorter "
        "filename."
    )


def mesh_sizes(sizes: ParallelSizes) -> dict[str, int]:
    """Return the size of every mesh axis by name, as manifests keep it."""
    return dict(zip(AXES, sizes.shape, strict=True))


class CheckpointSave:
    """Saves weights, optimizers and the state of the Trainer on a mesh.

    Every rank writes its part, into one file or into a folder; to a URL, into a folder. What
    another plugin than Lightning's own writes is gathered on rank 0 instead; so it is where
    somebody has replaced `torch.save`, or the method of Lightning's plugin.

    Args:
        options: The form of checkpoints, and whether training goes on while one is written.
        processes: The processes that save together.

    Attributes:
        leads: Whether these processes save; of several islands the first one does.
        share: Replaces weights in this rank's part of a state dict, as by those of all islands;
            None: they are saved as they are.
    """

    def __init__(self, options: MeshOptions, processes: MeshProcesses) -> None:
        self._form = options.checkpoint_format
        self._in_background = options.async_save
        self._processes = processes
        self._saver = CheckpointSaver(options.timeout)
        self.leads, self._names = True, list[list[list[str]]]()
        self.share: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def check(self, checkpoint_io: CheckpointIO, trainer: pl.Trainer) -> None:
        """Refuse plugins, callbacks and URLs that the options cannot serve.

        Args:
            checkpoint_io: Lightning's plugin that writes checkpoints as files.
            trainer: Has the callbacks that save checkpoints.

        Raises:
            ConfigurationError: With every problem.
        """
        problems, callbacks = [], trainer.checkpoint_callbacks
        # `type` and not isinstance: a subclass may write anything.
        plugin, foreign = type(checkpoint_io).__name__, type(checkpoint_io) is not TorchCheckpointIO
        if self._form == "folder" and foreign:
            problems.append(
                f"the plugin {plugin} writes a checkpoint as one file, but "
                "checkpoint_format='folder' was asked for. Use checkpoint_format='file' with this "
                "plugin, or remove the plugin (async_save=True writes folders in the background)."
            )
        if self._in_background and foreign:
            problems.append(
                f"async_save=True has no effect with the plugin {plugin}: rank 0 gathers the "
                "checkpoint for the plugin while all ranks wait. Remove async_save or the plugin."
            )
        links = any(getattr(callback, "save_last", None) == "link" for callback in callbacks)
        if self._in_background and links:
            problems.append(
                "async_save=True is not supported with ModelCheckpoint(save_last='link'): the "
                "link would point to a checkpoint that is not complete yet. Use save_last=True."
            )
        problems += [text for callback in callbacks if (text := _too_long(callback)) is not None]
        saves = trainer.state.fn == TrainerFn.FITTING and not foreign
        for folder in checkpoint_folders(trainer) if saves else ():
            problems += self._problems_of(place_of(folder))
        raise_problems(ConfigurationError, "LP511", problems)

    def _problems_of(self, place: Place) -> list[str]:
        """Return why the ranks cannot save together there, if so."""
        if not isinstance(place, UrlPath) or self._processes.world_size == 1:
            return []
        if place.is_of_one_process:
            return [
                f"{place} is in the memory of one process, which the other ranks do not share. "
                "Save to a store that all ranks reach, such as s3://..., or to a folder."
            ]
        if self._form == "file":
            return [
                f"checkpoint_format='file' is not supported for the URL {place}: only one process "
                "can write a file there, so rank 0 would need memory for the whole checkpoint. Use "
                "checkpoint_format='folder' or 'auto'. To convert a folder to one file later, use "
                "lightning-par export."
            ]
        return []

    def weights(self, model: ParallelModel) -> dict[str, Any]:
        """Return what checkpoints are made of: this rank's part of the state dict, or all of it
        once the module is whole again, which hooks on checkpoints then see.
        """
        self._names = []
        # After an exception on some ranks a collective would wait for ever.
        if not self._processes.interruption.ranks_are_together():
            return {}
        if model.forms.is_whole and self.share is None and model.mesh.sizes.world_size > 1:
            return dict(model.module.state_dict())
        with model.in_parallel_form(), model.steps.reads.paused():
            # `state_dict` has to give shards, by which the pieces of the ranks are cut.
            model.sharding.release()
            state = model.module.state_dict()
            return LocalWeights(state if self.share is None else self.share(state))

    def optimizer(
        self, model: ParallelModel, optimizer: Optimizer, is_seen: Callable[[Any], bool]
    ) -> dict[str, Any]:
        """Return the state of an optimizer: this rank's part, by names.

        Args:
            model: The model on its mesh.
            optimizer: Perhaps with what Lightning wraps it in.
            is_seen: Given the module, whether code of a user's sees it, which gets all of it once
                the module is whole again; in a run hooks are surrounded.

        **Communicates**: the whole states, to every rank, if they are seen after a run.
        """
        # Lightning wraps optimizers; states and groups are those of the user's.
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if not self._processes.interruption.ranks_are_together():
            return {}
        try:
            # An optimizer of others may hold the whole module's parameters since the last run.
            is_whole = model.forms.is_whole and model.mesh.sizes.world_size > 1
            with model.in_parallel_form(), with_parts(model, inner):
                if is_whole and is_seen(model.module):
                    made = WholeOptimizer(model, inner)
                    self._names.append(made.names)
                    return made.state_dict()
                return model.states.local_optimizer(model.module, inner)
        except CheckpointError as error:  # the other ranks go on to `save`
            return {"error": error.message}

    @no_collections()
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
            storage_options: For fsspec, if it is a URL; or for the checkpoint plugin.
            checkpoint_io: Lightning's plugin, which writes what is gathered.

        Raises:
            CheckpointError: On every rank, if it was not saved.

        **Communicates**: see `CheckpointSaver.save`.
        """
        if not self._processes.interruption.ranks_are_together():
            _log.error(
                "%s is not saved, since not all ranks stopped at the same place in the run.",
                filepath,
            )
            return
        # A rank that alone calls `save_checkpoint` is told so here, and not by a hang.
        model.steps.reads.agree("save_checkpoint")
        if self.leads:
            # Saved from a hook that sees the whole form, such as `on_fit_end`.
            with model.in_parallel_form():
                self._save(model, checkpoint, filepath, storage_options, checkpoint_io)

    def _save(
        self,
        model: ParallelModel,
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any,
        checkpoint_io: CheckpointIO,
    ) -> None:
        named_states(checkpoint, self._names, lambda *_: True)
        self._names = []
        # Before others: it may hold DTensors, which no encoder takes; a gather is a collective.
        checkpoint = self._gather_averages(model, checkpoint)
        # From rank 0: names with a time or a metric in them may differ between ranks.
        path, as_file = self._processes.broadcast((str(filepath), self._is_file(str(filepath))))
        in_parts, is_url = _writes_plainly(checkpoint_io), "://" in path
        # A plugin may have URLs of its own.
        place = place_of(path, storage_options) if in_parts else Path(path)
        if storage_options is not None and not is_url and self._form == "folder":
            raise ConfigurationError(
                "LP511",
                f"save_checkpoint({path!r}, storage_options={storage_options!r}) is not supported, "
                "since storage_options are for URLs, such as s3://..., and this is a path. Leave "
                "them out.",
            )
        if in_parts:
            raise_problems(ConfigurationError, "LP511", self._problems_of(place))
            in_parts = not as_file if is_url else storage_options is None
        if not in_parts or not self._save_parts(model, checkpoint, place, as_file=as_file):
            self._save_gathered(model, checkpoint, filepath, storage_options, checkpoint_io)
            if in_parts:
                self._saver.note(place)
        # The link may name what a save in the background has still to write.
        if self._processes.rank == 0:
            link_requeue_checkpoint(str(filepath), model.module.trainer)

    def _save_parts(
        self, model: ParallelModel, checkpoint: dict[str, Any], path: Place, *, as_file: bool
    ) -> bool:
        """Let every rank write its part; return False if one device has to save it otherwise."""
        # A node that does not share the folder is named here, before anything is written.
        if isinstance(path, Path):
            self._processes.check_folder(str(path.parent))
        stored = stored_names(model.states.tied, checkpoint.get("state_dict", {}), model.module)
        part = self._make_part(model, checkpoint, stored, as_file=as_file)
        metadata = self._metadata(model, checkpoint, stored)
        try:
            with self._processes.naming_interface():  # a first save makes a group
                self._saver.save(path, part, metadata, background=self._in_background)
        except CheckpointError as error:
            # There nothing else can be done: the error is raised on every rank.
            if self._processes.world_size > 1 or self._form != "auto" or self._in_background:
                raise
            if self._saver.is_taken(path):
                raise
            # What a plain Trainer can save, one device can, too; or it says why as that would.
            _log.info("%s is saved without the states of random generators: %s", path, error)
            return False
        return True

    def _metadata(
        self, model: ParallelModel, checkpoint: dict[str, Any], stored: Mapping[str, str]
    ) -> SaveMetadata:
        """Return what rank 0 writes about the run."""
        return SaveMetadata(
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
            aliases={name: of for name, of in stored.items() if name != of},
            place=model.states.place,
            state_order=model.states.order,
        )

    def _gather_averages(self, model: ParallelModel, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint with whole states where callbacks gave those of this rank's part;
        see Note [Local states].

        **Communicates**: these states, to rank 0.
        """

        # In the same order on all ranks, as `tree_map` goes through equal nests.
        def gathered(value: Any) -> Any:
            is_local = isinstance(value, LocalWeights)
            return model.states.gather_state(value) if is_local else value

        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        return {**checkpoint, **tree_map(gathered, rest)}

    def _is_file(self, path: str) -> bool:
        if self._form == "auto" and "://" in path:
            # One rank has all of it, in the form that Lightning reads from there.
            return self._processes.world_size == 1
        if self._form == "auto":
            return holds_one_file(Path(path).parent, self._processes.num_nodes)
        return self._form == "file"

    def _gather(self, model: ParallelModel, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint of one process on rank 0; elsewhere what is left of it."""
        # Collectives: every rank calls them, and only rank 0 gets what they give.
        whole = {**checkpoint, "state_dict": model.states.gather_state(checkpoint["state_dict"])}
        if "optimizer_states" in checkpoint:
            local = checkpoint["optimizer_states"]
            # What one rank found is on all: a plain tensor for a sharded parameter.
            raise_problems(CheckpointError, "LP505", [o["error"] for o in local if "error" in o])
            whole["optimizer_states"] = [model.states.gather_local_optimizer(o) for o in local]
        return whole

    def _make_part(
        self,
        model: ParallelModel,
        checkpoint: dict[str, Any],
        stored: Mapping[str, str],
        *,
        as_file: bool,
    ) -> Part:
        """Return what this rank would write; what fails here is reported by all ranks together."""
        step = checkpoint["global_step"]
        try:
            return self._encode(model, dict(checkpoint), stored, step, as_file=as_file)
        # In the part, as `CheckpointSaver.save` is a collective that this rank must not miss.
        except Exception as error:
            text = describe(error)
            rank, world = self._processes.rank, self._processes.world_size
            return Part(rank=rank, world=world, step=step, error=text)

    def _encode(
        self,
        model: ParallelModel,
        checkpoint: dict[str, Any],
        stored: Mapping[str, str],
        step: int,
        *,
        as_file: bool,
    ) -> Part:
        # In the order in which Lightning has it; tensors of weights and optimizers go without.
        plain = {**checkpoint, "state_dict": None}
        # Empty: only whether there is the entry counts; the states are pieces.
        if "optimizer_states" in checkpoint:
            plain["optimizer_states"] = []
        weights, values = model.states.weight_pieces(checkpoint.pop("state_dict"), stored)
        pieces, groups = [], []
        for number, optimizer in enumerate(checkpoint.pop("optimizer_states", ())):
            if "error" in optimizer:
                raise CheckpointError("LP505", optimizer["error"])
            of_one, rest = model.states.optimizer_pieces(number, optimizer)
            pieces += of_one
            values |= rest
            groups.append(optimizer["param_groups"])
        if self._processes.rank:  # what all ranks have in common is written by rank 0
            datamodule = getattr(model.module.trainer, "datamodule", None)
            # What may differ between ranks: places in the data.
            own = ("loops", type(datamodule).__qualname__)
            checkpoint = {key: value for key, value in checkpoint.items() if key in own}
        checkpoint[OWN_STATE] = {
            # What this rank's gradients were short of, to be added to the next ones.
            "compression": None if model.compression is None else model.compression.state(),
            "random": collect_random_states(self._processes.device),
            "seed": model.steps.seed,
            "evaluations": model.steps.evaluations,
            "samples": model.steps.loaders.cursors(),
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
            dumped=plain if as_file else None,
        )

    def _save_gathered(
        self,
        model: ParallelModel,
        checkpoint: dict[str, Any],
        path: Any,
        storage_options: Any,
        checkpoint_io: CheckpointIO,
    ) -> None:
        # On every rank; only rank 0 writes, and tells the others how it went: they would wait in
        # the next collective if it raised alone.
        whole, problem = self._gather(model, checkpoint), None
        if self._processes.rank == 0:
            try:
                checkpoint_io.save_checkpoint(whole, path, storage_options=storage_options)
                if "://" in str(path) and _writes_plainly(checkpoint_io):
                    self._remove_saves(place_of(path, storage_options))
            except Exception as error:
                if self._processes.world_size == 1:
                    raise
                problem = f"{path} was not saved: {type(error).__name__}: {error}"
                _log.debug("The cause:", exc_info=True)
        problem = self._processes.broadcast(problem)
        if problem is not None:
            raise CheckpointError("LP508", problem)

    def _remove_saves(self, place: Place) -> None:
        """Remove what is below a URL of which a file has taken the place."""
        try:
            if isinstance(place, UrlPath):
                place.remove_saves()
        except OSError as error:  # the file is there, and only room is lost
            _log.warning(
                "An earlier save to %s could not be removed: %s. The run continues; "
                "remove it yourself.",
                place,
                error,
            )

    def remove(self, filepath: Any, checkpoint_io: CheckpointIO) -> None:
        """Remove a checkpoint; rank 0 does it."""
        if self._processes.rank == 0 and self.leads:
            if "://" in str(filepath) and not _writes_plainly(checkpoint_io):
                checkpoint_io.remove_checkpoint(filepath)
            else:
                self._saver.remove(place_of(filepath))

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
            # It would hide the exception that ended the run.
            if not self._processes.interruption.is_handled:
                raise
            _log.error("%s", error)
        finally:
            self._saver.release()


def _writes_plainly(checkpoint_io: CheckpointIO) -> bool:
    """Whether a plugin writes what `torch.save` writes, as our own files are."""
    # Compared with those at import: someone who replaced one wants to be called.
    writers = torch.save, TorchCheckpointIO.save_checkpoint
    return type(checkpoint_io) is TorchCheckpointIO and writers == _PLAIN_WRITERS
