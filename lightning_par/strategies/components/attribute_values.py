"""Numbers, tensors and arrays that `training_step` leaves in attributes, under a pipeline.

Note [Values of micro-batches]: one process runs the step once for a batch, a pipeline once for each
micro-batch. A look at the step, on some samples and on their parts, tells what such a value is.
What the parts, one after the other, leave as the whole does, such as a sum over samples, goes on
from one micro-batch to the next. Any other value begins anew with each of them. What they leave
is then the same (a count of steps), or is combined like a logged number: as a mean (a loss, a sum
or a moving average of losses), as a sum (the number of tokens), or joined along dim 0 (outputs of
the samples).

A minimum of losses is combined in no such way, and is told. So a look has three rounds: the whole
and its parts; the parts once more, one after the other; the whole and its parts, from what the
whole has left.

A value that first changes in a later step, such as in the second epoch, is followed without a
look: if micro-batches leave unlike values, it is told.

Followed is what stands in attributes, and in the dicts, lists, tuples and objects in them, also in
those that a step puts in the place of others. A new list that has more entries for more samples is
joined like a tensor.

Length: the rounds of a look, and what they mean for numbers, tensors and arrays alike.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.observe.contents import copy_of, refill
from lightning_par.strategies.components.attribute_paths import (
    ABSENT,
    around,
    came_to,
    contents_of,
    entries,
    entries_in,
    inside,
    is_of_values,
    name_of,
    Path,
    put_all,
    remove,
    scopes_of,
    set_at,
    value_at,
    window_of,
)
from lightning_par.strategies.components.sendable import shallow_copy
from lightning_par.strategies.components.value_kinds import (
    all_equal,
    as_list,
    change_of,
    combined,
    goes_on,
    is_near,
    is_of_losses,
    is_on_host,
    is_same,
    is_value,
    join,
    joins_to,
    kind_of_list,
    LATER,
    linear_mark,
    Mark,
    nothing_like,
    size_of,
    takes_values,
    wide,
)
from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.strategies.step.returned import warn_of_results
from lightning_par.strategies.step.step_traces import LogCall
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["AttributeValues"]

Learned = tuple[dict[Path, bool], dict[Path, Any], list[Path], list[str]]
"""What a look has found: values that begin anew -> whether they are joined; what the whole has left
of those that parts leave otherwise; values that go on; names of lists that are not told.
"""

_MOST, _SENT = 2**16, 2**20
"""How many values are followed, and how many entries one has that a look sends to other stages."""


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

    def __init__(self, module: pl.LightningModule, *, stages: int, divides: bool) -> None:
        self._module, self._stages, self._scopes = module, stages, scopes_of(module)
        self.anew: dict[Path, bool] = {}
        self.is_known = not divides
        self._going: list[Path] = []  # what goes on from one micro-batch to the next
        self._left: dict[Path, Any] = {}  # by the whole of a look, where parts leave otherwise
        self._runs = 0  # of a round of a look
        # What stood there when the step began; also dicts, lists and objects that hold values.
        self._raw: dict[Path, Any] = {}
        # Containers and objects that were there; and others, with copies for values of the batch.
        self._before: dict[int, Any] = {}
        self._made: dict[int, tuple[Any, Any]] = {}
        self._start: dict[Path, Any] = {}  # copies of the values among it
        self._given: dict[Path, Any] = {}  # copies of these, which a micro-batch gets
        self._ends: dict[int, dict[Path, Any]] = {}  # what each run has left
        # Attributes of which no look has told, those that a warning has named, and what is there.
        self._unknown, self._told, self._steps = set[Path](), set[Path](), 1
        self._unlike: dict[int, dict[Path, Mark]] = {}
        self._alike = set[Path]()  # what was the same in each part of the look
        self._lists = set[Path]()  # what is joined as a list, also where a micro-batch has a number
        self._contents: list[tuple[Any, Any]] = []  # of containers, before a look; or of deques
        self._keys = set[tuple[Path, Any]]()  # those of dicts around the values, in any micro-batch
        self._other_than_seen: dict[Path, str] = {}  # of these, what micro-batches have left unlike
        self._counts = Counter[int]()  # how many stages of this rank have run a micro-batch

    @property
    def is_active(self) -> bool:
        """Whether `run` has to surround what runs."""
        is_followed = self.anew or self._runs or self._unknown
        return bool(is_followed or (self._going and self._stages > 1))

    @property
    def _windows(self) -> set[Path]:
        """Deques to which each micro-batch adds entries that are combined."""
        return {place for path in self.anew if (place := window_of(path)) is not None}

    def begin(self, *, trains: bool) -> None:
        """Note what is there before a step; in evaluation nothing is followed."""
        self._clear()
        names = [] if not trains else [*self.anew, *(self._going if self._stages > 1 else ())]
        if names:
            self._note([*around(names), *names])
            windows = (self._raw.get(place) for place in self._windows)
            self._contents = contents_of(held for held in windows if isinstance(held, deque))
        if any(len(path) > 2 for path in names):
            found = entries(self._scopes)
            self._before = {id(held): held for _, held in found if inside(held) is not None}

    @contextmanager
    def look(self, runs: int) -> Iterator[None]:
        """Surrounds a look at the step, on some samples and on their parts.

        Args:
            runs: Number of runs of a round.
        """
        self._clear()
        self._note([path for path, _ in entries(self._scopes)])
        self._runs, self._contents = runs, contents_of(self._raw.values())
        try:
            yield
        finally:
            self._runs, self._left, self._contents = 0, {}, []
            self._clear()

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """Surrounds the user's step on a micro-batch, for one stage.

        Args:
            index: Of the micro-batch, or of the run of a look: a round begins with each multiple of
                the number of its runs. The last run of the second round is left alone.
        """
        # Containers in which a value goes on stay, though a micro-batch has made them.
        stay = around(path for path in self._going if path not in self.anew)
        run = index - 2 * self._runs  # of the third round of a look
        begins = self._start if run < 0 or not self._runs else self._beginning(run)
        if self._runs and (index <= self._runs or 0 <= run <= 1):  # also the first of the second
            put_all(self._scopes, self._raw, self._contents)
            self._put(begins, set())
        elif not self._runs or run > 1:
            self._put(begins, stay)
        # What comes before the model is done by each stage of a rank; that of the last one counts.
        self._counts[index] += 1
        is_last = self._counts[index] == self._stages
        before = {} if is_last else self._found(None)
        contents = contents_of(before.values())
        # Of tensors and arrays those that were seen to change: a step may write into them.
        going = before if self._runs or is_last else self._found(self._going)
        for path, value in _copies(self._values_in(going)).items():
            if window_of(path) is None:  # whose entries tell, as they are, what has come to it
                set_at(self._scopes, path, value)
        try:
            yield
        finally:
            now = self._now(None if self._runs else self.anew, new=True)
            # Copies in a look, in which later runs may write to the same tensor.
            self._ends[index] = _copies(now) if self._runs else _detached(now)
            if not self._runs:
                found = ((place, value_at(self._scopes, place)) for place in around(self.anew))
                dicts = ((place, held) for place, held in found if isinstance(held, dict))
                fresh = ((place, held) for place, held in dicts if id(held) not in self._before)
                self._keys |= {(place, key) for place, held in fresh for key in held}
            if self._unknown and not self._runs:
                named = {path: value_at(self._scopes, path) for path in self._unknown}
                # To compare values on a device waits for it: ever more rarely.
                compares = self._steps & (self._steps - 1) == 0
                self._unlike[index] = {
                    path: Mark.of(value)
                    for path, value in self._others(named).items()
                    if compares or is_on_host(value)
                }
            if not is_last:
                put_all(self._scopes, before, contents)

    def learn(self) -> Learned:
        """Return what two rounds of a look tell."""
        found: Learned = ({}, {}, [], [])
        tolerance = self._tolerance
        whole, *rest = (self._ends.get(at, {}) for at in range(2 * self._runs - 1))
        lists = set[Path]()  # whose entries are not those of parts
        self._learn_windows([whole, *rest[: self._runs - 1]], found)
        for path, value in whole.items():
            if isinstance(value, deque) or window_of(path) is not None:
                continue
            own, start = [held.get(path) for held in rest], self._start.get(path)
            # A list gets new entries from each micro-batch.
            is_other = self._is_in_new_entry(path) or any(each in lists for each in around([path]))
            if is_other or is_same(value, start):
                continue
            if any(each is None for each in own):
                # Some parts have no such entry of what each of them makes anew.
                is_made = value_at(self._scopes, path[:-1]) is not self._raw.get(path[:-1], ABSENT)
                if start is None and len(path) > 2 and is_made and is_value(value):
                    found[0][path] = False
                    found[3].append(name_of(path))
                continue
            parts, in_a_row = own[: self._runs - 1], own[self._runs - 1 :]
            if any(isinstance(each, list) for each in (value, *own)):
                kind = kind_of_list(value, parts, in_a_row, tolerance)
                is_new = value_at(self._scopes, path) is not self._raw.get(path)
                if kind == "joined":
                    found[0][path] = True
                    self._lists.add(path)
                elif kind == "unlike" and is_new:
                    found[3].append(name_of(path))
                if kind == "joined" or (kind != "of one length" and is_new):
                    lists.add(path)
                continue
            shapes = {np.shape(each) for each in (value, *own)}
            if len(shapes) > 1 and not joins_to(parts, value, tolerance):
                continue
            if len(shapes) == 1 and goes_on(start, value, parts, in_a_row, tolerance):
                found[2].append(path)
                continue
            is_alike = all(is_same(each, value) for each in own)
            if is_alike and not is_of_losses(value, start):
                # Such as a mask, or the size of a batch: it is told if it is unlike later.
                self._unknown.add(path[:2])
                continue
            found[0][path] = len(shapes) > 1
            if is_alike:
                self._alike.add(path)
            if size_of(value) <= _SENT and not is_alike:
                found[1][path] = value
        return found

    def _learn_windows(self, ends: Sequence[Mapping[Path, Any]], found: Learned) -> None:
        """Learn which values in what came to deques begin anew: where each part adds as many
        entries as the whole does. Other deques go on.

        Args:
            ends: What the whole and the parts have left.
            found: Gets them.
        """
        for place in [path for path, value in ends[0].items() if isinstance(value, deque)]:
            whole, *parts = ({p: v for p, v in e.items() if window_of(p) == place} for e in ends)
            is_told = all(whole.keys() == part.keys() for part in parts)
            is_told = is_told and all(map(is_of_values, ends[0][place]))
            joined = dict[Path, bool]()
            for path in (path for path, value in whole.items() if is_told and is_value(value)):
                values = [part[path] for part in parts]
                joined[path] = len({*map(np.shape, (whole[path], *values))}) > 1
                is_told &= not joined[path] or joins_to(values, whole[path], self._tolerance)
            if is_told:
                found[0].update(joined)
            else:
                found[2].append(place)

    @property
    def _tolerance(self) -> float:
        """Relative difference that roundings make."""
        return 2e-2 if "16" in str(self._module.trainer.precision) else 1e-4

    def take(self, found: Learned | None) -> bool:
        """Take what the last stage has learned; return whether a third round has to follow.

        Args:
            found: By the last stage of this replica; None: a look came to no end.

        **Communicates**: what begins anew, over all ranks, which decide alike.
        """
        every: list[dict[Path, bool] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, None if found is None else found[0])
        self.is_known = all(each is not None for each in every)
        self.anew, self._left, self._going, unlike = found or ({}, {}, [], [])
        if unlike:
            warn_of_results(unlike)
        others = {path: joined for each in every for path, joined in (each or {}).items()}
        self.anew = others | self.anew if self.is_known else {}
        return bool(self.anew)

    def confirm(self) -> dict[Path, bool]:
        """Return `anew` after the third round, with those values that follow from others which
        begin anew, such as an average that is computed from a sum.
        """
        whole, last = (self._ends.get(at, {}) for at in (2 * self._runs, 3 * self._runs - 1))
        others = {}
        for path in self._going:
            is_there = is_value(whole.get(path)) and path in last
            if is_there and np.shape(whole[path]) == np.shape(last[path]):
                change, end = (change_of(self._start.get(path), e[path]) for e in (whole, last))
                if not is_near(end, change, self._tolerance):
                    others[path] = False
        return self.anew | others

    def _beginning(self, run: int) -> dict[Path, Any]:
        """Return with which values a run of the third round begins."""
        # A part cannot begin with what the rows of the whole have left.
        left = {path: v for path, v in self._left.items() if not run or not self.anew.get(path)}
        begins = self._start | left
        if run < 2:
            return begins
        # What does not begin anew goes on, as it will in steps.
        now = {path: value for path, value in self._now().items() if not isinstance(value, list)}
        return {**now, **{path: begins[path] for path in self.anew if path in begins}}

    def calls(self, runs: int) -> list[list[LogCall]]:
        """Return what the runs of the first round of a look, and of the third, have left, as calls
        that log a mean; of a look at another step none.

        Args:
            runs: Number of runs of a round.
        """
        found: list[list[LogCall]] = [[] for _ in range(runs)]
        for path in (path for path, is_joined in self.anew.items() if not is_joined):
            name = name_of(path)
            for at, made in enumerate(found):
                for told, run in ((name, at), (name + LATER, at + 2 * self._runs)):
                    end = self._ends.get(run, {}).get(path)
                    is_left = run == at or path in self._left
                    if is_left and is_value(end):
                        value = linear_mark(wide(end))
                        made.append(LogCall(name=told, value=value, metric=None, options={}))
        return found

    def follows(self, losses: Sequence[float], *, is_alone: bool) -> bool:
        """Return whether the loss follows from what an earlier step has left, where each replica or
        micro-batch would begin with its own.

        Args:
            losses: Of the first round; and, if there was one, the first of the third round.
            is_alone: Whether there is one replica: then only what is joined differs by micro-batch.
        """
        if len(losses) <= self._runs or (is_alone and not any(self.anew.values())):
            return False
        one, other, rounding = losses[0], losses[-1], self._tolerance / 10
        return math.isfinite(one) and not math.isclose(one, other, rel_tol=rounding, abs_tol=1e-12)

    def put_back(self) -> None:
        """Put back what was there before a step, on other stages than the last one, which has
        merged; what that has changed comes from `StepAttributes`.
        """
        if self._raw:
            self._put_containers(around(path for path in self._going if path not in self.anew))
            for path in self.anew:
                self._put_raw(path)
        self._clear()

    def merge(self, weights: BatchWeights) -> None:
        """Put the values of the batch into the module, after all micro-batches of a step.

        Args:
            weights: Of the micro-batches; it knows which numbers are sums.
        """
        for place, key in self._keys:
            held = value_at(self._scopes, place)
            if isinstance(held, dict) and key not in held:  # only other micro-batches have it
                self._other_than_seen[place[:2]] = name_of(place[:2])
        for place in self._windows:
            came = [[*end.get(place, ())] for end in self._ends.values()]
            held = value_at(self._scopes, place)
            counts = [*map(len, came)] or [0]
            seen = {path[len(place)] for path in self.anew if window_of(path) == place}
            if isinstance(held, deque) and not len(seen) >= max(counts) == min(counts):
                # The last micro-batch may have added less; what was there before stays.
                held.extend(max(came, key=len)[len(came[-1]) :])
                self._other_than_seen[place[:2]] = name_of(place[:2])
        for path, is_joined in self.anew.items():
            places = [at for at, end in sorted(self._ends.items()) if path in end]
            values = [self._ends[at][path] for at in places]
            if values and (path in self._lists or isinstance(values[-1], list)):
                self._keep(path, [entry for value in values for entry in as_list(value)])
                continue
            is_compared = path in self._alike and all(is_on_host(value) for value in values)
            if is_compared and not all_equal(values):
                self._other_than_seen[path[:2]] = name_of(path[:2])
            shapes = {np.shape(value) for value in values}
            if is_joined and values and all(shapes):
                self._keep(path, join(values))
            elif len(shapes) == 1 and not is_joined:
                start, name = self._start.get(path), name_of(path)
                self._keep(path, combined(values, start, places, name, weights))
        self._clear()

    def unknown(self, changes: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Return names of values that micro-batches have left unlike, and no look has told of.

        Args:
            changes: What the step has left in each scope, without new entries of lists.
        """
        found, every = dict(self._other_than_seen), list(self._unlike.values())
        for path in {path for marks in every for path in marks}:
            first, *others = [marks[path] for marks in every if path in marks]
            # A list gets new entries from each micro-batch.
            is_entry = isinstance(value_at(self._scopes, path[:-1]), list)
            is_in_all = is_entry or len(others) + 1 == len(every)
            if not (is_in_all and all(map(first.is_same, others))):
                found[path[:2]] = name_of(path[:2])
        found = {path: name for path, name in found.items() if path not in self._told}
        self._unlike.clear()
        self._other_than_seen.clear()
        self._steps += 1
        self._told |= found.keys()
        named: dict[Path, Any] = {
            (place, name): v for place, held in changes.items() for name, v in held.items()
        }
        self._unknown |= {path[:2] for path in self._others(named)}
        self._unknown -= self._told
        return [*found.values()]

    def _others(self, named: Mapping[Path, Any]) -> dict[Path, Any]:
        """Return the values in what some names are bound to of which no look has told."""
        known = {*self.anew, *self._going}
        found = (entries_in({path[1]: value}, path[:1]) for path, value in named.items())
        values = ((p, v) for each in found for p, v in each if is_value(v))
        return {p: v for p, v in values if not {p, window_of(p)} & known}

    def _clear(self) -> None:
        every = self._raw, self._before, self._made, self._start, self._given, self._ends
        for held in (*every, self._counts, self._keys, self._contents):
            held.clear()

    def _note(self, paths: Iterable[Path]) -> None:
        self._raw = self._found(paths)
        values = self._values_in(self._raw).items()
        self._start = _copies({path: value for path, value in values if window_of(path) is None})

    def _found(self, paths: Iterable[Path] | None) -> dict[Path, Any]:
        """Return what stands there now, and the containers around it; None: all that there is."""
        if paths is None:
            return dict(entries(self._scopes))
        paths = list(paths)
        found = ((path, value_at(self._scopes, path)) for path in (*around(paths), *paths))
        return {path: value for path, value in found if value is not ABSENT}

    def _values_in(self, found: Mapping[Path, Any]) -> dict[Path, Any]:
        """Return the values among what was found, without large data that was there before."""
        return {
            path: value
            for path, value in found.items()
            if is_value(value) and (size_of(value) <= _SENT or value is not self._raw.get(path))
        }

    def _now(self, paths: Iterable[Path] | None = None, *, new: bool = False) -> dict[Path, Any]:
        """Return the values there, and copies of lists.

        Args:
            paths: Where; None: everywhere.
            new: Whether these include what came to deques, and values in it.
        """
        paths = None if paths is None else list(paths)
        found = self._found(paths)
        came = came_to(found, self._contents) if new else {}
        found = {
            path: value
            for path, value in found.items()
            if (place := path if isinstance(value, deque) else window_of(path)) is None
            or (place in came and (path == place or -path[len(place)] <= len(came[place])))
        }
        wanted = found if paths is None else paths
        lists = {p: [*found[p]] for p in wanted if isinstance(found.get(p), list)} | came
        known = self._values_in(found)
        values = {
            path: lists.get(path, value)
            for path, value in found.items()
            if path in lists or path in known
        }
        return dict(list(values.items())[:_MOST])

    def _is_in_new_entry(self, path: Path) -> bool:
        """Whether a value is in an entry that came to a list which was there before the step."""
        ends = ((path[:length], path[: length + 1]) for length in range(2, len(path)))
        lists = (
            (held, place)
            for place, entry in ends
            if entry not in self._raw and isinstance(held := self._raw.get(place), list)
        )
        return any(held is value_at(self._scopes, place) for held, place in lists)

    def _put(self, values: Mapping[Path, Any], stay: set[Path]) -> None:
        """Let these be the values; what was none when the step began is that again.

        Args:
            values: By their paths.
            stay: Containers that stay what they are, though they were not there.
        """
        now = self._now() if self._runs else self._now(self.anew)
        self._put_containers(stay)
        for path in now.keys() - values.keys():
            if path not in self._raw and around([path]) & stay:
                set_at(self._scopes, path, nothing_like(now[path]))
            else:
                self._put_raw(path)
        now = self._now() if self._runs else {}
        fresh = {
            path: value
            for path, value in values.items()
            if (path in self.anew if not self._runs else not is_same(now.get(path), value))
        }
        # Copies: a backward that is to come may need those of an earlier micro-batch.
        self._given |= {p: v for p, v in _copies(fresh).items() if set_at(self._scopes, p, v)}

    def _put_containers(self, stay: set[Path]) -> None:
        """Put back the dicts, lists, tuples and objects in whose place the step has put others, but
        for those that stay; a deque to which micro-batches add gets what was in it.
        """
        kept = {id(held): items for held, items in self._contents}
        for place in self._windows:
            before, now = self._raw.get(place), value_at(self._scopes, place)
            window = before if isinstance(before, deque) else now
            if isinstance(window, deque):
                refill(window, kept.get(id(window), ()))
            stay = {*stay, place} if around([place]) & stay else stay
        found = self._found(None if self._runs else self.anew)
        places = {
            p for p, value in (*self._raw.items(), *found.items()) if inside(value) is not None
        }
        for place in sorted(places - stay, key=len):
            if value_at(self._scopes, place) is not self._raw.get(place, ABSENT):
                self._put_raw(place)

    def _put_raw(self, path: Path) -> None:
        if path in self._raw:
            set_at(self._scopes, path, self._raw[path])
        else:
            remove(self._scopes, path)

    def _keep(self, path: Path, value: Any) -> None:
        """Put a value of the batch into the module; into the tensor or array that it held, if the
        step wrote there, as others may hold the same one.
        """
        for place in sorted(around([path]), key=len):
            held = value_at(self._scopes, place)
            is_known = held is ABSENT or id(held) in self._before
            is_known |= any(held is made for _, made in self._made.values())
            # One that the last micro-batch has made may be kept elsewhere, too, as it is.
            if not is_known and not isinstance(held, tuple):
                _, made = self._made.setdefault(id(held), (held, shallow_copy(held)))
                set_at(self._scopes, place, made)
        raw, given = self._raw.get(path), self._given.get(path, ABSENT)
        if value_at(self._scopes, path) is given and isinstance(raw, Tensor | np.ndarray):
            is_copy = isinstance(given, Tensor)  # whose changes count from 0
            is_written = (
                count_of_changes(given) if is_copy else not is_same(given, self._start[path])
            )
            if is_written and np.shape(raw) == np.shape(value) and takes_values(raw):
                with torch.no_grad():
                    raw[...] = value
            value = raw if not is_written or takes_values(raw) else value
        if isinstance(raw, list) and value_at(self._scopes, path) is raw:
            raw[:] = value
        else:
            set_at(self._scopes, path, value)


def _detached(values: Mapping[Path, Any]) -> dict[Path, Any]:
    return {p: v.detach() if isinstance(v, Tensor) else v for p, v in values.items()}


def _copies(values: Mapping[Path, Any]) -> dict[Path, Any]:
    """Return copies of values; one that has two names has them again."""
    copies = {id(value): copy_of(value) for value in values.values()}
    return {path: copies[id(value)] for path, value in values.items()}
