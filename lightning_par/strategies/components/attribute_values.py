"""Numbers, tensors and arrays that `training_step` leaves in attributes, under a pipeline.

Note [Values of micro-batches]: one process runs the step once for a batch, a pipeline once for each
micro-batch. A look at the step, on some samples and on their parts, tells what such a value is.
What the parts, one after the other, leave as the whole does, such as a sum over samples, goes on
from one micro-batch to the next. Any other value begins anew with each of them. What they leave
is then the same (a count of steps), or is combined like a logged number: as a mean (a loss, a sum
or a moving average of losses), as a sum (the number of tokens), or joined along dim 0 (outputs of
the samples).

A minimum of losses is combined in no such way, and is told. So each value is looked at from two
beginnings.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn, Tensor

from lightning_par.observe.outside import is_of_user
from lightning_par.strategies.components.step_attributes import is_object
from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.strategies.step.step_traces import LogCall

__all__ = ["AttributeValues"]

Path = tuple[str | int, ...]
"""Name of an attribute of the LightningModule, and the keys of what is inside of it."""

_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_DEPTH, _FEW, _MOST = 4, 64, 4096
"""How deep values may lie, how many entries a container of them has, and how many there are."""
_TOLERANCE = 1e-4


class AttributeValues:
    """Keeps values in attributes as one process would; see Note [Values of micro-batches].

    Args:
        module: The user's LightningModule.
        stages: Number of stages of this rank.
        divides: Whether a batch is cut, into micro-batches or for replicas.

    Attributes:
        anew: Values that begin anew with each micro-batch -> whether they are joined along dim 0.
        is_known: Whether no look has to tell anything any more.
    """

    def __init__(self, module: nn.Module, *, stages: int, divides: bool) -> None:
        self._module, self._stages = module, stages
        self._counts = Counter[int]()  # how many stages of this rank have run a micro-batch
        self._going: list[Path] = []  # what goes on from one micro-batch to the next
        self.anew: dict[Path, bool] = {}
        self.is_known = not divides
        self._start: dict[Path, Any] = {}  # their copies
        self._held: dict[Path, Any] = {}  # what the module holds itself
        self._given: dict[Path, Any] = {}  # what a micro-batch gets in its place
        self._ends: dict[int, dict[Path, Any]] = {}
        self._left: dict[Path, Any] = {}  # by the samples of a look, where parts leave otherwise
        self._runs = 0  # of a look, on some samples and on their parts

    @property
    def is_active(self) -> bool:
        """Whether `run` has to surround what runs."""
        return bool(self.anew or self._runs or (self._going and self._stages > 1))

    def begin(self) -> None:
        """Note what is there before a step."""
        self._note(self._now() if self.anew else {})

    @contextmanager
    def look(self, runs: int) -> Iterator[None]:
        """Surrounds a look at the step. If it has to learn, it has three rounds: on some samples
        and on their parts; on the parts once more, one after the other; as the first, but from what
        the samples have left.

        Args:
            runs: Number of runs of the first round.
        """
        self._note(_values_in(self._module))
        self._runs = runs
        try:
            yield
        finally:
            self._runs, self._left = 0, {}
            self._note({})

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """Surrounds the user's step on a micro-batch, for one stage.

        Args:
            index: Of the micro-batch, or of the run of a look: each round begins with a multiple of
                the number of runs.
        """
        if not self._runs or index <= self._runs:  # also the first of those one after the other
            self._put(self._start)
        elif index >= 2 * self._runs:
            self._put(self._beginning(index - 2 * self._runs))
        # What comes before the model is done by each stage of a rank; that of the last one counts.
        self._counts[index] += 1
        aside: dict[Path, Any] = {}
        if self._counts[index] < self._stages:
            aside = _values_in(self._module) if self._runs else self._now(self._going)
            for path, value in _copies(aside).items():
                _put_at(self._module, path, value)
        try:
            yield
        finally:
            self._ends[index] = _values_in(self._module) if self._runs else self._now()
            for path, value in aside.items():
                _put_at(self._module, path, value)

    def learn(self) -> tuple[dict[Path, bool], dict[Path, Any]]:
        """Return, after two rounds of a look, which values begin anew with each micro-batch, as
        `anew` says; and what the samples have left of those that parts leave otherwise.
        """
        found: dict[Path, bool] = {}
        self._going = []
        whole, *parts = (self._ends.get(at, {}) for at in range(2 * self._runs - 1))
        for path, value in whole.items():
            own, start = [held.get(path) for held in parts], self._start.get(path)
            is_entry = start is None and isinstance(path[-1], int)  # what came to a list
            if is_entry or any(each is None for each in own) or _is_same(value, start):
                continue
            anew, after = own[: self._runs - 1], own[self._runs - 1 :]
            shapes = {np.shape(each) for each in (value, *own)}
            if len(shapes) > 1 and _is_joined(anew, value):
                found[path] = True
            elif len(shapes) == 1 and not _goes_on(start, value, anew, after):
                found[path] = False
            elif len(shapes) == 1:
                self._going.append(path)
        differing = (
            path
            for path in found
            if not all(_is_same(part[path], whole[path]) for part in parts[: self._runs - 1])
        )
        return found, _copies({path: whole[path] for path in differing})

    def take(self, found: tuple[dict[Path, bool], dict[Path, Any]] | None) -> bool:
        """Take what the last stage has learned; return whether a third round has to follow."""
        self.is_known = found is not None
        self.anew, self._left = found or ({}, {})
        return bool(self.anew)

    def calls(self) -> list[list[LogCall]]:
        """Return what the runs of the first round of a look, and of the third, have left, as calls
        that log a mean.
        """
        found: list[list[LogCall]] = [[] for _ in range(self._runs)]
        for path in (path for path, is_joined in self.anew.items() if not is_joined):
            for at, made in enumerate(found):
                name = _name_of(path)
                for told, run in ((name, at), (f"{name} in a later step", at + 2 * self._runs)):
                    end = self._ends.get(run, {}).get(path)
                    if end is not None and (run == at or path in self._left):
                        value = _mark(_wide(end))
                        made.append(LogCall(name=told, value=value, metric=None, options={}))
        return found

    def merge(self, weights: BatchWeights | None) -> None:
        """Put the values of the batch into the module, after all micro-batches of a step.

        Args:
            weights: Of the micro-batches; it knows which numbers are sums. None on other stages
                than the last one: those before the step, of which `StepAttributes` sends changes.
        """
        if weights is None:
            for path in self._now():
                if path in self._held:
                    _put_at(self._module, path, self._held[path])
        else:
            self._merge(weights)
        self._note({})  # let go of what a batch has left

    def _merge(self, weights: BatchWeights) -> None:
        ends = sorted(self._ends.items())
        for path, is_joined in self.anew.items() if len(ends) > 1 else ():
            places = [at for at, end in ends if path in end]
            values = [self._ends[at][path] for at in places]
            if is_joined and values:
                join = torch.cat if isinstance(values[0], Tensor) else np.concatenate
                self._keep(path, join([_detached(value) for value in values]))
            elif len({np.shape(value) for value in values}) == 1:
                every = torch.stack([_wide(value) for value in values])
                total = _combined(every, places, _name_of(path), weights)
                # A number may be an integer for some micro-batches only, as `min(1, x)` is.
                kind = next((value for value in values if not _is_count(value)), values[-1])
                self._keep(path, _like(kind, total))

    def confirm(self) -> dict[Path, bool]:
        """Return `anew` after the third round, with those values that follow from others which
        begin anew, such as an average that is computed from a sum.
        """
        whole, last = (self._ends.get(at, {}) for at in (2 * self._runs, 3 * self._runs - 1))
        others = {
            path: False
            for path in whole.keys() & last.keys() - self.anew.keys()
            if np.shape(whole[path]) == np.shape(last[path])
            and (path in self._start or isinstance(path[-1], str))
            and not _is_near(*(_change(self._start.get(path), end[path]) for end in (last, whole)))
        }
        return self.anew | others

    def _beginning(self, run: int) -> dict[Path, Any]:
        """Return with which values a run of the third round begins."""
        # A part cannot begin with what the rows of the whole have left.
        left = {path: v for path, v in self._left.items() if not run or not self.anew[path]}
        begins = self._start | left
        if run < 2:
            return begins
        # What does not begin anew goes on, as it will in steps.
        return {**_values_in(self._module), **{p: begins[p] for p in self.anew if p in begins}}

    def follows(self, losses: Sequence[float], *, is_alone: bool) -> bool:
        """Return whether the loss follows from what an earlier step has left, where each replica or
        micro-batch would begin with its own.

        Args:
            losses: Of the first round; and, if there was one, the first of the third round.
            is_alone: Whether there is one replica: then only what is joined differs by micro-batch.
        """
        if len(losses) <= self._runs or (is_alone and not any(self.anew.values())):
            return False
        one, other = losses[0], losses[-1]
        return math.isfinite(one) and not math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)

    def _note(self, held: dict[Path, Any]) -> None:
        self._ends.clear()
        self._given.clear()
        self._counts.clear()
        self._held, self._start = held, _copies(held)

    def _now(self, paths: Iterable[Path] | None = None) -> dict[Path, Any]:
        paths = self.anew if paths is None else paths
        found = {path: _value_at(self._module, path) for path in paths}
        return {path: value for path, value in found.items() if value is not None}

    def _put(self, values: Mapping[Path, Any]) -> None:
        """Give these values to the module; in a look others than these are taken away."""
        now = _values_in(self._module) if self._runs else self._now()
        for path in now.keys() - values.keys():
            holder = _holder(self._module, path)
            if isinstance(holder, dict):  # a list keeps what came to it, such as outputs
                del holder[path[-1]]
        # Copies: a backward that is to come may need those of an earlier micro-batch.
        for path, value in _copies(values).items():
            if not self._runs or path not in now or not _is_same(now[path], value):
                self._given[path] = value
                _put_at(self._module, path, value)

    def _keep(self, path: Path, value: Any) -> None:
        """Put a value of the batch into the module; into the tensor or array that it held, if the
        step wrote there, as others may hold the same one.
        """
        held, given = self._held.get(path), self._given.get(path)
        is_written = given is not None and _value_at(self._module, path) is given
        if is_written and isinstance(held, Tensor | np.ndarray) and held.shape == value.shape:
            with torch.no_grad():
                held[...] = value
            value = held
        _put_at(self._module, path, value)


def _goes_on(start: Any, whole: Any, anew: Sequence[Any], after: Sequence[Any]) -> bool:
    """Whether the parts, one after the other, leave a value as the whole does.

    Args:
        start: Before the step.
        whole: After the step on all samples.
        anew: After the step on each part.
        after: After the step on each part, where the first one began with `start`.
    """
    change, end = _change(start, whole), _change(start, after[-1])
    if not _is_near(end, change):
        return False
    # The losses of a model that knows nothing yet are all equal, and one of them seems to be the
    # largest. Counts are what they seem.
    is_tied = all(_is_near(_change(start, value), change) for value in anew)
    return not is_tied or _is_count(whole)


def _is_near(change: Tensor, whole: Tensor) -> bool:
    if not bool(torch.isfinite(whole).all()):
        return bool(torch.equal(change, whole))
    return bool(((change - whole).abs() <= _TOLERANCE * whole.abs().max()).all())


def _combined(values: Tensor, places: list[int], name: str, weights: BatchWeights) -> Tensor:
    """Return the value of the batch.

    Args:
        values: [m, ...], of micro-batches.
        places: Their numbers.
        name: Of the value.
        weights: Of the micro-batches.
    """
    if name in weights.sums:
        return values.sum(0)
    shares = weights.shares.to(values)[places]
    if name in weights.by_samples:
        shares = shares.new_tensor([float(weights.sizes[at]) for at in places])
    # Without a weight every micro-batch counts.
    shares = torch.where(shares.sum() > 0, shares, torch.ones_like(shares))
    # NaN where the weight is 0 does not matter.
    weighed = torch.where(shares > 0, values.movedim(0, -1), 0) * shares
    return weighed.sum(-1) / shares.sum()


def _is_joined(parts: Sequence[Any], whole: Any) -> bool:
    """Whether the values of the parts, joined along dim 0, are that of the whole."""
    shape, shapes = np.shape(whole), [np.shape(part) for part in parts]
    if not shape or any(not each or each[1:] != shape[1:] for each in shapes):
        return False
    joined = torch.cat([_wide(part) for part in parts])
    return joined.shape == shape and torch.allclose(joined, _wide(whole), _TOLERANCE, _TOLERANCE)


def _values_in(module: nn.Module) -> dict[Path, Any]:
    """Return the numbers, tensors and arrays in attributes of a module, in containers and objects
    of the user's, too; buffers and parameters are none.
    """
    own = {n: v for n, v in vars(module).items() if n not in _OF_LIGHTNING}
    return dict(islice(_walk(own, (), _DEPTH), _MOST))


def _walk(held: Mapping[Any, Any], path: Path, depth: int) -> Iterator[tuple[Path, Any]]:
    for key, value in held.items():
        if not isinstance(key, str | int):
            continue
        if _is_value(value):
            yield (*path, key), value
            continue
        inside = _inside(value) if depth else None
        if inside is not None and len(inside) <= _FEW:
            yield from _walk(inside, (*path, key), depth - 1)


def _is_value(value: Any) -> bool:
    if type(value) is Tensor:
        is_other = value.is_complex() or value.dtype == torch.bool or value.is_meta
        return value.layout == torch.strided and not is_other and value.numel() > 0
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iuf" and value.size > 0
    is_number = isinstance(value, int | float | np.integer | np.floating)
    return is_number and not isinstance(value, bool)


def _inside(value: Any) -> Mapping[Any, Any] | None:
    """Return what a container or an object of the user's holds, by its keys; None if it is none."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        return dict(enumerate(value)) if len(value) <= _FEW else None
    if not is_object(value):
        return None
    # An object of a package, such as the run of a logger, has states of its own; a meter has values
    # alone.
    is_own = is_of_user(type(value).__module__)
    held = vars(value)
    return held if is_own or all(v is None or _is_value(v) for v in held.values()) else None


def _holder(module: nn.Module, path: Path) -> Any:
    """Return the dict or list in which a value stands; None if it is not there any more."""
    held: Any = vars(module)
    for key in path[:-1]:
        try:
            value = held[key]
        except (KeyError, IndexError):
            return None
        held = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
        if held is None:
            return None
    return held


def _value_at(module: nn.Module, path: Path) -> Any:
    try:
        value = _holder(module, path)[path[-1]]
    except (IndexError, KeyError, TypeError):
        return None
    return value if _is_value(value) else None


def _put_at(module: nn.Module, path: Path, value: Any) -> None:
    holder = _holder(module, path)
    if isinstance(holder, dict) or (isinstance(holder, list) and int(path[-1]) < len(holder)):
        holder[path[-1]] = value  # type: ignore[index]


def _copies(values: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return copies of values; one that has two names has them again."""
    copies = {id(value): _copy(value) for value in values.values()}
    return {path: copies[id(value)] for path, value in values.items()}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other, equal_nan=True))


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point()
    return np.asarray(value).dtype.kind in "iu"


def _wide(value: Any) -> Tensor:
    """Return a value in float64."""
    return torch.as_tensor(_detached(value), dtype=torch.float64)


def _change(before: Any, end: Any) -> Tensor:
    """Return what was added to a value; all of it, where there was none of its shape."""
    is_new = before is None or np.shape(before) != np.shape(end)
    return _wide(end) if is_new else _wide(end) - _wide(before)


def _mark(value: Tensor) -> float:
    """Return a number that is linear in the entries of a value, and stands for them."""
    places = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
    return float((value.flatten() * places).sum())


def _like(value: Any, number: Tensor) -> Any:
    """Return a number as a value of the same kind; a count stays an integer."""
    number = number.round() if _is_count(value) else number
    if isinstance(value, Tensor):
        return number.to(value.device, value.dtype)
    if isinstance(value, np.ndarray):
        return number.cpu().numpy().astype(value.dtype)
    return type(value)(number.item())


def _name_of(path: Path) -> str:
    """Return the name of a value as code spells it: ``training_step().self.losses['val']``."""
    inside = "".join(f"[{key!r}]" for key in path[1:])
    return f"training_step().self.{path[0]}{inside}"
