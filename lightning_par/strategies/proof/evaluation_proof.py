"""Proves the first batch of each data loader in validation, test and prediction.

One process runs the step before the mesh does, as it needs the module as it is then: with the
weights and buffers that rank 0 gathers, and the attributes that hooks have left on rank 0.
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_par.engine.rng import collect_random_states, fork_all_rng
from lightning_par.engine.tensor_tree import to_cpu
from lightning_par.errors import VerificationError
from lightning_par.observe.compare import Difference, first_beyond, measure_values, Tolerance
from lightning_par.observe.report import EvaluationRecord, StartValues, StepRecord
from lightning_par.strategies.data.joined_batch import join_batches, samples_of
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.by_blocks import evaluate_by_blocks
from lightning_par.strategies.proof.gathering import from_first, gather_batches, gather_state
from lightning_par.strategies.proof.judge import agree, CannotProveError, Judge, verdict_of
from lightning_par.strategies.proof.on_difference import follow
from lightning_par.strategies.proof.one_process import evaluate_alone, GivenStep
from lightning_par.strategies.proof.skeleton import reason_of_run, Skeleton
from lightning_par.strategies.proof.step_proof import LONGEST, NOT_PROVED
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.metrics import MetricsOfBatch, OF_METRIC
from lightning_par.strategies.step.runner import EvaluationStep
from lightning_par.strategies.step.step_traces import LogCall, noted_logs
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["EvaluationProof"]

_SIXTEEN_BITS = 1e-3
"""Tolerance of losses above which a rounding may change what is counted, as an accuracy is."""
_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class _Batch:
    """A batch that is proved: what is known before the step, and what is noted in it."""

    judge: Judge | None
    one: EvaluationRecord
    metrics: MetricsOfBatch
    logs: list[LogCall] = field(default_factory=list)
    output: list[Any] = field(default_factory=list)


class EvaluationProof:
    """Compares the first batch of each evaluation step and data loader with one process.

    Args:
        skeleton: From `take_skeleton`; None: nothing is to be proved.
        options: Of the strategy.
        device: Device of this rank.
        outcomes: Gets, on rank 0, what came out; see `StepProof`.
    """

    def __init__(
        self,
        skeleton: Skeleton | str | None,
        options: MeshOptions,
        device: torch.device,
        outcomes: dict[str, str],
    ) -> None:
        self._skeleton, self._options, self._device = skeleton, options, device
        self._outcomes, self._met = outcomes, set[Any]()
        # Of all loaders together: by blocks nobody knows the time before.
        self._left = math.inf if options.verify_share is None else LONGEST

    @contextmanager
    def proved(
        self,
        model: ParallelModel,
        plugin: Precision,
        name: str,
        args: Sequence[Any],
        known: EvaluationStep,
    ) -> Iterator[list[Any]]:
        """Surrounds an evaluation step; what it returns has to be appended to the list.

        Args:
            model: The model on its mesh.
            plugin: Precision plugin.
            name: Of the step.
            args: The batch of this replica, and what else the step takes.
            known: What is known of the step.

        Raises:
            VerificationError: On every rank, if the step differs from that of one process.

        **Communicates**: for the first batch, weights, the batches, and what they gave, to rank 0;
        then the verdict.
        """
        key = name, *args[2:]
        if self._skeleton is None or key in self._met:
            yield []
            return
        self._met.add(key)
        loader = f", loader {args[2]}" if len(args) > 2 else ""
        which = f"the first batch of {name}{loader}"
        reason = "replicas may have different numbers of batches to predict."
        if name != "predict_step" or model.mesh.sizes.data == 1:
            run = reason_of_run(self._skeleton, model.module)
            if not run and model.resolved.plan.batch.local_statistics:
                run = (
                    "BatchLayout(local_statistics=True) allows statistics over a part of the batch."
                )
            alone = "each replica runs the step on its own samples, as an earlier log line says."
            reason = from_first(run or (alone if known.is_of_replica else ""))
        if reason:
            self._leave(which, reason)
            rank_zero_info(f"{_begin(which)} {NOT_PROVED}: {reason}")
            yield []
            return
        with self._aside():
            batch = self._take(model, plugin, name, args)
        with noted_logs(model.module, batch.logs), batch.metrics.follow():
            yield batch.output
        with self._aside():
            self._prove(model, batch, which, known)

    def _aside(self) -> ExitStack:
        stack = ExitStack()
        # Lightning evaluates in inference mode on CUDA, where a DTensor cannot be detached.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(fork_all_rng(self._device))
        return stack

    def _leave(self, which: str, reason: str) -> None:
        self._outcomes[which.removeprefix("the ")] = f"not proved: {reason.removesuffix('.')}"

    def _take(
        self, model: ParallelModel, plugin: Precision, name: str, args: Sequence[Any]
    ) -> _Batch:
        """Run the step on one process, on rank 0."""
        module, mesh, skeleton = model.module, model.mesh, self._skeleton
        is_large = from_first(isinstance(skeleton, Skeleton) and bool(skeleton.too_large))
        start = StartValues(
            tensors={} if is_large else gather_state(model),
            global_step=module.global_step,
            epoch=module.current_epoch,
            continues=False,
        )
        own = None if model.steps.repeats else args[0]
        given = GivenStep(
            start=start,
            batches=[gather_batches(own, mesh)],
            arguments=[args[1:]],
            random_states=[collect_random_states(self._device)],
        )
        judge, one = None, EvaluationRecord()
        if isinstance(skeleton, Skeleton):
            judge = Judge(
                skeleton=skeleton,
                model=model,
                options=self._options,
                plugin=plugin,
                device=self._device,
                given=given,
                noted=StepRecord(),
            )
        alone = partial(_run_alone, name=name)
        if is_large:
            begin, left = monotonic(), self._left
            found = verdict_of(lambda: evaluate_by_blocks(model, judge, alone, left))
            self._left -= monotonic() - begin
            is_known = not isinstance(found, CannotProveError)
            one = (found or one) if is_known else EvaluationRecord(error=found)
        elif judge is not None:
            one = alone(judge)
        return _Batch(judge=judge, one=one, metrics=MetricsOfBatch(module, looks=True))

    def _prove(
        self, model: ParallelModel, batch: _Batch, which: str, known: EvaluationStep
    ) -> None:
        steps, mesh = model.steps, model.mesh
        group = mesh.token_group if known.is_divided else mesh.data_group
        if group.size() > 1:
            batch.metrics.join(group)
        metrics = to_cpu(batch.metrics.values())
        if steps.pipeline is not None:
            metrics = steps.pipeline.from_last_stage(metrics)
        output = None if known.is_divided else to_cpu(batch.output[0])
        parts = gather_batches((list(map(_plain, batch.logs)), output), mesh)

        def judge() -> str | None:
            assert batch.judge is not None
            compared = _Comparison(
                judge=batch.judge, one=batch.one, notes=batch.judge.notes, told=known.told
            )
            return compared.verdict(parts, metrics, which)

        verdict = agree(judge)
        notes = [] if batch.judge is None else batch.judge.notes
        if isinstance(verdict, CannotProveError):
            self._leave(which, str(verdict))
            if mesh.rank == 0:
                _logger.warning("%s %s: %s.", _begin(which), NOT_PROVED, verdict)
        elif verdict is not None:
            error = VerificationError("LP801", verdict)
            follow(error, model.module.trainer, self._options.on_difference)
            self._outcomes[which.removeprefix("the ")] = f"differs ({error.code})"
        elif notes:
            self._outcomes[which.removeprefix("the ")] = f"in part: {'; '.join(notes)}"
            rank_zero_info(f"{_begin(which)} is proved in part: {'; '.join(notes)}.")
        else:
            self._outcomes[which.removeprefix("the ")] = "equal"
            rank_zero_info(f"{_begin(which)} on {mesh.sizes} equals that of one process.")


def _begin(which: str) -> str:
    return f"T{which[1:]}"


def _run_alone(judge: Judge, name: str) -> EvaluationRecord:
    try:
        return evaluate_alone(
            judge.skeleton,
            judge.given_whole,
            name,
            judge.model.module,
            judge.device,
            judge.own_plugin,
        )
    except CannotProveError as reason:  # of a batch that cannot be joined
        return EvaluationRecord(error=reason)


def _plain(call: LogCall) -> tuple[str, float, str, float, bool]:
    """Return name, value, reduction, weight, and whether the replicas are reduced."""
    kind, size = call.options.get("reduce_fx", "mean"), call.options.get("batch_size")
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    weight = 1.0 if size is None else float(size)
    return call.name, float(call.value), name, weight, bool(call.options.get("sync_dist"))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Comparison:
    """What the replicas have of a batch, against one process."""

    judge: Judge
    one: EvaluationRecord
    notes: list[str]
    told: frozenset[str]

    def verdict(
        self, parts: list[Any] | None, metrics: Mapping[str, Any], which: str
    ) -> str | None:
        """Return how they differ; None: they do not.

        Raises:
            CannotProveError: That is not known.
        """
        error = self.one.error
        if isinstance(error, CannotProveError):
            raise error
        if error is not None:
            kind = type(error).__name__
            raise CannotProveError(f"the step failed on one process with {kind}: {error}")
        batches = self.judge.given.batches[0]
        if parts is None:
            raise CannotProveError("its results cannot be sent to rank 0")
        if len(batches) < len(parts):
            raise CannotProveError("a replica has no sample in this batch")
        tolerance = self.judge.tolerance
        found = list(self._measure(parts, metrics, tolerance))
        difference = first_beyond(found)
        if difference is not None:
            if self.one.draws:
                raise CannotProveError("the step draws random numbers")
            if tolerance.loss > _SIXTEEN_BITS:
                raise CannotProveError(
                    f"{difference}, which may be a rounding error of 16-bit numbers"
                )
            return self.judge.explain(difference, draws=False, step=which)
        if not found:
            raise CannotProveError("it neither logs nor returns a value that can be compared")
        return None

    def _measure(
        self, parts: Sequence[Any], metrics: Mapping[str, Any], tolerance: Tolerance
    ) -> Iterator[Difference]:
        logged: list[dict[str, list[Any]]] = [{} for _ in parts]
        for held, (calls, _) in zip(logged, parts, strict=True):
            for name, *call in calls:
                held.setdefault(name, []).append(call)
        for name, wanted in self.one.logs.items():
            calls = [held.get(name, []) for held in logged]
            if name in self.told:
                self.notes.append(f"{name!r} differs between replicas, as a warning says")
            elif any(len(made) != len(wanted) for made in calls):
                self.notes.append(f"{name!r} is logged a different number of times on one process")
            elif len(parts) > 1 and not calls[0][0][-1]:
                self.notes.append(
                    f"{name!r} is logged without sync_dist, so it is the value of one replica"
                )
            else:
                got = [_reduced(turn) for turn in zip(*calls, strict=True)]
                yield from measure_values("log", name, got, wanted, tolerance)
        for name in self.one.metrics.keys() & metrics.keys():
            if OF_METRIC + name in self.told:
                self.notes.append(
                    f"the metric {name!r} differs between replicas, as a warning says"
                )
                continue
            got, wanted = (tree_leaves(held[name]) for held in (metrics, self.one.metrics))
            yield from measure_values("metric", name, got, wanted, tolerance)
        outputs = [tree_leaves(output) for _, output in parts]
        wanted = tree_leaves(self.one.output)
        if any(len(output) != len(wanted) for output in outputs):
            self.notes.append(
                "the values that it returns are not compared, since each rank has only a part of "
                "them"
            )
            return
        got = list(map(self._joined, zip(*outputs, strict=True)))
        pairs = [(g, w) for g, w in zip(got, wanted, strict=True) if g is not None]
        if len(pairs) < sum(isinstance(w, int | float | Tensor) for w in wanted):
            self.notes.append(
                "numbers that it returns are not compared, since they are computed from the "
                "samples of one replica"
            )
        if pairs:
            got, wanted = map(list, zip(*pairs, strict=True))
            yield from measure_values("output", "", got, wanted, tolerance)

    def _joined(self, leaves: Sequence[Any]) -> Any:
        """Return what all replicas return in one place; None: it has no batch dim."""
        if len(leaves) == 1:
            return leaves[0]
        sizes = map(samples_of, self.judge.given.batches[0])
        for leaf, size in zip(leaves, sizes, strict=True):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] != size:
                return None
        return join_batches(leaves)


def _reduced(calls: Sequence[Any]) -> float:
    """Return what Lightning makes of the number that every replica logs."""
    values, weights = [float(call[0]) for call in calls], [float(call[2]) for call in calls]
    kind = calls[0][1]
    if kind == "sum":
        return sum(values)
    if kind in ("max", "min"):
        return max(values) if kind == "max" else min(values)
    pairs = zip(values, weights, strict=True)
    return sum(v * w for v, w in pairs if w) / (sum(weights) or float("nan"))
