"""The hooks of a user's module and callbacks, and what surrounds them on a mesh."""

import inspect
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from functools import partial, wraps
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning, Callback, ModelSummary
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_par.engine.wrapping import copy_refused
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.components.attribute_paths import entries_in
from lightning_par.strategies.data.filled_batch import updates_dropped
from lightning_par.strategies.hooks.joined_results import (
    JoinedResults,
    OF_RESULTS,
    reads_argument,
)
from lightning_par.strategies.hooks.mixed_tensors import data_of_shards, MixedTensors
from lightning_par.strategies.hooks.shown_checkpoint import shown_checkpoint
from lightning_par.strategies.hooks.whole_view import WholeView
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.processes.world_size import noting_world_size
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.start.structure import structure_kept
from lightning_par.strategies.step.absent_parameter import is_of_a_framework
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.lightning import hook_calls

__all__ = ["UserHooks"]

_OF_LIGHTNING = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "current_model_state"}
_SAVES = "on_save_checkpoint"
_LOOPS = "train", "validation", "test"
_TIMES = "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"
_BETWEEN_STEPS = frozenset(
    {
        *(f"on_{loop}_{time}" for loop in _LOOPS for time in _TIMES),
        # Replicas may predict unequal numbers of batches.
        *(f"on_predict_{time}" for time in _TIMES if "batch" not in time),
        *("on_fit_start", "on_before_zero_grad", "on_sanity_check_start", "on_sanity_check_end"),
        _SAVES,
    }
)
_ON_GRADIENTS = frozenset(
    {
        *("on_before_backward", "on_after_backward"),
        *("on_before_optimizer_step", "configure_gradient_clipping"),
    }
)
"""Surrounded under a pipeline; elsewhere a rank has a part of every gradient, which is a DTensor
there, and only what the model computes is surrounded.
"""
_HOOKS = _BETWEEN_STEPS | _ON_GRADIENTS
_CALL_USERS = BaseFinetuning, ModelSummary
"""Callbacks of Lightning's whose hooks call code of a user's."""


class UserHooks:
    """Surrounds the hooks that a user's module and callbacks have, once it is attached to a run."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._view: WholeView | None = None
        self._on_all, self._seen = set[str](), set[str]()
        self._is_users: dict[tuple[int, str], bool] = {}  # asked at each call of a hook
        self._reading = set[str]()  # hooks of which one reads what a step returned
        self._sizes_read = list[str]()  # where `setup` reads the number of processes
        self._update, self._opened = ExitStack(), ExitStack()
        self._resume: Callable[[], None] = _nothing

    def attach(self, model: ParallelModel, trainer: pl.Trainer, processes: MeshProcesses) -> None:
        """Surround the hooks of a run on several ranks.

        Args:
            model: The model on its mesh.
            trainer: The user's Trainer.
            processes: The processes of the run; they ask this before they communicate.

        **Communicates**: names, over the ``pp`` axis, and of hooks, over all ranks.
        """
        if model.mesh.sizes.world_size == 1:
            return
        # Of the method of the Trainer before.
        self.close()
        if trainer.state.fn == "fit":
            self._warn_of_setup(model.mesh.sizes)
        self._model, self._trainer, self._reads = model, trainer, model.steps.reads
        model.gradients.around_hook = self.around
        self._view = WholeView(model.module, self._reads.known, model.mesh, processes.device)
        # The objects are held, so that no other one can get the same `id`.
        self._places: dict[int, tuple[nn.Module, str]] = {
            id(part): (part, name) for name, part in model.module.named_modules()
        }
        known = self._reads.known.items()
        self._parameters = [name for name, about in known if not about.is_buffer]
        self._are_together = processes.interruption.ranks_are_together
        self._opened.enter_context(replaced(processes, "agree", self._reads.agree))
        gradients = _ON_GRADIENTS if model.mesh.sizes.pipeline > 1 else ()
        self._surrounded = _BETWEEN_STEPS.union(gradients)
        # A callback that one rank has alone must not wait for the others.
        own = [*self._own_hooks()]
        found = [own] * model.mesh.sizes.world_size
        # Names of the classes: one that all ranks have may be compared among all.
        dist.all_gather_object(found, own)
        self._on_all = set(found[0]).intersection(*found)
        self._join_results(processes.device)
        self._opened.enter_context(data_of_shards())
        if model.mesh.sizes.pipeline > 1:
            load = self._loader(nn.Module.load_state_dict)
            self._opened.enter_context(replaced(nn.Module, "load_state_dict", load))
        # No caller of hooks that could be surrounded calls this one of callbacks.
        self._opened.enter_context(self._callbacks_surrounded(trainer, _SAVES))
        for name, around in (("module", self._of_module), ("callbacks", self._of_callbacks)):
            caller = hook_calls[name]
            inner = getattr(*caller)
            self._opened.enter_context(replaced(*caller, partial(around, inner)))

    def _own_hooks(self) -> Iterator[str]:
        for owner in (self._model.module, *self._trainer.callbacks):
            hooks = (name for name in _HOOKS if hasattr(owner, name))
            yield from (_label(owner, name) for name in hooks if self._is_user(owner, name))

    def _join_results(self, device: torch.device) -> None:
        """Find the hooks that read what steps return, of which replicas have each a part."""
        model, readers = self._model, dict[str, list[Any]]()
        for hook, step in OF_RESULTS.items():
            for owner in (model.module, *self._trainer.callbacks):
                # Of a callback's after the Trainer and the module.
                index = 0 if owner is model.module else 2
                if self._is_user(owner, hook) and _label(owner, hook) in self._on_all:
                    method = getattr(owner, hook)
                    if reads_argument(method, index):
                        readers.setdefault(step, []).append(method)
                        self._reading.add(hook)
        if not model.steps.weigher.is_needed or not readers:
            self._reading.clear()
            return
        alone = () if model.module.automatic_optimization else ("training_step",)
        model.steps.shown = frozenset(readers).difference(alone)
        weigher = model.steps.weigher
        self._results = JoinedResults(model.mesh, weigher, device, readers, alone)

    def _drop_updates(self, stack: ExitStack, name: str) -> None:
        """Until a stack is closed, let metrics learn nothing of a batch that repeats a sample."""
        owners = self._model.module, *self._trainer.callbacks
        if self._model.steps.repeats and any(self._is_user(owner, name) for owner in owners):
            held = (value for owner in owners for _, value in entries_in(vars(owner), ()))
            modules = [value for value in held if isinstance(value, nn.Module)]
            stack.enter_context(updates_dropped([self._model.module, *modules]))

    def _with_results(self, stack: ExitStack, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of a hook, with what a step returned for the global batch."""
        if name.endswith("_batch_end"):
            self._drop_updates(stack, name)
        if name not in self._reading or not self._are_together():
            return args
        step = OF_RESULTS[name]
        if name != "on_before_backward":
            return self._results.of_batch(step, args[0]), *args[1:]
        if not self._results.is_left_alone(step):
            stack.enter_context(self._results.shown_in(args[0]))
        return args

    def _is_user(self, owner: Any, name: str) -> bool:
        """Return whether a hook is code of a user's, or calls the user's model."""
        key = id(owner), name
        if key not in self._is_users:
            calls = getattr(owner, "calls_model", "") == name
            # Not the empty hooks that they have from their base class.
            calls |= isinstance(owner, _CALL_USERS) and is_overridden(name, owner, Callback)
            self._is_users[key] = calls or _is_own(owner, name)
        return self._is_users[key]

    def complete(self, checkpoint: dict[str, Any]) -> None:
        """Put whole tensors into what callbacks and hooks have added to a checkpoint.

        Args:
            checkpoint: Changed in place.

        **Communicates**: their values.
        """
        # After an exception a DTensor stays one: gathering would hang.
        if self._view is not None and self._are_together():
            for name in [name for name in checkpoint if name not in _OF_LIGHTNING]:
                checkpoint[name] = self._view.values(checkpoint[name])

    def barrier(self, name: str | None, processes: MeshProcesses) -> None:
        """Wait for all ranks. Lightning does so before and after `setup` of the user's, in which
        reads of the number of processes are noted.
        """
        processes.barrier(name)
        if name == "pre_setup":
            self._sizes_read.clear()
            self._opened.enter_context(noting_world_size(self._sizes_read))
        elif name == "post_setup":
            self._opened.close()

    def _warn_of_setup(self, sizes: ParallelSizes) -> None:
        if not self._sizes_read or sizes.data == sizes.world_size:
            return
        rank_zero_warn(
            f"setup reads the number of processes ({self._sizes_read[0]}). Here "
            f"{sizes.world_size} processes train {sizes.data} replica(s), so what setup computes "
            "from that number, such as the length of a schedule, may differ from a run on one "
            "process. For lengths use trainer.estimated_stepping_batches in configure_optimizers. "
            "A number that is only logged does no harm."
        )

    def close(self) -> None:
        """Surround nothing any more."""
        self._opened.close()
        for held in (self._seen, self._is_users, self._reading):
            held.clear()

    def _of_module(self, inner: Any, trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of the module as Lightning does."""
        call, module = partial(inner, trainer, name, *args, **kwargs), self._model.module
        # Another Trainer inside of this run, as a proof or a teacher has.
        if trainer is not self._trainer or kwargs.get("pl_module", module) is not module:
            return call()
        if name == "optimizer_step" and self._is_user(module, name):
            return self._in_update(partial(inner, trainer, name), *args)
        if name not in _HOOKS or not self._is_user(module, name):
            return call()
        if name == _SAVES:
            call = partial(self._on_checkpoint, module, call, args[0])
            return self.around(name, module, call)
        with ExitStack() as stack:
            args = self._with_results(stack, name, args)
            return self.around(name, module, partial(inner, trainer, name, *args, **kwargs))

    def _of_callbacks(self, inner: Any, trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of all callbacks as Lightning does."""
        with self._callbacks_surrounded(trainer, name) as stack:
            if trainer is self._trainer:
                args = self._with_results(stack, name, args)
            return inner(trainer, name, *args, **kwargs)

    def _callbacks_surrounded(self, trainer: Any, name: str) -> ExitStack:
        stack = ExitStack()
        if trainer is self._trainer and name in _HOOKS:
            for callback in trainer.callbacks:
                if self._is_user(callback, name):
                    # On the object, for the time of one call of Lightning's: callbacks come and
                    # go.
                    hook = _Hook(callback, name, self._around_callback)
                    stack.enter_context(replaced(callback, name, hook))
        return stack

    def _around_callback(self, name: str, owner: Any, call: Callable[[], Any], *args: Any) -> Any:
        """Call a hook of a callback."""
        if name == _SAVES:
            call = partial(self._on_checkpoint, owner, call, args[-1])
        return self.around(name, owner, call)

    def _on_checkpoint(self, owner: Any, call: Callable[[], Any], checkpoint: Any) -> Any:
        """Call a hook on a checkpoint, which is whole for hooks that all ranks have."""
        view = self._view
        if view is None or not view.is_on or _label(owner, _SAVES) not in self._on_all:
            return call()
        with shown_checkpoint(checkpoint, self._model, self._trainer.optimizers, view):
            return call()

    def see_checkpoints(self, module: Any) -> bool:
        """Return whether code of a user's sees checkpoints before they are saved."""
        owners = module, *module.trainer.callbacks
        return any(_is_own(owner, _SAVES) for owner in owners)

    def around(self, name: str, owner: Any, call: Callable[[], Any]) -> Any:
        """Call a hook of a user's.

        Args:
            name: Of the hook.
            owner: The module, callback or plugin that has it.
            call: Calls it.
        """
        # One hook calls another, or it saves.
        if self._view is None or self._view.is_on or not self._are_together():
            return call()
        try:
            if name not in self._surrounded:
                with self._model.steps.outside(True), MixedTensors():
                    return call()
            return self._between_steps(name, owner, call)
        except (AttributeError, pickle.PicklingError) as error:
            # Of what the mesh has put into a module, as FSDP's hooks and the stubs of stages.
            if re.search("pickle.*(FSDP|lightning_par|not the same object)", str(error)):
                raise copy_refused() from error
            raise

    def _between_steps(self, name: str, owner: Any, call: Callable[[], Any]) -> Any:
        label = _label(owner, name)
        # Few, or what follows waits for all ranks, too: compared in every run.
        is_new = label not in self._seen or name in _ON_GRADIENTS or "epoch" in name
        is_first = label in self._on_all and is_new
        self._seen.add(label)
        if name.endswith("epoch_end"):
            self._model.sharding.release()  # evaluation steps may have gathered parameters
        with ExitStack() as stack:
            self._show_whole(stack, label, is_first=is_first)
            return call()

    def _show_whole(self, stack: ExitStack, label: str, *, is_first: bool) -> None:
        """Until a stack is closed, code of a user's sees the whole module."""
        assert self._view is not None
        optimizers, module = self._trainer.optimizers, self._model.module
        plain = module.log

        def log(*args: Any, **kwargs: Any) -> None:  # a partial would be copied for a proof
            self._log(plain, *args, **kwargs)

        stack.enter_context(replaced(module, "log", log))
        # In this order: when the stack closes, the view ends first, with all ranks in it.
        stack.enter_context(self._reads.in_hook(self._view))
        stack.enter_context(self._view.around(label, optimizers, is_first=is_first))
        stack.enter_context(
            structure_kept(self._place_of, self._parameters, self._view.is_of_a_stage)
        )

    def _place_of(self, part: Any) -> str | None:
        """Return the FQN of a module of any stage; None: it is not on the mesh."""
        key = id(part)
        held = self._places.get(key) or self._reads.absent_modules.names.get(key)
        return None if held is None else held[1]

    def _log(self, inner: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log; what is reduced once the hook has ended has to be logged on all ranks."""
        if kwargs.get("sync_dist") or isinstance(value, Metric):
            self._reads.agree(f"log({name!r}, sync_dist=True)")
        inner(name, value, *args, **kwargs)

    def _loader(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands for `load_state_dict` in hooks: of a whole state dict, as `state_dict`
        gives it there, a stage takes what it holds.
        """
        module, states = self._model.module, self._model.states

        # The names are those of torch, which users may write.
        def load(
            part: nn.Module, state_dict: Any, strict: bool = True, assign: bool = False
        ) -> Any:
            place, view = self._place_of(part), self._view
            if place is None or view is None or not view.is_on:
                return inner(part, state_dict, strict, assign)
            # A collective follows: a rank that loads alone is told so.
            view.agree("load_state_dict")
            with self._reads.paused():
                states.load_weights(module, state_dict, strict=strict, place=place)
            start = f"{place}." if place else ""
            whole = [n.removeprefix(start) for n in states.order if n.startswith(start)]
            given = {*state_dict}
            # As torch would say it of the whole module.
            return _Keys([n for n in whole if n not in given], sorted(given.difference(whole)))

        return load

    def _in_update(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run an `optimizer_step` of the user's, which sees gradients and weights between what this
        package does: the closure and the update.
        """
        epoch, batch_idx, optimizer, closure = args
        self._resume = self._enter_update

        def run() -> Any:
            # The closure is the package's: it sees parts.
            self._update.close()
            output = closure()
            self._resume()
            return output

        try:
            with self._update:
                self._resume()
                return call(epoch, batch_idx, optimizer, run)
        finally:
            self._resume = _nothing

    def _enter_update(self) -> None:
        """Surround what the user's `optimizer_step` does itself."""
        stack = self._update
        stack.enter_context(self._model.gradients.norms.in_hooks())
        stack.enter_context(self._model.steps.outside(True))
        if self._model.mesh.sizes.pipeline > 1:
            label = _label(self._model.module, "optimizer_step")
            self._show_whole(stack, label, is_first=True)
        else:
            stack.enter_context(MixedTensors())

    @contextmanager
    def updating(self, closure: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Surrounds the update of an optimizer, which the user's `optimizer_step`, if there is one,
        calls.

        Args:
            closure: Given to the optimizer, perhaps with code of the user's around Lightning's own.

        Yields:
            The closure to give in its place.
        """

        def run() -> Any:
            self._resume()
            output = closure()
            self._update.close()
            return output

        self._update.close()
        yield run
        self._resume()

    def _register(self, inner: Callable[..., Any], optimizer: Optimizer, hook: Any) -> Any:
        """Register a hook on the steps of an optimizer."""

        @wraps(hook)
        def run(stepped: Any, *args: Any) -> Any:
            # A proof steps a copy on one process.
            if not any(stepped is one for one in self._trainer.optimizers):
                return hook(stepped, *args)
            with ExitStack() as stack:
                self._show_whole(stack, "a hook on the step of an optimizer", is_first=True)
                return hook(stepped, *args)

        return inner(optimizer, run)

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Surrounds `configure_optimizers`, for which modules list the parameters of all stages.

        Hooks on steps of optimizers that are made there see what hooks between steps see.
        """
        if self._view is None:
            yield
            return
        with ExitStack() as stack:
            for name in ("register_step_pre_hook", "register_step_post_hook"):
                made = partial(self._register, getattr(Optimizer, name))
                stack.enter_context(replaced(Optimizer, name, lambda *args, made=made: made(*args)))
            self._show_whole(stack, "configure_optimizers", is_first=True)
            yield


def _nothing() -> None:
    """Stands for what is not to be done."""


class _Keys(NamedTuple):
    """What `load_state_dict` returns."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def _label(owner: Any, name: str) -> str:
    return f"{type(owner).__name__}.{name}"


class _Hook:
    """A hook of a callback with what surrounds it."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._inner = getattr(owner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = partial(self._inner, *args, **kwargs)
        return self._around(self._name, self._owner, call, *args)


def _is_own(owner: Any, name: str) -> bool:
    """Return whether a hook is code of a user's."""
    # By the file of the code: what Lightning's own callbacks do needs no view.
    found = inspect.unwrap(getattr(owner, name))
    code = getattr(getattr(found, "__func__", found), "__code__", None)
    return code is not None and not is_of_a_framework(code.co_filename)
