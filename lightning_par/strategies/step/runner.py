"""Running the user's steps on a mesh: weights of the loss, random numbers, pipelines, logs."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.activity import Activity
from lightning_par.engine.batch import batch_size, count_valid, signature, split_batch
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.init.deferred_init import seed_generators, seed_of
from lightning_par.engine.pipeline.actions import Schedule
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.engine.pipeline.schedules import forward_only
from lightning_par.engine.rng import collect_random_states, restore_random_states
from lightning_par.errors import NonFiniteError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan import BatchLayout
from lightning_par.strategies.step.batch_broadcast import broadcast_object, to_cpu
from lightning_par.strategies.step.logs import (
    adjust_logs,
    BatchShares,
    combine_logs,
    LogCall,
    record_logs,
    replay_logs,
)
from lightning_par.strategies.step.loss import (
    loss_of,
    put_gradients,
    ScheduledLoss,
    take_gradients,
)
from lightning_par.strategies.step.results import merge_results
from lightning_par.strategies.step.sharded_sequence import DividedSteps

__all__ = ["StepRunner"]

_Context = Callable[[], AbstractContextManager[Any]]


@dataclass(kw_only=True, eq=False)
class StepRunner:
    """Runs `training_step` and its siblings so that the whole mesh computes what one process would.

    Attributes:
        module: The user's.
        mesh: Where.
        layout: Where the labels are.
        sharding: Surrounds every forward and backward.
        executor: Of this rank's pipeline stage; None without a pipeline.
        num_microbatches: How many the batch of a replica is cut into; None: 4 per
            pipeline rank.
        schedule: Gives the training schedule for a number of micro-batches.
        rank_of_stage: The pipeline rank that holds each stage.
        sequence: Divides the sequences of a batch.
        seed: The same on every rank.
        loss_scale: What the loss of the last step is to be multiplied by before its backward.
        scaler: Of the precision plugin, if it scales the loss.
        activity: Where every step is written down.
        counts: Whether any entry of the last batch counts, if that is asked.
        last_run: When the actions of the last pipelined step ran.
        in_step: True while the user's step runs.
        silent: Whether the loss of the last step, outside of a pipeline, weighs nothing.
        evaluations: How many steps have been evaluated.
    """

    module: pl.LightningModule
    mesh: ParallelMesh
    layout: BatchLayout
    sharding: Sharding
    executor: PipelineExecutor | None
    num_microbatches: int | None
    schedule: Callable[[int], Schedule]
    rank_of_stage: tuple[int, ...]
    sequence: DividedSteps
    seed: int
    activity: Activity = field(default_factory=Activity)
    loss_scale: Tensor | None = None
    scaler: MeshGradScaler | None = None
    counts: Tensor | None = None
    last_run: PipelineRun | None = None
    in_step: bool = False
    silent: bool = False
    evaluations: int = 0
    _checked: set[Any] = field(default_factory=set)

    def training(self, context: _Context, args: Sequence[Any]) -> Any:
        """Run `training_step` on the batch of this replica.

        Args:
            context: Of the precision plugin.
            args: The batch, and what else `training_step` takes.

        Returns:
            What `training_step` returned; its loss has a backward.
        """
        self.activity.step = self.module.trainer.global_step
        self.activity.begin("training_step")
        key = ("training_step", self.module.trainer.fit_loop.total_batch_idx)
        args = self.sequence.open("training_step", args)
        if self.executor is None:
            return self._whole("training_step", context, args, key, training=True)
        output = self._pipelined_training(self.executor, context, args, key)
        self.sequence.close()
        return output

    def evaluation(self, name: str, context: _Context, args: Sequence[Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on the batch of this replica.

        Args:
            name: Which one.
            context: Of the precision plugin.
            args: The batch, and what else the step takes.
        """
        self.evaluations += 1
        self.activity.begin(name)
        key = (name, self.evaluations)
        args = self.sequence.open(name, args)
        output = self._evaluate(name, context, args, key)
        self.sequence.close()
        return output

    def _evaluate(self, name: str, context: _Context, args: Sequence[Any], key: Any) -> Any:
        if self.executor is None:
            return self._whole(name, context, args, key, training=False)
        return self._pipelined_evaluation(self.executor, name, context, args, key)

    def _whole(
        self, name: str, context: _Context, args: Sequence[Any], key: Any, *, training: bool
    ) -> Any:
        weighted = self.mesh.sizes.shares > 1 and name != "predict_step"
        shares = self._shares([args[0]]) if weighted else None
        step = getattr(self.module, name)
        logs = adjust_logs(self.module, shares)
        self.sharding.silence.release()
        self.silent = training and shares is not None and bool(shares.silent)
        if self.silent:
            self.sharding.silence.prepare()
        with context(), self._random_restored(), logs, self._user_step():
            self._seed(key, 0)
            output = self.sharding.call(lambda: step(*args))
            self.sequence.check(name)
        if training:
            self.loss_scale = None if shares is None else shares.own
            asks = not weighted and self.layout.labels is not None
            self.counts = count_valid(args[0], self.layout) > 0 if asks else None
        return output

    def _shares(self, micro_batches: Sequence[Any]) -> BatchShares:
        """Weigh micro-batches by their valid entries.

        **Communicates**: one all-reduce of one number over the ranks that divide sequences, and
        one of two numbers over the replicas, where there are several.
        """
        counts = torch.stack([count_valid(b, self.layout) for b in micro_batches])
        samples, replica = None, counts
        divided = self.sequence.group
        if divided is not None:
            replica = counts.clone()
            dist.all_reduce(replica, group=divided)
        total = replica.sum()
        if self.mesh.sizes.data > 1:
            own = sum(batch_size(b) for b in micro_batches)
            sums = torch.stack([total, total.new_tensor(own)])
            dist.all_reduce(sums, group=self.mesh.data_group)
            total, samples = sums[0], sums[1]
        silent: frozenset[int] = frozenset()
        if self.layout.labels is not None:  # without labels every sample counts
            silent = frozenset(i for i, count in enumerate(replica.tolist()) if count == 0)
        valid = total.clamp(min=1)
        return BatchShares(
            scales=tuple((counts * self.mesh.sizes.shares / valid).unbind()),
            total=replica.sum() * self.mesh.sizes.data / valid,
            samples=samples,
            silent=silent,
            divided=divided,
        )

    @contextmanager
    def backward_of_step(self) -> Iterator[None]:
        """Surrounds the backward of the last step; see Note [Zero-weight loss]."""
        if not self.silent:
            yield
            return
        with self.sharding.silence.silent():
            yield
        self.sharding.silence.release()

    def _prepared_silence(self, shares: BatchShares) -> AbstractContextManager[None]:
        return self.sharding.silence.prepared() if shares.silent else nullcontext()

    @contextmanager
    def _around(self, index: int, silent: bool) -> Iterator[bool]:
        if not silent:
            yield True
            return
        with self.sharding.silence.silent():
            yield False

    @contextmanager
    def _user_step(self) -> Iterator[None]:
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    @property
    def _is_cut(self) -> bool:
        """Whether several ranks hold parts of one replica."""
        return self.mesh.sizes.world_size > self.mesh.sizes.data

    def _seed(self, key: Any, micro_batch: int) -> None:
        """Give all ranks of a replica the same random numbers, other ones for every step and
        micro-batch.
        """
        if self._is_cut:
            seed = seed_of(self.seed, *key, micro_batch, self.mesh.data_rank)
            seed_generators(seed, torch.device(self.mesh.device_type))
            random.seed(seed)
            np.random.seed(seed % 2**32)

    @contextmanager
    def _random_restored(self) -> Iterator[None]:
        """Leave the generators as they were, if `_seed` changes them."""
        if not self._is_cut:
            yield
            return
        device = torch.device(self.mesh.device_type)
        states = collect_random_states(device)
        try:
            yield
        finally:
            restore_random_states(states, device)

    def _split(self, batch: Any, *, training: bool) -> tuple[list[Any], Schedule]:
        ranks, owners = self.mesh.sizes.pipeline, self.rank_of_stage
        parts = split_batch(batch, self.num_microbatches or 4 * ranks)
        if training:
            return parts, self.schedule(len(parts))
        return parts, forward_only(owners, len(parts))

    def _stepper(
        self,
        name: str,
        context: _Context,
        parts: Sequence[Any],
        rest: Sequence[Any],
        key: Any,
        calls: list[list[LogCall]],
    ) -> Callable[[int], Any]:
        step = getattr(self.module, name)

        def run(index: int) -> Any:
            logs = record_logs(self.module, calls[index])
            with context(), logs, self._user_step():
                self._seed(key, index)
                return step(parts[index], *rest)

        return run

    def _pipelined_training(
        self, executor: PipelineExecutor, context: _Context, args: Sequence[Any], key: Any
    ) -> Any:
        parts, schedule = self._split(args[0], training=True)
        shares = self._shares(parts)
        calls: list[list[LogCall]] = [[] for _ in parts]
        step = self._stepper("training_step", context, parts, args[1:], key, calls)
        losses: dict[int, Tensor] = {}
        # Small gradients between stages have to be scaled as well.
        factor = None if self.scaler is None else self.scaler.current(self.module.device)

        def scaled_loss(index: int, result: Any) -> Tensor:
            loss, scale = loss_of(result), shares.scales[index]
            losses[index] = loss.detach()
            if index in shares.silent and self.mesh.sizes.data == 1:
                return loss.detach()  # no replica waits for this backward
            weighted = torch.where(scale > 0, loss, 0) * scale.to(loss.dtype)
            return weighted if factor is None else weighted * factor

        signatures = [signature(part, "training") for part in parts]
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        held = take_gradients(parameters)
        try:
            with self._random_restored(), self._prepared_silence(shares):
                around = lambda i: self._around(i, i in shares.silent)  # noqa: E731
                run = self.last_run = executor.run(schedule, step, signatures, scaled_loss, around)
        finally:
            computed = take_gradients(parameters)
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad
        self.sequence.check("training_step")
        weights = torch.stack(shares.scales)
        value, extras, logs = self._from_last_stage(run, losses, calls, weights)
        value = self.sequence.mean(value, shares.own)
        self._check_poison(value, signatures, weights)
        replay_logs(self.module, logs, shares, batch_size(args[0]))
        self.loss_scale = None
        self.counts = shares.total > 0
        anchor = torch.zeros((), requires_grad=True, device=self.module.device)
        undo = 1 if factor is None else 1 / factor  # the plugin scales once more
        install = lambda g: put_gradients(parameters, computed, g * undo)  # noqa: E731
        loss = ScheduledLoss.apply(anchor, value.to(self.module.device), install)  # type: ignore[no-untyped-call]
        return loss if extras is None else {**extras, "loss": loss}

    def _from_last_stage(
        self,
        run: PipelineRun,
        losses: Mapping[int, Tensor],
        calls: Sequence[Sequence[LogCall]],
        weights: Tensor,
    ) -> tuple[Tensor, dict[str, Any] | None, list[LogCall]]:
        """Give every stage the loss, the other results and the logs of the last one."""
        found = None
        if losses:
            values = torch.stack([losses[i] for i in sorted(losses)]).cpu()
            used = weights.cpu()
            kept = torch.where(used > 0, values, 0).to(values.dtype)
            value = (kept * used).sum() / used.sum() if bool(used.any()) else values.mean()
            results = [run.results[i] for i in sorted(run.results)]
            extras = None
            if isinstance(results[0], Mapping):
                others = [{k: v for k, v in r.items() if k != "loss"} for r in results]
                extras = to_cpu(merge_results(others, weights))
            logs = [_log_to_cpu(call) for call in combine_logs(calls, weights)]
            found = (value.to(values.dtype), extras, logs)
        run.results.clear()
        shared: tuple[Tensor, dict[str, Any] | None, list[LogCall]] = self._share(found)
        return shared

    def _pipelined_evaluation(
        self,
        executor: PipelineExecutor,
        name: str,
        context: _Context,
        args: Sequence[Any],
        key: Any,
    ) -> Any:
        parts, schedule = self._split(args[0], training=False)
        # A prediction needs no labels, and replicas may have unequal numbers of batches.
        predicts = name == "predict_step"
        shares = _by_samples(parts) if predicts else self._shares(parts)
        calls: list[list[LogCall]] = [[] for _ in parts]
        step = self._stepper(name, context, parts, args[1:], key, calls)
        signatures = [signature(part, "evaluation") for part in parts]
        with self._random_restored():
            run = executor.run(schedule, step, signatures, None)
        found = None
        if run.results:
            weights = torch.stack(shares.scales)
            merged = merge_results([run.results[i] for i in sorted(run.results)], weights)
            found = to_cpu(merged), [_log_to_cpu(c) for c in combine_logs(calls, weights)]
        output, logs = self._share(found)
        replay_logs(self.module, logs, shares, batch_size(args[0]))
        return output

    def _share(self, value: Any) -> Any:
        source = self.mesh.neighbor("pp", self.rank_of_stage[-1])
        return broadcast_object(value, source, self.mesh.group("pp"))

    def _check_poison(self, loss: Tensor, signatures: Sequence[Any], weights: Tensor) -> None:
        """Refuse a NaN loss in the first step of every batch shape: it may come from another
        stage's stub. The mean over no valid entry is NaN by itself.
        """
        shapes = tuple(signatures)
        if shapes in self._checked or not bool((weights > 0).any()):
            return
        self._checked.add(shapes)
        if bool(loss.isnan()):
            raise NonFiniteError(
                "the loss of the first pipelined step is NaN. Either the model itself gives NaN, "
                "or the step uses a "
                "value that lives on another pipeline stage (such values are NaN on purpose): name "
                "its module in "
                "ParallelPlan(replicated=...), or run once with pipeline_parallel_size=1 to tell. "
                "No weight was "
                "changed."
            )


def _by_samples(micro_batches: Sequence[Any]) -> BatchShares:
    """Weigh micro-batches by their samples, without asking other replicas."""
    counts = torch.tensor([float(batch_size(part)) for part in micro_batches])
    return BatchShares(scales=tuple(counts.unbind()), total=counts.sum(), samples=None)


def _log_to_cpu(call: LogCall) -> LogCall:
    return LogCall(
        name=call.name, value=to_cpu(call.value), metric=call.metric, options=call.options
    )
