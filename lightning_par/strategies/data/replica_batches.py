"""The samples of a replica: its part of the batches that one process would take.

Note [One order]: every replica iterates the user's own sampler, as one process does, and takes its
part of what comes. So the order is that of one process whose batches are as large as those of all
replicas together. A batch of it is dealt out like cards: replica r of R has the samples r, r + R,
r + 2R, ... Batches of a batch sampler of the user's stay as they are: replica r has the r-th of R.

Note [Where an epoch goes on]: a checkpoint that is saved inside an epoch keeps how many samples all
replicas have seen, the random states from which the sampler drew its order, and a checksum of the
first of them. Any number of replicas then skips these samples, and shares the others. A sampler
that draws from elsewhere gives others, which the checksum tells: then the epoch begins anew.

A replica for which the last batch of an iteration has no sample repeats one of it, as every rank
has to run the step: such a batch weighs nothing, see `Share.fills`.
"""

import math
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler

from lightning_par.engine.rng import collect_random_states, restore_random_states

__all__ = ["ReplicaBatches", "Share"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Share:
    """What the batch of a replica is of the global batch; by default, nobody knows.

    Attributes:
        total: Samples of the global batch; None: as many as this one's, times the replicas.
        own: Those of this batch; None: nobody knows, as where the data set gives whole batches.
        smallest: The fewest that a replica has.
        fills: Whether this replica has none, and repeats one that weighs nothing.
        check: Checksum of the global batch, of the first one of an iteration; else None.
        is_even: Whether parts of the batch tell what the step does on all of it; not where several
            loaders give it unequal numbers of samples.
        is_whole: Whether the first replica has the whole global batch, and the others fill.
    """

    total: int | None = None
    own: int | None = None
    smallest: int = sys.maxsize
    fills: bool = False
    check: int | None = None
    is_even: bool = True
    is_whole: bool = False


class ReplicaBatches:
    """Batch sampler of a replica; see Note [One order].

    Args:
        given: The user's batch sampler; or the sampler of a loader without one, whose data set
            gives whole batches.
        replicas: R.
        replica: r, 0 .. R - 1.
        predicts: Whether a replica takes whole batches, of any number, and repeats nothing.
        repeats: Says why all replicas need the same number of samples, so that some are repeated;
            empty: they do not.
        agree: Makes the random states of all ranks those of rank 0; called before an epoch.
        cursor: From `cursor` of a run whose epoch goes on here; None: epochs begin at their start.
        is_divided: Whether the sampler gives other samples on every replica, of which R is 1 then.

    Attributes:
        shares: Of the batches that were given to the loader and have not reached the step.
    """

    def __init__(
        self,
        given: Any,
        replicas: int,
        replica: int,
        *,
        predicts: bool,
        repeats: Callable[[], str],
        agree: Callable[[], None],
        cursor: dict[str, Any] | None = None,
        is_divided: bool = False,
    ) -> None:
        self._given, self._replicas, self._replica = given, replicas, replica
        # Exactly torch's: a subclass may group samples by length, and its batches are kept.
        self._is_dealt = type(given) is BatchSampler and not predicts
        self._predicts, self._repeats, self._agree = predicts, repeats, agree
        self.shares: deque[Share] = deque()
        self._source = given.sampler if self._is_dealt else given
        self._resumed, self._start, self._taken = self._fitting(cursor), 0, 0
        self._before = self.before
        self._states: dict[str, Any] = {}
        self._is_divided = is_divided
        self._first: list[Any] = []  # samples of the epoch's first global batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)

    @property
    def sampler(self) -> "_AgreedSampler":
        """Sampler to which Lightning tells the epoch, before it iterates the loader."""
        # The Trainer tells a sampler inside of a batch sampler the epoch, and not that one itself.
        return _AgreedSampler(getattr(self._given, "sampler", None), self._agree)

    @property
    def is_spare(self) -> bool:
        """Whether this replica has nothing to predict, and predicts a batch that nobody gets."""
        return self._predicts and 0 < len(self._given) <= self._replica

    @property
    def is_of_all(self) -> bool:
        """Whether it divides the samples among several replicas, and so counts what was taken."""
        return self._replicas > 1

    def __len__(self) -> int:
        drops = getattr(self._given, "drop_last", False)
        if self._predicts:
            own = len(range(self._replica, len(self._given), self._replicas))
            return own + self.is_spare
        return (len(self._source) + (0 if drops else self._step - 1)) // self._step

    @property
    def _step(self) -> int:
        """Number of entries of the user's sampler, or batch sampler, in a global batch."""
        return self._replicas * (int(self._given.batch_size) if self._is_dealt else 1)

    @property
    def resumes(self) -> bool:
        """Whether the next iteration goes on inside an epoch."""
        return self._resumed is not None

    @property
    def before(self) -> int:
        """Number of batches, of this layout, before where the epoch goes on."""
        if self._resumed is None:
            return 0
        # In entries of all replicas, whatever layout counted them.
        start, of = self._resumed["seen"], self._length
        if of is None:
            return int(start // self._step)
        more = 0 if getattr(self._given, "drop_last", False) else self._step - 1
        # Counted from the end: the last batch of this layout may have fewer samples.
        return int(len(self) - max(0, of - start + more) // self._step)

    @property
    def _length(self) -> int | None:
        """Number of entries of an epoch; None: nobody knows, as of a sampler without an end."""
        try:
            return len(self._source)
        except (TypeError, NotImplementedError):
            return None

    @property
    def _size(self) -> int | None:
        """Number of samples in an entry, where it is a batch of a batch sampler that says it."""
        return None if self._is_dealt else getattr(self._given, "batch_size", None)

    def take(self) -> Share | None:
        """Return the share of the next batch, which the step gets now."""
        if not self.shares:
            return None
        self._taken += 1
        return self.shares.popleft()

    def cursor(self, ready: int) -> dict[str, Any] | None:
        """Return where the epoch goes on; None: at its start.

        Args:
            ready: Batches of the epoch that the Trainer has begun.
        """
        # One replica's loader tells nobody what was taken: the loop's counter does.
        taken = self._taken if self._replicas > 1 else ready - self._before
        if taken <= 0:
            return None
        first = {"count": len(self._first), "check": _checksum(self._first)}
        kind = {"of": self._length, "size": self._size, "first": first}
        return {"seen": self._start + taken * self._step, **kind, **self._states}

    def _fitting(self, cursor: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return where an epoch goes on, in batches of the user's batch sampler as it is now."""
        if cursor is None:
            return None
        of, size, own = cursor["of"], cursor["size"], self._size
        # Of the same length, or both without one and in batches of the same size.
        if size == own if None in (of, self._length) else of == self._length:
            return cursor
        # Batches of another size, that fit into what was seen.
        if not size or not own or cursor["seen"] * size % own:
            rank_zero_warn(
                f"the sampler of the data loader has {self._length} entries, but had {of} when "
                "the checkpoint was saved, so the epoch starts from its beginning. Resume with "
                "the same data and batch size as in the run that saved the checkpoint."
            )
            return None
        return {**cursor, "seen": cursor["seen"] * size // own}

    @property
    def _generator(self) -> torch.Generator | None:
        """The generator of the sampler, as those of torch have it; others may name it the same."""
        found = getattr(self._source, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    def _note(self) -> None:
        """Note the random states from which the sampler draws the order of an epoch."""
        own = None if self._generator is None else self._generator.get_state()
        self._states = {"random": collect_random_states(_CPU), "generator": own}
        self._start = self._taken = self._before = 0
        self._first = []

    def _begun(self, entries: Iterator[Any]) -> Iterator[Any]:
        """Iterate, and note the samples of the first global batch."""
        for number, entry in enumerate(entries):
            if number < self._step and not self._is_divided:
                self._first.extend(_samples(entry))
            yield entry

    def _entries(self) -> Iterator[Any]:
        """Iterate the user's sampler from where the epoch goes on."""
        # Once: the next epoch begins at its start.
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._note()
            return self._begun(iter(self._source))
        self._start, self._taken = resumed["seen"], 0
        self._states = {name: resumed[name] for name in ("random", "generator")}
        # The sampler draws its order again from the state that it had; the run's own state comes
        # back after.
        before, generator = collect_random_states(_CPU), self._generator
        restore_random_states(self._states["random"], _CPU)
        if generator is not None and self._states["generator"] is not None:
            generator.set_state(self._states["generator"])
        entries: Iterator[Any] = iter(self._source)
        if not self._is_dealt:  # the loader draws a seed between it and the first batch
            torch.empty((), dtype=torch.int64).random_()
        first = resumed.get("first", {"count": 0, "check": _checksum([])})
        # Skipped by iterating: a sampler cannot be told to begin elsewhere.
        skipped = list(islice(entries, self._start))
        self._first = [s for entry in skipped for s in _samples(entry)][: first["count"]]
        is_same = _checksum(self._first) == first["check"]
        restore_random_states(before, _CPU)
        if is_same:
            return entries
        rank_zero_warn(
            "the sampler of the data loader returns a different order of samples than in the run "
            "that saved the checkpoint, so which samples are left is not known, and the epoch "
            "starts from its beginning. Let the sampler draw from torch, NumPy or random, or from "
            "a torch.Generator in its attribute `generator`, or compute its order from the number "
            "that it gets in set_epoch(epoch)."
        )
        self._note()
        return self._begun(iter(self._source))

    def __iter__(self) -> Iterator[Any]:
        if self._replicas > 1 or self._resumed is not None:
            # Batch samplers may draw when their iterator is made, and those of torch never do.
            return self._batches(
                self._dealt() if self._is_dealt else self._grouped(self._entries())
            )
        # What one replica has is taken as it is: only the start of an epoch is noted.
        if not self._is_dealt:
            self._note()
            return self._begun(iter(self._given))
        given = iter(self._given)

        def first() -> Iterator[Any]:
            self._note()
            # Noted when the first batch is asked for, since torch's sampler draws its order then,
            # after the loader has drawn its seed.
            for batch in islice(given, 1):
                self._first = [] if self._is_divided else list(_samples(batch))
                yield batch

        return chain(first(), given)

    def _batches(self, parts: Iterable[tuple[list[Any], Any, int]]) -> Iterator[Any]:
        self.shares.clear()
        for number, (everything, own, smallest) in enumerate(parts):
            check = None if number else _checksum(everything)
            total = len(everything)
            # Not full: some replicas have one sample more than others.
            differs = total // self._replicas == smallest and total % self._replicas > 0
            why = self._repeats() if differs and isinstance(own, list) else ""
            if why:
                most = math.ceil(total / self._replicas)
                samples = "sample" if total == 1 else "samples"
                rank_zero_warn(
                    f"the last batch of an epoch has {total} {samples}, which cannot be divided "
                    f"equally over {self._replicas} replicas. {most * self._replicas - total} of "
                    f"these samples will be used twice, since {why}."
                )
                places = (turn * self._replicas + self._replica for turn in range(most))
                own, smallest = [everything[place % total] for place in places], most
                total = most * self._replicas
            fills = own is None or own == []
            # The last sample: any will do, as it weighs nothing.
            if fills:
                own = everything[-1:] if own == [] else everything[-1]
            many = len(own) if isinstance(own, list | tuple) else None
            share = Share(total=total, own=many, smallest=smallest, fills=fills, check=check)
            # Before the yield: workers fetch ahead, and the share waits in the deque for its
            # step.
            if self._replicas > 1:
                self.shares.append(share)
            yield own

    def _dealt(self) -> Iterator[tuple[list[Any], Any, int]]:
        """Yield all samples of a global batch, those of this replica, and the fewest of one."""
        size, samples = self._step, self._entries()
        while batch := list(islice(samples, size)):
            # drop_last is about the global batch, as on one process.
            if len(batch) == size or not self._given.drop_last:
                own = batch[self._replica :: self._replicas]
                yield batch, own, len(batch) // self._replicas

    def _grouped(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], Any, int]]:
        """Yield the same, of batches of a batch sampler of the user's."""
        count = self._replicas
        while group := list(islice(batches, count)):
            # A batch may be any index that the data set understands.
            is_listed = all(isinstance(batch, list | tuple) for batch in group)
            every = [sample for batch in group for sample in batch] if is_listed else group
            if len(group) == count:
                smallest = min(map(len, group)) if is_listed else 1
                yield every, group[self._replica], smallest
            elif self._predicts:
                # Predictions need no equal numbers: only a replica without any repeats one.
                if self._replica < len(group) or self.is_spare:
                    yield every, group[min(self._replica, len(group) - 1)], -1
            elif not getattr(self._given, "drop_last", False):
                dealt = every[self._replica :: count]
                alone = dealt[0] if dealt else None
                yield every, dealt if is_listed else alone, len(every) // count


def _samples(entry: Any) -> Sequence[Any]:
    return entry if isinstance(entry, list | tuple) else [entry]


def _checksum(entries: Sequence[Any]) -> int:
    return zlib.crc32(repr(list(entries)).encode())


class _AgreedSampler:
    """The user's sampler, or none; before an epoch ranks agree on the random state of its draws.

    Data sets that draw in the training process have drawn other numbers on each replica by then.
    """

    def __init__(self, sampler: Any, agree: Callable[[], None]) -> None:
        self._sampler, self._agree = sampler, agree

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Agree, and tell the sampler the epoch, if it wants to know."""
        # Here, as Lightning tells every sampler the epoch right before its loader is iterated.
        self._agree()
        tell = getattr(self._sampler, "set_epoch", None)
        if callable(tell):
            tell(epoch)
