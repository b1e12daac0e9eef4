"""Optimizers that hold parameters from before the set-up replaced them.

On a mesh other tensors take the places of a module's parameters: shards, or nothing where another
pipeline stage holds one. An optimizer that `LightningCLI`, `__init__` or `setup` made, or one that
`configure_optimizers` makes of a list from there, still holds those from before; it would train
tensors that the module no longer has.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn, Tensor
from torch.optim import Optimizer

from lightning_par.errors import ConfigurationError

__all__ = ["check_membership", "fits", "replace_parameters"]

_ELSEWHERE: Any = object()
"""Stands for a parameter that this rank does not hold."""


def replace_parameters(
    optimizers: Iterable[Optimizer],
    before: Mapping[int, str],
    now: Mapping[str, nn.Parameter],
    state_like: Callable[[nn.Parameter, Any], Any] = lambda _, value: value,
) -> None:
    """Give optimizers the parameters that the module has now, in groups, states, and whatever else
    they keep.

    Args:
        optimizers: Changed in place.
        before: Id of every parameter from before the set-up -> its name.
        now: Name -> parameter that this rank has under it; others are left out of the groups.
        state_like: Returns this rank's part of a state of a parameter.
    """
    live = {id(parameter) for parameter in now.values()}
    # What stayed in the module needs no replacement; what another stage holds has no new one.
    table = {i: now.get(name, _ELSEWHERE) for i, name in before.items() if i not in live}
    replace = _Replacement(table, state_like)
    for optimizer in optimizers if table else ():
        replace(optimizer)


class _Replacement:
    """Replaces parameters inside of lists, dicts and optimizers, which stay the same objects."""

    def __init__(
        self, table: Mapping[int, Any], state_like: Callable[[nn.Parameter, Any], Any]
    ) -> None:
        self._table, self._state_like = table, state_like
        self._seen: dict[int, Any] = {}
        self._rows: list[list[Any]] = []  # those of each group now, and of all groups

    def __call__(self, value: Any) -> Any:
        """Return the value that takes the place of `value`; containers are changed in place."""
        if isinstance(value, Tensor):
            return self._table.get(id(value), value)
        if type(value) is tuple:
            found = self._in_sequence(value)
            # A pair of a parameter and its name, or its state, is nothing without the parameter.
            if any(each is _ELSEWHERE for each in found):
                return _ELSEWHERE
            return tuple(found)
        if id(value) in self._seen or not isinstance(value, Optimizer | list | dict):
            return value
        self._seen[id(value)] = value
        if isinstance(value, Optimizer):
            # Before the other attributes: a list of copies is known by the order of a group.
            rows = [list(map(self, group["params"])) for group in value.param_groups]
            self._rows += [*rows, [parameter for row in rows for parameter in row]]
            for held in vars(value).values():
                self(held)
        elif isinstance(value, dict):
            self._in_dict(value)
        else:
            value[:] = [each for each in self._in_sequence(value) if each is not _ELSEWHERE]
        return value

    def _in_sequence(self, held: Sequence[Any]) -> list[Any]:
        """Return the new entries of a list or tuple.

        A tensor beside a parameter in a tuple, or in a list as long as a group, may be a copy of a
        parameter, such as an average: then it becomes a part as the parameter does.
        """
        found = list(map(self, held))
        if isinstance(held, tuple):
            replaced = [new for old, new in zip(held, found, strict=True) if new is not old]
            of = replaced * len(found) if len(replaced) == 1 else []
        else:
            # Only the order tells of which parameter a tensor in a list is the copy.
            of = next((row for row in self._rows if fits(held, row)), [])
        if not of or (isinstance(held, tuple) and of[0] is _ELSEWHERE):
            return found
        return [self._beside(p, value) for p, value in zip(of, found, strict=True)]

    def _beside(self, parameter: Any, value: Any) -> Any:
        """Return what stands in the place of a value that may be a copy of a parameter."""
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        return parameter if parameter is _ELSEWHERE else self._state_like(parameter, value)

    def _in_dict(self, held: dict[Any, Any]) -> None:
        # Rebuilt in its order and in the same object, which others may hold.
        entries = list(held.items())
        held.clear()
        for key, value in entries:
            parameter = self(key) if isinstance(key, Tensor) else key
            if parameter is _ELSEWHERE:
                continue
            made = self(value)
            if parameter is not key:
                made = self._state(parameter, made)
            if made is not _ELSEWHERE:
                held[parameter] = made

    def _state(self, parameter: nn.Parameter, value: Any) -> Any:
        if isinstance(value, dict):
            return {k: self._state_like(parameter, v) for k, v in value.items()}
        return self._state_like(parameter, value)


def fits(held: Sequence[Any], row: Sequence[Any]) -> bool:
    """Tell whether a list may hold copies of parameters, in their order.

    Args:
        held: The list.
        row: The parameters of a group.
    """
    return len(held) == len(row) and all(
        isinstance(value, Tensor) and (parameter is _ELSEWHERE or value.shape == parameter.shape)
        for value, parameter in zip(held, row, strict=True)
    )


def check_membership(
    optimizers: Iterable[Optimizer], parameters: Iterable[nn.Parameter], num_ranks: int
) -> None:
    """Refuse an optimizer that trains what is no parameter of the module.

    Args:
        optimizers: All optimizers.
        parameters: Those of the module on this rank.
        num_ranks: Number of ranks; alone, such a tensor trains as anywhere.

    Raises:
        ConfigurationError: Its gradient would be that of one rank.
    """
    known = {id(parameter) for parameter in parameters}
    held = (p for optimizer in optimizers for g in optimizer.param_groups for p in g["params"])
    others = [p for p in held if p.requires_grad and id(p) not in known]
    if num_ranks > 1 and others:
        raise ConfigurationError(
            "LP414",
            f"the optimizer trains {len(others)} tensor{'s' if len(others) > 1 else ''} that "
            f"{'are' if len(others) > 1 else 'is'} no parameter of the LightningModule (the first "
            f"has shape {tuple(others[0].shape)}). The gradient of such a tensor is not summed "
            f"over the {num_ranks} ranks, and no checkpoint saves the tensor. Assign the module "
            "that holds the tensor, or nn.Parameter(tensor), to an attribute of the "
            "LightningModule in __init__.",
        )
