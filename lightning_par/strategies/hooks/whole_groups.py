"""The groups of optimizers as hooks see them: with the parameters and states of all stages."""

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.errors import PlanError
from lightning_par.strategies.step.absent_parameter import About, AbsentParameter, user_line
from lightning_par.upstream.pytree import tree_leaves, tree_map

__all__ = ["StagesView", "WholeGroups", "cut_to_stage", "is_absent", "note_places"]

_PLACES = "_lightning_par_places"
"""Attribute of an optimizer of a stage: for each group, its members as one process lists them; None
for one that this stage holds.
"""


def is_absent(given: Any) -> bool:
    """Tell whether what an optimizer is given is a parameter of another stage.

    Args:
        given: The parameter, or a pair of its name and itself.
    """
    return isinstance(given[1] if isinstance(given, tuple) else given, AbsentParameter)


def note_places(optimizer: Optimizer, groups: Iterable[Sequence[Any]]) -> None:
    """Note where the groups of an optimizer list parameters of other stages.

    Args:
        optimizer: The optimizer, which is to hold those of this stage alone.
        groups: For each of its groups, what it was given.
    """
    bare = ([m[1] if isinstance(m, tuple) else m for m in group] for group in groups)
    places = [[m if isinstance(m, AbsentParameter) else None for m in group] for group in bare]
    vars(optimizer)[_PLACES] = places


def cut_to_stage(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """Return what an optimizer of this stage loads of a state dict of all stages.

    Args:
        optimizer: The optimizer, by `note_places`.
        given: The state dict; None is returned if it is no such.
    """
    groups, places = given["param_groups"], vars(optimizer)[_PLACES]
    held = [len(group["params"]) for group in optimizer.param_groups]
    sizes = [len(group["params"]) for group in groups]
    if sizes == held or sizes != [len(members) for members in places]:
        return None
    kept = [
        [n for n, place in zip(group["params"], members, strict=True) if place is None]
        for group, members in zip(groups, places, strict=True)
    ]
    here = {n for numbers in kept for n in numbers}
    away = {n for group in groups for n in group["params"]} - here
    return {
        **given,
        "state": {n: state for n, state in given["state"].items() if n not in away},
        "param_groups": [
            {**group, "params": numbers} for group, numbers in zip(groups, kept, strict=True)
        ],
    }


class StagesView(Protocol):
    """What is known of the stages of a pipeline while a hook sees the whole module.

    Attributes:
        group: The ranks of this pipeline; None: there is none.
        place: Which of them this is.
    """

    group: dist.ProcessGroup | None
    place: int

    def parameters_here(self) -> Mapping[str, Tensor]:
        """Return the parameters that this stage gives to others, by FQN."""

    def agree(self, what: str) -> None:
        """Raise, on all ranks, if other ranks are not about to do `what`, too."""

    def stand_for(self, about: About, stage: int) -> Tensor:
        """Return what stands for a tensor of another stage."""


class WholeGroups:
    """Lets the groups and states of optimizers list what one process would have there.

    Args:
        optimizers: Those of this stage; others than by `note_places` stay as they are.
        view: What is known of the stages.
    """

    def __init__(self, optimizers: Iterable[Optimizer], view: StagesView) -> None:
        self._optimizers = [one for one in optimizers if _PLACES in vars(one)]
        self._view, self._plain = view, list[Any]()
        self._found: list[dict[str, Any]] | None = None

    def states(self) -> list[tuple[Any, Tensor]]:
        """Return the parameters that this rank holds, with each tensor that optimizers keep."""
        plain = self._plain or [optimizer.state for optimizer in self._optimizers]
        kept = (item for states in plain for item in states.items())
        return [(p, v) for p, state in kept for v in tree_leaves(state) if isinstance(v, Tensor)]

    def show(self) -> None:
        """List the parameters of all stages, and their states."""
        self._plain = [optimizer.state for optimizer in self._optimizers]
        for index, optimizer in enumerate(self._optimizers):
            for group, places in zip(
                optimizer.param_groups, vars(optimizer)[_PLACES], strict=False
            ):
                members = group["params"]
                # A hook has added or removed parameters since: their places are not known.
                if sum(place is None for place in places) != len(members):
                    continue
                held = iter(tuple(members))
                members[:] = [next(held) if place is None else place for place in places]
            away = partial(self._elsewhere, index)
            states: Any = _WholeStates(self._plain[index], optimizer.param_groups, away)
            optimizer.state = states

    def hide(self) -> None:
        """List the parameters that this rank holds; the others may be more than before."""
        for optimizer, plain in zip(self._optimizers, self._plain, strict=False):
            # A hook may have put another one in its place, as `load_state_dict` does.
            if isinstance(optimizer.state, _WholeStates):
                optimizer.state = plain
            groups = [group["params"] for group in optimizer.param_groups]
            note_places(optimizer, groups)
            for members in groups:
                # In place: Lightning and schedulers hold the lists.
                members[:] = [member for member in members if not is_absent(member)]
        self._plain = []

    def _elsewhere(self, index: int) -> dict[str, Any]:
        """Return the states of an optimizer that other stages keep, by FQN.

        **Communicates**: once in a hook, over the ``pp`` axis, what each stage keeps.
        """
        if self._found is None:
            self._found = self._exchanged()
        return self._found[index]

    def _exchanged(self) -> list[dict[str, Any]]:
        view, what, failure = self._view, "the states of the optimizers", ""
        here = view.parameters_here().items()
        own = [{n: _described(n, plain[p]) for n, p in here if p in plain} for plain in self._plain]
        try:
            pickle.dumps(own)
        except Exception as error:  # whatever an optimizer of a user's keeps
            failure = str(error) or type(error).__name__
            what += f", which cannot be sent from stage to stage: {failure}"
        view.agree(what)
        if failure:
            raise PlanError(
                "LP408",
                f"a hook{user_line()} reads the states of the optimizers, but those of other "
                f"pipeline stages cannot be sent to this stage: {failure}. Keep only tensors, "
                "numbers and text in the states of the optimizers.",
            )
        told = [own] * dist.get_world_size(view.group)
        dist.all_gather_object(told, own, group=view.group)
        found: list[dict[str, Any]] = [{} for _ in own]
        for stage, given in enumerate(told):
            stand = partial(_stand_for, view, stage)
            for states, theirs in zip(found, given, strict=True):
                states |= {} if stage == view.place else tree_map(stand, theirs)
        return found


def _described(name: str, state: Any) -> Any:
    """Return the state of a parameter with descriptions in the place of its tensors."""

    def describe(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return About(f"the optimizer's state of {name}", tuple(value.shape), value.dtype)

    return tree_map(describe, dict(state))


def _stand_for(view: StagesView, stage: int, value: Any) -> Any:
    return view.stand_for(value, stage) if isinstance(value, About) else value


class _WholeStates(MutableMapping[Any, Any]):
    """What an optimizer keeps of the parameters of all stages, in the order of its groups.

    Whoever reads it asks for the states of other stages, also for one that this rank has: all ranks
    run the same code, and so they ask at the same place.

    Args:
        plain: The states of this rank, which stay where they are.
        groups: Of the optimizer.
        elsewhere: Returns the states of other stages, by FQN.
    """

    def __init__(
        self, plain: Any, groups: list[dict[str, Any]], elsewhere: Callable[[], dict[str, Any]]
    ) -> None:
        self._plain, self._groups, self._elsewhere = plain, groups, elsewhere

    @override
    def __getitem__(self, key: Any) -> Any:
        found = self._elsewhere()
        if not is_absent(key):
            return self._plain[key]
        return found.setdefault(key.fqn, {})  # as torch's own, which is a `defaultdict`

    @override
    def __setitem__(self, key: Any, value: Any) -> None:
        if is_absent(key):
            self._elsewhere()[key.fqn] = value
        else:
            self._plain[key] = value

    @override
    def __delitem__(self, key: Any) -> None:
        if is_absent(key):
            del self._elsewhere()[key.fqn]
        else:
            del self._plain[key]

    @override
    def __iter__(self) -> Iterator[Any]:
        found = self._elsewhere()
        members = [p for group in self._groups for p in group["params"]]
        known = {id(p) for p in members}
        yield from (p for p in members if (p.fqn in found if is_absent(p) else p in self._plain))
        yield from (key for key in self._plain if id(key) not in known)

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)

    @override
    def __contains__(self, key: object) -> bool:
        found = self._elsewhere()
        return key.fqn in found if isinstance(key, AbsentParameter) else key in self._plain

    def __deepcopy__(self, memo: Any) -> Any:
        return defaultdict(dict, copy.deepcopy(dict(self), memo))

    @override
    def __reduce__(self) -> Any:
        return partial(defaultdict, dict), (dict(self),)
