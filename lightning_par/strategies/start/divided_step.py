"""Whether a step on divided sequences computes what it does on whole ones, tried on a few samples.

Note [Whole or divided]: attention of the blocks sees the tokens of all context ranks, but nothing
else does. A step that shifts labels, generates text, pools over tokens, or keeps outputs in a list
gives something else where a rank has its own tokens. So its first batch runs both ways, without a
trace: a training step whose loss differs is refused, an evaluation step then runs on whole
sequences, on every context rank the same. So does one of which that batch decides nothing, as where
an accuracy is 0 both ways; the next epoch asks again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_par.engine.batch import (
    batch_entry,
    BatchDims,
    sequence_entries,
    take_samples,
    with_entries,
)
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.modes import WithoutDropout
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.step.batch_weights import BatchWeigher, BatchWeights
from lightning_par.strategies.step.metrics import compare_metrics
from lightning_par.strategies.step.sharded_sequence import ShardedSequence
from lightning_par.strategies.step.step_report import StepReport
from lightning_par.strategies.step.step_traces import join_over_context, LogCall
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["DividedLook", "Look"]

_TOKENS = 4096
"""Tokens of a sequence, and of all samples but the first two, that one device tries."""
_TELL_NOTHING = (0.0, 1.0)
"""Values that both ways may have by chance, as an accuracy has."""

Look = Callable[[Any, int, dist.ProcessGroup | None], tuple[StepReport, bool]]
"""Runs the step on some samples, of that number, without a trace, and tells whether it draws random
numbers. The updates of metrics on all ranks of the group count together."""


class DividedLook:
    """Compares a step on divided sequences with the same step on whole ones.

    Args:
        module: The user's LightningModule.
        mesh: Its ``cp`` axis divides sequences.
        sequence: Divides them.
        layout: Where the sequence dims of a batch are.
        weigher: Weighs what the ranks log.
        tolerance: Returns that of roundings, relative.
        has_values: Whether losses have values, which may be compared.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        sequence: ShardedSequence,
        layout: BatchLayout,
        weigher: BatchWeigher,
        tolerance: Callable[[], float],
        has_values: bool,
    ) -> None:
        self._module, self._mesh, self._sequence = module, mesh, sequence
        self._layout, self._weigher, self._tolerance = layout, weigher, tolerance
        self._has_values, self._unsettled = has_values, set[Any]()

    def check_training(self, batch: Any, dims: BatchDims, run: Look) -> None:
        """Refuse a training step whose loss on divided sequences is another one.

        Args:
            batch: That of this replica, whole.
            dims: Which entries have a batch dim.
            run: Runs the step.

        Raises:
            ConfigurationError: See above, the step mixes tokens in a block, or context ranks of the
                same samples log different values.

        **Communicates**: what the step does, twice, and what was seen over all ranks.
        """
        # Both runs see other numbers of tokens, so that dropout would differ in any case.
        with WithoutDropout():
            found = self._try(batch, dims, run, trains=True)
        if "" in found:
            raise ConfigurationError("LP322", self._refusal(found[""]))
        if found:
            rank_zero_warn(
                "training_step runs on sequences that are divided over "
                f"{self._mesh.sizes.context} context-parallel ranks, and logged values change: "
                f"{'; '.join(found.values())}. Each rank logs a value of its own tokens, and the "
                "logged result is the mean of these values, weighted by the numbers of labels. "
                "Log a count or a sum with reduce_fx='sum'; a mean over tokens needs no change."
            )

    def runs_divided(self, key: tuple[Any, ...], batch: Any, dims: BatchDims, run: Look) -> bool:
        """Tell whether an evaluation step computes on divided sequences what it does on whole ones;
        if not, say so.

        Args:
            key: Name of the step, and number of its data loader.
            batch: As in `check_training`.
            dims: As in `check_training`.
            run: As in `check_training`.

        **Communicates**: what the step does, twice, and what was seen over all ranks.
        """
        found = self._try(batch, dims, run, trains=False)
        # On whole sequences all context ranks update a metric alike: summed over them, it would
        # count everything `cp` times. So only the replicas are joined.
        group = self._mesh.data_group if found else self._mesh.token_group
        for fqn in self._metrics:
            metric: Any = self._module.get_submodule(fqn)
            metric.process_group = group
        again = key in self._unsettled
        self._unsettled.discard(key)
        if found and all(text == _UNDECIDED for text in found.values()):
            self._unsettled.add(key)
        elif found and not again:
            rank_zero_info(
                f"{key[0]} runs on undivided sequences, since {next(iter(found.values()))}. So "
                f"each of the {self._mesh.sizes.context} context-parallel ranks computes the same."
            )
        return not found

    def is_unsettled(self, key: Any, batch_index: Any = None) -> bool:
        """Tell whether an evaluation step has to be tried again, as at the beginning of an epoch.

        Args:
            key: As in `runs_divided`.
            batch_index: Number of the batch; None where the step does not take it.
        """
        return batch_index == 0 and key in self._unsettled

    def _try(self, batch: Any, dims: BatchDims, run: Look, *, trains: bool) -> dict[str, str]:
        """Return what differs, the same on every rank: name -> text; "" is the step itself."""
        few, count = self._few(batch, dims)
        try:
            whole, draws = run(few, count, None)
        except Exception as failure:
            if trains and not isinstance(failure, LightningParError):
                # Only for its error, which names what cannot be divided; else that of the whole
                # run is raised.
                self._run_divided(few, count, run, trains=True)  # a refusal says more
            raise
        self._metrics = set(whole.metrics[0])
        error, seen, weights = "", None, None
        try:
            seen, weights = self._run_divided(few, count, run, trains=trains)
        except Exception as failure:
            if trains:
                raise
            error = str(failure).removesuffix(" [lightning-par explain LP303]")
        # Ranks that log other values would pair them up in the reductions below, and in the step.
        logged = [_joined_as(call) for call in seen.logs[0]] if seen and seen.logs else []
        leaves = () if seen is None or trains else seen.leaves
        every: list[Any] = [None] * dist.get_world_size()
        # All that can end the comparison on one rank is gathered first: the branches below are
        # then the same on every rank, and so are the collectives in `_compared`.
        replica = min(dist.get_process_group_ranks(self._mesh.group("cp")))
        dist.all_gather_object(every, (error, leaves, logged, replica, draws))
        for failed, left, others, _, _ in every:
            if failed:
                return {"": f"it fails on divided sequences ({failed})"}
            if left:
                return {"": f"it stores values in {', '.join(left)}"}
            if others != logged and not trains:
                return {"": "the ranks log different values on divided sequences"}
        self._check_logs([(first, others) for _, _, others, first, _ in every])
        if seen is None or weights is None or any(drawn for *_, drawn in every):
            return {} if trains else {"": "it draws random numbers"}
        found = self._compared(whole, seen, weights, trains=trains)
        # Merged, as a metric may differ on one rank only.
        dist.all_gather_object(every, found)
        found = {name: text for each in every for name, text in each.items()}
        if found.keys() - {""} and set(found.values()) != {_UNDECIDED}:
            # What a second run logs otherwise, as a time, tells nothing.
            again, _ = run(few, count, None)
            pairs = zip(whole.logs[0], again.logs[0], strict=False)
            varies = {a.name for a, b in pairs if a.value != b.value and a.value == a.value}
            dist.all_gather_object(every, varies)
            found = {n: t for n, t in found.items() if not any(n in each for each in every)}
        return found

    def _check_logs(self, every: Sequence[tuple[int, list[tuple[Any, ...]]]]) -> None:
        """Refuse a step that logs different values on context ranks of the same samples.

        Args:
            every: For each rank, the first one of its context group, and what it logs.

        Raises:
            ConfigurationError: On every rank.
        """
        of_group = dict(every)
        pairs = [(logged, of_group[first]) for first, logged in every]
        if all(one == other for one, other in pairs):
            return
        names = sorted({name for one, other in pairs for name, *_ in {*one} ^ {*other}})
        # Another order, or another number of calls, has no name of its own.
        said = f" ({', '.join(map(repr, names))})" if names else ""
        raise ConfigurationError(
            "LP322",
            f"context_parallel_size={self._mesh.sizes.context}: training_step runs on divided "
            f"sequences, but the ranks do not make the same calls of self.log{said}. A logged "
            "value is combined over these ranks. Log the same names in the same order on each "
            "rank, with the same reduce_fx, and with batch_size= on all ranks or on none. A rank "
            "without a valid label has to log, too: its value has the weight 0 in a mean. Or use "
            "context_parallel_size=1. No weight was changed.",
        )

    def _run_divided(
        self, few: Any, count: int, run: Look, *, trains: bool
    ) -> tuple[StepReport, BatchWeights]:
        try:
            (shard,) = self._sequence.open([few])
            weights = self._weigher.weigh([shard], [count])
            seen, _ = run(shard, count, self._sequence.shard.group)
            if trains:  # says more than that a loss differs
                self._sequence.check()
            return seen, weights
        finally:
            # Also after an error: attention would stay that of divided sequences.
            self._sequence.close()

    def _few(self, batch: Any, dims: BatchDims) -> tuple[Any, int]:
        """Return some samples of a batch, and their number; of long sequences the first tokens."""
        try:
            entries = sequence_entries(batch, self._layout).items()
            held = {path: (batch_entry(batch, path), dim) for path, dim in entries}
            longest = max((e.shape[d] for e, d in held.values()), default=1)
            tokens = min(longest, _TOKENS)
            degree = self._mesh.sizes.tensor if self._mesh.sizes.pipeline > 1 else 1
            # Sequence parallelism under a pipeline needs T divisible by tp.
            tokens -= tokens % degree if tokens > degree else 0  # as the stages of a pipeline need
            long = {p: (e, d) for p, (e, d) in held.items() if e.shape[d] > tokens}
        except (LightningParError, IndexError):  # the step on its tokens will tell
            return batch, dims.size or 1
        few = with_entries(batch, {p: e.narrow(d, 0, tokens) for p, (e, d) in long.items()})
        size, most = dims.size or 1, max(2, _TOKENS // max(1, longest))
        # A cut along an unsure dim would be a guess: then all samples are taken.
        if dims.size is None or dims.unsure or size <= most:
            return few, size
        return take_samples(few, dims, range(most)), most

    def _compared(
        self, whole: StepReport, seen: StepReport, weights: BatchWeights, *, trains: bool
    ) -> dict[str, str]:
        """Return which values on divided sequences are others than on whole ones."""
        if not self._has_values:
            return {}
        tolerance = self._tolerance()
        values: dict[str, tuple[float, float]] = {}
        found: dict[str, str] = {}
        if whole.losses and seen.losses and not weights.is_sum:
            for one, other in zip(whole.losses[0], seen.losses[0], strict=False):
                loss = self._sequence.mean(torch.tensor(other, dtype=torch.float64), weights.own)
                values[""] = float(loss), one
            found = self._terms_differ(whole, seen, weights)
        wanted_logs = {call.name: call.value for call in whole.logs[0]}
        for call in seen.logs[0]:
            # All of them, as on the other ranks; what is logged on one of both tells nothing.
            joined, _ = join_over_context(call.value, call.options, weights)
            if call.name in wanted_logs:
                values[call.name] = float(joined), wanted_logs[call.name]
        for name, (value, wanted) in values.items():
            text = _apart(name or "the loss", value, wanted)
            # Absolute 1e-9: two losses of 0 differ by rounding only.
            if not math.isclose(value, wanted, rel_tol=tolerance, abs_tol=1e-9):
                if math.isfinite(value) and math.isfinite(wanted):
                    found[name] = text
            elif not trains and wanted in _TELL_NOTHING:
                found[name] = _UNDECIDED
        kinds = compare_metrics(whole.metrics[0], seen.metrics[0], tolerance)
        for name, kind in kinds.items():
            if kind:
                found[name] = f"{name} gets different values on divided sequences"
            elif not trains and _tells_nothing(whole.metrics[0][name.removeprefix("self.")]):
                found[name] = _UNDECIDED
        return found

    def _terms_differ(
        self, whole: StepReport, seen: StepReport, weights: BatchWeights
    ) -> dict[str, str]:
        """Return a term of the loss that is the mean of all tokens where the loss is another one;
        it may be too small to be seen in the loss.
        """
        group, tolerance = self._mesh.group("cp"), self._tolerance()
        wanted, given = ([t for each in made.terms[0] for t in each] for made in (whole, seen))
        # Means are collectives: all ranks have to have as many.
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, len(wanted) == len(given), group=group)
        found = {}
        for one, other in zip(wanted, given, strict=True) if all(every) else ():
            value = torch.tensor(other, dtype=torch.float64)
            ours, even = (
                float(self._sequence.mean(value, weight))
                for weight in (weights.own, torch.ones_like(weights.own))
            )
            is_other = not math.isclose(ours, one, rel_tol=tolerance)
            if is_other and math.isclose(even, one, rel_tol=tolerance):
                found[""] = _apart("a term of the loss", ours, one)
        return found

    def _refusal(self, difference: str) -> str:
        layout = self._layout
        cure = "and compute each value from the logits and the label of one token"
        if layout.shifted is not None:
            cure = (
                f"add a batch entry {layout.shifted!r} with the labels shifted by one token and "
                f"-100 at the end, pass it to the model as {layout.shifted}=, and compute your "
                "own values from this entry and the logits, each from one token"
            )
        return (
            f"context_parallel_size={self._mesh.sizes.context}: the result of training_step "
            f"changes when its sequences are divided over ranks: {difference}. Each rank has only "
            "some tokens of a sequence, so training_step must not shift, slice or pool tokens. "
            "The loss has to be a mean over the labels that BatchLayout(labels=..., "
            "ignore_index=...) declares, or be weighted by BatchLayout(loss_weight=...). Shift "
            f"labels in the data set, {cure}; or use context_parallel_size=1. No weight was "
            "changed."
        )


_UNDECIDED = "undecided"


def _apart(name: str, divided: float, whole: float) -> str:
    return f"{name} is {divided:.6g} on divided sequences, but {whole:.6g} on undivided sequences"


def _joined_as(call: LogCall) -> tuple[str, str, bool]:
    """Return what ranks have to agree on, so that they put together the same value."""
    reduction = call.options.get("reduce_fx", "mean")
    kind = str(getattr(reduction, "__name__", reduction))
    return call.name, kind, call.options.get("batch_size") is None


def _tells_nothing(values: Any) -> bool:
    numbers: Sequence[Any] = [torch.as_tensor(v) for v in tree_leaves(values) if v is not None]
    return all(bool(((n == 0) | (n == 1) | n.isnan()).all()) for n in numbers)
