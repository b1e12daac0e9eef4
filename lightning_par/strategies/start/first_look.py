"""The first look at a run's training step: how the loss of a batch is made of those of its parts.

Length: the ways to decide, and what is said where none of them does.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_par.engine.batch import BatchDims, has_entry, take_samples
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.data.replica_batches import Share
from lightning_par.strategies.data.weights_on_host import KnownWeights
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.start.contrast import make_contrast
from lightning_par.strategies.start.logged_means import judge_logs
from lightning_par.strategies.start.loss_refusal import refusal_of_loss, refusal_of_uncounted
from lightning_par.strategies.start.loss_rule import (
    candidate_rules,
    choose_parts,
    choose_rule,
    errors_of,
    have_no_loss,
    rows_of_a_step,
)
from lightning_par.strategies.start.own_outputs import (
    check_hyperparameters,
    check_left_values,
    check_tensor_ranks,
    warn_of_logs,
    warn_of_own_outputs,
)
from lightning_par.strategies.start.seen_rules import (
    common_ratios,
    labels_seen,
    ratios_seen,
    rules_made,
    rules_seen,
)
from lightning_par.strategies.start.uncut_batch import cure_of_uncut, run_parts, RunParts
from lightning_par.strategies.step.batch_statistics import training_batchnorms
from lightning_par.strategies.step.batch_weights import BatchWeigher, LossRule
from lightning_par.strategies.step.loss_form import Confirmed, FormWatch
from lightning_par.strategies.step.step_report import StepReport

__all__ = ["FirstLook"]

_LOG = logging.getLogger(__name__)
_DECLARE = (
    "Declare what the loss is a mean over in ParallelPlan(batch=BatchLayout(loss_weight=...)): "
    "'samples', 'labels', 'sum' for a sum, the name of the batch entry that holds the weights, or "
    "a function of the batch that returns its weight."
)
_LOOKS = 4
"""Batches for which rules that agreed so far may differ, before the question is given up."""
_LATEST = 2**10
"""Batches after which no number or term of the loss is looked at any more that was always 0."""


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What one replica, or all of them together, found out about the rule.

    Attributes:
        errors: Name of a rule -> its largest error; empty if nothing can be told.
        is_random: Whether the step draws random numbers that cannot be cut.
        seen: Names of the rules that a cross-entropy shows; None: it shows none.
        ratios: Name of a rule -> see `ratios_seen`.
        labels: Entries of the batch that are labels of a cross-entropy.
        samples: Number of samples of the smallest batch; 0 if it is not known.
    """

    errors: Mapping[str, float]
    is_random: bool
    seen: frozenset[str] | None = None
    ratios: Mapping[str, frozenset[float]] = field(default_factory=dict)
    labels: frozenset[str] = frozenset()
    samples: int = 0


class FirstLook:
    """Finds the rule of a run's loss, see Note [Finding the rule] in `loss_rule.py`.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        layout: What is declared of its batches.
        weigher: Gets the rule.
        form: Notices when the loss takes another form than it had when it was looked at.
        decisions: Where it is noted.
        microbatches: Into how many a full batch is cut.
        has_values: Whether losses have values, which may tell the rule.

    Attributes:
        share: What the batch that comes is of the global one.
        is_over: Whether no later step has to be looked at, whatever its batch.
        is_told: Whether the last look has shown anything of the rule of the loss.
        looks: Number of looks.
        judge_logs: `logged_means.judge_logs` of this run.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        layout: BatchLayout,
        weigher: BatchWeigher,
        form: FormWatch,
        decisions: Decisions,
        microbatches: int,
        has_values: bool,
    ) -> None:
        self._module, self._mesh, self._layout, self._weigher = module, mesh, layout, weigher
        self._form, self._decisions, self._microbatches = form, decisions, microbatches
        self.looks, self._is_known, self.share, self._fits = 0, True, Share(), frozenset[str]()
        self._asked, self._hides_logs = 0, False  # after the first look; as of the weigher
        self._stays: LossRule | None = None  # the rule in use, if a look is to change it only if
        # it does not fit
        self.judge_logs = partial(judge_logs, weigher, mesh, decisions, self.tolerance)
        self.is_told, self._has_values = False, has_values
        self.is_over = mesh.sizes.context > 1 or mesh.sizes.world_size == 1
        if mesh.sizes.context > 1 and layout.labels and layout.loss_weight is None:
            form.confirms = Confirmed(weigher.rule.name, frozenset(), of_labels=True)

    def is_due(
        self,
        batch: Any,
        samples: int,
        microbatches: int,
        known: KnownWeights | None = None,
    ) -> bool:
        """Tell whether the step has to be looked at before it runs; the same on every rank.

        Args:
            batch: That of this replica.
            samples: Their number.
            microbatches: Into how many it is cut.
            known: How the rules weigh it, if the host knows that; None: the weigher is asked.

        **Communicates**: see `BatchWeigher.is_unsettled`.
        """
        if self.is_over:
            return False
        if not self.looks:
            # What the first replica has alone tells nothing of how losses of replicas add up.
            return not self.share.is_whole or self._mesh.sizes.data == 1
        if not self.share.is_even:
            return False
        weigher, self._asked = self._weigher, self._asked + 1
        is_settled = self._is_known and not weigher.alternatives
        ends = self.looks >= _LOOKS or is_settled
        is_shown = not self._hides_logs or self._asked > _LATEST
        self.is_over = ends and is_shown
        # Ever more rarely: a number may be 0 for all of a run.
        is_turn = not is_shown and self._asked & (self._asked - 1) == 0
        if self.is_over or (ends and not is_turn) or not self._finds_rule(microbatches):
            if self.is_over and not is_settled:
                self._name_unsettled()
            return False
        if is_turn or not self._is_known:
            return True
        compared = weigher.compare_rules(batch, samples) if known is None else known.compared
        return weigher.is_unsettled(compared)

    def rules(self, batch: Any, dims: BatchDims) -> list[LossRule]:
        """Return the rules that a loss of a batch may follow, the likely ones first."""
        rules = candidate_rules(batch, self._layout, dims, self._module)
        if self._stays is not None and self._stays.name not in [rule.name for rule in rules]:
            rules.insert(-1, self._stays)  # one that was seen to be made by the step
        return rules

    def _with_whole(self, batch: Any, dims: BatchDims) -> BatchDims:
        """Return dims by which entries that are never cut may hold the labels of a loss."""
        held = (path for path in self._layout.whole if has_entry(batch, path))
        return replace(dims, dims=dict.fromkeys(held, 0))

    def _finds_rule(self, microbatches: int) -> bool:
        divides = microbatches > 1 or self._mesh.sizes.data > 1
        # With statistics over the batch, no loss is made of those of parts.
        return (
            divides
            and self._layout.loss_weight is None
            and not self._layout.local_statistics
            and not (self._mesh.sizes.pipeline == 1 and training_batchnorms(self._module))
        )

    def look(self, batch: Any, dims: BatchDims, microbatches: int, run: RunParts) -> None:
        """Run the step on a few samples; find the rule of the loss and give it to the weigher.

        Args:
            batch: That of this replica.
            dims: Which entries have a batch dim.
            microbatches: Into how many it is cut.
            run: Runs the step.

        Raises:
            ConfigurationError: The loss of a batch is not made of the losses of its parts, or the
                step runs on the batch and not on parts of it.
            Exception: Of the user's step, which does not run on the batch either.

        **Communicates**: what the step does, and the results over stages and replicas.
        """
        self.looks += 1
        is_whole = dims.size is None and bool(self._layout.whole)
        rules = self.rules(batch, self._with_whole(batch, dims) if is_whole else dims)
        parts = [(batch, dims.size or 1)]
        divides = microbatches > 1 or self._mesh.sizes.data > 1
        if divides and dims.size is not None and dims.size > 1 and not dims.unsure:
            parts = choose_parts(batch, dims, microbatches, rules)
        whole = (batch, dims.size or 1)
        takes_whole = partial(self._shows_rule, rules, whole) if microbatches == 1 else None
        cure = cure_of_uncut(batch, microbatches, self._mesh.sizes.data)
        seen, is_random = run_parts(run, parts, whole, takes_whole, cure)
        parts = parts if len(seen.losses) == len(parts) else [whole]
        self._check(seen)
        made = rules_made(rules, seen, parts, dims) if self._finds_rule(microbatches) else []
        if not self._all_agree(not made):
            rules[-1:-1] = made  # before the sum, which a part without a weight makes like them
            parts = choose_parts(batch, dims, microbatches, rules) if len(parts) > 1 else parts
            seen, is_random = run_parts(run, parts, whole, takes_whole, cure)
        self._form.has_to_stay = self._finds_rule(microbatches)
        # A batch of unequal parts is not cut, and tells nothing of those that are.
        self._is_known = self._form.has_to_stay or not self._finds_rule(self._microbatches)
        if self._form.has_to_stay:
            count = 0 if dims.unsure else dims.size or 0
            found = self._agree(self._finding(rules, seen, parts, is_random, count))
            is_random = found.is_random
            if is_whole and self._layout.labels is None and not (found.seen or self._stays):
                raise ConfigurationError("LP309", refusal_of_uncounted(self._layout))
            found = self._told_better(rules, found, (batch, parts[0][0]), dims, microbatches, run)
            self._decide(rules, found, batch, dims, microbatches, run)
            if not is_random and self._stays is None:
                told = seen if _is_told(found) else StepReport(losses=[], logs=[], metrics=({}, {}))
                self._warn_of_logs(told, parts, microbatches)
        elif divides:
            # Over replicas a step may gather samples; over micro-batches it cannot.
            if microbatches > 1 and not self._layout.local_statistics:
                rule = self._weigher.rule
                found = self._agree(self._finding([rule], seen, parts, is_random))
                fits = not _is_told(found) or choose_rule(found.errors, self.tolerance())
                if not fits and not found.is_random:
                    raise ConfigurationError("LP309", self._refusal(rule, dims, microbatches))
            self._decisions.add("loss", self._weigher.rule.name, "as declared")
            if self._layout.loss_weight is not None and not is_random:
                self._warn_of_logs(seen, parts, microbatches)
        if self._mesh.sizes.data > 1:
            warn_of_own_outputs(self._module, "training_step", seen, self._mesh.sizes.data)
        if divides and dims.size is not None:
            entries = ", ".join(path or "the batch" for path in dims.dims)
            self._decisions.add("batch dim", f"{dims.size} samples of {entries}")
        self._decisions.log()

    def _check(self, seen: StepReport) -> None:
        """Refuse what no rule of a loss mends."""
        check_tensor_ranks(self._module, self._mesh, seen, self.tolerance())
        check_left_values(seen, self._mesh.sizes, follows=not self._all_agree(not seen.follows))
        check_hyperparameters(seen, self._mesh.sizes, any_sets=not self._all_agree(not seen.sets))

    def look_again(
        self,
        batch: Any,
        dims: BatchDims,
        microbatches: int,
        run: RunParts,
        cut: Callable[[Any], tuple[Sequence[Any], Sequence[int]]],
        may_stay: bool,
    ) -> None:
        """Look at a step whose loss has a new form, after its backward.

        Args:
            batch: That of this replica.
            dims: Which entries have a batch dim.
            microbatches: Into how many it is cut.
            run: Runs the step.
            cut: Gives the micro-batches, and their numbers of samples.
            may_stay: Whether the rule in use stays if it fits this batch, or the batch tells
                nothing of it, as one in which a replica has no label that counts.

        Raises:
            ConfigurationError: The loss of a batch is not made of the losses of its parts any more,
                or in another way, so that the gradients of this step are wrong.

        **Communicates**: as `look` does.
        """
        weigher, parts = self._weigher, cut(batch)
        before, weights = weigher.rule, weigher.weigh(*parts)
        step = self._module.trainer.global_step
        told = self.looks, self._is_known
        self._stays = before if may_stay else None
        try:
            self.look(batch, dims, microbatches, run)
        except ConfigurationError as error:
            error.add_note(
                f"The formula of the loss changed in step {step}. The steps before it were "
                "checked and are correct. No weight was changed in this step."
            )
            raise
        finally:
            self._stays = None
        if may_stay and weigher.rule is before:
            self.looks, self._is_known = told  # the search for the rule goes on as it was
        now = weigher.weigh(*parts)
        is_same = weights.is_sum == now.is_sum and torch.allclose(weights.shares, now.shares)
        if not self._all_agree(is_same):
            sizes = self._mesh.sizes
            cure = ["num_microbatches=1"] * (microbatches > 1)
            cure += ["data_parallel_size=1"] * (sizes.data > 1)
            raise ConfigurationError(
                "LP309",
                f"{type(self._module).__name__}.training_step: the formula of the loss changed in "
                f"step {step}. Before this step the loss was {before.name}; now it is "
                f"{weigher.rule.name}, but the gradients of this step were weighted by the old "
                f"formula. Use one formula in all steps, or use {' and '.join(cure)}. No weight "
                "was changed in this step.",
            )

    def _shows_rule(
        self, rules: Sequence[LossRule], whole: tuple[Any, int], seen: StepReport
    ) -> bool:
        """Tell whether the loss of a batch that cannot be cut is a cross-entropy, whose labels
        weigh the batches of replicas; the same on every rank.
        """
        is_loss = any(
            math.isclose(call.value, loss[0], rel_tol=self.tolerance())
            for calls, loss in zip(seen.calls, seen.losses, strict=True)
            for call in calls
            if loss
        )
        return self._all_agree(is_loss and bool(rules_seen(rules, seen, [whole])))

    def _finding(
        self,
        rules: Sequence[LossRule],
        seen: StepReport,
        parts: Sequence[tuple[Any, int]],
        is_random: bool,
        count: int = 0,
    ) -> _Finding:
        errors = errors_of(rules, seen, parts[1:], self.tolerance()) if len(parts) > 1 else {}
        if self._stays is not None and not any(self._stays.weigh(*part) for part in parts):
            errors = {}  # no rule is told by a loss of nothing
        return _Finding(
            errors=errors if self._has_values else dict.fromkeys(errors, math.nan),
            is_random=is_random,
            seen=rules_seen(rules, seen, parts),
            ratios=ratios_seen(rules, seen.calls, parts),
            labels=labels_seen(rules, seen.calls, parts),
            samples=count,
        )

    def _decide(
        self,
        rules: Sequence[LossRule],
        found: _Finding,
        batch: Any,
        dims: BatchDims,
        microbatches: int,
        run: RunParts,
    ) -> None:
        """Give the weigher the rule that was found, and those that fit as well so far.

        Raises:
            ConfigurationError: No rule fits.
        """
        tolerance, stays = self.tolerance(), self._stays
        has_none = have_no_loss(found.errors, found.samples, microbatches)
        is_told = _is_told(found) or (has_none and stays is None)
        fitting = choose_rule(found.errors, tolerance) if is_told else []
        if stays and (not is_told or found.errors.get(stays.name, math.inf) <= tolerance):
            return
        self._is_known = is_told or found.seen is not None
        self.is_told = is_told or bool(found.seen)
        names = [rule.name for rule in rules]
        if is_told and not fitting:
            if not found.is_random:
                raise ConfigurationError("LP309", self._refusal(rules[0], dims, microbatches))
            # Parts draw other numbers than the whole: only what a cross-entropy shows is known.
            if shown := [name for name in names if name in (found.seen or ())]:
                self._settle(rules, shown, "seen in cross_entropy", found.ratios)
            else:
                self._warn_of_random()
            return
        source = "found by comparing a batch with parts of it"
        plausible = [name for name in names if found.errors.get(name, 0.0) <= tolerance]
        kept = [name for name in plausible if name in (found.seen or ())]
        if kept:
            fitting, source = kept, "seen in cross_entropy"
        elif found.is_random:
            return
        fitting = [n for n in fitting or names if n in self._fits] or fitting or names
        if len(fitting) > 1:
            near = [rule for rule in rules if rule.name in fitting]
            made = self._contrast(near, found, batch, dims, microbatches, run)
            self._is_known |= bool(made)
            fitting = [name for name in fitting if name in made] or fitting
        self._settle(rules, fitting, source, found.ratios)
        is_asked = self.looks == 1 or self._weigher.compares_lengths
        self._weigher.compares_lengths = is_asked and self._has_values

    def _told_better(
        self,
        rules: Sequence[LossRule],
        found: _Finding,
        batches: tuple[Any, Any],
        dims: BatchDims,
        microbatches: int,
        run: RunParts,
    ) -> _Finding:
        """Return what was found, or what other samples of the batch tell where that is little.

        Args:
            rules: Those that may hold.
            found: By all replicas.
            batches: That of this replica, and its samples that were looked at.
            dims: Which entries have a batch dim.
            microbatches: Into how many a batch is cut.
            run: Runs the step.
        """

        def tried(*rows: list[int]) -> _Finding | None:
            cut = [(take_samples(batches[0], dims, each), len(each)) for each in rows]
            return self._try(rules, cut, run)

        if found.samples == 1 and not found.is_random and (two := tried([0, 0], [0], [0])):
            found = replace(found, errors=two.errors)
        if found.samples >= 4 and not _is_told(found):
            # Of a part nothing may count, or no triplet have its third; more samples may tell.
            cut = tried(*rows_of_a_step(found.samples, microbatches))
            return found if cut is None else replace(cut, samples=found.samples)
        if found.samples >= 4 and not found.seen:
            # In the order of the halves: a step that draws for the samples gives each its numbers.
            # A mean over groups of samples is one over samples where groups are equally large.
            if found.samples // microbatches >= 2:
                others = [[[0, 2, 1, 3], [0, 2], [1, 3]], [[0, 0, 0, 3], [0, 0], [0, 3]]]
                return self._crossed(rules, found, batches[1], dims, run, others)
            others = [[[row, row + 1], [row], [row + 1]] for row in range(3)]
            others.append([[0, 0, 0, 1], [0], [0], [0], [1]])
            return self._crossed(rules, found, batches[0], dims, run, others)
        return found

    def _crossed(
        self,
        rules: Sequence[LossRule],
        found: _Finding,
        batch: Any,
        dims: BatchDims,
        run: RunParts,
        others: Sequence[Sequence[list[int]]],
    ) -> _Finding:
        """Return what was found on some samples and two parts of them, with the errors of other
        samples: one choice (`topk`, tokens that count) may give the same by chance.
        """
        for other in others:
            parts = [(take_samples(batch, dims, rows), len(rows)) for rows in other]
            seen, is_random = run(parts)
            more = self._agree(self._finding(rules, seen, parts, is_random))
            if not (_is_told(found) and _is_told(more)):
                return found
            errors = {n: max(e, more.errors.get(n, 0.0)) for n, e in found.errors.items()}
            found = replace(found, errors=errors, is_random=found.is_random or is_random)
        return found

    def _contrast(
        self,
        rules: Sequence[LossRule],
        found: _Finding,
        batch: Any,
        dims: BatchDims,
        microbatches: int,
        run: RunParts,
    ) -> list[str]:
        """Return the names of the rules that hold for samples some of whose labels are masked;
        empty if that tells nothing.

        **Communicates**: as `look` does.
        """
        parts: list[tuple[Any, int]] = []
        if dims.size is not None and not dims.unsure:
            half = 2 if dims.size == 1 or dims.size // microbatches >= 2 else 1
            parts = make_contrast(batch, dims, half, rules, found.labels)
        told = self._try(rules, parts, run) if self._all_agree(bool(parts)) else None
        if told is None:
            return []
        if told.seen:
            return [rule.name for rule in rules if rule.name in told.seen]
        is_told = _is_told(told) and not told.is_random
        return choose_rule(told.errors, self.tolerance()) if is_told else []

    def _try(
        self, rules: Sequence[LossRule], parts: Sequence[tuple[Any, int]], run: RunParts
    ) -> _Finding | None:
        """Return what samples that are not those of the batch tell; None if the step cannot take
        them.
        """
        try:
            seen, is_random = run(parts, made=True)
        except ConfigurationError:  # the same on every rank
            return None
        return self._agree(self._finding(rules, seen, parts, is_random))

    def _settle(
        self, rules: Sequence[LossRule], fitting: Sequence[str], source: str, ratios: Any
    ) -> None:
        """Give the weigher its rule, and those that fit as well so far."""
        by_name, weigher = {rule.name: rule for rule in rules}, self._weigher
        self._fits = frozenset(fitting)
        weigher.rule = by_name[fitting[0]]
        trusted = weigher.rule is rules[0] and self._layout.labels is not None
        others = [] if trusted else [by_name[name] for name in fitting[1:]]
        weigher.alternatives = tuple(rule for rule in others if not rule.is_sum)
        if trusted:
            source = "as declared"
        if weigher.alternatives:
            rest = f"{len(others)} other rules fit" if len(others) > 1 else "another rule fits"
            source = f"{source}; {rest} as well so far"
        self._decisions.add("loss", weigher.rule.name, source)
        self._form.confirms = Confirmed.of(weigher.rule, ratios.get(weigher.rule.name))

    def _agree(self, found: _Finding) -> _Finding:
        """Return what all replicas found together: of errors the largest."""
        box = [found] * self._mesh.sizes.data
        if len(box) > 1:
            dist.all_gather_object(box, found, group=self._mesh.data_group)
        held = [replica for replica in box if replica.errors]
        first = held[0].errors if held else {}
        names = [name for name in first if all(name in replica.errors for replica in held)]
        seen = [replica.seen for replica in box if replica.seen is not None]
        return _Finding(
            errors={name: max(replica.errors[name] for replica in held) for name in names},
            is_random=any(replica.is_random for replica in box),
            seen=frozenset.intersection(*seen) if len(seen) == len(box) else None,
            ratios=common_ratios([replica.ratios for replica in box]),
            labels=frozenset().union(*(replica.labels for replica in box)),
            samples=min(replica.samples for replica in box),
        )

    def _all_agree(self, value: bool) -> bool:
        """Return whether all replicas say yes."""
        votes = torch.tensor(float(value))
        if self._mesh.sizes.data > 1:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._mesh.data_group)
        return bool(votes)

    def _refusal(self, rule: LossRule, dims: BatchDims, microbatches: int) -> str:
        return refusal_of_loss(self._module, rule, dims, microbatches, self._mesh.sizes.data)

    def _warn_of_logs(
        self, seen: StepReport, parts: Sequence[tuple[Any, int]], microbatches: int
    ) -> None:
        """Learn how logged numbers follow from those of parts, and name those that do not."""
        warn_of_logs("training_step", self.judge_logs(seen, parts, microbatches))
        # An evaluation step changes that of the weigher. Ranks of a replica may log other numbers.
        hides = torch.tensor(float(self._weigher.hides_logs or seen.has_zero_term))
        if self._mesh.sizes.world_size > 1:
            dist.all_reduce(hides, dist.ReduceOp.MAX)
        self._hides_logs = bool(hides)

    def _warn_of_random(self) -> None:
        """Say that random numbers hide how the loss is made of those of its parts."""
        rank_zero_warn(
            f"{type(self._module).__name__}.training_step draws random numbers that differ between "
            "a batch and its parts (micro-batches, replicas). So comparing their losses does not "
            "show how to compute the loss of a batch from the losses of its parts. The loss is "
            f"assumed to be {self._weigher.rule.name}. {_DECLARE}"
        )

    def _name_unsettled(self) -> None:
        """Say, once, that the rule of the loss is not known for sure."""
        rules = [self._weigher.rule, *self._weigher.alternatives]
        rank_zero_warn(
            f"{type(self._module).__name__}.training_step: its first steps do not show whether "
            f"the loss is {' or '.join(rule.name for rule in rules[:3])}. It is assumed to be "
            f"{rules[0].name}. {_DECLARE}"
        )

    def tolerance(self) -> float:
        """Return the relative difference that roundings may make."""
        precision = str(self._module.trainer.precision)
        if precision.startswith("64"):
            return 2e-6  # models may compute parts in float32: scans, norms, CTC
        if precision.endswith("16-true"):
            return 2e-2  # the losses themselves are rounded to bfloat16
        return 5e-3 if "16" in precision else 2e-5


def _is_told(found: _Finding) -> bool:
    """Whether errors tell anything: not of one sample, or of a loss that is not finite."""
    return bool(found.errors) and math.isfinite(min(found.errors.values()))
