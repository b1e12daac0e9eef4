"""The first look at a run's training step: finds how the loss of a batch is made of those of its
parts, without leaving a trace.
"""

import inspect
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_par.engine.batch import BatchDims, take_samples
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.step.batch_statistics import training_batchnorms
from lightning_par.strategies.step.batch_weights import BatchWeigher, LossRule
from lightning_par.strategies.step.look.loss_rule import (
    candidate_rules,
    choose_rule,
    rule_error,
    Seen,
)
from lightning_par.strategies.step.metrics import compare_metrics, OF_METRIC
from lightning_par.strategies.step.step_traces import (
    compare_parts,
    NOT_OF_PARTS,
    SAME_KIND,
    SUM_OF_PARTS,
)

__all__ = ["FirstLook", "choose_parts", "run_parts"]

_LOG = logging.getLogger(__name__)
_LOOKS = 4
"""Batches for which rules that agreed so far may differ, before the question is given up."""
_ROWS = 16
"""Samples of a batch from which the parts are chosen."""

RunParts = Callable[[Sequence[tuple[Any, int]]], tuple[Seen, bool]]
"""Runs the step without gradients on some samples (and their number) and on their parts, and tells
whether it drew random numbers that cannot be cut; the same on every rank of the replica.
"""


class FirstLook:
    """Finds the rule of a run's loss, see Note [Finding the rule] in `look/loss_rule.py`.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        layout: What is declared of its batches.
        weigher: Gets the rule.

    Attributes:
        is_over: Whether no later step has to be looked at, whatever its batch.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        layout: BatchLayout,
        weigher: BatchWeigher,
    ) -> None:
        self._module, self._mesh, self._layout, self._weigher = module, mesh, layout, weigher
        self._looks = 0
        self.is_over = mesh.sizes.context > 1 or mesh.sizes.world_size == 1

    def is_due(self, batch: Any, microbatches: int, differ: bool | None = None) -> bool:
        """Tell whether the step has to be looked at before it runs; the same on every rank.

        Args:
            batch: That of this replica.
            microbatches: Into how many it is cut.
            differ: Whether the rules differ for it, as the weigher says; None: it is asked.

        **Communicates**: see `BatchWeigher.is_unsettled`.
        """
        if self.is_over:
            return False
        if not self._looks:
            return True
        self.is_over = self._looks >= _LOOKS or not self._weigher.alternatives
        if self.is_over or not self._finds_rule(microbatches):
            return False
        return self._weigher.is_unsettled(
            self._weigher.rules_differ(batch) if differ is None else differ
        )

    def rules(self, batch: Any, dims: BatchDims) -> list[LossRule]:
        """Return the rules that a loss of a batch may follow, the likely ones first."""
        return candidate_rules(batch, self._layout, dims, self._module)

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
        self._looks += 1
        rules = self.rules(batch, dims)
        found = None
        parts = [(batch, dims.size or 1)]
        divides = microbatches > 1 or self._mesh.sizes.data > 1
        if divides and dims.size is not None and dims.size > 1 and not dims.unsure:
            parts = choose_parts(batch, dims, microbatches, rules)
        seen, is_random = run_parts(run, parts, (batch, dims.size or 1))
        self._check_tensor_ranks(seen)
        if not self._finds_rule(microbatches):
            return
        if len(parts) > 1:
            found = _errors(rules, seen, parts[1:]), is_random
        errors, is_random = self._agree(found)
        # Of one sample, or of a loss that is not finite, nothing can be told.
        is_known = bool(errors) and math.isfinite(min(errors.values()))
        fitting = choose_rule(errors, self._tolerance()) if is_known else []
        if fitting:
            self._settle(rules, fitting)
        elif is_known and is_random:
            _LOG.info("the step draws random numbers in a way that left its loss unchecked.")
        elif is_known:
            raise ConfigurationError("LP309", self._refusal(rules[0], dims, microbatches))
        if not is_random:
            told = seen if is_known else Seen(losses=[], logs=[], metrics=({}, {}))
            self.warn_of_logs("training_step", self.judge_logs(told, parts, microbatches))

    def _settle(self, rules: Sequence[LossRule], fitting: Sequence[str]) -> None:
        """Give the weigher its rule, and those that fit as well so far."""
        by_name = {rule.name: rule for rule in rules}
        weigher = self._weigher
        weigher.rule = by_name[fitting[0]]
        trusted = weigher.rule is rules[0] and self._layout.labels is not None
        others = [] if trusted else [by_name[name] for name in fitting[1:]]
        weigher.alternatives = tuple(rule for rule in others if not rule.is_sum)
        if weigher.rule is not rules[0]:
            _LOG.info("the loss of a batch is %s.", weigher.rule.name)

    def judge_logs(
        self, seen: Seen, parts: Sequence[tuple[Any, int]], microbatches: int
    ) -> frozenset[str]:
        """Learn which logged numbers are sums over the samples; return the names of those, and of
        metrics, that are not made of what parts of a batch log, or update them with.

        Args:
            seen: What the step did on some samples and on parts of them.
            parts: These, with their numbers of samples.
            microbatches: Into how many a batch is cut. Replicas log together what `sync_dist` asks.

        **Communicates**: a number over the replicas; and the names, if there are such.
        """
        kinds: dict[str, int] | None = None
        # A prediction has no labels to weigh by.
        if len(parts) > 1 and (any(seen.logs) or any(seen.metrics)):
            weights = [float(self._weigher.rule.weigh(*part)) for part in parts[1:]]
            logs = [
                [call for call in made if microbatches > 1 or call.options.get("sync_dist")]
                for made in seen.logs
            ]
            weighted = torch.tensor(weights, dtype=torch.float64)
            kinds = compare_parts(logs, weighted, self._tolerance())
            kinds |= compare_metrics(*seen.metrics, self._tolerance())
        held = [kinds]
        if self._mesh.sizes.data > 1:
            tells = torch.tensor(max((kinds or {}).values(), default=SAME_KIND))
            dist.all_reduce(tells, dist.ReduceOp.MAX, group=self._mesh.data_group)
            if tells == SAME_KIND:
                return frozenset()
            held *= self._mesh.sizes.data
            dist.all_gather_object(held, kinds, group=self._mesh.data_group)
        known = [found for found in held if found is not None]
        by_name = {name: {found.get(name) for found in known} for found in known for name in found}
        self._weigher.sums |= {name for name, kind in by_name.items() if kind == {SUM_OF_PARTS}}
        return frozenset(name for name, kind in by_name.items() if NOT_OF_PARTS in kind)

    def warn_of_logs(self, step: str, names: frozenset[str]) -> None:
        """Say which numbers are logged as the mean of what parts of a batch give, and which metrics
        get something else from parts than from a batch.
        """
        metrics = {name for name in names if name.startswith(OF_METRIC)}
        logged = names - metrics
        if metrics:
            rank_zero_warn(
                f"{step} updates the metrics {', '.join(sorted(metrics))} with something else for "
                "the parts of a batch than for the whole: with each micro-batch, on every replica, "
                "where one process updates them once. Give a mean the number of what it is over "
                "(MeanMetric.update(value, weight)), or give the metric what the value is computed "
                "from."
            )
        if logged:
            rank_zero_warn(
                f"{step} logs {', '.join(sorted(logged))}, which for a batch is neither the mean "
                "nor the sum of its parts: micro-batches and replicas log the mean of theirs, "
                "where one process would log another number. Log what it is computed from, and "
                "compute it at the end of the epoch; or use a torchmetrics metric, or "
                "reduce_fx='max'."
            )

    def _check_tensor_ranks(self, seen: Seen) -> None:
        """Refuse a loss that tensor-parallel ranks, which have the same samples, do not share.

        **Communicates**: the losses, over the ``tp`` axis.
        """
        degree = self._mesh.sizes.tensor
        if degree == 1:
            return
        found = [loss for losses in seen.losses for loss in losses]
        if not found:  # the step had no backward
            return
        losses = torch.tensor(found, dtype=torch.float64, device=self._module.device)
        ends = torch.cat([losses, -losses])
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._mesh.group("tp"))
        most, least = ends[: len(losses)], -ends[len(losses) :]
        if bool(((most - least) > self._tolerance() * most.abs().clamp(min=1e-30)).any()):
            raise ConfigurationError(
                "LP310",
                f"{type(self._module).__name__}.training_step gives other losses on the "
                f"{degree} tensor-parallel ranks ({least[0]:.6g} to {most[0]:.6g} for the same "
                "samples): it computes with activations of which every rank has its own tokens or "
                "features. Use sequence_parallel=False, or give the module whose output the loss "
                "takes a style that makes it whole ('sequence_gather_output', "
                "'colwise_gather_output'). No weight was changed.",
            )

    def _agree(self, found: tuple[dict[str, float], bool] | None) -> tuple[dict[str, float], bool]:
        """Return the largest error of every rule, and whether a replica draws."""
        box: list[Any] = [None] * self._mesh.sizes.data
        if len(box) > 1:
            dist.all_gather_object(box, found, group=self._mesh.data_group)
        else:
            box = [found]
        held = [replica for replica in box if replica is not None]
        if not held:
            return {}, False
        names = [name for name in held[0][0] if all(name in errors for errors, _ in held)]
        worst = {name: max(errors[name] for errors, _ in held) for name in names}
        return worst, any(draws for _, draws in held)

    def _tolerance(self) -> float:
        precision = str(self._module.trainer.precision)
        if precision.startswith("64"):
            return 2e-6  # models may compute parts in float32: scans, norms, CTC
        if precision.endswith("16-true"):
            return 2e-2  # the losses themselves are rounded to bfloat16
        return 5e-3 if "16" in precision else 2e-5

    def _refusal(self, rule: LossRule, dims: BatchDims, microbatches: int) -> str:
        sizes = self._mesh.sizes
        step = inspect.unwrap(type(self._module).training_step)
        code = getattr(step, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        divided = f"{microbatches} micro-batches" * (microbatches > 1)
        divided += " and " * (microbatches > 1 and sizes.data > 1)
        divided += f"{sizes.data} replicas" * (sizes.data > 1)
        cut = ", ".join(repr(path) for path in dims.dims if path)
        cure = ["num_microbatches=1"] * (microbatches > 1)
        cure += ["data_parallel_size=1"] * (sizes.data > 1)
        return (
            f"{type(self._module).__name__}.training_step{where} on {divided}: the loss of some "
            f"samples is neither {rule.name}, nor their sum, nor a mean over labels, of the losses "
            "of its parts, so the mesh would train something else than one process. Cut along the "
            f"batch: {cut or 'the batch'}. If one of these entries has no batch dim, declare "
            "ParallelPlan(batch=BatchLayout(whole=(entry,))). If the loss is a weighted mean, "
            "declare BatchLayout(loss_weight=...): 'samples', 'labels', 'sum', the name of an "
            "entry, or a function of the batch that returns its weight. If samples are compared "
            "with each other (in-batch negatives), gather them with self.all_gather(..., "
            "sync_grads=True), declare loss_weight='samples', and use one micro-batch. If the step "
            "draws from a generator of its own, draw in the dataset or collate_fn instead. "
            f"Otherwise use {' and '.join(cure)}. No weight was changed."
        )


def run_parts(
    run: RunParts, parts: Sequence[tuple[Any, int]], whole: tuple[Any, int]
) -> tuple[Seen, bool]:
    """Run a step on parts of a batch.

    Args:
        run: Runs it.
        parts: Some samples, and parts of them.
        whole: The batch, on which the step runs if it does not run on its parts.

    Raises:
        Exception: Of the user's step, if it fails on the whole batch, too.
        ConfigurationError: Of `run`, as where the step runs on the whole batch only.
    """
    try:
        return run(parts)
    except ConfigurationError as error:
        refusal = error
    if refusal.code == "LP303" and len(parts) > 1:
        run([whole])  # not while the refusal is handled, which would be told first
    raise refusal


def choose_parts(
    batch: Any, dims: BatchDims, microbatches: int, rules: Sequence[LossRule]
) -> list[tuple[Any, int]]:
    """Return some samples and two parts of them, for which the rules differ most; each with its
    number of samples.
    """
    assert dims.size is not None
    # A step may not bear a single sample, unless micro-batches have no more.
    half = 2 if dims.size >= 4 and dims.size // microbatches >= 2 else 1
    count = min(dims.size, _ROWS)
    rows = [take_samples(batch, dims, [index]) for index in range(count)]
    orders = [list(range(count))]
    for rule in rules:
        weights = [float(rule.weigh(row, 1)) for row in rows]
        if len(set(weights)) > 1:
            orders.append(sorted(range(count), key=weights.__getitem__))

    def parts_of(order: Sequence[int]) -> list[tuple[Any, int]]:
        low, high = sorted(order[:half]), sorted(order[-half:])
        return [(take_samples(batch, dims, part), len(part)) for part in (low + high, low, high)]

    def distinct(order: Sequence[int]) -> tuple[int, int]:
        """How many rules differ for these parts, of the likely ones and of all."""
        _, *halves = parts_of(order)
        weights = [[float(rule.weigh(*part)) for part in halves] for rule in rules]
        shares = [round(w[0] / max(sum(w), 1e-30), 6) for w in weights]
        likely = [share for share, rule in zip(shares, rules, strict=True) if rule.is_likely]
        return len({*likely}), len({*shares})

    return parts_of(max(orders, key=distinct))


def _errors(
    rules: Sequence[LossRule], seen: Seen, parts: Sequence[tuple[Any, int]]
) -> dict[str, float]:
    """Return the error of every rule, the largest of all losses of a step; nothing if the parts
    have other numbers of them, or none.
    """
    if len({len(losses) for losses in seen.losses}) > 1 or not seen.losses[0]:
        return {}
    weights = {rule.name: [float(rule.weigh(*part)) for part in parts] for rule in rules}
    columns = list(zip(*seen.losses, strict=True))
    return {
        rule.name: max(
            rule_error(rule, whole, losses, weights[rule.name]) for whole, *losses in columns
        )
        for rule in rules
    }
