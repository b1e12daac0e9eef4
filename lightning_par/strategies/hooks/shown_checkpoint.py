"""What `on_save_checkpoint` sees of a checkpoint: that of one process, of which each rank has a
part; and how each rank gets its part back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_par.checkpoint.optimizer_groups import number_names, torch_state
from lightning_par.strategies.hooks.whole_groups import is_absent
from lightning_par.strategies.hooks.whole_view import WholeView
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = ["named_states", "shown_checkpoint"]

_WEIGHTS, _OPTIMIZERS = "state_dict", "optimizer_states"


@contextmanager
def shown_checkpoint(
    checkpoint: dict[str, Any],
    model: ParallelModel,
    optimizers: Sequence[Optimizer],
    view: WholeView,
) -> Iterator[None]:
    """Surrounds a hook on a checkpoint, inside of a `WholeView`.

    Weights and states of other stages are among those of this rank, and states are numbered, as in
    a state dict of torch. At the end what is of other stages is left out: they do the same.

    Args:
        checkpoint: Of this rank's part; changed in place.
        model: The model on its mesh.
        optimizers: Of which the checkpoint has states.
        view: Inside of which the hook is.

    **Communicates**: which states there are, over the ``pp`` axis.
    """
    given, lent = checkpoint.get(_WEIGHTS), dict[str, Any]()
    if isinstance(given, dict):
        known = model.steps.reads.known
        for name, value in given.items():
            view.own(name, value)
        # A stage that holds a tied weight has it under each of its names.
        held = {known[name].name: value for name, value in given.items() if name in known}
        others = [name for name in model.states.order if name in known and name not in given]
        lent = {name: held[known[name].name] for name in others if known[name].name in held}
        here = lent | given
        # In the order of one process; what only a hook has added comes last.
        shown = {
            name: here[name] if name in here else view.absent(known[name])
            for name in model.states.order
            if name in here or name in known
        }
        checkpoint[_WEIGHTS] = type(given)({**shown, **given})
    names, kept = list[list[list[str]]](), list[set[str]]()
    for index, local in enumerate(checkpoint.get(_OPTIMIZERS, ())):
        if "error" in local:
            return (yield)
        members = model.states.names_in_groups(model.module, optimizers[index])
        checkpoint[_OPTIMIZERS][index], own_names = _shown(optimizers[index], local, members)
        names.append(members)
        kept.append(own_names)
    try:
        yield
    finally:
        left = checkpoint.get(_WEIGHTS)
        if isinstance(left, dict) and (lent or any(map(is_absent, left.values()))):
            own = {n: v for n, v in left.items() if n not in lent and not is_absent(v)}
            checkpoint[_WEIGHTS] = type(left)(own)
        named_states(checkpoint, names, lambda index, name: name in kept[index])


def _shown(
    optimizer: Optimizer, local: Mapping[str, Any], names: Sequence[Sequence[str]]
) -> tuple[dict[str, Any], set[str]]:
    """Return an optimizer's numbered state dict, and the names that are not of other stages."""
    groups = optimizer.param_groups
    members = {
        name: parameter
        for group, of_group in zip(groups, names, strict=True)
        for name, parameter in zip(of_group, group["params"], strict=True)
    }
    # The same objects as in the optimizer, as in a state dict of torch.
    states = {name: optimizer.state[p] for name, p in members.items() if p in optimizer.state}
    # Options as they were when the checkpoint was made.
    options = [
        {**group, "params": list(of_group)}
        for group, of_group in zip(local["param_groups"], names, strict=True)
    ]
    made, numbers = torch_state(options, {}), number_names(names)
    made["state"] = {numbers[name]: state for name, state in states.items()}
    return made, {name for name, parameter in members.items() if not is_absent(parameter)}


def named_states(
    checkpoint: dict[str, Any],
    names: Sequence[Sequence[Sequence[str]]],
    is_kept: Callable[[int, str], bool],
) -> None:
    """Put names in the place of numbers in the states of optimizers.

    Args:
        checkpoint: Whose states are numbered, whatever a hook has made of them; changed in place.
        names: For each optimizer the names in its groups, of which the numbers are.
        is_kept: Given the index of an optimizer and a name: whether it is not left out.
    """
    found = checkpoint.get(_OPTIMIZERS)
    if not isinstance(found, list):
        return
    for index, (given, members) in enumerate(zip(found, names, strict=False)):
        of = {number: name for name, number in number_names(members).items()}
        states = {of.get(number, str(number)): state for number, state in given["state"].items()}
        groups = [[of.get(n, str(n)) for n in g["params"]] for g in given["param_groups"]]
        found[index] = {
            **given,
            "state": {n: dict(s) for n, s in states.items() if is_kept(index, n)},
            "param_groups": [
                {**group, "params": [name for name in of_group if is_kept(index, name)]}
                for group, of_group in zip(given["param_groups"], groups, strict=True)
            ],
        }
