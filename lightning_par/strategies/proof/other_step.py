"""What rank 0 finds of a step that a strategy of Lightning's or of the user's took.

Note [Parts of a batch]: replicas compute a mean over the parts of the batch. One process computes
it, too, each part with the random numbers of its rank: where the strategy has that mean, and the
whole batch gives another loss, the strategy is right and the loss is no mean over parts. A step
with dropout, whose masks depend on the part, is compared in two ways: with the mean over the parts
as it is, and this one with the whole batch without dropout.
"""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.rng import states_alike
from lightning_par.engine.tensor_tree import tensors_of, to_cpu
from lightning_par.observe.compare import (
    Difference,
    first_beyond,
    measure_backwards,
    measure_handed,
    measure_states,
    Tolerance,
)
from lightning_par.observe.isolate import is_equal
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.data.joined_batch import CannotJoinError, join_batches, samples_of
from lightning_par.strategies.proof.causes import causes_elsewhere, Elsewhere, StepReport
from lightning_par.strategies.proof.judge import CannotProveError, verdict_of
from lightning_par.strategies.step.batch_statistics import training_batchnorms

__all__ = ["OtherStep", "Share", "agree_elsewhere", "gather_all"]

_IGNORED = -100
"""Label that losses of torch leave out unless they are told another one."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a rank had of a batch.

    Attributes:
        replica: Number of its replica.
        batch: The batch, pickled; empty: it cannot be.
        states: Of the generators.
    """

    replica: int
    batch: bytes
    states: dict[str, Any]

    @classmethod
    def of(cls, batch: Any, replica: int, states: dict[str, Any]) -> "Share":
        """Return what this rank has."""
        try:
            packed = pickle.dumps(to_cpu(batch))
        except Exception:  # whatever the user's objects raise
            packed = b""
        return cls(replica=replica, batch=packed, states=states)


@dataclass(kw_only=True, eq=False)
class OtherStep:
    """Takes the step on one process, and compares.

    Attributes:
        strategy: What took the step, as in a sentence.
        module: The user's module.
        noted: What the strategy computed.
        shares: For each batch of the step, what each rank had.
        run: Takes the step on one process, with batches, states of generators, and with dropout or
            without.
        start: Name -> value before the step.
        tolerance: Of losses and gradients.
        update: Of the update; None: it is not compared.
        copies: For each rank, name -> norm of the gradients of which it holds a copy.
        clips: Whether gradients are clipped by their norm.
        may_evaluate: Whether a step without gradients is compared by its loss.
        notes: What else was seen.
    """

    strategy: str
    module: nn.Module
    noted: StepRecord
    shares: Sequence[Sequence[Share]]
    run: Callable[[list[Any], list[dict[str, Any]], bool], StepRecord]
    start: Mapping[str, Tensor]
    tolerance: Tolerance
    update: Tolerance | None = None
    copies: Sequence[Mapping[str, float]] = ()
    clips: bool = False
    may_evaluate: bool = False
    notes: list[str] = field(default_factory=list)

    def judge(self) -> StepReport:
        """Return what came out.

        Raises:
            CannotProveError: That is not known.
        """
        batches = self._batches()
        try:
            joined = [join_batches(parts) for parts in batches]
        except CannotJoinError as reason:
            raise CannotProveError(str(reason)) from None
        one = self._run(joined, 0)
        records = (*self.noted.gradients, *one.gradients)
        if self.may_evaluate and not any(records):
            self.notes.append("the step computes no gradients, so only its result is compared")
        elif not any(bool(g.any()) for held in one.gradients for g in (held or {}).values()):
            raise CannotProveError("all of its gradients are zero")
        difference = self._measure(self.noted, one)
        parts = self._mean_of_parts(batches) if difference is not None else None
        are_parts = parts is not None and self._measure(self.noted, parts) is None
        draws = one.draws
        if difference is not None and draws:
            if len(batches[0]) < len(self.shares[0]) and not are_parts:
                raise CannotProveError(
                    "it draws random numbers, and ranks that compute the same samples draw other "
                    "numbers than one process. Set dropout to 0 for the comparison"
                )
            if are_parts:
                whole = self._run(joined, 0, drops=False)
                mean = self._mean_of_parts(batches, drops=False)
                difference, draws = self._measure(mean, whole), whole.draws
        difference = difference or self._measure_update(one)
        self._look_at_shares(batches, draws=one.draws)
        copies, is_own = self._differing_copies(), False
        if difference is None and not copies:
            return StepReport(strategy=self.strategy, notes=tuple(self.notes))
        if difference is not None and difference.kind == "gradient" and len(batches[0]) > 1:
            step, part = (replace(r, losses=[]) for r in (self.noted, self._part(batches, 0)))
            is_own = self._measure(step, part) is None
        found = Elsewhere(
            strategy=self.strategy,
            replicas=len(batches[0]),
            draws=draws,
            are_parts=are_parts,
            is_own=is_own,
            norms=_local_norms(self.module),
            counts=_unequal_counts(batches),
            copies=copies,
            clips=self.clips,
        )
        causes = tuple(causes_elsewhere(difference, found))
        return StepReport(
            strategy=self.strategy, difference=difference, causes=causes, notes=tuple(self.notes)
        )

    def _batches(self) -> list[list[Any]]:
        """Return for each batch of the step the parts of the replicas."""
        found = []
        for shares in self.shares:
            if not all(share.batch for share in shares):
                raise CannotProveError("a batch cannot be sent to rank 0")
            firsts = {share.replica: share.batch for share in reversed(shares)}
            found.append([pickle.loads(firsts[replica]) for replica in sorted(firsts)])
        return found

    def _run(self, batches: list[Any], replica: int, *, drops: bool = True) -> StepRecord:
        states = [next(s.states for s in held if s.replica == replica) for held in self.shares]
        one = self.run(batches, states, drops)
        if one.error is not None:
            kind = type(one.error).__name__
            raise CannotProveError(f"the step failed on one process with {kind}: {one.error}")
        return one

    def _part(self, batches: list[list[Any]], replica: int, *, drops: bool = True) -> StepRecord:
        return self._run([parts[replica] for parts in batches], replica, drops=drops)

    def _mean_of_parts(self, batches: list[list[Any]], *, drops: bool = True) -> StepRecord:
        """Return the mean of what one process computes of the part of each replica."""
        count = len(batches[0])
        found = [self._part(batches, replica, drops=drops) for replica in range(count)]
        losses = [sum(each) / count for each in zip(*(r.losses for r in found), strict=True)]
        gradients: list[dict[str, Tensor] | None] = []
        for of_one in zip(*(r.gradients for r in found), strict=True):
            names = dict.fromkeys(name for held in of_one for name in held or ())
            parts = {n: [held[n].double() for held in of_one if held and n in held] for n in names}
            gradients.append(
                {name: torch.stack(each).sum(0) / count for name, each in parts.items()}
            )
        return StepRecord(losses=losses, gradients=gradients)

    def _measure(self, step: StepRecord, one: StepRecord) -> Difference | None:
        return first_beyond(measure_backwards(step, one, self.tolerance))

    def _measure_update(self, one: StepRecord) -> Difference | None:
        if self.update is None:
            return None
        handed = first_beyond(measure_handed(self.noted, one, self.update))
        states = self.start, self.noted.updated, one.updated
        return handed or first_beyond(measure_states(*states, self.update))

    def _differing_copies(self) -> list[str]:
        """Return the parameters of whose gradient ranks hold other copies."""
        first, *others = self.copies or ({},)
        nothing = self.tolerance.nothing * sum(first.values())

        def differs(name: str, norm: float) -> bool:
            bound = self.tolerance.gradient * norm + nothing
            return any(abs(other.get(name, math.inf) - norm) > bound for other in others)

        return [name for name, norm in first.items() if differs(name, norm)]

    def _look_at_shares(self, batches: list[list[Any]], *, draws: bool) -> None:
        """Note what is odd about who has which samples and random numbers."""
        shares, firsts = self.shares[0], {s.replica: s for s in reversed(self.shares[0])}
        held = [pickle.loads(share.batch) for share in shares]
        own = zip(shares, held, strict=True)
        if not all(_alike(batch, batches[0][share.replica]) for share, batch in own):
            self.notes.append("the ranks of one replica have different batches")
        if any(_alike(batches[0][0], batch) for batch in batches[0][1:]):
            self.notes.append(
                "the replicas have the same batch, so their data loaders need a DistributedSampler"
            )
        first, *others = firsts.values()
        if draws and any(states_alike(first.states, other.states) for other in others):
            self.notes.append(
                "replicas draw the same random numbers for different samples, so dropout masks "
                "repeat. Seed each rank differently in on_fit_start: torch.manual_seed(seed + "
                "rank)"
            )


def _alike(one: Any, other: Any) -> bool:
    pairs = [list(tensors_of(batch)) for batch in (one, other)]
    return len(pairs[0]) == len(pairs[1]) and all(map(is_equal, *pairs))


def _local_norms(module: nn.Module) -> list[str]:
    names = training_batchnorms(module)
    return [n for n in names if not isinstance(module.get_submodule(n), nn.SyncBatchNorm)]


def _unequal_counts(batches: Sequence[Sequence[Any]]) -> dict[str, list[int]]:
    """Return how many samples, and labels that count, the replicas have, where that is unequal."""
    found: dict[str, list[int]] = {}
    for parts in batches:
        found.setdefault("samples", [samples_of(part) for part in parts])
        for tensors in zip(*map(tensors_of, parts), strict=False):
            if any(not t.is_floating_point() and bool((t == _IGNORED).any()) for t in tensors):
                found.setdefault("labels", [int((t != _IGNORED).sum()) for t in tensors])
    return {what: counts for what, counts in found.items() if len({*counts}) > 1}


def gather_all(value: Any) -> list[Any]:
    """Return what all ranks have, on rank 0; elsewhere nothing."""
    if not dist.is_initialized():
        return [value]
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found or []


def agree_elsewhere(judge: Callable[[], StepReport], strategy: str) -> StepReport:
    """Return what rank 0 finds, on every rank.

    Args:
        judge: Finds it.
        strategy: What took the step, as in a sentence.
    """
    finds = not dist.is_initialized() or dist.get_rank() == 0
    box: list[Any] = [verdict_of(judge) if finds else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    if isinstance(box[0], CannotProveError):
        return StepReport(strategy=strategy, unknown=str(box[0]))
    found: StepReport = box[0]
    return found
