"""What rank 0 finds: the step on one process, and how that on the mesh differs from it."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.observe.compare import (
    Difference,
    first_beyond,
    GradientDifferences,
    measure_backwards,
    measure_handed,
    measure_states,
    Tolerance,
    tolerance_of,
)
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.data.joined_batch import (
    CannotJoinError,
    cut_replica,
    join_batches,
    samples_of,
)
from lightning_par.strategies.optimizers.reach import declared_reach, LOOKS_ACROSS
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.causes import explain, Findings
from lightning_par.strategies.proof.gathering import from_first
from lightning_par.strategies.proof.on_difference import ENDS
from lightning_par.strategies.proof.one_process import GivenStep, run_alone
from lightning_par.strategies.proof.parted_batch import part_batch, PartedBatch
from lightning_par.strategies.proof.skeleton import Skeleton
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = [
    "REHEARSE",
    "CannotProveError",
    "Differs",
    "Judge",
    "agree",
    "numbers_of",
    "tolerance_at",
    "verdict_of",
]

REHEARSE = "rehearse"
"""Verdict: random numbers may be all that differs; a rehearsal without dropout tells."""


def numbers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, float]]:
    """Return the numbers of every group of parameters, such as learning rates."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return [{n: v for n, v in g.items() if isinstance(v, bool | int | float)} for g in groups]


def tolerance_at(precision: object, *dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance of losses and gradients.

    Args:
        precision: That of the Trainer.
        dtypes: Of weights, and of what is sent.
    """
    name = str(precision)
    is_bfloat16 = name.startswith("bf16") or "transformer" in name
    more = [torch.bfloat16] * is_bfloat16 + [torch.float16] * name.startswith("16")
    return tolerance_of(*dtypes, *more)


class CannotProveError(Exception):
    """The steps cannot be compared; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Differs:
    """Verdict: the step differs from that of one process.

    Attributes:
        text: Of the error.
        kind: Of the `Difference`; "write": the forward writes to a parameter of which ranks hold
            parts.
    """

    text: str
    kind: str


@dataclass(kw_only=True, eq=False)
class Judge:
    """Takes a step on one process, and compares.

    Attributes:
        skeleton: The user's module and callbacks as they were before the mesh.
        model: The model on the mesh.
        options: Of the strategy.
        plugin: Precision plugin of the mesh.
        device: Device of this rank.
        given: What the step started from, with the batches of all replicas.
        noted: What the mesh computed.
        notes: What was not proved.
        one: What one process computed, last.
        difference: What differs most, once something does.
    """

    skeleton: Skeleton
    model: ParallelModel
    options: MeshOptions
    plugin: Precision
    device: torch.device
    given: GivenStep
    noted: StepRecord
    notes: list[str] = field(default_factory=list)
    one: StepRecord = field(default_factory=StepRecord)
    difference: Difference | None = None

    def judge(self) -> Differs | str | None:
        """Return how the steps differ, or `REHEARSE`; None: they do not.

        Raises:
            CannotProveError: That is not known.
        """
        if not self._has_valid_labels:
            raise CannotProveError(
                "its batch has no valid label (all are ignored), so the loss on one process is NaN"
            )
        is_later = self.given.start.is_later
        feeds = all(g is not None for g in self.noted.gradients[-1:])
        if feeds:
            one = self._run(gradients=self.noted.gradients, handed=self.noted.handed)
        else:
            one = self._run(backwards=len(self.noted.losses) if is_later else None)
        self.one = one
        lost = None if is_later else self._lost_write(one)
        if lost is not None:
            return Differs(text=lost, kind="write")
        if self.options.gradient_compression is not None and not is_later:
            self.notes.append("gradients are not compared, since they are compressed")
        difference = self._compare_backwards(one)
        if difference is not None and not one.draws:
            return self._explain(difference, one)
        update = self._compare_update(one) if feeds else None
        if not feeds and not is_later:
            self.notes.append(
                "gradients and the update are not compared, since they are in CPU memory"
            )
        if update is not None:
            return self._explain(update, replace(one, draws=False))
        if difference is not None:
            return REHEARSE
        if self.noted.is_finite and not is_later:
            self._check_motion(one)
        return None

    def _compare_backwards(self, one: StepRecord) -> Difference | None:
        noted = self.noted
        if self.options.gradient_compression is not None:
            noted = replace(noted, gradients=[None] * len(noted.gradients))
        return first_beyond(measure_backwards(noted, one, self.tolerance))

    def _check_motion(self, one: StepRecord) -> None:
        """Note what an equal step does not show, as nothing moved.

        Raises:
            CannotProveError: It shows nothing of gradients or updates.
        """
        found = [gradients for gradients in one.gradients if gradients is not None]
        reached = {name for gradients in found for name in gradients}
        if not any(bool(g.count_nonzero()) for gradients in found for g in gradients.values()):
            raise CannotProveError("all of its gradients are zero")
        left = sorted(one.trains - reached)
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            self.notes.append(f"no gradient reaches {', '.join(left[:3])}{more}")
        before, after = self.given.start.tensors, self.noted.state
        if any(n in after and not torch.equal(before[n], after[n]) for n in one.trains):
            return
        if self.given.start.learns:
            raise CannotProveError(
                "no weight changed in it, although neither the gradients nor the learning rates "
                "are zero. Check that the optimizers hold the parameters of the module"
            )
        self.notes.append("the update is not compared, since every learning rate is 0")

    def _lost_write(self, one: StepRecord) -> str | None:
        """Return what is wrong with a forward that writes to a parameter of which ranks hold parts,
        or copies.

        It need not show in the first step: a weight may have its length already.
        """
        held = dict(self.model.module.named_parameters())
        divided = any(isinstance(parameter, DTensor) for parameter in held.values())
        for name in sorted(one.written):
            if isinstance(held[name], DTensor) if name in held else divided:
                why = (
                    "is sharded: the forward uses a gathered copy, and the write to the copy is "
                    "lost"
                )
            # A number is a copy at every ZeRO stage, and mostly clamped, equally on all of them.
            elif name in held and held[name].ndim and self.model.mesh.sizes.data > 1:
                why = (
                    "has a copy on every replica, and each replica may write a value of its own "
                    "samples"
                )
            else:
                continue
            return (
                f"the forward of {name.rpartition('.')[0] or 'the module'} writes to its "
                f"parameter {name}, but this parameter {why}. Compute with the new value "
                "instead of writing it to the parameter, as in F.linear(x, "
                "F.normalize(self.weight)) or torch.nn.utils.parametrize. Or write to the "
                f"parameter in on_train_batch_end, each entry separately. {ENDS}"
            )
        return None

    def judge_rehearsal(self, mesh: StepRecord, tensors: Mapping[str, Tensor]) -> Differs | None:
        """Return how the first batch, taken again without dropout, differs; None: it does not.

        Args:
            mesh: What the mesh computed in it.
            tensors: See `take_again`.

        Raises:
            CannotProveError: That is not known.
        """
        self.take_again(tensors, drops=False)
        return self.judge_again(mesh)

    def judge_again(self, mesh: StepRecord) -> Differs | None:
        """Return how the batch that the mesh has taken again differs; None: it does not.

        Args:
            mesh: What the mesh computed; `take_again` has given what one process did.
        """
        difference = first_beyond(measure_backwards(mesh, self.one, self.tolerance))
        return None if difference is None else self._explain(difference, self.one)

    def judge_gradients(self, mesh: StepRecord, gradients: GradientDifferences) -> Differs | None:
        """Return how a batch that `take_again` has taken differs; None: it does not.

        Args:
            mesh: The loss that the mesh computed.
            gradients: How the gradients of both differ.

        Raises:
            CannotProveError: That is not known.
        """
        lost = self._lost_write(self.one)
        if lost is not None:
            return Differs(text=lost, kind="write")
        losses = measure_backwards(mesh, self.one, self.tolerance)
        difference = first_beyond((*losses, *gradients.largest()))
        if difference is not None:
            return self._explain(difference, self.one)
        if not gradients.norm:
            raise CannotProveError("all of its gradients are zero")
        return None

    def take_again(self, tensors: Mapping[str, Tensor], *, drops: bool) -> StepRecord:
        """Take the first batch of the step again on one process, with the attributes, learning
        rates and what is outside of the module as they are now; return its loss and gradients.

        Args:
            tensors: Name -> value of every parameter and buffer.
            drops: Whether dropout is on.

        Raises:
            CannotProveError: It fails.
        """
        start = replace(
            self.given.start,
            tensors=tensors,
            groups=numbers_of(self.model.module.trainer.optimizers),
            put_outside=lambda: None,
            is_later=True,
            gradients={},
        )
        self.one = self._take(0, drops=drops, start=start, batches=self.joined[:1])
        return self.one

    def _run(self, **changes: Any) -> StepRecord:
        """Take the step on one process, with `changes` of what is given."""
        if "batches" not in changes:
            changes["batches"] = self.joined
        given, plugin = replace(self.given, **changes), self.own_plugin
        trainer = self.model.module.trainer
        originals = {i: name for i, (name, _) in self.model.states.given.items()}
        one = run_alone(self.skeleton, given, trainer, originals, self.device, plugin)
        if one.error is not None:
            kind_of = type(one.error).__name__
            raise CannotProveError(f"the step failed on one process with {kind_of}: {one.error}")
        return one

    @property
    def own_plugin(self) -> Precision | None:
        """A plugin of the user's, or one with the loss scale of the mesh, for one process; None: it
        is one of Lightning.
        """
        given: Precision = self.plugin.given  # type: ignore[attr-defined]
        scales = getattr(given, "scaler", None) is not None
        if type(given).__module__.startswith("lightning.") and not scales:
            return None
        plugin = copy.copy(given)
        vars(plugin).update(vars(self.plugin))  # what it has learned on the mesh
        return plugin

    @property
    def given_whole(self) -> GivenStep:
        """What the step starts from, with the global batches.

        Raises:
            CannotProveError: They cannot be joined.
        """
        return replace(self.given, batches=self.joined)

    @property
    def _is_parted(self) -> bool:
        """Whether one process takes the step part by part; see Note [Local statistics]."""
        return self.model.resolved.plan.batch.local_statistics

    @cached_property
    def joined(self) -> list[Any]:
        """The global batches."""
        joined = []
        for parts in self.given.batches:
            if parts is None:
                raise CannotProveError("a batch cannot be sent to rank 0")
            try:
                joined.append(self._part(parts) if self._is_parted else join_batches(parts))
            except CannotJoinError as reason:
                if self._is_parted:
                    raise CannotProveError(str(reason)) from None
                joined.append(self._pad(parts, reason))
        return joined

    def _part(self, replicas: Sequence[Any]) -> PartedBatch:
        sums = bool(self.model.resolved.plan.replica_sums)
        return part_batch(replicas, self.model.steps, sums=sums)

    @property
    def _has_valid_labels(self) -> bool:
        """Whether any label of the step counts."""
        parts = (b["parts"] if self._is_parted else [b] for b in self.joined)
        counts = [self.model.steps.has_valid_labels(part) for each in parts for part in each]
        return any(counted is None or bool(counted) for counted in counts)

    def _pad(self, parts: Sequence[Any], reason: CannotJoinError) -> Any:
        """Return one batch of parts with unequal lengths, if padding changes no loss.

        Raises:
            CannotProveError: They cannot be joined, or padding changes a loss.
        """
        try:
            whole = join_batches(parts, self.model.resolved.plan.batch)
        except CannotJoinError:
            raise CannotProveError(str(reason)) from None
        sizes = [samples_of(part) for part in parts]
        for replica, part in enumerate(parts):
            padded = cut_replica(whole, sizes, replica)
            alone, longer = (self.loss_of(batch) for batch in (part, padded))
            if not abs(alone - longer) <= self.tolerance.loss * max(1.0, abs(alone)):
                raise CannotProveError(
                    f"{reason}, and padding the batches to one length changes the loss"
                )
        return whole

    def loss_of(self, batch: Any, number: int = 0) -> float:
        """Return the loss of a batch on one process, without dropout.

        Args:
            batch: In place of one of the step.
            number: Which one.
        """
        return self._take(number, batches=[batch]).losses[0]

    def _take(self, number: int, *, drops: bool = False, **changes: Any) -> StepRecord:
        """Take one batch of the step up to its backward, with `changes` of what is given."""
        at = slice(number, number + 1)
        with nullcontext() if drops else WithoutDropout():
            return self._run(
                arguments=self.given.arguments[at],
                random_states=self.given.random_states[at],
                gradients=None,
                backwards=1,
                **changes,
            )

    def _compare_update(self, one: StepRecord) -> Difference | None:
        start, noted = self.given.start, self.noted
        why_not = self._why_no_update(one)
        if why_not:
            if not start.is_later:
                self.notes.append(why_not)
            return None
        tolerance = tolerance_of(*(t.dtype for t in start.tensors.values()))
        # Callbacks do not run on one process in a later step.
        if not (start.is_later and self.skeleton.changes_gradients):
            handed = first_beyond(measure_handed(noted, one, tolerance))
            if handed is not None:
                return handed
        if start.continues:
            pair = noted.updated, one.updated
        else:
            # Each rank keeps the statistics of its own parts.
            left_out = one.buffers if one.draws or self._is_parted else frozenset()
            pair = noted.state, {n: t for n, t in one.state.items() if n not in left_out}
        return first_beyond(measure_states(start.tensors, *pair, tolerance))

    def _why_no_update(self, one: StepRecord) -> str:
        """Return why the update is not compared; empty: it is."""
        if not self.noted.is_finite:
            return "the update is not compared, since the loss or a gradient is not finite"
        dtypes = {t.dtype for t in self.given.start.tensors.values()}
        if self.model.host is not None and torch.float16 in dtypes:
            return "the update is not compared, since the CPU computes it in float32"
        if self.given.start.continues and not one.restored:
            return "the update is not compared, since it continues from loaded optimizer states"
        if self.skeleton.problems and not self.given.start.is_later:
            left = "; ".join(self.skeleton.problems)
            return f"the update is not compared, since callbacks cannot be copied ({left})"
        return ""

    @property
    def tolerance(self) -> Tolerance:
        """Of losses and gradients."""
        dtypes = [t.dtype for t in self.given.start.tensors.values()]
        if self.options.reduce_dtype is not None:
            dtypes.append(self.options.reduce_dtype)
        return tolerance_at(self.model.module.trainer.precision, *dtypes)

    @property
    def step(self) -> str:
        """Which one it is, as in a sentence."""
        start = self.given.start
        return f"step {start.global_step}" if start.is_later else "the first step"

    def _explain(self, difference: Difference, one: StepRecord) -> Differs:
        self.difference = difference
        text = self.explain(difference, draws=one.draws, step=self.step)
        return Differs(text=text, kind=difference.kind)

    def explain(self, difference: Difference, *, draws: bool, step: str, again: str = "") -> str:
        """Return the text of the error.

        Args:
            difference: What differs.
            draws: Whether the step draws random numbers.
            step: Which one it is, as in a sentence.
            again: What another forward and backward has shown.
        """
        trainer = self.model.module.trainer
        found = Findings(
            module=self.skeleton.module,
            sizes=self.model.mesh.sizes,
            styles=self.model.resolved.styles,
            draws=draws,
            optimizers=[
                type(optimizer)
                for optimizer in trainer.optimizers
                if declared_reach(optimizer) != "entry" or hasattr(optimizer, LOOKS_ACROSS)
            ],
            callbacks=self.skeleton.callback_names,
            step=step,
            again=again,
        )
        return explain(difference, found)


def verdict_of(judge: Callable[[], Any]) -> Any:
    """Return what a judge finds, or why it cannot be proved."""
    try:
        return judge()
    except CannotProveError as reason:
        return reason
    except Exception as error:  # of ours: the other ranks wait for a verdict
        return CannotProveError(f"{type(error).__name__}: {error}")


def agree(judge: Callable[[], Any]) -> Any:
    """Return what rank 0 finds, or why it cannot be proved, on every rank."""
    return from_first(verdict_of(judge) if dist.get_rank() == 0 else None)
