"""Running the user's steps on a mesh: the batch, weights of the loss, random numbers, logs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from lightning_par.engine.activity import Activity
from lightning_par.engine.batch import batch_entry, sequence_entries
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.engine.rng import fork_all_rng, seed_all_generators, seed_of
from lightning_par.engine.tensor_tree import BatchBroadcast
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.step.batch_weights import BatchWeigher, weigh
from lightning_par.strategies.step.logs import adjust_logs
from lightning_par.strategies.step.metrics import bind_metrics
from lightning_par.strategies.step.mixing import mixing_told
from lightning_par.strategies.step.parameter_reads import ParameterReads
from lightning_par.strategies.step.pipelined_step import PipelinedSteps, StepContext
from lightning_par.strategies.step.sharded_sequence import ShardedSequence
from lightning_par.strategies.step.uneven_batches import check_loader, join_ranks, samples_differ

__all__ = ["Step", "StepRunner"]


@dataclass(kw_only=True, eq=False)
class Step:
    """What the forward of one training step found out for its backward.

    `StepRunner.training` makes it, the backward consumes it and closes it. Under a pipeline it only
    says whether labels are valid; gradients and loss scale are with the loss (`ScheduledLoss`).

    Attributes:
        loss_scale: Factor of the loss before its backward; None: 1.
        has_valid_labels: Bool tensor, whether any entry of the batch counts; None: every entry
            counts.
        is_zero_weight: Whether the loss has weight 0; see Note [Zero-weight loss] in
            `engine/data/zero_weight_loss.py`.
        opened: What has to stay open until the backward is over, as recomputation needs it.
    """

    loss_scale: Tensor | None = None
    has_valid_labels: Tensor | None = None
    is_zero_weight: bool = False
    opened: ExitStack = field(default_factory=ExitStack)

    def weigh(self, loss: Tensor) -> Tensor:
        """Return the loss times its scale."""
        return loss if self.loss_scale is None else weigh(loss, self.loss_scale.to(loss.dtype))

    def close(self) -> None:
        """Close what the forward opened; may be called again."""
        self.opened.close()


class StepRunner:
    """Runs `training_step` and its siblings so that the whole mesh computes what one process would.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        batch_layout: Where labels and sequence dims of a batch are.
        sharding: Surrounds every forward and backward.
        sequence: Shards sequences over context ranks, if there are several.
        executor: Runs the stages of this rank; None without a pipeline.
        rank_of_stage: The pipeline rank that holds each stage.
        options: The options of the strategy.
        device: Device of this rank.
        seed: Seed of all steps, the same on every rank.
        activity: Where every step is written down.
        reads: Answers parameters that the user's step reads.

    Attributes:
        pipeline: Runs steps through the pipeline; None without one.
        seed: Seed of all steps; checkpoints keep it.
        evaluations: Number of evaluation steps so far, which seeds the next; checkpoints keep it.
    """

    def __init__(
        self,
        *,
        module: pl.LightningModule,
        mesh: ParallelMesh,
        batch_layout: BatchLayout,
        sharding: Sharding,
        sequence: ShardedSequence | None,
        executor: PipelineExecutor | None,
        rank_of_stage: Sequence[int],
        options: MeshOptions,
        device: torch.device,
        seed: int,
        activity: Activity,
        reads: ParameterReads,
    ) -> None:
        sizes = mesh.sizes
        self._reads = reads
        self.module, self.sequence = module, sequence
        self.seed, self.evaluations = seed, 0
        self._batch_layout, self._sharding, self._activity = batch_layout, sharding, activity
        self._in_step = False
        # Each is asked for in every step or micro-batch: properties of the mesh compute them anew.
        self._shares_replica = sizes.world_size > sizes.data
        self._data_rank, self._device_type = mesh.data_rank, mesh.device_type
        self._has_replicas, self._device = sizes.data > 1, device
        self._num_microbatches = options.num_microbatches
        self._pads = sizes.context > 1
        self._tensor_degree = sizes.tensor if options.sequence_parallel else 1
        self._broadcast = BatchBroadcast(mesh)
        self._weigher = BatchWeigher(mesh, batch_layout)
        self.pipeline: PipelinedSteps | None = None
        if executor is not None:
            ranks = sizes.pipeline
            self.pipeline = PipelinedSteps(
                module=module,
                mesh=mesh,
                executor=executor,
                sharding=sharding,
                weigher=self._weigher,
                user_step=self._microbatch_step,
                sequence=sequence,
                num_microbatches=options.microbatches(ranks),
                schedule=cache(partial(options.build_schedule, ranks)),
                rank_of_stage=rank_of_stage,
            )
        bind_metrics(module, mesh, rank_of_stage, lambda: self._in_step)

    @property
    def last_run(self) -> PipelineRun | None:
        """When the actions of the last pipelined training step ran."""
        return None if self.pipeline is None else self.pipeline.last_run

    def timeline(self) -> list[list[TimedAction]]:
        """Return when every stage ran its actions in the last pipelined training step, in seconds.

        **Communicates**: the actions of every stage, over the ``pp`` axis.
        """
        return [] if self.pipeline is None else self.pipeline.timeline()

    def prepare_loader(self, dataloader: object) -> object:
        """Return a loader that gives every rank the same number of batches.

        Predictions may differ in number; then parameters are gathered before the first.

        Raises:
            ConfigurationError: Its batches are smaller than the number of micro-batches.

        **Communicates**: numbers of samples and of batches, over all ranks, where they may differ.
        """
        trainer, device = self.module.trainer, self._device
        if self.pipeline is not None:
            check_loader(dataloader, self._num_microbatches)
        predicts_in_parallel = trainer.predicting and self._has_replicas
        if predicts_in_parallel and samples_differ(dataloader, device):
            self._sharding.hold()
        return join_ranks(dataloader, trainer, device)

    def begin_batch(self) -> None:
        """Write down that a batch is on its way to the device."""
        self._activity.step = self.module.trainer.global_step
        self._activity.begin("broadcast of the batch")

    def prepare_batch(self, batch: Any) -> Any:
        """Return the batch that all ranks of the replica use.

        Raises:
            ConfigurationError: Its sequences cannot be sharded over the tensor-parallel ranks.
            PlanError: It has no such entry or dim as the plan says.

        **Communicates**: the batch, from the first rank of the replica to the others.
        """
        batch = self._broadcast.broadcast(batch)
        self._check_tokens(batch, predicts=bool(self.module.trainer.predicting))
        self._activity.begin("start of the batch")
        return batch

    def training(self, plugin: Precision, args: Sequence[Any]) -> tuple[Any, Step]:
        """Run `training_step` on the batch of this replica.

        Args:
            plugin: Precision plugin, whose scaler, if it has one, scales the loss.
            args: The batch, and what else `training_step` takes.

        Returns:
            What `training_step` returned, whose loss has a backward; and what that needs to know.
        """
        trainer = self.module.trainer
        self._activity.step = trainer.global_step
        self._activity.begin("training_step")
        key = ("training_step", trainer.fit_loop.total_batch_idx)
        with ExitStack() as opened:  # closes what is open if the step raises
            args = self._open("training_step", args, opened)
            if self.pipeline is not None:
                scaler = getattr(plugin, "scaler", None)
                with self._random_restored(), self._reads.agreed():
                    context = plugin.train_step_context
                    output, has_valid_labels = self.pipeline.training(context, args, key, scaler)
                return output, Step(has_valid_labels=has_valid_labels)
            weights = self._weigher.weigh([args[0]]) if self._weigher.is_needed else None
            is_zero_weight = weights is not None and bool(weights.zero)
            if is_zero_weight:
                opened.enter_context(self._sharding.zero_weight.prepared())
            with adjust_logs(self.module, weights):
                output = self._whole("training_step", plugin.train_step_context, args, key)
            weigher = self._weigher
            return output, Step(
                loss_scale=None if weights is None else weights.own,
                has_valid_labels=weigher.has_valid_labels(args[0]) if weights is None else None,
                is_zero_weight=is_zero_weight,
                opened=opened.pop_all(),
            )

    def evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on the batch of this replica.

        Args:
            name: Name of the step.
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.
        """
        self.evaluations += 1
        self._activity.begin(name)
        key = (name, self.evaluations)
        with ExitStack() as opened:
            args = self._open(name, args, opened)
            if self.pipeline is not None:
                with self._random_restored():
                    return self.pipeline.evaluation(name, context, args, key)
            weighted = self._weigher.is_needed and name != "predict_step"
            weights = self._weigher.weigh([args[0]]) if weighted else None
            with adjust_logs(self.module, weights):
                return self._whole(name, context, args, key)

    def before_backward(self) -> None:
        """Get ready for the backward of a whole step; a pipeline does so for every micro-batch."""
        if self.pipeline is None:
            self._sharding.before_backward()

    @contextmanager
    def backward(self, step: Step) -> Iterator[None]:
        """Surrounds the backward of a step, and closes it."""
        self._activity.begin("backward")
        try:
            with (
                self._sharding.zero_weight.zero_gradients()
                if step.is_zero_weight
                else nullcontext()
            ):
                yield
        finally:
            step.close()

    def _open(self, name: str, args: Sequence[Any], opened: ExitStack) -> Sequence[Any]:
        """Return the arguments of a step with this rank's tokens of the batch."""
        if self.sequence is None:
            return args
        opened.callback(self.sequence.close)
        return self.sequence.open(name, args)

    def _whole(self, name: str, context: StepContext, args: Sequence[Any], key: Any) -> Any:
        step: Callable[..., Any] = getattr(self.module, name)
        with context(), self._random_restored(), self._user_step(key, 0):
            output = self._sharding.call(partial(self._run, step, args))
            if self.sequence is not None:
                self.sequence.check(name)
        return output

    def _run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        with self._reads.in_step(), mixing_told(self.module):
            return step(*args)

    @contextmanager
    def _microbatch_step(self, key: Any, microbatch: int) -> Iterator[None]:
        step = self._user_step(key, microbatch)
        with step, self._reads.in_step(), mixing_told(self.module):
            yield

    @contextmanager
    def _user_step(self, key: Any, microbatch: int) -> Iterator[None]:
        """Surrounds the user's step: all ranks of a replica draw the same random numbers, other
        ones for every step and micro-batch.
        """
        self._in_step = True
        if self._shares_replica:
            seed = seed_of(self.seed, *key, microbatch, self._data_rank)
            seed_all_generators(seed, torch.device(self._device_type))
        try:
            yield
        finally:
            self._in_step = False

    def _random_restored(self) -> AbstractContextManager[None]:
        """Leave the generators as they were, if `_user_step` seeds them."""
        device = torch.device(self._device_type)
        return fork_all_rng(device) if self._shares_replica else nullcontext()

    def _check_tokens(self, batch: Any, *, predicts: bool) -> None:
        """Refuse a batch whose sequences cannot be sharded over the tensor-parallel ranks.

        Sequences that context ranks shard are padded, except in predictions, whose batches may lack
        the labels.
        """
        degree, layout = self._tensor_degree, self._batch_layout
        if degree == 1 or (self._pads and not predicts):
            return
        for entry, dim in sequence_entries(batch, layout).items():
            if entry == layout.labels and predicts:
                continue
            shape = tuple(getattr(batch_entry(batch, entry), "shape", ()))
            if not -len(shape) <= dim < len(shape):
                raise PlanError(
                    f"the plan says that T is dim {dim} of the batch entry {entry!r}, but its "
                    f"shape is {shape}."
                )
            tokens = shape[dim]
            if tokens % degree:
                raise ConfigurationError(
                    f"tensor_parallel_size={degree} with sequence_parallel=True: {entry!r} has "
                    f"T={tokens} tokens in dim {dim}, not divisible by {degree}. Pad to "
                    f"{-(-tokens // degree) * degree}, or use sequence_parallel=False."
                )
