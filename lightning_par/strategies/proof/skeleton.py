"""The user's module and callbacks as they were before the mesh, without the bytes of parameters."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from lightning_par.dtensor import like_parameter
from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.rng import fork_all_rng
from lightning_par.observe.contents import copy_of
from lightning_par.observe.isolate import is_equal
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.pytree import tree_map
from lightning_par.upstream.tensor import gradient_hooks

__all__ = ["LARGEST", "Skeleton", "reason_of_run", "take_skeleton"]

LARGEST = 2**30
"""Bytes of parameters up to which ``verify="auto"`` takes a whole step on one process."""
_COPIES = 12
"""Parameters, gradients before and after hooks, and two states, and what the mesh had of them, in
units of the parameters."""
_OF_RUN = 8
"""Parameters, gradients and two states of two replicas, which a run on the CPU allocates later."""

_OWN = frozenset(vars(pl.LightningModule()))
"""Attributes that Lightning and torch give every module."""
_NO_STATE: tuple[type, ...] = (FunctionType, MethodType, nn.Module, dist.ProcessGroup)
_NO_STATE += (Dataset, DataLoader, pl.LightningDataModule)
_MISSING = object()
_OF_GRADIENTS = "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"
_OURS = ("lightning.", "lightning_par.", "lightning_fabric.", "pytorch_lightning.")


def take_skeleton(
    module: pl.LightningModule, verify: bool | str, world_size: int, rank: int
) -> "Skeleton | str | None":
    """Return what the proof has to know of a module before it is put on a mesh.

    Args:
        module: The user's LightningModule, whole.
        verify: The option of the strategy.
        world_size: Number of ranks.
        rank: Global rank; only rank 0 gets a skeleton.

    Returns:
        On rank 0 the skeleton; a text if nothing can be proved; None if nothing is to be proved.
    """
    if verify is False or world_size == 1:
        return None
    if rank:
        return ""
    size, free = sum(p.nbytes for p in module.parameters()), available_memory()
    too_large = ""
    if verify == "auto" and size > LARGEST:
        too_large = f"the model has {size / 2**30:.1f} GiB of parameters, more than 1"
    else:
        is_on_cpu = module.trainer.strategy.root_device.type == "cpu"
        need = (_COPIES + (_OF_RUN if is_on_cpu else 0)) * size
        if free is not None and free < need:
            too_large = (
                f"rank 0 needs {need / 2**30:.1f} GiB of free CPU memory to compare the whole model"
            )
    try:
        with fork_all_rng(torch.device("cpu")):  # copies of the user's objects may draw numbers
            return Skeleton(module, getattr(module.trainer, "callbacks", ()), too_large)
    except Exception as error:  # whatever a copy of the user's objects raises
        return f"the module cannot be copied ({type(error).__name__}: {error})."


def reason_of_run(skeleton: "Skeleton | str | None", module: pl.LightningModule) -> str:
    """Return why nothing of a run can be proved, as rank 0 knows it; empty: it can.

    Args:
        skeleton: From `take_skeleton`.
        module: The user's LightningModule.
    """
    if isinstance(skeleton, str) and skeleton:
        return skeleton
    callbacks: Any = getattr(module.trainer, "callbacks", ())
    if any(map(_tunes, callbacks)):
        return "a tuner has changed the run since it was set up."
    return ""


def _tunes(callback: Callback) -> bool:
    """Whether a callback looks for a learning rate or a batch size; the finder has one inside."""
    inside = type(callback).__module__.startswith("lightning.pytorch.tuner.")
    return inside or isinstance(callback, LearningRateFinder | BatchSizeFinder)


class _NoTrainer:
    """Stands for the Trainer in a skeleton."""


class Skeleton:
    """A copy of a module and of its callbacks, from which whole ones can be made later.

    The parameters are on meta; buffers and plain attributes are copied. What refers to the Trainer
    refers to that of the whole copy then.

    Args:
        module: The user's LightningModule, whole.
        callbacks: Those of its Trainer; of Lightning's and ours, none changes a step.
        too_large: Why rank 0 has no room for whole copies of the parameters; empty: it has.

    Attributes:
        too_large: As given.
        module: The copy; parameters are on meta.
        callback_names: Classes of the user's own callbacks.
        problems: Callbacks that could not be copied, and why.
        changes_gradients: Whether a callback has a hook between a backward and the update.

    Raises:
        Exception: Whatever the module's own `__deepcopy__` and that of its attributes raise.
    """

    def __init__(
        self, module: pl.LightningModule, callbacks: Sequence[Callback], too_large: str = ""
    ) -> None:
        trainer, self.too_large = trainer_of(module), too_large
        self._trainer = _NoTrainer()
        memo: dict[int, Any] = {}
        if trainer is not None:
            memo |= {id(trainer): self._trainer}
            # What only one process may hold, or nobody wants twice.
            shared = [
                getattr(trainer, "datamodule", None),
                trainer.strategy,
                trainer.train_dataloader,
            ]
            memo |= {id(kept): kept for kept in (*shared, *trainer.loggers) if kept is not None}
        for held in vars(module).values():
            if isinstance(held, Dataset | DataLoader | pl.LightningDataModule):
                memo[id(held)] = held
        for part in module.modules():  # as metrics have one, after a run on another mesh
            held = (h for h in vars(part).values() if isinstance(h, dist.ProcessGroup | DeviceMesh))
            memo |= {id(group): None for group in held}
        made: list[tuple[nn.Parameter, nn.Parameter]] = []
        for parameter in module.parameters():
            on_meta = like_parameter(parameter, torch.empty_like(parameter, device="meta"))
            memo[id(parameter)] = on_meta
            made.append((parameter, on_meta))
        self.module: pl.LightningModule = copy.deepcopy(module, memo)
        self._before: dict[tuple[str, str], Any] = {}
        self._callbacks: list[Callback] = []
        self.callback_names: list[str] = []
        self.problems: list[str] = []
        self.changes_gradients = False
        for callback in callbacks:
            if type(callback).__module__.startswith(_OURS) and type(callback) is not LambdaCallback:
                continue
            self.callback_names.append(type(callback).__name__)
            hooks = (is_overridden(name, callback, Callback) for name in _OF_GRADIENTS)
            self.changes_gradients |= any(hooks)
            try:
                self._callbacks.append(copy.deepcopy(callback, memo))
            except Exception as error:
                self.problems.append(f"{type(callback).__name__}: {error}")
        _rebind(self.module, self._callbacks, memo)
        self._hooks = {
            id(on_meta): [_rebound(hook, memo) for hook in gradient_hooks(parameter)]
            for parameter, on_meta in made
        }

    def note(self, module: pl.LightningModule) -> None:
        """Note the attributes of the module on the mesh, before any hook runs.

        Args:
            module: That of rank 0.
        """
        # Also inside of containers: a hook averages weights into tensors in a dict, in place.
        self._before = {key: tree_map(copy_of, value) for key, value in _attributes(module)}

    def follow(self, module: pl.LightningModule, whole: pl.LightningModule | None = None) -> None:
        """Take over the attributes that have changed on the mesh since `note`.

        Args:
            module: That of rank 0.
            whole: From `fill`, which takes them; None: the skeleton does.

        Raises:
            Exception: Whatever copies of the attributes raise.
        """
        trainer, taker = module.trainer, self.module if whole is None else whole
        parts, own = dict(taker.named_modules()), dict(taker.named_parameters())
        memo: dict[int, Any] = {id(trainer.strategy): trainer.strategy}
        memo[id(trainer)] = self._trainer if whole is None else whole.trainer
        memo |= {id(m): parts[place] for place, m in module.named_modules() if place in parts}
        memo |= {id(p): own[name] for name, p in module.named_parameters() if name in own}
        memo |= {id(logger): logger for logger in trainer.loggers}
        now = dict(_attributes(module))
        for (place, name), value in now.items():
            if place in parts and not is_equal(value, self._before.get((place, name), _MISSING)):
                parts[place].__dict__[name] = copy.deepcopy(value, memo)
        for place, name in self._before.keys() - now.keys():
            parts[place].__dict__.pop(name, None)

    def fill(
        self, tensors: Mapping[str, Tensor], trainer: pl.Trainer
    ) -> tuple[pl.LightningModule, list[Callback]]:
        """Return a whole copy of the module, and of the callbacks.

        Args:
            tensors: Name -> value of every parameter, and of buffers. A value that is a parameter
                itself is taken as it is, others are copied.
            trainer: What referred to the user's Trainer refers to this one.

        Raises:
            RuntimeError: A parameter is missing.
        """
        memo: dict[int, Any] = {id(self._trainer): trainer}
        for name, parameter in self.module.named_parameters():
            if name not in tensors or tensors[name].shape != parameter.shape:
                raise RuntimeError(f"the value of {name} is not known")
            given = tensors[name]
            is_ready = isinstance(given, nn.Parameter)
            whole = given if is_ready else like_parameter(parameter, given.clone())
            memo[id(parameter)] = whole
            for hook in self._hooks[id(parameter)]:
                whole.register_hook(hook)
        module, callbacks = copy.deepcopy((self.module, self._callbacks), memo)
        _rebind(module, callbacks, memo)
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in tensors and tensors[name].shape == buffer.shape:
                    if buffer.device.type == "meta":
                        owner, _, last = name.rpartition(".")
                        setattr(module.get_submodule(owner), last, tensors[name].clone())
                    else:
                        buffer.copy_(tensors[name])
        return module, callbacks


def _attributes(module: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Give the attributes of a module and its parts that no mesh makes: no functions, no data."""
    for place, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _OWN and not isinstance(value, _NO_STATE):
                yield (place, name), value


def _rebind(module: nn.Module, callbacks: Sequence[Callback], memo: dict[int, Any]) -> None:
    """Let hooks, and functions kept as attributes, refer to the copies; `copy.deepcopy` copies no
    function, so that what a closure refers to would be the original.
    """
    for owner in (*module.modules(), *callbacks):
        for name, value in vars(owner).items():
            if isinstance(value, dict):
                for key, inner in value.items():
                    if isinstance(inner, FunctionType):
                        value[key] = _rebound(inner, memo)
            elif isinstance(value, FunctionType | MethodType):
                vars(owner)[name] = _rebound(value, memo)


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    if isinstance(function, MethodType):
        bound: Any = function.__func__
        if isinstance(bound, partial):  # as LightningCLI binds an optimizer
            bound = copy.deepcopy(bound, memo)
        return MethodType(bound, memo.get(id(function.__self__), function.__self__))
    if isinstance(function, partial):
        return copy.deepcopy(function, memo)
    if not isinstance(function, FunctionType):
        return function

    def other(value: Any) -> Any:
        if isinstance(value, MethodType):
            return _rebound(value, memo)
        return memo.get(id(value), value)

    cells = [_filled(cell, other) for cell in function.__closure__ or ()]
    defaults = tuple(map(other, function.__defaults__ or ()))
    made = FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, tuple(cells)
    )
    made.__kwdefaults__ = {k: other(v) for k, v in (function.__kwdefaults__ or {}).items()}
    made.__dict__.update(vars(function))
    return made


def _filled(cell: CellType, other: Callable[[Any], Any]) -> CellType:
    try:
        return CellType(other(cell.cell_contents))
    except ValueError:  # it is empty
        return cell
