"""A step on one process: a Trainer of its own, inside the process of rank 0.

Only a real `Trainer.fit` has Lightning's order of hooks, closures and optimizers. Inside, this
process looks like the only one; nothing that is global to it is changed afterwards.
"""

import functools
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn, Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.dtensor import local_part
from lightning_par.engine.data.fsdp import second_names_dropped
from lightning_par.engine.rng import (
    collect_random_states,
    restore_random_states,
    states_alike,
)
from lightning_par.engine.tensor_tree import to_cpu
from lightning_par.observe.outside import data_of, outside_kept
from lightning_par.observe.report import EvaluationRecord, StartValues, StepRecord
from lightning_par.strategies.proof.parted_batch import PartedBatch, run_parts
from lightning_par.strategies.proof.silence import single_process
from lightning_par.strategies.proof.skeleton import Skeleton
from lightning_par.strategies.proof.updates import (
    copies_of_gradients,
    restore,
    take_over,
    watch_steps,
    with_gradients,
)
from lightning_par.strategies.setup.replaced_parameters import replace_parameters
from lightning_par.strategies.step.metrics import MetricsOfBatch
from lightning_par.strategies.step.step_traces import LogCall, logs_off, noted_logs
from lightning_par.upstream.lightning import TunerExit
from lightning_par.upstream.tensor import count_of_changes, storage_key

__all__ = ["GivenStep", "evaluate_alone", "run_alone"]

_MODULE_HOOKS = ("prepare_data", "setup", "configure_model", "teardown", "on_exception")
_HOOKS_BEFORE = ("on_fit_start", "on_train_start", "on_train_epoch_start")
_BATCH_HOOKS = ("on_before_batch_transfer", "on_after_batch_transfer")


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenStep:
    """What the mesh started a step from.

    Attributes:
        start: Values of parameters and buffers, and the place in the run.
        batches: The batches; on the mesh, of every batch those of all replicas, or None where one
            could not be sent.
        arguments: What else `training_step` was given with each batch.
        random_states: Of the generators of rank 0 at the start of each batch.
        handed: What the mesh handed to every step of an optimizer; taken over right before it, in
            the same way.
        gradients: What the mesh computed in every backward; taken over before hooks and optimizer
            see the own ones, so that an optimizer that divides by tiny gradients gives the same.
            None: the own ones stay.
        after_hooks: Whether gradients are noted and taken over after `on_after_backward`.
        backwards: Number of backwards after which the run ends; None: after the whole step.
        prepare: Called with the whole copy of the module, right before its first step.
    """

    start: StartValues
    batches: list[Any] = field(default_factory=list)
    arguments: list[Sequence[Any]] = field(default_factory=list)
    random_states: list[dict[str, Any]] = field(default_factory=list)
    gradients: Sequence[Mapping[str, Tensor] | None] | None = None
    handed: Sequence[Mapping[str, Tensor]] = ()
    after_hooks: bool = False
    backwards: int | None = None
    prepare: Callable[[pl.LightningModule], None] = lambda _: None


class _LetGo(SingleDeviceStrategy):
    """Lets go of the copy of the module at the end, where Lightning moves it to the CPU."""

    @override
    def teardown(self) -> None:
        self.precision_plugin.teardown()


class _Alone(_LetGo):
    """Notes losses, gradients of each backward, and what optimizers are handed and make of it."""

    def __init__(
        self,
        device: torch.device,
        given: GivenStep,
        record: StepRecord,
        originals: Mapping[int, str],
        theirs: Sequence[Optimizer],
    ) -> None:
        super().__init__(device)
        self._given, self._record = given, record
        self._originals, self._theirs = originals, theirs

    @override
    def setup_environment(self) -> None:
        """The device is set up already."""

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if any(one is other for one in self.optimizers for other in self._theirs):
            raise RuntimeError(
                "configure_optimizers returns the same optimizer object each time, and this "
                "optimizer has already stepped. Make a new optimizer in configure_optimizers"
            )
        module = self._module
        named = dict(module.named_parameters(remove_duplicate=False))
        replace_parameters(self.optimizers, self._originals, named)
        watch_steps(self.precision_plugin, self._note_handed, self._note_updated)

    def _note_handed(self) -> None:
        named = with_gradients(self._module)
        number = len(self._record.handed)
        self._record.handed.append(copies_of_gradients(named))
        if number < len(self._given.handed):
            take_over(self._given.handed[number], named)

    def _note_updated(self) -> None:
        named = self._module.named_parameters()
        self._record.updated = {name: local_part(p).cpu().clone() for name, p in named}

    @property
    def _module(self) -> pl.LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        module, plugin = self._module, self.precision_plugin
        loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(loss, module, optimizer, *args, **kwargs)
        if not self._given.after_hooks:
            self._note(module, loss)
        loss = plugin.post_backward(loss, module)
        if self._given.after_hooks:
            self._note(module, loss)
        return loss

    def whole(self, module: nn.Module | None = None, on: str = "every") -> Any:
        """Answer hooks that call `MeshStrategy.whole`: here the module is whole."""
        return nullcontext(self.lightning_module if module is None else module)

    def _note(self, module: pl.LightningModule, loss: Tensor) -> None:
        record, given = self._record, self._given
        number = len(record.losses)
        record.losses.append(float(loss.detach()))
        named = with_gradients(module)
        record.gradients.append(copies_of_gradients(named))
        if given.backwards == number + 1:
            raise TunerExit
        found = (given.gradients or [])[number : number + 1]
        if found and found[0] is not None:
            take_over(found[0], named)


class _Batches:
    """A loader of the given batches that says that it has as many as the user's.

    Args:
        batches: The batches.
        count: What its length is to be; None: it has none.
    """

    def __init__(self, batches: Sequence[Any], count: int | None) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError  # by which Lightning knows a loader without a length
        return self._count


def run_alone(
    skeleton: Skeleton,
    given: GivenStep,
    user: pl.Trainer,
    originals: Mapping[int, str],
    device: torch.device,
    plugin: Precision | None = None,
    world: dist.ProcessGroup | None = None,
) -> StepRecord:
    """Take a step on one process, and return what it computed.

    Args:
        skeleton: The user's module and callbacks.
        given: What the step starts from.
        user: The Trainer of the run on the mesh.
        originals: Id of every parameter of the user's module before the mesh -> its name.
        device: Device of this rank.
        plugin: Precision plugin; None: that of the user's `precision`.
        world: See `single_process`.
    """
    record = StepRecord()
    try:
        with single_process(device, user.loggers, world), ExitStack() as stack:
            alone = _Alone(device, given, record, originals, user.optimizers)
            trainer = _trainer_like(user, alone, plugin)
            _continue(trainer, given.start)
            module, callbacks = skeleton.fill(given.start.tensors, trainer)
            if not given.start.is_later:
                trainer.callbacks += _quiet(callbacks)  # type: ignore[attr-defined]
            _prepare(module, user, given, record, device)
            stack.enter_context(outside_kept([*module.modules(), *callbacks, *data_of(user)]))
            given.start.put_outside()
            total = user.num_training_batches
            # A run may go on with a loader that has fewer batches than were used before.
            fewest = given.start.batch + len(given.batches)
            sized = None if total == float("inf") else max(int(total), fewest)
            trainer.fit(module, _Batches(given.batches, sized))
    except Exception as error:
        record.error = _without_frames(error)
    return record


def _without_frames(error: Exception) -> Exception:
    """Return an error that no longer keeps what its frames hold, as activations of the batch."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__, chain = None, chain.__cause__ or chain.__context__
    return error


_RUNS = {"validation_step": "validate", "test_step": "test", "predict_step": "predict"}


def evaluate_alone(
    skeleton: Skeleton,
    given: GivenStep,
    name: str,
    on_mesh: pl.LightningModule,
    device: torch.device,
    plugin: Precision | None = None,
) -> EvaluationRecord:
    """Run an evaluation step on one process, and return what it computed.

    Args:
        skeleton: The user's module.
        given: What the step starts from: one batch.
        name: Of the step.
        on_mesh: The module on the mesh, whose attributes are taken over: hooks have run.
        device: Device of this rank.
        plugin: See `run_alone`.
    """
    record, user = EvaluationRecord(), on_mesh.trainer
    try:
        with single_process(device, user.loggers), ExitStack() as stack:
            trainer = _trainer_like(user, _LetGo(device), plugin)
            trainer.limit_val_batches = 1.0
            _continue(trainer, given.start)
            module, _ = skeleton.fill(given.start.tensors, trainer)
            module.trainer = trainer
            skeleton.follow(on_mesh, module)
            _prepare_evaluation(module, user, given, name, record, device)
            stack.enter_context(outside_kept([*module.modules(), *data_of(user)]))
            for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
                loop.inference_mode = False  # as on the mesh, where there is gloo
            getattr(trainer, _RUNS[name])(module, _Batches(given.batches, 1))
    except Exception as error:
        record.error = _without_frames(error)
    return record


def _prepare_evaluation(
    module: pl.LightningModule,
    user: pl.Trainer,
    given: GivenStep,
    name: str,
    record: EvaluationRecord,
    device: torch.device,
) -> None:
    """Give a copy of the module its batch, without the hooks that have run before it, and end its
    run after the step.
    """
    own, loop = vars(module), name.removesuffix("_step")
    before = [f"on_{loop}_{time}" for time in ("start", "epoch_start", "batch_start")]
    own |= {hook: lambda *_, **__: None for hook in (*_MODULE_HOOKS, *before)}
    own |= {hook: lambda batch, *_, **__: batch for hook in _BATCH_HOOKS}
    own["configure_callbacks"] = list
    step, state = getattr(module, name), user.state
    metrics, calls = MetricsOfBatch(module, looks=True), list[LogCall]()

    @functools.wraps(step)
    def run(batch: Any, *_: Any, **__: Any) -> Any:
        restore_random_states(given.random_states[0], device)
        module.trainer.state.fn, module.trainer.state.stage = state.fn, state.stage
        before = collect_random_states(device)
        with logs_off(module), noted_logs(module, calls), metrics.follow():
            record.output = to_cpu(step(batch, *given.arguments[0]))
        record.draws = not states_alike(before, collect_random_states(device))
        record.metrics = to_cpu(metrics.values())
        for call in calls:
            record.logs.setdefault(call.name, []).append(float(call.value))
        raise TunerExit

    own[name] = run


def _continue(trainer: pl.Trainer, start: StartValues) -> None:
    """Let a Trainer say that it is as far as that of the mesh."""
    epochs = trainer.fit_loop.epoch_progress.current
    # Lightning makes the second, which is `current_epoch`, of the first where epochs end a run.
    epochs.processed = epochs.completed = start.epoch  # type: ignore[attr-defined]
    loop = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.optim_progress.optimizer.step.total.completed = start.global_step
    loop.manual_optimization.optim_step_progress.total.completed = start.global_step
    reset: Callable[[], None] = loop.reset
    batches: Any = loop.batch_progress.current

    def reset_to_start() -> None:
        reset()  # to 0
        batches.ready = batches.started = batches.processed = batches.completed = start.batch

    loop.__dict__["reset"] = reset_to_start


def _trainer_like(
    user: pl.Trainer, strategy: SingleDeviceStrategy, plugin: Precision | None
) -> pl.Trainer:
    device = strategy.root_device
    return pl.Trainer(
        accelerator=device.type,
        devices=1 if device.index is None else [device.index],
        strategy=strategy,
        precision=user.precision if plugin is None else None,
        plugins=plugin,
        gradient_clip_val=user.gradient_clip_val,
        gradient_clip_algorithm=user.gradient_clip_algorithm,
        accumulate_grad_batches=user.accumulate_grad_batches,
        max_steps=user.max_steps,
        max_epochs=user.max_epochs,
        log_every_n_steps=user.log_every_n_steps,  # type: ignore[attr-defined]
        default_root_dir=user.default_root_dir,
        logger=list(user.loggers) or False,  # which are silent
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _quiet(callbacks: Sequence[Callback]) -> list[Callback]:
    """Leave out what the user's own callbacks have done already, or do once a run ends."""
    for callback in callbacks:
        for name in ("setup", "teardown", "on_exception"):
            vars(callback)[name] = lambda *_, **__: None
    return list(callbacks)


def _prepare(
    module: pl.LightningModule,
    user: pl.Trainer,
    given: GivenStep,
    record: StepRecord,
    device: torch.device,
) -> None:
    """Give a copy of the module its batches, and end its run after the last one."""
    own = vars(module)
    own |= {name: lambda *_, **__: None for name in _MODULE_HOOKS}
    own |= {name: lambda batch, *_, **__: batch for name in _BATCH_HOOKS}
    own["configure_callbacks"] = list
    step, last = module.training_step, module.on_train_batch_end
    done, begun = 0, -1

    @functools.wraps(step)
    def training_step(batch: Any, *_: Any, **__: Any) -> Any:
        nonlocal begun
        if begun != done:  # not where an optimizer computes the loss once more
            if begun < 0:
                _begin(module, given, record)
            begun = done
            restore_random_states(given.random_states[done], device)
        if given.start.is_later:
            _follow(module.trainer.optimizers, given.start.groups)
        before = collect_random_states(device)
        with _noting_writes(module, record.written), second_names_dropped(module):
            take = partial(run_parts, step) if isinstance(batch, PartedBatch) else step
            result = take(batch, *given.arguments[done])
        record.draws |= not states_alike(before, collect_random_states(device))
        return result

    @functools.wraps(last)
    def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
        nonlocal done
        last(*args, **kwargs)
        done += 1
        if done == len(given.batches):
            named = (*module.named_parameters(), *module.named_buffers())
            record.state = {name: local_part(tensor).cpu().clone() for name, tensor in named}
            record.buffers = frozenset(name for name, _ in module.named_buffers())
            trained = (name for name, p in module.named_parameters() if p.requires_grad)
            record.trains = frozenset(trained)
            module.trainer.callbacks.clear()  # type: ignore[attr-defined]
            raise TunerExit

    if given.start.is_later:
        _leave_out_begin(module)
    own |= {"training_step": training_step, "on_train_batch_end": on_train_batch_end}


def _begin(module: pl.LightningModule, given: GivenStep, record: StepRecord) -> None:
    """Bring the module and its optimizers to where the step began on the mesh."""
    _refill(module, given.start.tensors)
    record.restored = restore(module.trainer.optimizers, given.start.optimizers)
    if given.start.is_later and given.start.trains is not None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in given.start.trains)
    for name, parameter in module.named_parameters():
        if name in given.start.gradients:
            parameter.grad = given.start.gradients[name].to(parameter.device, copy=True)
    given.prepare(module)


@torch.no_grad()
def _refill(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Undo what hooks before the first step, which have run on the mesh, did to weights again."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        given = tensors.get(name)
        if given is not None and given is not tensor and tensor.shape == given.shape:
            local_part(tensor).copy_(given)


def _leave_out_begin(module: pl.LightningModule) -> None:
    """Leave out the hooks of a module that have run before the first batch of a later step."""
    vars(module).update({name: lambda *_, **__: None for name in _HOOKS_BEFORE})
    plain, calls = module.on_train_batch_start, count()

    @functools.wraps(plain)
    def on_train_batch_start(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if next(calls) else None

    vars(module)["on_train_batch_start"] = on_train_batch_start


def _follow(optimizers: Sequence[Optimizer], groups: Sequence[Mapping[str, float]]) -> None:
    """Give optimizers the numbers of those on the mesh, which a step may read."""
    own = (group for optimizer in optimizers for group in optimizer.param_groups)
    for group, numbers in zip(own, groups, strict=False):
        group |= numbers


@contextmanager
def _noting_writes(module: nn.Module, written: set[str]) -> Iterator[None]:
    """Add the names of parameters to which the forward of their own module writes to `written`."""
    before: dict[str, tuple[tuple[int, int, int], Tensor]] = {}

    def own(place: str, part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        named = part.named_parameters(place, recurse=False)
        return ((name, p) for name, p in named if type(p) is nn.Parameter)

    def marks(p: nn.Parameter) -> tuple[int, int, int]:
        return id(p), storage_key(p.untyped_storage()), count_of_changes(p)

    def enter(place: str, part: nn.Module, *_: Any) -> None:
        before.update({n: (marks(p), p.detach().clone()) for n, p in own(place, part)})

    def leave(place: str, part: nn.Module, *_: Any) -> None:
        for name, p in own(place, part):
            known = before.pop(name, None)
            if known is None:
                continue
            # A write through .data is not counted.
            alike = torch.allclose(p, known[1], rtol=0, atol=0, equal_nan=True)
            if marks(p) != known[0] or not alike:
                written.add(name)

    with ExitStack() as hooks:
        for place, part in module.named_modules():
            if part._parameters:
                begin = part.register_forward_pre_hook(partial(enter, place))
                hooks.callback(begin.remove)
                hooks.callback(part.register_forward_hook(partial(leave, place)).remove)
        yield
