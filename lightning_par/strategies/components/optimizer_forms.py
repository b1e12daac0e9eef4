"""Optimizers of others after a run: of the whole module, as one process would have them.

Some exchange or average weights when a run has ended, as those without a schedule do in `eval()`.
So where every rank gets the whole module, they get its parameters, and whole states. Optimizers of
torch and of this package do no such thing, and keep their parts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.checkpoint.optimizer_groups import merge_names, number_names, torch_state
from lightning_par.dtensor import replicated
from lightning_par.engine.tensor_tree import broadcast_object
from lightning_par.errors import CheckpointError
from lightning_par.strategies.components.state_map import state_like
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.replaced_parameters import replace_parameters

__all__ = ["WholeOptimizer", "gather_optimizers", "give_parts", "with_parts"]

_KEEP = ("torch.optim.", "lightning_par.optimizers")


class WholeOptimizer:
    """An optimizer, and what it has once the module is whole; made while the module is in parts.

    Args:
        model: The model on its mesh.
        optimizer: Its parameters and states are parts.

    Attributes:
        names: FQNs of the parameters in every group.

    Raises:
        CheckpointError: Nobody knows of which part a state is.

    **Communicates**: the states, to every rank.
    """

    def __init__(self, model: ParallelModel, optimizer: Optimizer) -> None:
        states, group = model.states, dist.group.WORLD
        assert group is not None
        self._optimizer = optimizer
        stages: list[Any] = [states.names_in_groups(model.module, optimizer)]
        if model.mesh.sizes.pipeline > 1:
            stages *= model.mesh.sizes.pipeline
            dist.all_gather_object(stages, stages[0], group=model.mesh.group("pp"))
        # The same on all ranks: every stage has part of a group.
        self.names = [merge_names(parts, states.place) for parts in zip(*stages, strict=True)]
        gathered = states.gather_optimizer(model.module, optimizer)
        # Whole states on all ranks: each gets the whole module, too.
        self._states = broadcast_object(gathered.get("state", {}), 0, group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of one process, of the groups as they are now."""
        groups = zip(self._optimizer.param_groups, self.names, strict=True)
        options = [{**group, "params": list(names)} for group, names in groups]
        return {**torch_state(options, {}), "state": self._states}

    def show(self, model: ParallelModel) -> None:
        """Give the optimizer the parameters of the module, which is whole now, and their states."""
        named = dict(model.module.named_parameters())
        numbers = number_names(self.names)
        # It is keyed by parameters that are gone.
        self._optimizer.state.clear()
        for group, names in zip(self._optimizer.param_groups, self.names, strict=True):
            group["params"][:] = [named[name] for name in names]
            for name in names:
                if numbers[name] in self._states:
                    self._optimizer.state[named[name]] = self._states[numbers[name]]


def gather_optimizers(
    model: ParallelModel, optimizers: Iterable[Optimizer]
) -> list[WholeOptimizer]:
    """Gather the states of optimizers of others, before the module becomes whole.

    **Communicates**: as `WholeOptimizer`.
    """
    found = []
    for optimizer in optimizers:
        # By module name: subclasses of torch's optimizers that others wrote count as theirs.
        if optimizer.param_groups and not type(optimizer).__module__.startswith(_KEEP):
            try:
                found.append(WholeOptimizer(model, optimizer))
            except CheckpointError:  # on all ranks: it cannot be saved either
                continue
    return found


def give_parts(model: ParallelModel, optimizers: Iterable[Optimizer]) -> None:
    """Give optimizers of the whole module the parameters that this rank has, and parts of their
    states; see `replaced_parameters`.

    Args:
        model: The model on the mesh.
        optimizers: Changed in place.
    """
    named = dict(model.module.named_parameters(remove_duplicate=False))
    now = {c: named[n] for n, c in model.resolved.canonical.items() if n in named}
    before = {i: name for i, (name, _) in model.states.given.items()}
    replace_parameters(optimizers, before, now, _part_of_state)


def _part_of_state(parameter: nn.Parameter, value: Any) -> Any:
    part, data = state_like(parameter, value), parameter.data
    # Means over rows or columns: the same on every rank, which a checkpoint has to know.
    if isinstance(data, DTensor) and type(part) is Tensor and part.numel() > 1:
        return replicated(part, data)
    return part


@contextmanager
def with_parts(model: ParallelModel, optimizer: Optimizer) -> Iterator[None]:
    """Inside, an optimizer of the whole module has this rank's parts, as the module has."""
    # Copies: `give_parts` changes the lists in place.
    groups = [list(group["params"]) for group in optimizer.param_groups]
    states = dict(optimizer.state)
    give_parts(model, [optimizer])
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, groups, strict=True):
            # In place: Lightning and schedulers hold the groups.
            group["params"][:] = parameters
        optimizer.state.clear()
        optimizer.state.update(states)
