"""What an update of an optimizer looks at: entries alone, whole parameters, or the whole model.

Note [Probe]: of a class that is not known, nothing is guessed. Copies of the optimizer, with its
hyperparameters, step a few times on small tensors: together and one by one, and whole and
sharded as the model is. An update that looks across parameters differs in the first pair; one that
looks across a matrix, and is not right on DTensors, in the second.
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.optim import Optimizer

from lightning_par.dtensor import box_at, whole
from lightning_par.engine.rng import collect_random_states, fork_all_rng, states_alike
from lightning_par.errors import ConfigurationError, either
from lightning_par.strategies.setup.replaced_parameters import fits
from lightning_par.upstream.dispatch import TorchDispatchMode

__all__ = [
    "LOOKS_ACROSS",
    "Reach",
    "check_references",
    "declared_reach",
    "looks_across_model",
    "right_on_shards",
    "steps_alone",
]

Reach = Literal["entry", "parameter", "model"]
"""``"entry"``: each entry of a weight is updated by its own gradient and states; ``"parameter"``:
by those of its whole parameter; ``"model"``: by those of several parameters."""
LOOKS_ACROSS = "looks_across"
"""Attribute of an optimizer or its class that declares its `Reach`."""

_NAMES = "SGD Adam AdamW Adamax Adadelta Adagrad ASGD NAdam RAdam RMSprop"
_BY_ENTRY = tuple(getattr(torch.optim, name) for name in _NAMES.split(" "))
"""Without Rprop: it writes where a mask is true, which a DTensor refuses, so that it is probed."""
_BY_MODEL = ("DAdapt", "LBFGS", "Prodigy", "SAM")
"""Beginnings of class names. The estimates of D-Adaptation and its kind start to move late."""
_OVER_PROCESSES = "ZeroRedundancyOptimizer"
_STEPS, _ROWS, _COLUMNS, _REST = 10, 136, 132, 4
_MOST_KINDS = 6
_SAME = 1e-6
"""Largest difference, as a part of the way that the weights went."""


@dataclass(frozen=True)
class _Kind:
    """Parameters that a probe treats alike: of one group, number of dims and sharding."""

    group: int
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()


def declared_reach(optimizer: Optimizer) -> Reach | None:
    """Return what is known of an optimizer without a probe; None: nothing.

    Raises:
        ConfigurationError: Its `looks_across` is no `Reach`.
    """
    kind = type(optimizer)
    declared = getattr(optimizer, LOOKS_ACROSS, None)
    # A declaration counts more than a name or a probe: the author knows.
    if declared is not None:
        choices = Reach.__args__  # type: ignore[attr-defined]
        if declared not in choices:
            raise ConfigurationError(
                "LP610",
                f"{kind.__name__}.{LOOKS_ACROSS}={declared!r} must be "
                f"{either([repr(choice) for choice in choices])}: what the update of an entry of a "
                "parameter depends on.",
            )
        return declared  # type: ignore[no-any-return]
    if any(base.__name__.startswith(_BY_MODEL) for base in kind.__mro__):
        return "model"
    # A class that overrides `step` of torch's Adam may look at anything; `unwrap`, as torch wraps
    # each class's step for profiling.
    step = inspect.unwrap(kind.step)
    if any(issubclass(kind, base) and step is inspect.unwrap(base.step) for base in _BY_ENTRY):
        return "entry"
    return None


def _refuse_over_processes(optimizer: Optimizer) -> None:
    """Refuse one that divides parameters over processes: no other list of them would cure it."""
    kind = type(optimizer)
    if any(base.__name__ == _OVER_PROCESSES for base in kind.__mro__):
        inside = type(getattr(optimizer, "optim", optimizer)).__name__
        raise ConfigurationError(
            "LP610",
            f"{kind.__name__} divides parameters and states over all processes by itself, "
            "although ranks of a mesh hold different parts of the parameters. Return the "
            f"optimizer inside of it from configure_optimizers, {inside}(self.parameters(), ...), "
            "and use zero_stage=1, which divides its states over the replicas.",
        )


def check_references(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps parameters, or copies of them, beside its groups and states
    and is to step on whole tensors, which take the places of those in groups and states.

    Raises:
        ConfigurationError: With the attributes that keep them.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    known = {id(parameter) for group in groups for parameter in group}

    # By identity, through containers and optimizers inside; tensors are compared by id, as `in`
    # would compare entries.
    def holds(value: Any, seen: set[int]) -> bool:
        if isinstance(value, Tensor):
            return id(value) in known or isinstance(value, DTensor)
        if isinstance(value, list) and value and any(fits(value, group) for group in groups):
            return id(value) not in seen
        if id(value) in seen:
            return False
        seen.add(id(value))
        if isinstance(value, dict):
            return any(holds(each, seen) for entry in value.items() for each in entry)
        if isinstance(value, list | tuple | set):
            return any(holds(each, seen) for each in value)
        return isinstance(value, Optimizer) and holds(vars(value), seen)

    # Lists that are replaced in place may be shared, as with an optimizer inside.
    shared = {id(optimizer.state), *map(id, groups)}
    own = {n: value for n, value in vars(optimizer).items() if not n.startswith("_lightning_par")}
    found = [name for name, value in own.items() if holds(value, set(shared))]
    if found:
        kind = type(optimizer).__name__
        _refuse_over_processes(optimizer)
        raise ConfigurationError(
            "LP610",
            f"the optimizer {kind} stores parameters or copies of them in {' and '.join(found)}, "
            "outside of param_groups and state. Its update may need whole tensors, but whole "
            "tensors replace the shards in param_groups only. Read the parameters from "
            "param_groups, and store copies of them in self.state[parameter]. Or, if the update "
            "of each entry of a weight depends only on the gradient and states of this entry, set "
            f"{LOOKS_ACROSS} = 'entry' in the class {kind}.",
        )


def looks_across_model(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether an update depends on other parameters of the optimizer; see Note [Probe].

    What cannot be tried is taken to do so.
    """
    # Not sharded: what is asked is whether parameters depend on each other.
    kinds = [_Kind(k.group, k.shape) for k in _kinds(optimizer)]
    if not kinds:
        return False
    # Two of a kind, as an update may look across all matrices and leave vectors out.
    kinds = [kind for kind in kinds for _ in range(2)]
    together = _try(optimizer, kinds, device, range(len(kinds)))
    for number, _ in enumerate(kinds):
        # The same start and gradients as together, so that any difference comes from the others.
        alone = _try(optimizer, kinds, device, [number])
        if together is None or alone is None or not _same(together[number], alone[0]):
            return True
    return False


def right_on_shards(
    optimizer: Optimizer, device: torch.device, later: Sequence[Tensor] | None = None
) -> bool:
    """Return whether an update of sharded parameters is that of whole ones; see Note [Probe].

    Every rank of the meshes of the parameters has to call this.

    Args:
        optimizer: Stays as it is.
        device: Where small tensors are made.
        later: Parameters that it may be given later on, to try these; None: its own. What it does
            not take whole it is not given.

    **Communicates**: what the optimizer does, on small tensors.
    """
    kinds = _kinds(optimizer) if later is None else _kinds_in([later])
    sharded = [kind for kind in kinds if kind.mesh is not None]
    if not sharded:
        return True
    plain = [_Kind(kind.group, kind.shape) for kind in sharded]
    numbers = range(len(sharded))
    wanted = _try(optimizer, plain, device, numbers)
    if wanted is None and later is not None:
        return True
    found = _try(optimizer, sharded, device, numbers)
    if wanted is None or found is None:
        # What cannot be tried sharded is stepped on whole tensors.
        return False
    return all(_same(a, b) for a, b in zip(wanted, found, strict=True))


def steps_alone(optimizer: Optimizer, device: torch.device) -> bool:
    """Return whether ranks may step on some of the parameters each; see Note [Probe].

    They may if no update looks across parameters or draws random numbers, whose order would be
    another one; if nothing is read before the closure has run; if states are tensors and numbers;
    and if it communicates nothing itself, which ranks with other parameters could not do together.

    Args:
        optimizer: Stays as it is.
        device: Where small tensors are made.
    """
    reach = declared_reach(optimizer)
    if reach == "model" or (reach is None and looks_across_model(optimizer, device)):
        return False
    kinds = [_Kind(kind.group, kind.shape) for kind in _kinds(optimizer)]
    numbers = range(len(kinds))
    wanted = _try(optimizer, kinds, device, numbers)
    found = _try(optimizer, kinds, device, numbers, is_late=True)
    if wanted is None or found is None:
        return False
    return all(_same(a, b) for a, b in zip(wanted, found, strict=True))


def _kinds(optimizer: Optimizer) -> list[_Kind]:
    return _kinds_in([group["params"] for group in optimizer.param_groups])


def _kinds_in(groups: Iterable[Sequence[Tensor]]) -> list[_Kind]:
    """Return the kinds of parameters, the largest first of each."""
    found: dict[Any, _Kind] = {}
    for number, group in enumerate(groups):
        # The largest stands for its kind: small ones may be below a threshold of the optimizer.
        for parameter in sorted(group, key=Tensor.numel, reverse=True):
            mesh: DeviceMesh | None = None
            placements: tuple[Placement, ...] = ()
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
            # Rows and columns above 128, a threshold below which some optimizers do not factor a
            # matrix.
            caps = (_ROWS, _COLUMNS) if parameter.ndim <= 2 else (8, 6, *[_REST] * parameter.ndim)
            shape = tuple(min(size, cap) for size, cap in zip(parameter.shape, caps, strict=False))
            key = number, parameter.ndim, placements
            found.setdefault(key, _Kind(number, shape, mesh, tuple(placements)))
    return list(found.values())[:_MOST_KINDS]


def _try(
    optimizer: Optimizer,
    kinds: Sequence[_Kind],
    device: torch.device,
    numbers: Sequence[int],
    *,
    is_late: bool = False,
) -> list[tuple[Tensor, Tensor]] | None:
    """Step a copy of an optimizer on small tensors; return each before and after, whole.

    Args:
        optimizer: Stays as it is.
        kinds: The tensors of the problem, with their values.
        device: Where they are made.
        numbers: Those that the copy is given.
        is_late: Whether the groups are empty until the closure has run, as with `WholeStep`, and
            what `steps_alone` does not allow counts as an error.

    Returns:
        None if that raises.
    """
    # All of them, also those that are not stepped: each has the same numbers in every trial.
    values = list(_problem(kinds, device))
    start = [values[number][0] for number in numbers]
    tensors = [nn.Parameter(_place(values[n][0], kinds[n])) for n in numbers]
    slopes = [_place(values[n][1], kinds[n]) for n in numbers]

    late = _Late(is_late=is_late)

    def closure() -> Tensor:
        late.show()
        with torch.no_grad():
            for tensor, slope in zip(tensors, slopes, strict=True):
                # Entry by entry, so that it is the same for a shard; it changes sign rarely.
                tensor.grad = slope + tensor * 0.01
        return torch.ones((), device=device, dtype=torch.float64)

    try:
        with fork_all_rng(device), torch.enable_grad():
            clone = _clone(optimizer)
            for number, group in enumerate(clone.param_groups):
                pairs = zip(numbers, tensors, strict=True)
                group["params"][:] = [t for n, t in pairs if kinds[n].group == number]
            for _ in range(_STEPS):
                late.hide(clone, device)
                with _Alone() if is_late else nullcontext():  # type: ignore[no-untyped-call]
                    # Of the class: a scheduler or a hook may have replaced `step` on the object.
                    type(clone).step(clone, closure)  # type: ignore[arg-type]
                late.check(clone, device)
            after = [whole(tensor.detach()) for tensor in tensors]
    except Exception:  # whatever a stranger's optimizer raises means that it cannot be tried
        return None
    return list(zip(start, after, strict=True))


class _Alone(TorchDispatchMode):
    """Inside, a collective raises an exception before it starts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError("see `steps_alone`")
        return func(*args, **(kwargs or {}))


class _Late:
    """Hides parameters and states of an optimizer until its closure runs.

    Args:
        is_late: False: does nothing.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._hidden: tuple[Optimizer, list[list[Tensor]], dict[Any, Any]] | None = None
        self._random: Any = None

    def hide(self, optimizer: Optimizer, device: torch.device) -> None:
        """Empty the groups and the states; called before a step."""
        if self._is_late:
            lists = [list(group["params"]) for group in optimizer.param_groups]
            self._hidden = optimizer, lists, dict(optimizer.state)
            self._random = collect_random_states(device)
            for group in optimizer.param_groups:
                group["params"][:] = []
            optimizer.state.clear()

    def show(self) -> None:
        """Put back what was hidden; called by the closure."""
        if self._hidden is not None:
            optimizer, lists, states = self._hidden
            self._hidden = None
            for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                group["params"][:] = parameters
            # What was made before the closure is lost, as it is with `WholeStep`.
            optimizer.state.clear()
            optimizer.state.update(states)

    def check(self, optimizer: Optimizer, device: torch.device) -> None:
        """Raise what `_try` takes for no; called after a step."""
        if not self._is_late:
            return
        values = [v for state in optimizer.state.values() for v in state.values()]
        is_plain = all(isinstance(v, Tensor | bool | int | float | str | None) for v in values)
        draws = not states_alike(self._random, collect_random_states(device))
        if self._hidden is not None or draws or not is_plain:
            raise RuntimeError("the closure was not called, or see `steps_alone`")


def _problem(kinds: Sequence[_Kind], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Give the start and the slope of every tensor; those of unlike size have unlike slopes."""
    # The same numbers on every rank, of which each then cuts its shard.
    generator = torch.Generator().manual_seed(0)
    for number, kind in enumerate(kinds):
        start, slope = (
            torch.randn(kind.shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        # Unlike slopes, or an update that takes a mean over all would look the same.
        yield start.to(device), slope.to(device) * (number + 1)


def _place(value: Tensor, kind: _Kind) -> Tensor:
    if kind.mesh is None:
        return value.clone()
    box = box_at("probe", kind.shape, kind.mesh, kind.placements)
    local = value
    for dim, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        local = local.narrow(dim, low, size)
    return DTensor.from_local(
        local.clone(),
        kind.mesh,
        kind.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    # Relative to how far the weights went, whatever the learning rate.
    way = (a[1] - a[0]).abs().max()
    return bool((a[1] - b[1]).abs().max() <= _SAME * way)


def _clone(optimizer: Optimizer) -> Optimizer:
    """Return a copy with the same hyperparameters, without states, hooks, and parameters.

    Torch's own copy keeps only groups and states; others keep more, such as the list of all
    parameters.
    """
    left_out = ("step", "state", "param_groups")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # Parameters are not copied, wherever the optimizer keeps them: they may fill the memory.
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty(0)) for p in parameters}
    rest = {k: v for k, v in vars(optimizer).items() if k not in left_out}
    clone: Optimizer = object.__new__(type(optimizer))
    # First the groups, whose lists others may share.
    clone.param_groups = copy.deepcopy(optimizer.param_groups, memo)
    clone.state = type(optimizer.state)(dict)
    memo[id(optimizer.state)] = clone.state
    memo[id(optimizer.param_groups)] = clone.param_groups
    for name, value in rest.items():
        hooks = name.startswith("_optimizer_")
        setattr(clone, name, type(value)() if hooks else copy.deepcopy(value, memo))
    return clone
