"""A step whose batch goes through a pipeline in micro-batches.

Length: training, evaluation and the first look share the cutting and the joining.

The schedule runs forwards and backwards inside `training_step`, before Lightning calls for a
backward. So the gradients are set aside, and the loss that Lightning gets puts them in place in its
own backward: accumulation, hooks and loss scaling then see them where they expect them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.batch import (
    batch_entry,
    BatchDims,
    sequence_entries,
    signature,
    split_batch,
    split_rows,
    tokens_of,
)
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.data.gradient_reduction import scale_together
from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.pipeline.actions import Schedule, TimedAction
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun, TrainedParts
from lightning_par.engine.pipeline.model_calls import ModelCalls
from lightning_par.engine.pipeline.schedules import forward_only
from lightning_par.engine.tensor_tree import broadcast_object, map_tensors, to_cpu
from lightning_par.errors import ConfigurationError, NonFiniteError, PlanError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.components.attribute_values import AttributeValues
from lightning_par.strategies.components.block_attributes import BlockAttributes
from lightning_par.strategies.components.step_attributes import new_values, StepAttributes
from lightning_par.strategies.components.step_writes import StepWrites
from lightning_par.strategies.processes.world import World
from lightning_par.strategies.step.batch_weights import (
    BatchWeigher,
    BatchWeights,
    weigh,
    weighted_mean,
)
from lightning_par.strategies.step.counted_buffers import CountedBuffers, StageBuffers
from lightning_par.strategies.step.loss_form import FormWatch
from lightning_par.strategies.step.metrics import MetricsOfBatch
from lightning_par.strategies.step.returned import (
    counts_in,
    merge_results,
    merge_training,
    returned_numbers,
    warn_of_results,
)
from lightning_par.strategies.step.sharded_sequence import ShardedSequence
from lightning_par.strategies.step.step_report import StepReport, StepWatch
from lightning_par.strategies.step.step_traces import (
    combine_logs,
    LogCall,
    numbers_of,
    record_logs,
    replay_logs,
)

__all__ = ["PipelinedSteps", "check_tokens", "loss_of"]

StepContext = Callable[[], AbstractContextManager[Any]]
"""Precision plugin's context of a step."""
UserStep = Callable[[Any, int], AbstractContextManager[None]]
"""Surrounds the user's step for a key and the number of a micro-batch; see `StepRunner`."""


class PipelinedSteps:
    """Runs the user's steps through the stages of a pipeline.

    Args:
        module: The user's LightningModule, which holds the stages of this rank.
        mesh: Mesh with a ``pp`` axis.
        executor: Runs the stages of this rank.
        world: The other ranks of the run.
        sharding: Zeroes gradients of losses with weight 0.
        weigher: Weighs micro-batches.
        user_step: Surrounds the user's step.
        replay: Surrounds the backward of a micro-batch.
        sequence: Shards sequences over context ranks, if there are several.
        num_microbatches: Number of micro-batches of a batch that has as many samples.
        counts: Buffers that replicas add to.
        schedule: Gives the training schedule for a number of micro-batches.
        rank_of_stage: The pipeline rank that holds each stage.

    Attributes:
        last_run: When the actions of the last training step ran; None before one.
        last_weight: What its batch weighed in the global batch, 1 on average over the replicas.
        model_calls: Passes calls of the model that are no step through the stages.
        most: The most micro-batches that every replica can cut its batch into.
        form: Is given the loss of the first micro-batch, and what others weigh where their losses
            have to confirm it; None: nobody asks.
    """

    def __init__(
        self,
        *,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        executor: PipelineExecutor,
        world: World,
        sharding: Sharding,
        weigher: BatchWeigher,
        user_step: UserStep,
        replay: Callable[[int], AbstractContextManager[None]],
        sequence: ShardedSequence | None,
        num_microbatches: int,
        counts: CountedBuffers,
        schedule: Callable[[int], Schedule],
        rank_of_stage: Sequence[int],
    ) -> None:
        self.module, self.executor = module, executor
        self.last_run: PipelineRun | None = None
        self.last_weight, self.most = torch.ones(()), sys.maxsize
        self.form: FormWatch | None = None
        self._sharding, self._weigher, self._user_step = sharding, weigher, user_step
        self._sequence, self._num_microbatches, self._replay = sequence, num_microbatches, replay
        self._schedule, self._rank_of_stage = schedule, rank_of_stage
        self._is_only_replica = mesh.sizes.data == 1
        self._source = mesh.rank_at("pp", rank_of_stage[-1])  # the last stage, of this replica
        self._group = mesh.group("pp")
        self._trained = TrainedParts(module, module.device, self._group)
        own = [world.broadcast(self._group, self._source) for _ in range(3)]
        self._results, self._attributes_sent, sent = own
        self.model_calls = ModelCalls(executor, rank_of_stage, sent)
        self._attributes = StepAttributes(module)
        self._of_blocks = BlockAttributes(module, executor.stages, self._group)
        self._metrics = MetricsOfBatch(module)
        self._metrics.follow()
        self._writes = StepWrites(module, executor.stages, self._source, self._group)
        stages, divides = len(executor.stages), num_microbatches > 1
        self._buffers = StageBuffers(module, counts, stages=stages, divides=divides)
        divides |= not self._is_only_replica
        self._values = AttributeValues(module, stages=stages, divides=divides)
        self._checked: set[Any] = set()  # shapes of batches whose loss was not NaN

    def training(
        self,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
        key: Any,
        scaler: MeshGradScaler | None,
        zero: frozenset[int] | None,
    ) -> tuple[Any, Tensor]:
        """Run `training_step` and its backward on the batch of this replica.

        The order matters. Weights come first, as they are sums over all replicas, and every loss is
        scaled by them before its backward. Results and logs of the last stage are broadcast after
        the schedule, when no stage waits for a message of another one.

        Args:
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.
            dims: Which entries of the batch have a batch dim.
            key: Seed of the step, without its micro-batch.
            scaler: Scales the loss, and with it the small gradients between stages.
            zero: Numbers of the micro-batches with weight 0, if they are known.

        Returns:
            What the step returned, the same on every stage, with a loss whose backward puts the
            gradients in place; and whether any entry of the global batch counts.
        """
        parts, sizes = self.cut(args[0], dims)
        weights = self._weigher.weigh(parts, sizes, zero)
        calls: list[list[LogCall]] = [[] for _ in parts]
        step = self._stepper("training_step", context, parts, args[1:], key, calls)
        losses: dict[int, Tensor] = {}
        factor = None if scaler is None else scaler.current(self.module.device)

        def scaled_loss(index: int, result: Any) -> Tensor:
            loss, scale = loss_of(result), weights.scales[index]
            if self.form is not None:
                self.form.see(loss, sizes[index], weights, index)
            losses[index] = loss.detach()
            if index in weights.zero and self._is_only_replica:
                return loss.detach()  # no replica waits for this backward
            weighted = weigh(loss, scale.to(loss.dtype))
            return weighted if factor is None else weighted * factor

        trained = self._trained.count(self.module.trainer.current_epoch)
        signatures = [(signature(part, "training"), trained) for part in parts]
        self._begin_step(trains=True)
        parameters = list(self.module.parameters())  # the step may freeze and unfreeze some
        with self._gradients_aside(parameters) as computed:
            prepared = self._sharding.zero_weight.prepared() if weights.zero else nullcontext()
            with prepared, self._buffers.step() if self._buffers.is_active else nullcontext():
                schedule = self._schedule(len(parts))
                around = lambda i: self._around(i in weights.zero)  # noqa: E731
                run = self.executor.run(
                    schedule, step, signatures, scaled_loss, around, self._replay
                )
        self.last_run, self.last_weight = run, weights.of_loss
        if self._sequence is not None:
            self._sequence.check()
        value, extras, logs = self._from_last_stage(run, losses, calls, weights)
        if self._sequence is not None:
            value = self._sequence.mean(value, weights.own)
        self._check_stub(value, signatures, torch.stack(weights.scales))
        replay_logs(self.module, logs, weights, sum(sizes), context)
        self._name_unknown(extras, len(parts))
        loss = self._deferred_loss(value, parameters, computed, factor)
        output = loss if extras is None else {**extras, "loss": loss}
        return output, weights.total > 0

    def evaluation(
        self,
        name: str,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
        key: Any,
        count: int,
    ) -> Any:
        """Run a step without a backward on the batch of this replica; every stage gets the result.

        Args:
            name: ``"validation_step"``, ``"test_step"`` or ``"predict_step"``.
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.
            dims: Which entries of the batch have a batch dim.
            key: Seed of the step, without its micro-batch.
            count: Number of micro-batches.
        """
        parts, sizes = self.cut(args[0], dims, count)
        # A prediction needs no labels, and replicas may have unequal numbers of batches.
        predicts = name == "predict_step"
        weights = BatchWeights.of_samples(sizes) if predicts else self._weigher.weigh(parts, sizes)
        calls: list[list[LogCall]] = [[] for _ in parts]
        self._begin_step()
        run = self._forward_only(name, context, parts, args[1:], key, calls)
        self._of_blocks.check(args[1:2])
        found = None
        left = (self._attributes.changes(), self._writes.take()) if run.results else None
        left, written = self._attributes_sent.broadcast(left)
        self._take_attributes(left)
        self._writes.write(name, written, len(parts))
        if run.results:
            merged = merge_results([run.results[i] for i in sorted(run.results)], weights.shares)
            names = weights.sums, weights.by_samples
            logs = combine_logs(calls, weights.shares, *names, sizes)
            found = to_cpu(merged), [replace(call, value=to_cpu(call.value)) for call in logs]
        output, logs = self.from_last_stage(found)
        replay_logs(self.module, logs, weights, sum(sizes), context)
        return output

    def look(
        self,
        context: StepContext,
        batches: Sequence[Any],
        rest: Sequence[Any],
        refusal: Callable[..., Exception | None],
        name: str,
        watch: StepWatch,
    ) -> StepReport:
        """Run a step on batches of their own, without gradients and logs.

        Args:
            context: Precision plugin's context of the step.
            batches: Any number of batches.
            rest: What else the step takes.
            refusal: Says why the step cannot run here, and gave nothing; is given a new reason.
            name: Of the step.
            watch: Watches what else the step does.
        """
        calls: list[list[LogCall]] = [[] for _ in batches]
        key, count, trains = ("first look",), len(batches), name == "training_step"
        self._begin_step()
        has_failed: Callable[..., bool] = lambda *e: refusal(*e) is not None  # noqa: E731
        of_buffers = trains and count > 1 and not self._buffers.is_known
        learns = of_buffers or (trains and count > 1 and not self._values.is_known)
        # Copies, as the step may write into its batch.
        again = [*batches[1:], batches[1], *batches] if learns else []
        again = [map_tensors(batch, Tensor.clone) for batch in again]
        given = name, context, [*batches, *again], rest, key, calls, watch.followed, has_failed
        buffers = self._buffers.look(count - 1) if of_buffers else nullcontext()
        values = self._values.look(count) if trains else nullcontext()
        with torch.no_grad(), buffers, values, self._writes.undone():
            run = self._forward_only(*given, cut=(0, 1))
            # As between steps: what the last stage has kept of samples, the others may read.
            kept = self._attributes.changes() if run.results else {}
            self._take_attributes(self._attributes_sent.broadcast(kept), warns=False)
            self._attributes.begin()
            if count > 1:
                run.results |= self._forward_only(*given, cut=(1, 2 * count)).results
            can_learn = learns and bool(run.results) and not has_failed()
            learned = self._values.learn() if can_learn else None
            if learns and self._values.take(self._attributes_sent.broadcast(learned)):
                run.results |= self._forward_only(*given, cut=(2 * count, None)).results
                self._values.anew = self.from_last_stage(self._values.confirm())
            found = None
            if all(index in run.results for index in range(count)) and not has_failed():
                ends = (i for i in (*range(count), 2 * count) if trains and i in run.results)
                losses = [float(loss_of(run.results[i]).detach()) for i in ends]
                returned = [returned_numbers(name, run.results[i]) for i in range(count)]
                rows = zip(calls, returned, self._values.calls(count), strict=True)
                found = watch.report(
                    losses=[(loss,) for loss in losses[:count]],
                    logs=[numbers_of([*c, *r, *n]) for c, r, n in rows],
                    leaves=self._attributes.names_changed(),
                    writes=self._writes.take()[0],
                    follows=self._values.follows(losses, is_alone=self._is_only_replica),
                )
        told = self.from_last_stage(found) or StepReport(losses=[], logs=[], metrics=({}, {}))
        self._writes.is_known |= told.writes and trains
        return told

    def _forward_only(
        self,
        name: str,
        context: StepContext,
        parts: Sequence[Any],
        rest: Sequence[Any],
        key: Any,
        calls: list[list[LogCall]],
        followed: Callable[[int], AbstractContextManager[Any]] | None = None,
        has_failed: Callable[..., bool] = lambda _: False,
        cut: tuple[int, int | None] = (0, None),
    ) -> PipelineRun:
        run = self._stepper(name, context, parts, rest, key, calls, followed)
        numbers = range(len(parts))[slice(*cut)]
        schedule = forward_only(self._rank_of_stage, len(numbers))
        given = lambda i: run(numbers[i]), [signature(parts[n], name) for n in numbers], None
        found = self.executor.run(schedule, *given, has_failed=has_failed)
        found.results = {numbers[i]: result for i, result in found.results.items()}
        return found

    def cut(
        self, batch: Any, dims: BatchDims, count: int | None = None
    ) -> tuple[list[Any], list[int]]:
        """Return the micro-batches of a batch, and their numbers of samples.

        Args:
            batch: That of this replica.
            dims: Which entries have a batch dim.
            count: Number of micro-batches; None: as in training.
        """
        count = min(self._num_microbatches if count is None else count, self.most)
        sizes = [length for _, length in split_rows(dims.size or 1, count)]
        return split_batch(batch, count, dims), sizes

    def timeline(self) -> list[list[TimedAction]]:
        """Return when every stage ran its actions in the last training step, in seconds; an empty
        list before one.

        **Communicates**: the actions of every stage, over the ``pp`` axis.
        """
        if self.last_run is None:
            return []
        rows: list[Any] = [None] * self._group.size()
        dist.all_gather_object(rows, self.last_run.events, group=self._group)
        return rows

    def _stepper(
        self,
        name: str,
        context: StepContext,
        parts: Sequence[Any],
        rest: Sequence[Any],
        key: Any,
        calls: list[list[LogCall]],
        followed: Callable[[int], AbstractContextManager[Any]] | None = None,
    ) -> Callable[[int], Any]:
        step, value_of = getattr(self.module, name), self._metrics.value
        trains = name == "training_step"
        keeps, restarts = trains and self._buffers.is_active, trains and self._values.is_active

        def run(index: int) -> Any:
            # A look runs its parts once more, and then all of them, which have been followed.
            own, number = len(calls), index
            if index >= own:
                number = (index - own) % (own - 1) + 1 if index < 2 * own else index - 2 * own
            is_again = number != index
            logged = [] if is_again else calls[index]
            logs = record_logs(self.module, logged, value_of, on_step=trains)
            follow = nullcontext() if followed is None or is_again else followed(index)
            written, user_step = self._writes.in_step(), self._user_step(key, number)
            buffers = self._buffers.run(index) if keeps else nullcontext()
            values = self._values.run(index) if restarts else nullcontext()
            with context(), logs, follow, user_step, buffers, values, written:
                return step(parts[index], *rest)

        return run

    @contextmanager
    def _gradients_aside(self, parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
        """Set gradients of earlier batches aside; inside, the list is empty, after it, it holds the
        gradients that were computed.
        """
        held = take_gradients(parameters)
        computed: list[Tensor | None] = []
        try:
            yield computed
        finally:
            computed += take_gradients(parameters)
            if not any(p.requires_grad for p in parameters):
                # No backward has resharded what FSDP gathered.
                self._sharding.release()
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad

    @contextmanager
    def _around(self, is_zero_weight: bool) -> Iterator[bool]:
        """Surrounds the backward of a loss; gives whether the loss counts."""
        if not is_zero_weight:
            yield True
            return
        with self._sharding.zero_weight.zero_gradients():
            yield False

    def _from_last_stage(
        self,
        run: PipelineRun,
        losses: Mapping[int, Tensor],
        calls: Sequence[Sequence[LogCall]],
        weights: BatchWeights,
    ) -> tuple[Tensor, dict[str, Any] | None, list[LogCall]]:
        """Give every stage the loss, other results and logs of the last one, and what it left."""
        found = None
        if losses:
            shares = weights.shares
            values = torch.stack([losses[i] for i in sorted(losses)])
            mean, total = weighted_mean(values, shares.to(values.device))
            # Decided on the device: a number on the host would have to be waited for.
            value = torch.where(total > 0, mean, values.mean()).to(values.dtype)
            value = values.sum() if weights.is_sum else value
            results = [run.results[i] for i in sorted(run.results)]
            merged = merge_training(results, weights) if isinstance(results[0], Mapping) else None
            extras = None if merged is None else map_tensors(merged, Tensor.detach)
            names = weights.sums, weights.by_samples
            logs = combine_logs(calls, shares, *names, weights.sizes)
            self._values.merge(weights)
            left = self._attributes.changes()
            unknown = self._values.unknown(new_values(left))
            found = value, extras, logs, (left, self._writes.take(), unknown)
        run.results.clear()
        value, extras, logs, (left, written, unknown) = self._results.broadcast(found)
        if unknown:
            warn_of_results(unknown)
        self._values.put_back()
        self._take_attributes(left)
        self._writes.write("training_step", written, len(calls))
        return value, extras, logs

    def _name_unknown(self, extras: Mapping[str, Any] | None, count: int) -> None:
        """Warn, once for each, of integers in the step's output that may count one micro-batch."""
        if extras and count > 1:
            unknown = {*counts_in(extras)} - self._weigher.judged
            self._weigher.judged |= unknown
            warn_of_results(unknown)

    def _begin_step(self, *, trains: bool = False) -> None:
        if trains and not self._checked:
            self._of_blocks.begin_step()
        self._values.begin(trains=trains)
        self._attributes.begin()
        self._writes.begin()
        self._metrics.is_new = True

    def _take_attributes(self, changes: dict[str, Any], *, warns: bool = True) -> None:
        """Have in the module what the step has left there on the last stage."""
        self._attributes.take(changes, is_source=dist.get_rank() == self._source, warns=warns)

    def _deferred_loss(
        self,
        value: Tensor,
        parameters: Sequence[nn.Parameter],
        computed: list[Tensor | None],
        factor: Tensor | None,
    ) -> Tensor:
        """Return a loss whose backward puts the computed gradients in place."""
        # Without a leaf that needs a gradient autograd would not call `ScheduledLoss.backward`.
        anchor = torch.zeros((), requires_grad=True, device=self.module.device)
        undo = 1 if factor is None else 1 / factor  # the plugin scales once more
        install = lambda g: put_gradients(parameters, computed, g * undo)  # noqa: E731
        loss: Tensor = ScheduledLoss.apply(anchor, value.to(self.module.device), install)  # type: ignore[no-untyped-call]
        return loss

    def from_last_stage(self, value: Any) -> Any:
        """Return, on every stage, the value of the last one."""
        return broadcast_object(value, self._source, self._group)

    def _check_stub(self, loss: Tensor, signatures: Sequence[Any], weights: Tensor) -> None:
        """Refuse a NaN loss in the first step of every batch shape: it may come from another
        stage's stub. The mean over no valid entry is NaN by itself.
        """
        shapes = tuple(signatures)
        if shapes in self._checked or not bool((weights > 0).any()):
            return
        self._checked.add(shapes)
        self._of_blocks.check()
        if bool(loss.isnan()):
            problems = {text for stage in self.executor.stages for text in stage.problems}
            every: list[Any] = [None] * self._group.size()
            dist.all_gather_object(every, problems, self._group)
            raise_problems(PlanError, "LP407", sorted(set().union(*every)))
            raise NonFiniteError(
                "LP314",
                "the loss of the first pipelined step is NaN. Either the model itself computes "
                "NaN, or the step uses the output of a module that another pipeline stage holds: "
                "such an output is NaN here. Run once with pipeline_parallel_size=1: if the loss "
                "is NaN, too, the model computes it. If not, name the module in "
                "ParallelPlan(replicated=...). No weight was changed.",
            )


class ScheduledLoss(torch.autograd.Function):
    """The loss of a step whose gradients a schedule has computed; backward(g) puts them in place,
    times g.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, value: Tensor, install: Callable[[Tensor], None]
    ) -> Tensor:
        """Return the value; `install` puts the gradients in place, times the one it is given."""
        ctx.install = install
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Put the gradients in place."""
        ctx.install(grad)
        return torch.zeros_like(grad), None, None


def loss_of(result: Any) -> Tensor:
    """Return the loss in what `training_step` returned.

    Raises:
        ConfigurationError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = "None" if result is None else f"a {type(result).__name__}"
        if isinstance(result, Mapping):
            kind += f" with the keys {sorted(map(str, result))}"
        if isinstance(loss, Tensor):
            kind += f" whose loss has the shape {tuple(loss.shape)}"
        raise ConfigurationError(
            "LP318",
            f"training_step returned {kind}. Under a pipeline it has to return the loss as a "
            "scalar tensor, or a dict whose key 'loss' holds this tensor. To skip batches with a "
            "bad loss, log the loss with sync_dist=True, read it from trainer.callback_metrics in "
            "on_before_optimizer_step, and set every p.grad = None there.",
        )
    return loss.reshape(())


def take_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
    """Return the gradients and leave none."""
    grads = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


@torch.no_grad()
def put_gradients(
    parameters: Sequence[nn.Parameter], computed: list[Tensor | None], factor: Tensor
) -> None:
    """Add the computed gradients times `factor`; without a gradient before, they move without a
    copy.
    """
    if factor.device.type != "cpu" or float(factor) != 1:  # asking another device would wait
        scale_together((local_part(grad) for grad in computed if grad is not None), factor)
    for index, parameter in enumerate(parameters):
        grad, computed[index] = computed[index], None
        if grad is None or not parameter.requires_grad:  # the step froze it behind the model
            continue
        parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


def check_tokens(batch: Any, layout: BatchLayout, *, has_labels: bool) -> None:
    """Refuse a batch without the sequences that tensor-parallel ranks are to share.

    Args:
        batch: That of this replica.
        layout: Where its sequence dims are.
        has_labels: Whether it has labels; batches for predictions may lack them.

    Raises:
        PlanError: It has no such entry or dim as the plan says.
    """
    for entry, dim in sequence_entries(batch, layout).items():
        if entry != layout.labels or has_labels:
            tokens_of(entry, batch_entry(batch, entry), dim)
