"""The data loaders of a run on a mesh: divided among the replicas, as one process orders them."""

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lightning_par.engine.rng import collect_random_states, restore_random_states, states_alike
from lightning_par.engine.tensor_tree import broadcast_object
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.contents import names_in
from lightning_par.strategies.data.island_order import island_batches
from lightning_par.strategies.data.joint_batches import share_joint_batch
from lightning_par.strategies.data.replica_batches import ReplicaBatches, Share
from lightning_par.strategies.data.uneven_batches import join_ranks, samples_differ
from lightning_par.strategies.options import MeshOptions
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.lightning import (
    callbacks_of,
    forget_loaders,
    loaders_in_use,
    noted_batches,
    trainer_of,
    uses_distributed_sampler,
)
from lightning_par.upstream.pytree import tree_flatten, tree_leaves

__all__ = ["EarlyLoaders", "ReplicaLoaders"]

_MEETING = frozenset({"barrier", "all_gather", "all_gather_object", "gather_object", "all_reduce"})
_NOTHING = object()
_GATHERS = frozenset({"all_gather", "all_gather_into_tensor"})
_CPU = torch.device("cpu")


class ReplicaLoaders:
    """Divides the samples of loaders among the replicas, and knows the share of every batch.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        hold: Keeps parameters whole while replicas predict unequal numbers of batches.
        device: Device of this rank.
        options: Of the strategy; the samples of training are divided among islands, too.

    Attributes:
        has_several: Whether a step may take batches of several loaders.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        hold: Callable[[], None],
        device: torch.device,
        options: MeshOptions,
    ) -> None:
        self._module, self._mesh, self._hold, self._device = module, mesh, hold, device
        self._has_replicas = mesh.sizes.data > 1
        self._on_island = options.outer is not None
        self._divides = not self._on_island and mesh.sizes.world_size > 1
        self._cursors: list[Any] = []
        self._prepared = Counter[Any]()
        self.has_several = False
        self._gathers, self._muted = options.gather_predictions, ExitStack()
        self._quiet = ExitStack()
        self._divided: WeakKeyDictionary[Any, ReplicaBatches] = WeakKeyDictionary()

    def prepare(self, dataloader: object) -> object:
        """Return a loader of this replica's samples, with as many batches as on every rank.

        Predictions may differ in number; then parameters are gathered before the first.

        **Communicates**: random states, where a sampler may draw; numbers of samples and of
        batches, over all ranks, where they may differ.
        """
        trainer, device = self._module.trainer, self._device
        strategy: Any = trainer.strategy
        # Lightning asks for each loader of a stage in turn.
        self._prepared[trainer.state.stage] += 1
        self.has_several |= self._prepared[trainer.state.stage] > 1
        cursor = self._cursor_of(dataloader)  # every loader has one, if only some are divided
        if self._on_island and trainer.training and uses_distributed_sampler(trainer):
            dataloader = self._divide_among_islands(dataloader)
        elif self._divides and self._is_divided(trainer):
            dataloader = self._divide(dataloader, cursor)
        if trainer.predicting and self._has_replicas:
            divided = self._divided.get(dataloader) if isinstance(dataloader, DataLoader) else None
            if samples_differ(dataloader, device, divided, trainer.limit_predict_batches):
                self._check_experts(divided)
                # FSDP2 gathers in every forward, with all ranks: a replica that has no batch left
                # would be missed.
                self._hold()
        if trainer.predicting:
            self._mute_writers()
        return join_ranks(dataloader, trainer, device, strategy.processes.as_replica)

    def is_on(self, mesh: ParallelMesh) -> bool:
        """Whether they are those of a run on this mesh."""
        return self._mesh is mesh

    def adopt(self, early: "ReplicaLoaders") -> None:
        """Take loaders that others have prepared, with the shares of their batches."""
        self._divided.update(early._divided)
        self._prepared += early._prepared
        self.has_several |= early.has_several

    def _is_divided(self, trainer: pl.Trainer) -> bool:
        """Whether samples are divided; training on one replica keeps where an epoch goes on."""
        return uses_distributed_sampler(trainer) if self._has_replicas else trainer.training

    def cursors(self) -> list[Any]:
        """Return where the loaders of training go on, if an epoch has begun and is not over."""
        trainer = self._module.trainer
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_inside = progress.current.ready and not progress.is_last_batch
        if trainer.state.fn != TrainerFn.FITTING or not self._divides or not is_inside:
            return []
        # The Trainer keeps them after training, when its loop has no loaders in use.
        loaders = tree_leaves(trainer.train_dataloader)
        divided = [self._divided.get(x) if isinstance(x, DataLoader) else None for x in loaders]
        if len(loaders) > 1:  # one that nobody divides here may have begun again
            divided = [None if d is None or not d.is_of_all else d for d in divided]
        ready = int(progress.current.ready)
        return [None if batches is None else batches.cursor(ready) for batches in divided]

    def resume(self, cursors: list[Any]) -> None:
        """Let the epoch of the next training go on there.

        Args:
            cursors: From `cursors`, of a run on any layout.
        """
        self._cursors = list(cursors)

    def end_evaluation(self) -> None:
        """Give every rank the predictions of all replicas, in the order of the data set.

        **Communicates**: they go to every rank, where the Trainer returns some.
        """
        self._muted.close()
        trainer = self._module.trainer
        if not (trainer.predicting and self._divided):
            return
        loop = trainer.predict_loop
        found: Any = loop.predictions if loop.return_predictions else []
        found = [found] if loop.num_dataloaders == 1 and loop.return_predictions else found
        held = zip(tree_leaves(loaders_in_use(loop)[0]), found, strict=False)
        for loader, predictions in held:
            if not isinstance(loader, DataLoader) or loader not in self._divided:
                continue
            # It predicted a batch of others, so that it took part in collectives.
            if self._divided[loader].is_spare:
                predictions.clear()
            if self._gathers:
                parts: list[Any] = [None] * self._mesh.sizes.data
                dist.all_gather_object(parts, predictions, group=self._mesh.data_group)
                # Replicas took batches in turns, so their predictions are dealt back in turns.
                turns = zip_longest(*parts, fillvalue=_NOTHING)
                # In place: the Trainer has taken this list already.
                predictions[:] = [one for turn in turns for one in turn if one is not _NOTHING]

    def _check_experts(self, divided: ReplicaBatches | None) -> None:
        """Refuse to predict unequal numbers of batches with experts of other replicas, which answer
        in each of their own batches only.
        """
        if divided is None or self._mesh.sizes.expert == 1:
            return
        replicas = self._mesh.sizes.data
        raise ConfigurationError(
            "LP334",
            f"trainer.predict() with expert_parallel_size={self._mesh.sizes.expert}: the loader "
            f"gives a number of batches that {replicas} replicas cannot share equally. Each batch "
            "uses experts on other replicas, so every replica needs equally many batches. Choose "
            f"a batch_size that gives a multiple of {replicas} batches, or predict with "
            "expert_parallel_size=1.",
        )

    def _mute_writers(self) -> None:
        """Let writers of predictions write on the first rank of a replica only, unless all ranks
        meet in them.
        """
        self._muted.close()
        is_first = dist.get_rank() == dist.get_global_rank(self._mesh.replica_group, 0)
        if is_first and not any(batches.is_spare for batches in self._divided.values()):
            return
        for callback in callbacks_of(self._module.trainer):
            if not isinstance(callback, BasePredictionWriter):
                continue
            for name in ("write_on_batch_end", "write_on_epoch_end"):
                # A writer that gathers needs all ranks; one that only writes would write several
                # times.
                if not names_in(getattr(type(callback), name)) & _MEETING:
                    self._muted.enter_context(replaced(callback, name, _write_nothing))

    def take(self, batch: Any, dataloader_idx: int) -> tuple[Any, Share]:
        """Return the batch that a step gets, and what it is of the global one.

        Args:
            batch: As the loaders of this replica gave it.
            dataloader_idx: Number of its loader, where these are iterated one after the other.

        Raises:
            ConfigurationError: The samplers of the replicas do not give the same order.

        **Communicates**: a checksum over all ranks, in the first batch of an iteration; see
        `share_joint_batch`.
        """
        self._quiet.close()
        nest, is_joint = loaders_in_use(_running_loop(self._module.trainer))
        loaders, spec = tree_flatten(nest)
        if not is_joint:
            loaders = loaders[dataloader_idx : dataloader_idx + 1]
        if not loaders:  # of no loader, as a batch that a hook makes outside of a loop
            return batch, Share()
        # In the order of the loaders, on every rank, as the first batch of each is compared.
        shares = [self._taken(loader) for loader in loaders]
        if len(shares) == 1:
            return batch, shares[0] or Share()
        return share_joint_batch(batch, spec, shares, self._mesh)

    def _taken(self, loader: Any) -> Share | None:
        batches = self._divided.get(loader) if isinstance(loader, DataLoader) else None
        share = None if batches is None else batches.take()
        if share is None:
            return None
        if share.check is not None and not self._module.trainer.predicting:
            # The largest of x and of -x: equal in size only if all ranks have the same x. One
            # all-reduce, on the device's own group.
            ends = torch.tensor([share.check, -share.check], device=self._device)
            dist.all_reduce(ends, dist.ReduceOp.MAX)
            if int(ends[0]) != -int(ends[1]):
                raise ConfigurationError(
                    "LP324",
                    "the sampler of the data loader returns a different order of samples on each "
                    f"of {self._mesh.sizes.data} replicas, so some samples would be used several "
                    "times and others never. If the sampler divides the samples itself, pass "
                    "Trainer(use_distributed_sampler=False). Otherwise let it draw from a "
                    "generator that has the same seed on every rank.",
                )
        return share

    def _divide_among_islands(self, dataloader: object) -> object:
        """Return a copy of a loader whose batch sampler gives the part of this island's replica."""
        if not isinstance(dataloader, DataLoader) or _is_stream(dataloader):
            return dataloader
        held: Any = dataloader.batch_sampler
        if _is_divided(dataloader.sampler, held, getattr(held, "sampler", None)):
            return dataloader
        given: Any = dataloader.sampler if held is None else held
        try:
            len(given)
        except (TypeError, NotImplementedError):
            rank_zero_warn(
                "the sampler of the data loader has no length, so its samples are not divided "
                "over the islands, and each island uses all of them. Divide the samples with "
                "trainer.strategy.distributed_sampler_kwargs, which holds rank and num_replicas."
            )
            return dataloader
        strategy: Any = self._module.trainer.strategy
        places = strategy.distributed_sampler_kwargs
        batches = island_batches(given, places["num_replicas"], places["rank"])
        return _with_batches(dataloader, batches)

    def _divide(self, dataloader: object, cursor: Any) -> object:
        """Return a copy of a loader whose batch sampler gives this replica's part."""
        if not isinstance(dataloader, DataLoader) or _is_stream(dataloader):
            return dataloader
        noting: Any = type(dataloader.batch_sampler)
        held: Any = dataloader.batch_sampler
        # Lightning notes the batches for writers of predictions, by a sampler around another.
        is_noted = noting.__module__ == UnrepeatedDistributedSampler.__module__
        held = noted_batches(held) if is_noted else held
        is_divided = _is_divided(dataloader.sampler, held, getattr(held, "sampler", None))
        if is_divided and (not self._module.trainer.training or self._has_state(dataloader)):
            return dataloader
        # Of what is divided already, only the place where an epoch goes on is kept.
        replicas, rank = (1, 0) if is_divided else (self._mesh.sizes.data, self._mesh.data_rank)
        is_sequential = type(held) is BatchSampler and isinstance(held.sampler, SequentialSampler)
        # A sampler may draw already when it is iterated, or when its length is asked.
        if replicas > 1 and not is_sequential:
            self._agree()
        batches = ReplicaBatches(
            dataloader.sampler if held is None else held,
            replicas,
            rank,
            predicts=bool(self._module.trainer.predicting),
            repeats=self._why_repeat,
            agree=self._agree if replicas > 1 else lambda: None,
            cursor=cursor,
            is_divided=is_divided,
        )
        copied = _with_batches(dataloader, noting(batches) if is_noted else batches)
        self._divided[copied] = batches
        self._count_batches(batches)
        return copied

    def _count_batches(self, batches: ReplicaBatches) -> None:
        """Let the Trainer count what is left of an epoch in the global batches of this layout."""
        progress: Any = self._module.trainer.fit_loop.epoch_loop.batch_progress.current
        if not batches.resumes:
            return
        # In the middle of a step the last of these is one less.
        more = batches.before - progress.ready
        progress.ready += more
        progress.started += more
        progress.processed += more
        progress.completed += more
        # Lightning would warn that this loader begins the epoch again.
        # Until the first batch is taken.
        self._quiet.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        rank_zero_info(
            f"The epoch continues after batch {batches.before}, the last batch before the "
            "checkpoint was saved. On one device Lightning's Trainer would start the epoch from "
            "its beginning."
        )

    def _cursor_of(self, dataloader: Any) -> Any:
        """Return where a loader goes on, once, unless it or the data module has a state for it."""
        trainer: Any = self._module.trainer
        if trainer.training and trainer.train_dataloader is not None:
            self._cursors.clear()  # those of a later epoch are new
        if not trainer.training or not self._cursors:
            return None
        cursor = self._cursors.pop(0)
        return None if self._has_state(dataloader) else cursor

    def _has_state(self, dataloader: Any) -> bool:
        """Return whether a loader, or the data module, knows itself where an epoch goes on."""
        module = self._module.trainer.datamodule  # type: ignore[attr-defined]
        leaves_out = module is not None and is_overridden("load_state_dict", module)
        return leaves_out or hasattr(dataloader, "load_state_dict")

    def _agree(self) -> None:
        """Give all ranks the random states of rank 0, from which samplers draw."""
        assert dist.group.WORLD is not None
        own = collect_random_states(_CPU)
        common = broadcast_object(own, 0, dist.group.WORLD)
        if not states_alike(own, common):
            restore_random_states(common, _CPU)

    def _why_repeat(self) -> str:
        """Say why replicas need equal numbers of samples; empty if they do not."""
        kind = type(self._module)
        classes = kind.__mro__[: kind.__mro__.index(pl.LightningModule)]
        for owner in classes:
            for name, value in vars(owner).items():
                # By name in the source: equal shapes are needed on all replicas then.
                if names_in(value) & _GATHERS:
                    who = f"{owner.__name__}.{name}"
                    return f"{who} gathers values of equally many samples from all replicas"
        return ""


class EarlyLoaders:
    """Loaders of training that are prepared before the module is on the mesh, where its `setup` or
    `configure_model` asks for `Trainer.estimated_stepping_batches`: the Trainer keeps them.
    """

    def __init__(self) -> None:
        self._given: list[object] = []
        self._loaders: ReplicaLoaders | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave what is of one run behind."""
        return {"_given": [], "_loaders": None}

    def prepare(self, dataloader: object, strategy: Any) -> object:
        """Return a loader of this replica's samples, or as it is where no training follows.

        Args:
            dataloader: The user's.
            strategy: The `MeshStrategy` of the run, whose processes are set up.

        **Communicates**: as `ReplicaLoaders.prepare` does.
        """
        module = strategy.lightning_module
        trainer = trainer_of(module)
        if trainer is None or not trainer.training:
            return dataloader
        if self._loaders is None or not self._loaders.is_on(strategy.mesh):
            self._given = []
            rest = strategy.mesh, lambda: None, strategy.root_device, strategy.options
            self._loaders = ReplicaLoaders(module, *rest)
        self._given.append(dataloader)
        return self._loaders.prepare(dataloader)

    def hand_over(self, runner: Any, trainer: pl.Trainer, *, resumes: bool) -> None:
        """Give the loaders to the run that begins.

        Args:
            runner: Its `StepRunner`.
            trainer: Its Trainer.
            resumes: Whether the run goes on where another was, so that the order of samples, which
                these loaders may have drawn, is another; then the Trainer prepares them anew.
        """
        (early, given), self._loaders, self._given = (self._loaders, self._given), None, []
        if early is None or not early.is_on(runner.mesh):  # of a run that failed before its set-up
            return
        if resumes:
            forget_loaders(trainer.fit_loop, given)
            return
        for dataloader in given:
            runner.check_loader(dataloader)
        runner.loaders.adopt(early)


def _is_stream(dataloader: DataLoader[Any]) -> bool:
    return isinstance(dataloader.dataset, IterableDataset)


def _is_divided(*samplers: Any) -> bool:
    """Whether one of them gives other samples on every replica, or island."""
    return any(isinstance(s, DistributedSampler) or hasattr(s, "num_replicas") for s in samplers)


def _with_batches(dataloader: DataLoader[Any], batches: Any) -> DataLoader[Any]:
    """Return a copy of a loader that takes these batches.

    The user may iterate the loader in another run; made anew, it would need every argument of a
    class of the user's.
    """
    copied = copy.copy(dataloader)
    # `DataLoader.__setattr__` refuses these once it is made.
    vars(copied)["sampler" if dataloader.batch_sampler is None else "batch_sampler"] = batches
    return copied


def _running_loop(trainer: pl.Trainer) -> Any:
    if trainer.training:
        return trainer.fit_loop
    if trainer.predicting:
        return trainer.predict_loop
    if trainer.testing:
        return trainer.test_loop
    fits = trainer.state.fn == TrainerFn.FITTING
    return trainer.fit_loop.epoch_loop.val_loop if fits else trainer.validate_loop


def _write_nothing(*_: Any, **__: Any) -> None:
    """Stand in the place of a method of a writer."""
