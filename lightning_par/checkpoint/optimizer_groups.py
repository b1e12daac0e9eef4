"""Parameter groups of an optimizer: FQNs in our checkpoints, numbers in torch's state dicts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_par.checkpoint.tensor_files import StoredTensors
from lightning_par.errors import CheckpointError

__all__ = [
    "StoredOptimizer",
    "by_name",
    "check_groups",
    "merge_groups",
    "merge_names",
    "number_names",
    "split_states",
    "torch_state",
]


class StoredOptimizer(dict[str, Any]):
    """State of one optimizer in a checkpoint: a state dict of torch, which hooks may change, whose
    tensors stay in files until they are accessed.

    Args:
        groups: Parameter groups: their options, and FQNs under ``"params"``.
        states: FQN of a parameter -> name of a state -> its value; tensors may be `StoredTensor`.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]]
    ) -> None:
        made = torch_state(groups, states)
        kept = {i: StoredTensors(entries) for i, entries in made["state"].items()}
        super().__init__(made | {"state": kept})
        # Kept beside the dict: a hook may rename or drop groups, but numbers go on meaning these
        # names.
        self._names = list(number_names([group["params"] for group in groups]))

    def _name(self, number: Any) -> str:
        # A hook may have added an entry under a number, or a key, that was never stored.
        known = isinstance(number, int) and 0 <= number < len(self._names)
        return self._names[number] if known else f"parameter {number}"

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups as they are now, with FQNs under ``"params"``."""
        return [
            {**group, "params": [self._name(number) for number in group["params"]]}
            for group in self["param_groups"]
        ]

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """FQN of a parameter -> name of a state -> its value as it is now; tensors that nobody has
        accessed are `StoredTensor`.
        """
        return {
            self._name(i): e.unread() if isinstance(e, StoredTensors) else dict(e)
            for i, e in self["state"].items()
        }


def number_names(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the number of every parameter in torch's state dict: counted group by group.

    Args:
        groups: FQNs of the parameters in every group.
    """
    numbers: dict[str, int] = {}
    # torch counts on over the groups (`Optimizer.state_dict`), and gives a parameter that is in
    # two of them one number.
    for name in (n for group in groups for n in group):
        numbers.setdefault(name, len(numbers))
    return numbers


def merge_names(parts: Sequence[Sequence[str]], order: Callable[[str], int]) -> list[str]:
    """Return the parameters of one group over all stages of a pipeline, as one process has them.

    They are in the optimizer's order, by which torch numbers them. Where stages hold parts of the
    group, that order is not known, and the model's takes its place.

    Args:
        parts: FQNs of every stage, or of every rank.
        order: Function from a parameter's FQN to its position in the model.
    """
    # `dict.fromkeys` drops a name that a rank lists twice, and keeps the order.
    given = {tuple(dict.fromkeys(names)) for names in parts}
    if len(given) == 1:
        return list(*given)
    return sorted({name for names in given for name in names}, key=order)


def merge_groups(
    parts: Sequence[Sequence[Sequence[Mapping[str, Any]]]], order: Callable[[str], int]
) -> list[list[dict[str, Any]]]:
    """Merge the parameter groups of all ranks: FQNs of all, options of one rank.

    Args:
        parts: Per rank that has optimizers, per optimizer its groups.
        order: As for `merge_names`.
    """
    return [
        [
            # Options are the same on all ranks, since each makes its optimizers with the same
            # code.
            {**group[0], "params": merge_names([part["params"] for part in group], order)}
            # strict: ranks whose optimizers differ in groups would otherwise lose the last ones
            # silently.
            for group in zip(*optimizers, strict=True)
        ]
        for optimizers in zip(*parts, strict=True)
    ]


def by_name(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> StoredOptimizer:
    """Return an optimizer's state dict with the FQNs of its parameters.

    Args:
        state: `Optimizer.state_dict()` of one process, or a `StoredOptimizer`, which knows them.
        groups: FQNs of the parameters in every group of this run's optimizer.

    Raises:
        CheckpointError: Groups differ in their number of parameters.
    """
    if isinstance(state, StoredOptimizer):
        return state
    # Numbers carry no names, so sizes of groups are all that can be compared.
    saved = state["param_groups"]
    counts = [len(g["params"]) for g in saved]
    if counts != [len(group) for group in groups]:
        raise CheckpointError(
            "LP507",
            f"the parameter groups of the optimizer in the checkpoint have {counts} parameters, "
            f"but those of this run have {[len(group) for group in groups]}. Use the same "
            "parameter groups, or load only the weights: "
            "lightning_par.load_from_checkpoint(MyModule, path).",
        )
    numbers = number_names(groups)
    # A parameter without a gradient so far has no state, in torch as here.
    states = {name: state["state"][i] for name, i in numbers.items() if i in state["state"]}
    named = [{**g, "params": list(names)} for g, names in zip(saved, groups, strict=True)]
    return StoredOptimizer(named, states)


def split_states(number: int, entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return FQN of a parameter -> name of a state -> its entry, of one optimizer.

    Args:
        number: Number of the optimizer.
        entries: ``"<number>/<FQN>/<name of the state>"`` -> entry, of all optimizers.
    """
    found: dict[str, dict[str, Any]] = {}
    prefix = f"{number}/"
    for key, entry in entries.items():
        if key.startswith(prefix):
            # From the right: an FQN may hold a "/", the name of a state does not.
            name, _, state = key.removeprefix(prefix).rpartition("/")
            found.setdefault(name, {})[state] = entry
    return found


def torch_state(
    groups: Sequence[Mapping[str, Any]], states: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return an optimizer's state dict in the form of torch: `by_name` is the inverse.

    Args:
        groups: Parameter groups: their options, and FQNs under ``"params"``.
        states: FQN of a parameter -> name of a state -> its value.
    """
    numbers = number_names([group["params"] for group in groups])
    return {
        "state": {number: dict(states[name]) for name, number in numbers.items() if name in states},
        "param_groups": [
            # The numbers last, as torch has them.
            {k: v for k, v in group.items() if k != "params"}
            | {"params": [numbers[name] for name in group["params"]]}
            for group in groups
        ],
    }


def check_groups(stored: StoredOptimizer, groups: Sequence[Sequence[str]]) -> None:
    """Check that an optimizer has the groups of the stored one.

    Args:
        stored: Optimizer in the checkpoint.
        groups: FQNs of the parameters in every group of this run's optimizer.

    Raises:
        CheckpointError: The number of groups or the FQNs in one differ; lists every difference.
    """
    problems = []
    if len(stored.groups) != len(groups):
        problems.append(
            f"has {len(stored.groups)} parameter groups, but that of this run has {len(groups)}"
        )
    # Not strict: a different number of groups is named above, and the first ones compared anyway.
    for number, (saved, names) in enumerate(zip(stored.groups, groups, strict=False)):
        for more, missing, words in (
            (saved["params"], names, "which only the checkpoint has"),
            (names, saved["params"], "which only this run has"),
        ):
            extra = sorted(set(more) - set(missing))
            if extra:
                rest = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
                problems.append(f"differs in parameter group {number} by {extra[0]}{rest}, {words}")
    if problems:
        text = "the optimizer in the checkpoint " + "; it ".join(problems)
        raise CheckpointError(
            "LP507",
            f"{text}. Use the same parameter groups, or load only the weights: "
            "lightning_par.load_from_checkpoint(MyModule, path).",
        )
