"""The groups of optimizers as hooks see them: with the parameters of all pipeline stages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.errors import PlanError
from lightning_par.strategies.step.absent_parameter import AbsentParameter, user_line
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["WholeGroups", "is_absent", "note_places"]

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


class WholeGroups:
    """Lets the groups of optimizers list what one process would have there.

    Args:
        optimizers: Those of this stage; others than by `note_places` stay as they are.
        agree: Raises, on all ranks, where others ask for something else than this rank.
    """

    def __init__(self, optimizers: Iterable[Optimizer], agree: Callable[[str], None]) -> None:
        self._optimizers = [one for one in optimizers if _PLACES in vars(one)]
        self._agree = agree

    def states(self) -> list[Tensor]:
        """Return the tensors that the optimizers keep of the parameters that this rank holds."""
        kept = (state for optimizer in self._optimizers for state in optimizer.state.values())
        return [
            value for state in kept for value in tree_leaves(state) if isinstance(value, Tensor)
        ]

    def show(self) -> None:
        """List the parameters of all stages."""
        for optimizer in self._optimizers:
            for group, places in zip(
                optimizer.param_groups, vars(optimizer)[_PLACES], strict=False
            ):
                members = group["params"]
                # A hook has added or removed parameters since: their places are not known.
                if sum(place is None for place in places) != len(members):
                    continue
                held = iter(tuple(members))
                members[:] = [next(held) if place is None else place for place in places]
                away = (place for place in places if place is not None)
                # An entry, or a hook that asks for the state would find none and think that it
                # never stepped.
                optimizer.state.update((p, _StateElsewhere(p.fqn, self._agree)) for p in away)

    def hide(self) -> None:
        """List the parameters that this rank holds; the others may be more than before."""
        for optimizer in self._optimizers:
            groups = [group["params"] for group in optimizer.param_groups]
            note_places(optimizer, groups)
            for members in groups:
                for absent in filter(is_absent, members):
                    optimizer.state.pop(absent, None)
                # In place: Lightning and schedulers hold the lists.
                members[:] = [member for member in members if not is_absent(member)]


class _StateElsewhere(dict[str, Any]):
    """What an optimizer keeps of a parameter of another stage: whoever asks for an entry, for how
    many there are or for a file of it is refused; who goes over all of them finds none.

    Args:
        name: FQN of the parameter.
        agree: As in `WholeGroups`: the rank that has it may ask others for its value.
    """

    def __init__(self, name: str, agree: Callable[[str], None]) -> None:
        super().__init__()
        self._name, self._agree = name, agree

    @override
    def __getitem__(self, key: str) -> Any:
        raise self._refusal()

    @override
    def get(self, key: str, default: Any = None) -> Any:
        raise self._refusal()

    @override
    def __contains__(self, key: object) -> bool:
        raise self._refusal()

    @override
    def __len__(self) -> int:
        raise self._refusal()

    @override
    def __reduce__(self) -> Any:
        raise self._refusal()

    def __deepcopy__(self, memo: Any) -> "_StateElsewhere":
        return self

    def _refusal(self) -> PlanError:
        what = f"the optimizer's state of {self._name}, which another stage has,"
        self._agree(what)  # differs, as the stage that has it does not get here
        return PlanError("LP408", f"a hook reads {what}{user_line()}.")
