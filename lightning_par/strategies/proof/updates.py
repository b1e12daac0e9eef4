"""What optimizers go on from, what they are handed, and what they make of it."""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn, Tensor
from torch.optim import Optimizer

from lightning_par.dtensor import local_part
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.proof.gathering import (
    gather_gradients,
    gather_parameters,
    gather_tensors,
)
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.gradient_path import MeshPrecision

__all__ = [
    "NotedUpdates",
    "copies_of_gradients",
    "gather_left_gradients",
    "has_stepped",
    "restore",
    "take_over",
    "watch_steps",
    "with_gradients",
]


class NotedUpdates:
    """Notes what the mesh hands to optimizers and, if asked, what they make of it.

    Args:
        model: The model on the mesh.
        plugin: Its precision plugin, which calls before and after every update.
        noted: Where it is noted, on rank 0.
        follows: Whether the parameters are noted, too, after each update.

    **Communicates**: before every update the gradients, and after it the parameters, to rank 0.
    """

    def __init__(
        self, model: ParallelModel, plugin: Precision, noted: StepRecord, *, follows: bool
    ) -> None:
        self._model, self._plugin, self._noted = model, cast(MeshPrecision, plugin), noted
        self._plugin.before_update = self._before
        self._plugin.after_update = self._after if follows else None

    def close(self) -> None:
        """Note nothing any more."""
        self._plugin.before_update = self._plugin.after_update = None

    def _before(self) -> None:
        self._noted.handed.append(gather_gradients(self._model))

    def _after(self) -> None:
        self._noted.updated = gather_parameters(self._model)


def watch_steps(
    plugin: Precision, before: Callable[[], None], after: Callable[[], None]
) -> Callable[[], None]:
    """Call a function right before every optimizer updates, and one right after, from now on, and
    return what ends that.

    Args:
        plugin: Runs the hooks and the clipping before an update, and then the update.
        before: Called once hooks and clipping are through.
        after: Called before hooks that follow.
    """

    def call_behind(name: str, following: Callable[[], None]) -> None:
        plain = getattr(plugin, name)

        @functools.wraps(plain)
        def called(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            following()
            return output

        vars(plugin)[name] = called

    calls = {"_after_closure": before, "optimizer_step": after}
    for name, function in calls.items():
        call_behind(name, function)

    def end() -> None:
        for name in calls:
            vars(plugin).pop(name, None)

    return end


def with_gradients(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module that have a gradient, with their names."""
    return [(n, p) for n, p in module.named_parameters() if p.grad is not None]


def copies_of_gradients(named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Return copies of their gradients on the CPU."""
    return {n: local_part(p.grad).cpu().clone() for n, p in named}  # type: ignore[arg-type]


def take_over(given: Mapping[str, Tensor], named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Put the numbers of the mesh in the place of the own gradients."""
    for name, parameter in named:
        if name in given:
            local_part(parameter.grad).copy_(given[name])  # type: ignore[arg-type]


def restore(optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]] | None) -> bool:
    """Give optimizers the states of those on the mesh; return whether they have them."""
    if states is None:
        return False
    try:
        for optimizer, state in zip(optimizers, states, strict=True):
            before = {p: held for p, held in optimizer.state.items() if isinstance(held, dict)}
            optimizer.load_state_dict(copy.deepcopy(dict(state)))
            # In a closure LBFGS holds its state already, and goes on with that dict.
            for parameter, held in before.items():
                loaded = optimizer.state[parameter]
                if loaded is not held:
                    held.clear()
                    held.update(loaded)
                    optimizer.state[parameter] = held
    except Exception:  # of an optimizer that loads in a way of its own
        return False
    return True


def gather_left_gradients(model: ParallelModel) -> dict[str, Tensor]:
    """Return the gradients of earlier steps to which the next backward adds, whole, on rank 0.

    Those are of parameters that no optimizer has, and of all where the module zeroes them itself.

    Args:
        model: The model on the mesh, before the backward.

    **Communicates**: these gradients, to rank 0.
    """
    module = model.module
    if model.host is not None:
        return {}
    is_own = is_overridden("optimizer_zero_grad", module, pl.LightningModule)
    groups = (g for optimizer in module.trainer.optimizers for g in optimizer.param_groups)
    zeroed = {id(parameter) for group in groups for parameter in group["params"]}
    if is_own or not module.automatic_optimization:
        zeroed = set()
    left = ((n, p.grad) for n, p in module.named_parameters() if id(p) not in zeroed)
    return gather_tensors(left, model.resolved.canonical, model.mesh)


def has_stepped(optimizer: Optimizer) -> bool:
    """Whether it holds more than the zeros that some (LBFGS) write before their first closure."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return any(isinstance(v, Tensor) or bool(v) for state in states for v in state.values())
