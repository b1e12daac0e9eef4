"""Notes the first step of a run with a strategy of Lightning's or of the user's, and proves it.

Note [Proof of another strategy]: the strategy takes its step as always; weights, batches, losses,
gradients and the update are noted on the way, whole, on rank 0. Then rank 0 takes the same step
with a Trainer of one process. The strategy says nothing of itself: what ranks hold is found in
their tensors, and the loss of the global batch is what all strategies of Lightning make gradients
of: the mean over the ranks.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_par.dtensor import local_part, whole
from lightning_par.engine.rng import collect_random_states, fork_all_rng
from lightning_par.observe.compare import tolerance_of
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.outside import data_of, outside_state
from lightning_par.observe.report import StartValues, StepRecord
from lightning_par.observe.whole_tensors import norms_of_copies, whole_tensors
from lightning_par.strategies.proof.causes import StepReport
from lightning_par.strategies.proof.judge import CannotProveError, numbers_of, tolerance_at
from lightning_par.strategies.proof.one_process import GivenStep, run_alone
from lightning_par.strategies.proof.other_step import agree_elsewhere, gather_all, OtherStep, Share
from lightning_par.strategies.proof.skeleton import Skeleton
from lightning_par.strategies.proof.updates import watch_steps
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.lightning import callbacks_of, is_accumulating

__all__ = ["StrategyProof"]


class _OnMeshOfOne(Skeleton):
    """Makes modules that the user's `configure_model` divides over a mesh of one rank."""

    def __init__(
        self, module: pl.LightningModule, callbacks: Sequence[Callback], mesh: DeviceMesh
    ) -> None:
        super().__init__(module, callbacks)
        self._mesh = mesh

    @override
    def fill(
        self, tensors: Mapping[str, Tensor], trainer: pl.Trainer
    ) -> tuple[pl.LightningModule, list[Callback]]:
        module, callbacks = super().fill(tensors, trainer)
        with ExitStack() as stack:
            stack.enter_context(replaced(type(module), "device_mesh", self._mesh))
            stack.enter_context(trainer.precision_plugin.module_init_context())
            module.configure_model()
        named = dict([*module.named_parameters(), *module.named_buffers()])
        if any(tensor.is_meta for tensor in named.values()):
            module.to_empty(device="cpu")
            named = dict([*module.named_parameters(), *module.named_buffers()])
        with torch.no_grad():
            for name, tensor in named.items():
                local_part(tensor).copy_(tensors[name])
        return module, callbacks


class StrategyProof:
    """Notes a step and compares it; see Note [Proof of another strategy].

    Args:
        trainer: Its strategy is set up soon.
        module: The user's LightningModule.
        world: Group of rank 0 alone; None on other ranks, and without torch.distributed.
    """

    def __init__(
        self, trainer: pl.Trainer, module: pl.LightningModule, world: dist.ProcessGroup | None
    ) -> None:
        self._trainer, self._module, self._world = trainer, module, world
        self._skeleton: Skeleton | str = ""
        self._originals: dict[int, str] = {}
        self._ends: list[Callable[[], Any]] = []
        self._noted, self._shares = StepRecord(), list[Sequence[Share]]()
        self._given: GivenStep | None = None
        self._copies: list[Any] = []
        self._batch = -1
        # A module that divides itself is copied before, any other one once it is complete.
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self._before(module, "configure_model", self._copy)
        else:
            self._before(trainer.strategy, "setup", self._copy)

    @property
    def name(self) -> str:
        """The strategy, as in a sentence."""
        strategy, ranks = self._trainer.strategy, self._trainer.world_size
        return f"{type(strategy).__name__} on {ranks} {'ranks' if ranks > 1 else 'rank'}"

    @property
    def is_accumulating(self) -> bool:
        """Whether the step that is noted goes on with the next batch."""
        return self._noted.gradients[-1:] == [None]

    def close(self) -> None:
        """Note nothing any more."""
        for end in self._ends:
            end()
        self._ends.clear()

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `wrapper`, which takes what it stands for first, stand for a method of an object."""
        plain = getattr(owner, name)
        vars(owner)[name] = functools.wraps(plain)(functools.partial(wrapper, plain))
        self._ends.append(lambda: vars(owner).pop(name, None))

    def _before(self, owner: Any, name: str, function: Callable[[], None]) -> None:
        def wrapper(plain: Callable[..., Any], *args: Any) -> Any:
            vars(owner).pop(name)
            function()
            return plain(*args)

        self._wrap(owner, name, wrapper)

    def _copy(self) -> None:
        """Take the skeleton of the module, which is not divided yet."""
        module, trainer = self._module, self._trainer
        named = module.named_parameters(remove_duplicate=False)
        self._originals = {id(p): name for name, p in named}
        if trainer.global_rank:
            return
        try:
            with fork_all_rng(torch.device("cpu")):  # copies of the user's objects may draw numbers
                callbacks = callbacks_of(trainer)
                if isinstance(trainer.strategy, ModelParallelStrategy):
                    self._skeleton = _OnMeshOfOne(module, callbacks, self._mesh_of_one())
                else:
                    self._skeleton = Skeleton(module, callbacks)
        except Exception as error:  # whatever a copy of the user's objects raises
            self._skeleton = f"the module cannot be copied ({type(error).__name__}: {error})"

    def _mesh_of_one(self) -> DeviceMesh:
        assert isinstance(self._trainer.strategy, ModelParallelStrategy)
        mesh, group = self._trainer.strategy.device_mesh, self._world
        assert group is not None
        place = torch.zeros((1,) * mesh.ndim, dtype=torch.int)
        names = mesh.mesh_dim_names
        groups = [group] * mesh.ndim
        return DeviceMesh.from_group(groups, mesh.device_type, mesh=place, mesh_dim_names=names)

    def begin(self) -> None:
        """Note the step that follows."""
        strategy, plugin = self._trainer.strategy, self._trainer.precision_plugin
        self._wrap(strategy, "training_step", self._take)
        # A strategy may reduce gradients after its precision plugin has computed them.
        self._wrap(strategy, "backward", self._take_backward)
        self._ends.append(watch_steps(plugin, self._note_handed, self._note_updated))

    def _take(self, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trainer, device = self._trainer, self._trainer.strategy.root_device
        with fork_all_rng(device):  # what gathers objects may draw numbers
            if self._given is None:
                self._given = GivenStep(start=self._start())
            if self._batch != trainer.fit_loop.total_batch_idx:  # else the loss once more
                self._batch = trainer.fit_loop.total_batch_idx
                self._given.arguments.append(args[1:])
                given: Mapping[str, int] = getattr(
                    trainer.strategy, "distributed_sampler_kwargs", {}
                )
                states, replica = collect_random_states(device), given.get("rank", 0)
                self._shares.append(gather_all(Share.of(args[0], replica, states)))
        return plain(*args, **kwargs)

    def _start(self) -> StartValues:
        module, trainer = self._module, self._trainer
        owners = [*module.modules(), *callbacks_of(trainer), *data_of(trainer)]
        return StartValues(
            tensors=self._whole(buffers=True),
            global_step=module.global_step,
            epoch=module.current_epoch,
            batch=trainer.fit_loop.batch_idx,
            continues=module.global_step > 0,
            groups=numbers_of(trainer.optimizers),
            put_outside=outside_state(owners),
        )

    def _whole(self, **which: bool) -> dict[str, Tensor]:
        keeps, wrapper = self._trainer.global_rank == 0, self._trainer.strategy.model
        return whole_tensors(self._module, within=wrapper, keeps=keeps, **which)

    def _take_backward(
        self, plain: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        result = plain(loss, *args, **kwargs)
        mean = whole(loss.detach()).double().reshape(1)
        if dist.is_initialized():
            mean = mean.clone()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self._noted.losses.append(float(mean))
        accumulates = is_accumulating(self._trainer)
        self._noted.gradients.append(None if accumulates else self._whole(gradients=True))
        if not accumulates:
            self._copies = gather_all(norms_of_copies(self._module, self._trainer.strategy.model))
        return result

    def _note_handed(self) -> None:
        self._noted.handed.append(self._whole(gradients=True))

    def _note_updated(self) -> None:
        self._noted.updated = self._whole()

    def end(self) -> StepReport:
        """Compare the step that was noted, and return what came out, on every rank."""
        self.close()
        with fork_all_rng(self._trainer.strategy.root_device):
            report = agree_elsewhere(self._judge, self.name)
        self._skeleton, self._given = "", None
        return report

    def _judge(self) -> StepReport:
        trainer, given, skeleton = self._trainer, self._given, self._skeleton
        plugin = trainer.precision_plugin
        if isinstance(skeleton, str):
            raise CannotProveError(skeleton or "its whole module could not be captured")
        if getattr(plugin, "scaler", None) is not None:
            raise CannotProveError("the loss is scaled (16-mixed)")
        assert given is not None
        is_ours = type(plugin).__module__.startswith("lightning.")
        device = trainer.strategy.root_device

        def run(batches: list[Any], states: list[dict[str, Any]], drops: bool) -> StepRecord:
            step = replace(
                given,
                batches=batches,
                random_states=states,
                gradients=self._noted.gradients,
                handed=self._noted.handed,
                after_hooks=True,
            )
            own = None if is_ours else copy.copy(plugin)
            with nullcontext() if drops else WithoutDropout():
                return run_alone(skeleton, step, trainer, self._originals, device, own, self._world)

        dtypes = [t.dtype for t in given.start.tensors.values()]
        notes = [f"callbacks cannot be copied ({each})" for each in skeleton.problems]
        if given.start.continues:
            notes.append(
                "the update is not compared, since it continues from loaded optimizer states"
            )
        algorithm = trainer.gradient_clip_algorithm
        return OtherStep(
            strategy=self.name,
            module=skeleton.module,
            noted=self._noted,
            shares=self._shares,
            run=run,
            start=given.start.tensors,
            tolerance=tolerance_at(trainer.precision, *dtypes),
            update=None if notes else tolerance_of(*dtypes),
            copies=self._copies,
            clips=bool(trainer.gradient_clip_val) and algorithm in (None, "norm"),
            notes=notes,
        ).judge()
