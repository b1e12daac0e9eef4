"""Lets an optimizer whose update treats each entry alone step on this rank's shards.

Note [Local step]: such an update of a DTensor is the same update of its shard. Torch finds this out
for every operation anew: its sharding propagation takes time that is quadratic in the length of a
list of DTensors, as fused and foreach optimizers step on. So while the optimizer updates, its
groups and states hold the shards as plain tensors, with the same memory. Before and after, hooks
and checkpoints see parameters and states as DTensors.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from lightning_par.upstream.dtensor import sharded_like

__all__ = ["end_local_step", "step_on_shards"]

_State = dict[str, Any]


def step_on_shards(optimizer: Optimizer) -> None:
    """Let an optimizer step on the shards of its parameters; see Note [Local step].

    Args:
        optimizer: Updates each entry of a weight by its own gradient and states, which it finds by
            its groups and states alone, and calls the closure of a step before it reads anything.
            A step without a closure, as with a scaler of gradients, stays as it is.
    """
    if optimizer not in _STEPS:
        _STEPS[optimizer] = _LocalStep(optimizer)


def end_local_step(optimizer: Optimizer) -> None:
    """Put the parameters back after an update that has raised an exception."""
    step = _STEPS.get(optimizer)
    if step is not None:
        step.hide(optimizer)


class _LocalStep:
    def __init__(self, optimizer: Optimizer) -> None:
        # Weakly: an optimizer may be given other parameters, and outlives these.
        self._shards: Any = WeakIdKeyDictionary()
        self._parameters: list[list[Tensor]] | None = None  # of each group, while shards are shown
        optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(lambda each, *_: self.hide(each))
        # Before hooks of the user, which are to see the parameters.
        hooks: Any = after.hooks_dict_ref()
        hooks.move_to_end(after.id, last=False)

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Show the shards once the closure has run; the pre-hook of the step."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None

        def run() -> Any:
            self.hide(optimizer)  # the closure is called once more, or an update has failed
            loss = closure()
            self._show(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": run}
        return (args[0], run, *args[2:]), kwargs

    @torch.no_grad()
    def _show(self, optimizer: Optimizer) -> None:
        if self._parameters is not None:  # by the step of a base class
            return
        self._parameters = [list(group["params"]) for group in optimizer.param_groups]
        state = optimizer.state
        for group, parameters in zip(optimizer.param_groups, self._parameters, strict=True):
            shown = []
            for parameter in parameters:
                if isinstance(parameter, DTensor):
                    shard = self._shard_of(parameter)
                    shard.tensor.grad = _local(parameter.grad, parameter)
                    # A step that fails here loses no state.
                    if parameter in state:
                        state[shard.tensor] = shard.show(state[parameter], parameter)
                        del state[parameter]
                    else:
                        shard.forget()
                    shown.append(shard.tensor)
                else:
                    shown.append(parameter)
            group["params"][:] = shown  # in place: an optimizer may keep the list

    def _shard_of(self, parameter: DTensor) -> "_Shard":
        local, shard = parameter.to_local(), self._shards.get(parameter)
        # While the shard holds its memory, no other has the same address.
        if shard is None or shard.tensor.data_ptr() != local.data_ptr():
            self._shards[parameter] = shard = _Shard(local)
        return shard  # type: ignore[no-any-return]

    @torch.no_grad()
    def hide(self, optimizer: Optimizer) -> None:
        """Put the parameters back, with their states, if shards are shown."""
        parameters, self._parameters = self._parameters, None
        if parameters is None:
            return
        state = optimizer.state
        for group, held in zip(optimizer.param_groups, parameters, strict=True):
            for parameter in held:
                shard = self._shards.get(parameter)  # None also where showing them has failed
                if shard is not None:
                    shard.tensor.grad = None
                    if shard.tensor in state:
                        state[parameter] = shard.hide(state.pop(shard.tensor), parameter)
            group["params"][:] = held


class _Shard:
    """The shard of a parameter, and its states in both forms, which have the same memory.

    Args:
        local: The shard.

    Attributes:
        tensor: Stands for the parameter in a step; with the memory and version counter of `local`.
    """

    def __init__(self, local: Tensor) -> None:
        self.tensor = local.detach()
        self.forget()

    def forget(self) -> None:
        """Know no states, as before the first update."""
        self._between: _State = {}
        self._within: _State = {}
        self._known: tuple[_State, _State] = ({}, {})

    def show(self, held: Any, parameter: DTensor) -> Any:
        """Return the states as a step has them.

        Args:
            held: As they are between steps: of the shape of the parameter as DTensors.
            parameter: The parameter.
        """
        if not isinstance(held, dict):
            return _local(held, parameter)
        # Mostly an update changes memory only.
        if held is not self._between or not _holds(held, self._known[0]):
            self._between = held
            self._within = {k: _local(v, parameter) for k, v in held.items()}
            self._known = dict(held), dict(self._within)
        return self._within

    def hide(self, found: Any, parameter: DTensor) -> Any:
        """Return the states as they are between steps.

        Args:
            found: As the step leaves them.
            parameter: The parameter.
        """
        shape = self.tensor.shape
        if not isinstance(found, dict):
            return _sharded(found, parameter, shape)
        is_other = found is not self._within
        if is_other:  # the user may keep the one before
            self._between = {}
        if is_other or not _holds(found, self._known[1]):
            made = {k: _sharded(v, parameter, shape) for k, v in found.items()}
            # In place, as on one process: somebody may hold it.
            self._between.clear()
            self._between.update(made)
            self._within, self._known = found, (made, dict(found))
        return self._between


_STEPS: WeakKeyDictionary[Optimizer, _LocalStep] = WeakKeyDictionary()


def _local(value: Any, parameter: DTensor) -> Any:
    """Return the shard of a gradient or state; placed as the parameter is, or it is moved so."""
    if not isinstance(value, DTensor):
        return value
    if value.placements != parameter.placements:
        value = value.redistribute(placements=parameter.placements)
    return value.to_local()


def _sharded(value: Any, parameter: DTensor, shape: torch.Size) -> Any:
    is_shard = isinstance(value, Tensor) and value.ndim > 0 and value.shape == shape
    return sharded_like(value, parameter) if is_shard else value


def _holds(state: Mapping[str, Any], known: Mapping[str, Any]) -> bool:
    """Return whether a state has the very values that are known."""
    return len(state) == len(known) and all(state.get(k) is v for k, v in known.items())
