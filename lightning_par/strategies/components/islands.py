"""Islands inside Lightning: when an island meets the others, and which weights the Trainer sees."""

import json
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint.pieces import assign_writers, Piece
from lightning_par.checkpoint.storage import write_object
from lightning_par.dtensor import local_box, local_part
from lightning_par.engine.batch import batch_size
from lightning_par.engine.data.islands.client import Exchange
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.shards import ShardedClient
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.components.checkpoint_save import CheckpointSave
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.setup.averaging_checks import averaging_callbacks
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.upstream.dtensor import sharded_like
from lightning_par.upstream.lightning import callbacks_of

__all__ = ["IslandRounds", "KeptOptimizers"]

_log = logging.getLogger(__name__)
_LONGEST_PLACE = 1 << 16
"""Bytes of the longest place in the data, which the server keeps for every island."""


class IslandRounds(Callback):
    """Exchanges weights with the other islands after optimizer steps of a fit.

    The first of the Trainer's callbacks, from `attach` to `detach`. A step is a batch after which
    an optimizer has stepped. Validation and checkpoints see the weights that all islands share.

    Args:
        outer: The options of the run.
        processes: The ranks of this island.
        saving: Saves checkpoints, on the first island only.
        model: Returns the model on its mesh.

    Attributes:
        client: The connections of this rank; None: there is no fit.
        exchanges: Those of this rank in this fit so far.
    """

    def __init__(
        self,
        outer: Outer,
        processes: MeshProcesses,
        saving: CheckpointSave,
        model: Callable[[], ParallelModel],
    ) -> None:
        self._outer, self._processes, self._saving, self._model = outer, processes, saving, model
        self.client: ShardedClient | None = None
        self.exchanges: list[Exchange] = []
        self._kept: KeptOptimizers | None = None
        self._incarnation = ""
        self._is_warned = self._is_placeless = False
        self._samples = self._steps = 0
        self._missed: dict[str, int] = {}
        self._own: list[tuple[Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Callback:
        """Return a callback that does nothing: the run that proves the first step meets nobody."""
        return Callback()

    def attach(self, trainer: pl.Trainer) -> None:
        """Become the first callback of a Trainer.

        Raises:
            ConfigurationError: Another callback averages weights, too; or nothing says where the
                server is, or which island this is.
        """
        # Raises where the place is not known, before anything is changed.
        self._processes.find_place()
        if averaging_callbacks(trainer):
            raise ConfigurationError(
                "LP706",
                "outer= is not supported with a callback that averages weights, since the "
                "callback would average the weights of one island only. Remove the callback; "
                "outer= with optimizer='average' averages the weights of all islands.",
            )
        if self not in callbacks_of(trainer):
            # First, so that other callbacks see the weights after an exchange.
            callbacks_of(trainer).insert(0, self)
        # All islands share one folder, perhaps, and their weights are alike.
        self._saving.leads = self._processes.island == 0
        self._saving.share = self._share

    def detach(self, trainer: pl.Trainer) -> None:
        """Leave a Trainer as it was, and close the connection."""
        if self.client is not None:
            self.client.close()
            self.client = None
        self._saving.leads, self._saving.share = True, None
        if self in callbacks_of(trainer):
            callbacks_of(trainer).remove(self)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        place = self._processes.find_place()
        # One name for all ranks of the island: the server tells incarnations apart by it.
        place = replace(place, incarnation=self._processes.broadcast(place.incarnation))
        model = self._model()
        # Pieces are views of the shards, into which an exchange writes.
        model.sharding.release()
        named = dict(model.module.named_parameters())
        pieces, _ = model.states.weight_pieces(named)
        canonical = model.resolved.canonical
        trained = {canonical.get(n, n) for n, p in named.items() if p.requires_grad}
        _check_dtypes(pieces, trained)
        # Every rank has to know all boxes: of replicas one sends, and all receive.
        held = self._gather([(p.box, p.nbytes, p.global_shape) for p in pieces])
        sends = assign_writers([[(box, size) for box, size, _ in part] for part in held])
        mine = sends[self._processes.rank], frozenset(trained)
        sizes = {box.name: math.prod(shape) for part in held for box, _, shape in part}
        self.client = ShardedClient(self._outer, place, pieces, *mine, sizes)
        # Kept after the client is gone: a test or a user may look.
        self.exchanges = self.client.exchanges
        self.client.step, epoch = trainer.global_step, trainer.current_epoch
        self.client.join()
        # What the schedules have to make up for, in steps and in epochs.
        self._samples, self._missed = 0, {"step": self.client.step - trainer.global_step}
        # An island that came back goes on in its data where it was.
        if self.client.place is not None:
            _resume(trainer, self.client.place)
        self._missed["epoch"] = trainer.current_epoch - epoch
        self._steps = trainer.global_step
        self._incarnation = place.incarnation
        self._take_back(trainer, place.island)
        _log.info("island %d begins at step %d", place.island, self.client.step)

    def _take_back(self, trainer: pl.Trainer, island: int) -> None:
        """Give the optimizers the states that this island had at its last exchange, if every rank
        has kept them.
        """
        folder = self._outer.keep
        if folder is None:
            return
        assert self.client is not None
        path = Path(folder, f"island-{island}-rank-{self._processes.rank}.pt")
        self._kept = KeptOptimizers(path, self.client.era, trainer.optimizers)
        # Of all ranks: states of different exchanges do not belong together.
        moments = {moment for (moment,) in self._gather([self._kept.read()])}
        if moments != {None} and len(moments) == 1:
            self._kept.load()
            _log.info(
                "the optimizers of island %d continue from its last exchange of weights", island
            )

    def _gather(self, held: list[Any]) -> list[list[Any]]:
        """Return what every rank of this island holds."""
        every: list[Any] = [held] * self._processes.world_size
        if len(every) > 1:
            dist.all_gather_object(every, held)
        return every

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._samples += batch_size(batch)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        client = self.client
        # `global_step` grows only where an optimizer stepped.
        if client is None or trainer.global_step == self._steps:  # gradients accumulate
            return
        self._steps = trainer.global_step
        # After the first step: a scheduler warns if it is stepped before its optimizer.
        self._catch_up(trainer)
        exchanges, rounds = client.exchanges_next, client.rounds
        # The client reads and writes shards.
        self._model().sharding.release()
        if exchanges:
            client.after_step(self._count_samples(), self._place(trainer))
            if self._kept is not None:
                # After the exchange: at its next start the island meets the others from here.
                self._kept.save(f"{self._incarnation}-{trainer.global_step}")
        else:
            client.after_step(0)
        # At its own last step Lightning ends a run by itself, and does not validate once more.
        if client.rounds > rounds and trainer.global_step < trainer.max_steps:
            is_over = client.step >= trainer.max_steps
            # Decided together: a rank that came back after a lost answer may know of a later step.
            trainer.should_stop |= self._processes.decide(is_over, unanimous=False)

    def _place(self, trainer: pl.Trainer) -> dict[str, Any] | None:
        """Return where the loop and its loaders stand, as a checkpoint would hold it, if that can
        be sent.
        """
        place: dict[str, Any] = trainer.fit_loop.state_dict()
        try:
            text = json.dumps(place)
        except (TypeError, ValueError):
            text = ""
        # JSON turns tuples into lists and keys into text: only what comes back equal is a place.
        if 0 < len(text) <= _LONGEST_PLACE and json.loads(text) == place:
            return place
        if not self._is_placeless:
            self._is_placeless = True
            rank_zero_warn(
                "the state of the training data loader cannot be written as JSON, or has more "
                f"than {_LONGEST_PLACE:,} bytes, so it is not saved. If this island is restarted, "
                "its data start from the beginning."
            )
        return None

    def _count_samples(self) -> int:
        """Return the samples of this island since the last call.

        **Communicates**: one all-reduce of one number over the replicas.
        """
        # Ranks of one replica see the same batch, which `reduce` counts once.
        mine, self._samples = torch.tensor(self._samples, device=self._processes.device), 0
        return int(self._processes.reduce(mine, reduce_op="sum"))

    def _catch_up(self, trainer: pl.Trainer) -> None:
        """Give the schedules the steps that were made before this island came."""
        missed, self._missed = self._missed, {}
        # Those on a plateau need the metrics, which nobody has of steps that others made.
        for config in trainer.lr_scheduler_configs if missed else ():
            if not config.reduce_on_plateau:
                for _ in range(missed[config.interval] // config.frequency):
                    config.scheduler.step()  # type: ignore[call-arg]

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.client is None:
            return
        if not self.client.rounds and not trainer.sanity_checking and not self._is_warned:
            self._is_warned = True
            rank_zero_warn(
                "validation uses the weights that all islands share, but the islands have not "
                f"exchanged weights yet: they do so every {self._outer.every} optimizer steps "
                f"(every=), and this validation comes after {trainer.global_step} steps. Use a "
                "smaller every=."
            )
        self._model().sharding.release()
        for piece in self._pieces():
            # All are kept before the first is overwritten.
            self._own.append((piece.values, piece.values.clone()))
        for piece, shared in zip(self._pieces(), self.client.shared().values(), strict=True):
            piece.values.copy_(shared)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # A validation that began without a client.
        if not self._own:
            return
        self._model().sharding.release()
        for values, own in self._own:
            values.copy_(own)
        self._own.clear()

    def _pieces(self) -> list[Piece]:
        model = self._model()
        return model.states.weight_pieces(dict(model.module.named_parameters()))[0]

    def _share(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of this rank's part with the weights that all islands share."""
        if self.client is None:
            return state
        shared, canonical = self.client.shared(), self._model().resolved.canonical
        found = dict(state)
        for name, value in state.items():
            # Each island has its own buffers.
            if name not in canonical:
                continue  # a buffer
            found[name] = value.detach().clone()
            box = local_box(canonical[name], value)
            local_part(found[name]).copy_(shared[box])
        return found

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.client is not None:
            self._model().sharding.release()
            # Before it leaves: the last steps since an exchange count, too.
            self.client.finish(self._count_samples())
            self.client.leave()
            self.client = None
            if self._kept is not None:
                # The run is over: the next one of this name starts anew.
                self._kept.forget()


def _resume(trainer: pl.Trainer, place: dict[str, Any]) -> None:
    """Let a fit that has just begun go on where another one stood, as if from its checkpoint.

    Args:
        trainer: In `on_train_start`, when its loop has made iterators of its loaders already.
        place: ``fit_loop.state_dict()`` of the other one, at an `on_train_batch_end`.
    """
    own: Any = trainer  # Lightning does not declare the attribute on its class
    loop, reload = trainer.fit_loop, own.reload_dataloaders_every_n_epochs
    loop.load_state_dict(place)
    # `setup_data` makes loaders anew only if it is due, by this number.
    own.reload_dataloaders_every_n_epochs = -1  # now, however many epochs were made
    loop.setup_data()
    own.reload_dataloaders_every_n_epochs = reload
    loop.reset()


def _check_dtypes(pieces: list[Piece], trained: set[str]) -> None:
    """Refuse weights of which the optimizer keeps wider copies, which an exchange does not change.

    Raises:
        ConfigurationError: A trained weight has 16 bits.
    """
    for piece in pieces:
        dtype = piece.values.dtype
        if piece.box.name in trained and dtype not in (torch.float32, torch.float64):
            raise ConfigurationError(
                "LP706",
                f"outer= is not supported with weights in {dtype} ({piece.box.name}), since "
                "islands exchange float32 or float64 weights. Use precision='bf16-mixed' instead "
                "of 'bf16-true'.",
            )


class KeptOptimizers:
    """The states of a rank's optimizers in one file, which is replaced at once.

    Args:
        path: The file.
        era: Name of the run; a file of another one is not read.
        optimizers: Those of this rank.
    """

    def __init__(self, path: Path, era: str, optimizers: Sequence[Optimizer]) -> None:
        self._path, self._era = path, era
        # In the order of the groups, which the same script makes again at its next start.
        self._held = [
            (optimizer.state, parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._read: list[dict[str, Any]] = []

    def save(self, moment: str) -> None:
        """Write the states, with the name of this moment, which all ranks of the island give."""
        states = [
            # Plain parts: a DTensor would need its mesh to be read again.
            {n: local_part(v) if isinstance(v, Tensor) else v for n, v in state.get(p, {}).items()}
            for state, p in self._held
        ]
        write_object(self._path, {"era": self._era, "moment": moment, "states": states})

    def read(self) -> str | None:
        """Read the file; return the moment of which it is, or None if it is not of this run, or of
        other parameters.
        """
        try:
            found = torch.load(self._path, weights_only=True)
        # There is no file, or it is not one that `save` has written whole.
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None
        if not isinstance(found, dict) or not {"era", "moment", "states"} <= found.keys():
            return None
        shapes = [local_part(parameter).shape for _, parameter in self._held]
        fits = len(shapes) == len(found["states"]) and all(
            not isinstance(value, Tensor) or value.ndim == 0 or value.shape == shape
            for shape, state in zip(shapes, found["states"], strict=True)
            for value in state.values()
        )
        if found["era"] != self._era or not fits:
            return None
        self._read = found["states"]
        return str(found["moment"])

    def load(self) -> None:
        """Give the optimizers what was read."""
        for (state, parameter), entries in zip(self._held, self._read, strict=True):
            for name, value in entries.items():
                # A step count without dims is whole everywhere.
                is_part = isinstance(value, Tensor) and value.ndim > 0
                shards = is_part and isinstance(parameter, DTensor)
                state[parameter][name] = sharded_like(value, parameter) if shards else value
        self._read = []

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
