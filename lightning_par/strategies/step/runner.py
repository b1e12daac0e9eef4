"""Running the user's steps on a mesh: the batch, weights of the loss, random numbers, logs.

Length: training and evaluation go the same way, through a pipeline and without one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.engine.activity import Activity
from lightning_par.engine.batch import BatchDims, BatchDimsFinder
from lightning_par.engine.data.equal_copies import EqualCopies
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.experts.router_balance import shared_balance
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.data.batch_copies import copies_to
from lightning_par.strategies.data.filled_batch import counting_nowhere
from lightning_par.strategies.data.loaders import ReplicaLoaders
from lightning_par.strategies.data.replica_batches import Share
from lightning_par.strategies.data.uneven_batches import check_loader
from lightning_par.strategies.data.weights_on_host import KnownWeights, WeightsOnHost
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.world import World
from lightning_par.strategies.step.batch_statistics import synchronize_batchnorm
from lightning_par.strategies.step.batch_weights import BatchWeigher, declared_rule, Step
from lightning_par.strategies.step.counted_buffers import CountedBuffers
from lightning_par.strategies.step.gradient_path import GradientPath
from lightning_par.strategies.step.loss_form import FormWatch
from lightning_par.strategies.step.manual_step import ManualSteps
from lightning_par.strategies.step.metrics import bind_metrics
from lightning_par.strategies.step.parameter_reads import ParameterReads
from lightning_par.strategies.step.pipelined_step import (
    check_tokens,
    loss_of,
    PipelinedSteps,
    StepContext,
)
from lightning_par.strategies.step.sharded_sequence import ShardedSequence
from lightning_par.strategies.step.skipped_step import SkippedSteps
from lightning_par.strategies.step.step_errors import raise_explained
from lightning_par.strategies.step.step_random import HookDraws, shared_tokens, StepRandom
from lightning_par.strategies.step.step_traces import adjust_logs
from lightning_par.upstream.functions import replaced

__all__ = ["EvaluationStep", "StepLooks", "StepRunner"]


@dataclass(kw_only=True, eq=False)
class EvaluationStep:
    """What is known of an evaluation step on the batches of one data loader.

    Attributes:
        random: Its random numbers.
        count: Into how many micro-batches a batch is cut.
        is_divided: Whether its sequences are divided over the context ranks.
        told: Logs, and metrics, of which a warning has said that replicas get something else.
        is_of_replica: Whether a warning or the log has said that each replica runs it alone.
        is_whole: Whether all of it runs on every stage of a pipeline, see `ModelCalls`.
        rule: Name of the rule of the training loss with which its logs were compared.
    """

    random: StepRandom
    count: int
    is_divided: bool
    told: frozenset[str] = frozenset()
    is_of_replica: bool = False
    is_whole: bool = False
    rule: str = ""


class StepLooks(Protocol):
    """Looks at steps before they run; what `RunStart` does.

    Attributes:
        is_over: Whether no later training step has to be looked at.
    """

    is_over: bool

    def before_batch(self, context: StepContext, args: Sequence[Any]) -> None:
        """Look at a training step whose sequences are whole."""

    def before_training(
        self,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
        count: int,
        known: KnownWeights | None,
    ) -> None:
        """Look at a training step."""

    def evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> EvaluationStep:
        """Return what is known of an evaluation step, which may be looked at."""

    def proved(
        self, name: str, args: Sequence[Any], known: EvaluationStep
    ) -> AbstractContextManager[list[Any]]:
        """Surrounds an evaluation step, which may be proved; takes what it returns."""


class OnHost(Protocol):
    """What prepares an optimizer on the host for gradients."""

    def before_backward(self) -> None: ...


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
        world: The other ranks of the run.
        reads: Answers parameters that the user's step reads.
        manual: Steps that run their own backwards, if they do.

    Attributes:
        manual: As given.
        reads: As given.
        world: As given.
        loaders: Divides the samples of data loaders.
        pipeline: Runs steps through the pipeline; None without one.
        seed: Seed of all steps; checkpoints keep it.
        evaluations: Number of evaluation steps so far, which seeds the next; checkpoints keep it.
        looks: Looks at the steps before they run; set before the first.
        form: Notices when the loss takes another form.
        random: Random numbers of the step that runs.
        weigher: Weighs the losses of replicas and micro-batches.
        counts: Buffers that replicas add to.
        dims: Finds the batch dims of a batch.
        share: What the present batch is of the global one.
        most: Samples that every replica has of it.
        count: Into how many micro-batches a batch is cut; 1 without a pipeline.
        is_outside: Whether a hook on this rank's parts is at work, between a backward and a step.
        shown: Steps of which hooks of a user's read what they return.
        begun: Context and arguments of the present training step, batch dims, and micro-batches.
        balances: Whether the model adds a loss that balances experts over all replicas.
    """

    def __init__(  # house: half of it names what it is given
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
        world: World,
        reads: ParameterReads,
        manual: ManualSteps,
    ) -> None:
        sizes, self._copies = mesh.sizes, copies_to(module, device)
        self.module, self.sequence, self.reads = module, sequence, reads
        self.seed, self.evaluations, self.manual = seed, 0, manual
        self.batch_layout, self.sharding, self._activity = batch_layout, sharding, activity
        self._in_step = self.is_outside = self.balances = False
        self.shown: frozenset[str] = frozenset()
        # Loaders are seeded by global rank: what they shuffle may differ within a replica.
        first = dist.get_global_rank(mesh.replica_group, 0)
        self._broadcast, self.world = world.broadcast(mesh.replica_group, first), world
        self.mesh, self._has_replicas, self._device = mesh, sizes.data > 1, device  # asked often
        self.loaders = ReplicaLoaders(module, mesh, sharding.hold, device, options)
        self.share = Share()
        self.most = self.share.smallest  # samples that every replica has
        self._num_microbatches, self._graphs = options.num_microbatches, options.records_graphs
        self._tensor_degree = sizes.tensor if options.sequence_parallel else 1
        synchronize_batchnorm(module, mesh)
        self.weigher = BatchWeigher(mesh, declared_rule(batch_layout))
        self._on_host = WeightsOnHost(module, self.weigher, self.cut)
        self.form = FormWatch(module.device, has_values=world.has_values)
        self._skipped = SkippedSteps(module, mesh)
        self.counts = CountedBuffers(module, mesh, takes_parts=batch_layout.local_statistics)
        self.looks: StepLooks
        self.begun: tuple[StepContext, Sequence[Any], BatchDims, int]
        self._hook_draws = HookDraws(module, sizes.data, device)
        self.random = self._training = self.random_of("training_step")
        self.pipeline: PipelinedSteps | None = None
        self.count = count = 1 if executor is None else options.microbatches(sizes.pipeline)
        self.dims = BatchDimsFinder(batch_layout, count, sizes.data)
        if executor is not None:
            self.pipeline = PipelinedSteps(
                module=module,
                mesh=mesh,
                executor=executor,
                world=world,
                sharding=sharding,
                weigher=self.weigher,
                user_step=self._microbatch_step,
                replay=self._training.replay,
                sequence=sequence,
                num_microbatches=count,
                counts=self.counts,
                schedule=cache(partial(options.build_schedule, sizes.pipeline)),
                rank_of_stage=rank_of_stage,
            )
        self._equal: EqualCopies | None = None
        if options.verify is not False and world.has_values and sizes.world_size > 1:
            self._equal = EqualCopies(module, mesh, device)
        bind_metrics(module, mesh, device, rank_of_stage, lambda: self._in_step)

    @property
    def last_run(self) -> PipelineRun | None:
        """When the actions of the last pipelined training step ran."""
        return None if self.pipeline is None else self.pipeline.last_run

    def timeline(self) -> list[list[TimedAction]]:
        """Return when every stage ran its actions in the last pipelined training step, in seconds.

        **Communicates**: the actions of every stage, over the ``pp`` axis.
        """
        # No pipeline has no timeline; callers ask on every layout.
        return [] if self.pipeline is None else self.pipeline.timeline()

    def prepare_loader(self, dataloader: object) -> object:
        """Return a loader of this replica's samples; see `ReplicaLoaders.prepare`.

        Raises:
            ConfigurationError: Its batches are smaller than the number of micro-batches.
        """
        # Before the loader is replaced: the sampler of a replica hides the user's batch size.
        self.check_loader(dataloader)
        return self.loaders.prepare(dataloader)

    def check_loader(self, dataloader: object) -> None:
        """Note the batch size of a loader of the user's; refuse what `prepare_loader` refuses."""
        self.dims.add_loader(dataloader)
        if self.pipeline is not None:
            check_loader(dataloader, self._num_microbatches)

    def end_evaluation(self) -> None:
        """Let go of gathered weights; see `ReplicaLoaders.end_evaluation`."""
        self.sharding.release()
        self.loaders.end_evaluation()

    def prepare_batch(self, given: Any, move: Callable[..., Any], *rest: Any) -> Any:
        """Return the batch that all ranks of the replica use, on the device.

        Args:
            given: As the data loader gave it.
            move: Moves to the device what is not there yet, and calls the user's hooks.
            rest: What else `move` takes.

        Raises:
            PlanError: It has no such entry or dim as the plan says.

        **Communicates**: the batch, from the first rank of the replica to the others.
        """
        # Each replica takes its own samples first, so that only those are moved to the device.
        if self._has_replicas:
            given = self._take_share(given, *rest[1:2])
        copied = given if self._copies is None else self._copies.copy(given)
        with self._hook_draws.watched():
            batch = move(copied, *rest)
        self._activity.step = self.module.trainer.global_step
        if self._graphs:  # else every block is a step to torch, which reuses its output
            torch.compiler.cudagraph_mark_step_begin()
        self._activity.begin("broadcast of the batch")
        # The whole batch is sent, also what the loader of another rank gave differently: within a
        # replica all ranks have to see the same samples, or their shards of one matmul do not
        # match.
        if self._device.type == "cpu":  # which needs not be waited for
            batch = self._broadcast.broadcast(batch)
        else:
            batch = self._on_host.broadcast(self._broadcast, batch, given)
        if self.loaders.has_several and not self._has_replicas:
            self._take_share(batch, *rest[1:2])  # the same on all ranks
        predicts = bool(self.module.trainer.predicting)
        # Sequences that context ranks divide are padded.
        if predicts or self.sequence is None:
            self._check_tokens(batch, has_labels=not predicts)
        self._activity.begin("start of the batch")
        return batch

    @property
    def repeats(self) -> bool:
        """Whether the batch of this replica repeats a sample, and counts nowhere."""
        return self.weigher.fills

    def _take_share(self, given: Any, dataloader_idx: int = 0) -> Any:
        """Return the batch, and take note of what it is of the global one."""
        given, share = self.loaders.take(given, dataloader_idx)
        self.share, self.most = share, max(1, share.smallest)
        self.dims.given, self.dims.is_whole = share.own, share.is_whole
        self.form.watches = share.is_even
        self.weigher.fills = share.fills
        if self.pipeline is not None:
            self.pipeline.most = self.most
        return given

    def training(  # house: the order of a step, in one place
        self, plugin: Precision, args: Sequence[Any]
    ) -> tuple[Any, Step]:
        """Run `training_step` on the batch of this replica.

        Args:
            plugin: Precision plugin, whose scaler, if it has one, scales the loss.
            args: The batch, and what else `training_step` takes.

        Returns:
            What `training_step` returned, whose loss has a backward; and what that needs to know.
        """
        trainer, context = self.module.trainer, plugin.train_step_context
        self._activity.begin("training_step")
        # While sequences are whole: afterwards attention is that of context ranks.
        if self.sequence is not None:
            self.looks.before_batch(context, args)
        self._activity.step, self.random = trainer.global_step, self._training
        if self._equal is not None and trainer.global_step >= self._equal.next:
            self._equal.advance(trainer.global_step)
        # Not global_step: several accumulated batches share one, and each has to draw anew.
        key = "training_step", trainer.fit_loop.total_batch_idx
        known = None if self._device.type == "cpu" else self._on_host.known(args[0])
        zero = None if known is None else known.zero
        # A step that raises must not leave attention, logs or buffers in the state of a step.
        with ExitStack() as opened:  # closes what is open if the step raises
            args = self._open(args, opened)
            dims = self.dims_of(args[0])
            # The same on every replica, as each micro-batch has collectives of FSDP in its
            # backward: `most` is the number of samples of the smallest replica.
            count = min(self.count, dims.size or 1, self.most)
            samples, self.begun = dims.size or 1, (context, args, dims, count)
            if not self.looks.is_over:
                self.looks.before_training(*self.begun, known)
                if self.pipeline is not None and self.form.is_asked:
                    self.pipeline.form = self.form
            if self.balances:
                opened.enter_context(self._shared_balance())
            if self.pipeline is not None:
                scaler = getattr(plugin, "scaler", None)
                random = self.random.step(samples, count, self.tokens_of(args[0]), self.share)
                if self.counts.names:
                    fills = self.weigher.fills
                    opened.enter_context(self.counts.summed("training_step", fills=fills))
                # Inside of `random`, which has to see the states that all stages agree on.
                with random, self.reads.agreed():
                    output, valid = self.pipeline.training(context, args, dims, key, scaler, zero)
                    self.random.share(self.pipeline.from_last_stage)
                return output, Step(has_valid_labels=valid)
            # One replica without context parallelism is its own mean: its loss is left as it is.
            weigher, weighs = self.weigher, self.weigher.is_needed
            weights = weigher.weigh([args[0]], [samples], zero) if weighs else None
            if weigher.fills:
                opened.enter_context(counting_nowhere(self.module, trains=True))
            # Its backward still has to run, as others wait in the collectives of FSDP, but what
            # it computes may be NaN; see Note [Zero-weight loss].
            if is_zero_weight := weights is not None and bool(weights.zero):
                opened.enter_context(self.sharding.zero_weight.prepared())
            step = Step(
                loss_scale=None if weights is None else weights.own,
                has_valid_labels=None if weighs else self.has_valid_labels(args[0]),
                is_zero_weight=is_zero_weight,
            )
            with adjust_logs(self.module, weights, samples), self.manual.running(step):
                output = self._whole("training_step", context, args, key, dims)
            if not self.manual.is_used and self._skipped.is_skipped(output):
                # No backward comes that would free what FSDP has gathered in the forward.
                self.sharding.release()
                return torch.zeros((), device=self._device, requires_grad=True), Step(skips=True)
            if self.form.is_asked and not self.manual.is_used and output is not None:
                self.form.see(loss_of(output), samples, weights)
            # What is open stays open until the backward is over: recomputation runs the forward
            # again, and needs the same attention, weights and sequences.
            step.opened = opened.pop_all()
            return output, step

    def _shared_balance(self) -> AbstractContextManager[None]:
        weigher = self.weigher
        is_lost = lambda: weigher.last is not None and bool(weigher.last.zero)  # noqa: E731
        return shared_balance(repeats=weigher.fills, is_sum=weigher.rule.is_sum, is_lost=is_lost)

    def has_valid_labels(self, batch: Any) -> Tensor | None:
        """Return whether any label of a batch counts; None if every sample counts."""
        return self.weigher.has_valid_labels(batch)

    def evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on the batch of this replica.

        Args:
            name: Name of the step.
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.
        """
        # Counted on every rank, also where the step is not run to its end: it seeds the draws.
        self.evaluations += 1
        self._activity.begin(name)
        key, predicts = (name, self.evaluations), name == "predict_step"
        with ExitStack() as opened:
            if self.weigher.fills:
                opened.enter_context(counting_nowhere(self.module, trains=False))
            known = self.looks.evaluation(name, context, args)
            noted = opened.enter_context(self.looks.proved(name, args, known))
            if known.is_divided:
                args = self._open(args, opened)
            else:
                opened.enter_context(self.weigher.on_whole_sequences())
                self._check_tokens(args[0], has_labels=not predicts)
            weighted = self.weigher.is_needed and not predicts
            if self.balances and not predicts:
                opened.enter_context(self._shared_balance())
            dims = self.dims_of(args[0], predicts=predicts)
            self.random, samples = known.random, dims.size or 1
            if self.pipeline is not None and not known.is_whole:
                # Nobody knows which values of a step whose loss is a sum are sums, too.
                count = 1 if self.weigher.rule.is_sum else min(known.count, self.most)
                with self.random.step(samples, count, self.tokens_of(args[0]), self.share):
                    output = self.pipeline.evaluation(name, context, args, dims, key, count)
                    self.random.share(self.pipeline.from_last_stage)
            else:
                weights = self.weigher.weigh([args[0]], [samples]) if weighted else None
                with adjust_logs(self.module, weights):
                    output = self._whole(name, context, args, key, dims)
            noted.append(output)
        return output

    def evaluated(self, step: Callable[[], Any]) -> Any:
        """Run an evaluation step from its beginning to its end, on a pipeline on every stage."""
        # Stages take part in each other's calls of the model in the order in which they are made.
        if self.pipeline is None:
            return self.sharding.call(step)
        with self.pipeline.model_calls.one_by_one():
            return step()

    def random_of(self, name: str) -> StepRandom:
        """Return random numbers of a step that nobody has looked at."""
        return StepRandom(self.mesh, self._device, lambda: self.seed, name)

    def before_backward(self) -> None:
        """Get ready for the backward of a whole step; a pipeline does so for every micro-batch."""
        if self.pipeline is None and not self.manual.is_used:
            self.sharding.before_backward()

    @contextmanager
    def whole_backward(
        self, loss: Tensor, step: Step, gradients: GradientPath, offload: OnHost | None
    ) -> Iterator[Tensor]:
        """Surrounds the backward of a loss; gives what is to be differentiated.

        Args:
            loss: What the step has returned.
            step: The step.
            gradients: Their path to the optimizer.
            offload: The optimizer on the host, if it is there.
        """
        with closing(step), gradients.of_one_backward():
            self.before_backward()
            if offload is not None:
                offload.before_backward()
            weighted = step.weigh(loss)
            gradients.add_loss(weighted, step.has_valid_labels)
            # Whole step: runs the backward. Pipeline: it has run; this puts the gradients in place.
            with self.backward(step):
                yield weighted
            gradients.after_backward()

    @contextmanager
    def backward(self, step: Step) -> Iterator[None]:
        """Surrounds the backward of a step, and closes it."""
        self._activity.begin("backward")
        self.reads.settle()
        # In manual optimization FSDP has to reduce inside of the step, where the backward runs.
        try:
            # Under a pipeline the backward has run.
            with (
                self.manual.in_backward() if self.manual.is_used else nullcontext(),
                self.random.replay() if self.pipeline is None else nullcontext(),
                self.sharding.zero_weight.zero_gradients()
                if step.is_zero_weight
                else nullcontext(),
                self.sharding.backward_in_step() if self.manual.is_used else nullcontext(),
            ):
                yield
                if self.reads.wholes.late:
                    self.reads.wholes.add_gradients()
        finally:
            step.close()
        if self._copies is not None:
            self._copies.begin_next()

    def watch(self, optimizer: Optimizer) -> None:
        """Let a step that runs its own optimizers see what they have changed."""
        if self.manual.is_used:
            # Weights change in the middle of a step: what the step wrote to whole tensors is kept
            # before, and what FSDP has gathered of the old weights is dropped after.
            optimizer.register_step_pre_hook(lambda *_: self.reads.settle())
            optimizer.register_step_post_hook(lambda *_: self.sharding.after_update())

    def _open(self, args: Sequence[Any], opened: ExitStack) -> Sequence[Any]:
        """Return the arguments of a step with this rank's tokens of the batch."""
        if self.sequence is None:
            return args
        opened.callback(self.sequence.close)
        return self.sequence.open(args)

    def dims_of(self, batch: Any, *, predicts: bool = False) -> BatchDims:
        """Return which entries of a batch have a batch dim, if it is divided."""
        if self.pipeline is None and (predicts or not self._has_replicas):
            return BatchDims()
        layout = self.batch_layout
        is_declared = layout.loss_weight is not None or layout.labels is not None
        must_know = self.count > 1 or (self._has_replicas and not is_declared)
        return self.dims.find(batch, must_know=must_know)

    def cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return the micro-batches of a batch, which may be one, and their numbers of samples."""
        dims = self.dims_of(batch)
        return (
            ([batch], [dims.size or 1]) if self.pipeline is None else self.pipeline.cut(batch, dims)
        )

    def _whole(
        self, name: str, context: StepContext, args: Sequence[Any], key: Any, dims: BatchDims
    ) -> Any:
        random = self.random.step(dims.size or 1, 1, self.tokens_of(args[0]), self.share)
        is_manual = name == "training_step" and self.manual.is_used
        if name != "training_step":
            call = self.evaluated
        else:
            call = self.sharding.call_with_backwards if is_manual else self.sharding.call
        counts, fills = self.counts, self.weigher.fills
        counted = counts.summed(name, fills=fills) if counts.names else nullcontext()
        with context(), random, self.user_step(key, 0), counted:
            output = call(partial(self.call, getattr(self.module, name), args))
            if self.sequence is not None:
                self.sequence.check()
        return output

    def call(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Call a step of the user's, which may read parameters and run its own backwards."""
        with self.reads.in_step(), self.manual.in_step():
            return step(*args)

    @contextmanager
    def _microbatch_step(self, key: Any, microbatch: int) -> Iterator[None]:
        with self.user_step(key, microbatch), self.reads.in_step():
            yield

    @contextmanager
    def user_step(self, key: Any, microbatch: int) -> Iterator[None]:
        """Surrounds the user's step."""
        self._in_step = True
        with self.random.user_step(key, microbatch):
            try:
                yield
            except (RuntimeError, ValueError, AttributeError, TypeError) as error:
                # Under a pipeline other stages are in the same schedule: in the first look the
                # error is noted, and raised on all of them at its end.
                refuse = None if self.pipeline is None else self.random.refuse
                raise_explained(self.module, error, refuse)
            finally:
                self._in_step = False

    def outside(self, is_outside: bool) -> AbstractContextManager[None]:
        """Surrounds a hook on this rank's parts, or what this package does inside of it."""
        return replaced(self, "is_outside", is_outside)

    @property
    def is_in_step(self) -> bool:
        """Whether the user's step is running."""
        return self._in_step

    def _check_tokens(self, batch: Any, *, has_labels: bool) -> None:
        if self._tensor_degree > 1:
            check_tokens(batch, self.batch_layout, has_labels=has_labels)

    def tokens_of(self, batch: Any) -> int | None:
        """Return the length of sequences that tensor-parallel ranks share; None: they do not."""
        return None if self._tensor_degree == 1 else shared_tokens(batch, self.batch_layout)
