"""Running the user's steps on a mesh: the batch, weights of the loss, random numbers, logs.

Length: training and evaluation go the same way, through a pipeline and without one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.engine.activity import Activity
from lightning_par.engine.batch import BatchDims, BatchDimsFinder, take_samples
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.executor import PipelineExecutor, PipelineRun
from lightning_par.engine.tensor_tree import TreeBroadcast
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.isolate import untouched
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.components.batch_copies import copies_to
from lightning_par.strategies.data.filled_batch import counting_nowhere
from lightning_par.strategies.data.loaders import ReplicaLoaders
from lightning_par.strategies.data.replica_batches import Share
from lightning_par.strategies.data.uneven_batches import check_loader
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.start.divided_step import DividedLook, Look
from lightning_par.strategies.start.first_look import FirstLook
from lightning_par.strategies.start.seen_losses import LookAtStep
from lightning_par.strategies.start.silence import silent
from lightning_par.strategies.start.trial import Trial
from lightning_par.strategies.start.uncut_batch import run_parts
from lightning_par.strategies.start.world_size import compares_world_sizes
from lightning_par.strategies.step.batch_statistics import (
    check_batch_statistics,
    synchronize_batchnorm,
)
from lightning_par.strategies.step.batch_weights import BatchWeigher, declared_rule, Step
from lightning_par.strategies.step.loss_rule import choose_parts, Seen
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
from lightning_par.strategies.step.weights_on_host import WeightsOnHost

__all__ = ["StepRunner"]

_LOOK = ("first look",)


@dataclass(eq=False)
class _Evaluation:
    """What is known of an evaluation step on the batches of one data loader.

    Attributes:
        random: Its random numbers.
        count: Into how many micro-batches a batch is cut.
        is_divided: Whether its sequences are divided over the context ranks.
    """

    random: StepRandom
    count: int
    is_divided: bool


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
        manual: Steps that run their own backwards, if they do.
        decisions: Where the rule of the loss is noted.

    Attributes:
        manual: As given.
        reads: As given.
        loaders: Divides the samples of data loaders.
        pipeline: Runs steps through the pipeline; None without one.
        seed: Seed of all steps; checkpoints keep it.
        evaluations: Number of evaluation steps so far, which seeds the next; checkpoints keep it.
        form: Notices when the loss takes another form.
        after_look: Id of an object -> function of it that is called after the first look at the
            step, which runs it on a few samples: what counts the first step begins anew.
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
        reads: ParameterReads,
        manual: ManualSteps,
        decisions: Decisions,
    ) -> None:
        sizes, self._copies = mesh.sizes, copies_to(module, device)
        self.module, self.sequence, self.reads = module, sequence, reads
        self.seed, self.evaluations, self.manual = seed, 0, manual
        self._batch_layout, self._sharding, self._activity = batch_layout, sharding, activity
        self._in_step, self._is_checked, self._proves = False, False, options.verify is not False
        # Loaders are seeded by global rank: what they shuffle may differ within a replica.
        first = dist.get_global_rank(mesh.replica_group, 0)
        self._broadcast = TreeBroadcast(mesh.replica_group, first)
        self._mesh, self._has_replicas, self._device = mesh, sizes.data > 1, device  # asked often
        self.loaders = ReplicaLoaders(module, mesh, sharding, device, options)
        self._share = Share()
        self._most = self._share.smallest  # samples that every replica has
        self._num_microbatches, self._graphs = options.num_microbatches, options.records_graphs
        self._tensor_degree = sizes.tensor if options.sequence_parallel else 1
        synchronize_batchnorm(module, mesh)
        self._weigher = BatchWeigher(mesh, declared_rule(batch_layout))
        self._on_host = WeightsOnHost(module, self._weigher, self._cut)
        self._first_look = FirstLook(module, mesh, batch_layout, self._weigher, decisions)
        self.form, self._skipped = self._first_look.form, SkippedSteps(module, mesh)
        look = partial(self._user_step, _LOOK)
        self._trial = Trial(module, mesh, batch_layout, sharding, manual, look, self._run)
        self._divided_look: DividedLook | None = None
        if sequence is not None:
            self._divided_look = DividedLook(
                module, mesh, sequence, batch_layout, self._weigher, self._first_look.tolerance
            )
        self._hook_draws = HookDraws(module, sizes.data, device)
        self._training, self._met = self._random_of("training_step"), dict[Any, _Evaluation]()
        self.after_look: dict[int, Callable[[], None]] = {}
        self.pipeline: PipelinedSteps | None = None
        self._count = count = 1 if executor is None else options.microbatches(sizes.pipeline)
        self._dims = BatchDimsFinder(batch_layout, count, sizes.data)
        if executor is not None:
            self.pipeline = PipelinedSteps(
                module=module,
                mesh=mesh,
                executor=executor,
                sharding=sharding,
                weigher=self._weigher,
                user_step=self._microbatch_step,
                replay=self._training.replay,
                sequence=sequence,
                num_microbatches=count,
                schedule=cache(partial(options.build_schedule, sizes.pipeline)),
                rank_of_stage=rank_of_stage,
            )
        bind_metrics(module, mesh, device, rank_of_stage, lambda: self._in_step)

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
        """Return a loader of this replica's samples; see `ReplicaLoaders.prepare`.

        Raises:
            ConfigurationError: Its batches are smaller than the number of micro-batches.
        """
        self._dims.add_loader(dataloader)
        if self.pipeline is not None:
            check_loader(dataloader, self._num_microbatches)
        return self.loaders.prepare(dataloader)

    def end_evaluation(self) -> None:
        """Let go of gathered weights; see `ReplicaLoaders.end_evaluation`."""
        self._sharding.release()
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
        if self._has_replicas:
            given = self._take_share(given, *rest[1:2])
        copied = given if self._copies is None else self._copies.copy(given)
        with self._hook_draws.watched():
            batch = move(copied, *rest)
        self._activity.step = self.module.trainer.global_step
        if self._graphs:  # else every block is a step to torch, which reuses its output
            torch.compiler.cudagraph_mark_step_begin()
        self._activity.begin("broadcast of the batch")
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
        return self._weigher.fills

    def _take_share(self, given: Any, dataloader_idx: int = 0) -> Any:
        """Return the batch, and take note of what it is of the global one."""
        given, share = self.loaders.take(given, dataloader_idx)
        self._share, self._most = share, max(1, share.smallest)
        self._dims.given, self._dims.is_whole = share.own, share.is_whole
        self._first_look.share, self.form.watches = share, share.is_even
        self._weigher.fills = share.fills
        if self.pipeline is not None:
            self.pipeline.most = self._most
        return given

    def _shown(self, batch: Any, dims: BatchDims) -> tuple[Any, BatchDims]:
        """Return what of a batch is looked at: one sample, if another replica has no more."""
        if self._most > 1 or dims.size in (None, 1):
            return batch, dims
        return take_samples(batch, dims, [0]), replace(dims, size=1)

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
        if self._divided_look is not None and not self._is_checked:
            self._divided_look.check_training(args[0], *self._tried("training_step", context, args))
            self._end_look()
        self._activity.step, self._random = trainer.global_step, self._training
        key = "training_step", trainer.fit_loop.total_batch_idx
        known = None if self._device.type == "cpu" else self._on_host.known(args[0])
        zero = None if known is None else known.zero
        with ExitStack() as opened:  # closes what is open if the step raises
            args = self._open(args, opened)
            dims = self._dims_of(args[0])
            count = min(self._count, dims.size or 1, self._most)
            if not self._is_checked:
                self._is_checked = True
                if not self._batch_layout.local_statistics:
                    check_batch_statistics(self.module, self._mesh, count)
            looks, samples = self._first_look, dims.size or 1
            look = partial(self._look, "training_step", context, args[1:], size=samples)
            if not looks.is_over and looks.is_due(args[0], samples, count, known):
                found = dims if dims.size is not None else self._dims.find(args[0], must_know=False)
                batch, found = self._shown(args[0], found)
                looks.look(batch, found, count, partial(look, size=found.size or 1))
                self._end_look()
                if self.pipeline is not None and looks.watches:
                    self.pipeline.see_loss = self.form.see
            self.form.again = partial(looks.look_again, args[0], dims, count, look, self._cut)
            if self.pipeline is not None:
                scaler = getattr(plugin, "scaler", None)
                random = self._random.step(samples, count, self._tokens_of(args[0]), self._share)
                with random, self.reads.agreed():
                    output, valid = self.pipeline.training(context, args, dims, key, scaler, zero)
                    self._random.share(self.pipeline.from_last_stage)
                return output, Step(has_valid_labels=valid)
            weigher, weighs = self._weigher, self._weigher.is_needed
            weights = weigher.weigh([args[0]], [samples], zero) if weighs else None
            if weigher.fills:
                opened.enter_context(counting_nowhere(self.module, trains=True))
            if is_zero_weight := weights is not None and bool(weights.zero):
                opened.enter_context(self._sharding.zero_weight.prepared())
            step = Step(
                loss_scale=None if weights is None else weights.own,
                has_valid_labels=None if weighs else self.has_valid_labels(args[0]),
                is_zero_weight=is_zero_weight,
            )
            with adjust_logs(self.module, weights, samples), self.manual.running(step):
                output = self._whole("training_step", context, args, key, dims)
            if not self.manual.is_used and self._skipped.is_skipped(output):
                self._sharding.release()
                return torch.zeros((), device=self._device, requires_grad=True), Step(skips=True)
            if looks.watches and not self.manual.is_used and output is not None:
                self.form.see(loss_of(output), samples)
            step.opened = opened.pop_all()
            return output, step

    def has_valid_labels(self, batch: Any) -> Tensor | None:
        """Return whether any label of a batch counts; None if every sample counts."""
        return self._weigher.has_valid_labels(batch)

    def evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> Any:
        """Run `validation_step`, `test_step` or `predict_step` on the batch of this replica.

        Args:
            name: Name of the step.
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.
        """
        self.evaluations += 1
        self._activity.begin(name)
        key, predicts = (name, self.evaluations), name == "predict_step"
        with ExitStack() as opened:
            if self._weigher.fills:
                opened.enter_context(counting_nowhere(self.module, trains=False))
            known = self._evaluation(name, context, args)
            if known.is_divided:
                args = self._open(args, opened)
            else:
                opened.enter_context(self._weigher.on_whole_sequences())
                self._check_tokens(args[0], has_labels=not predicts)
            weighted = self._weigher.is_needed and not predicts
            dims = self._dims_of(args[0], predicts=predicts)
            self._random, samples = known.random, dims.size or 1
            if self.pipeline is not None:
                # Nobody knows which values of a step whose loss is a sum are sums, too.
                count = 1 if self._weigher.rule.is_sum else min(known.count, self._most)
                with self._random.step(samples, count, self._tokens_of(args[0]), self._share):
                    output = self.pipeline.evaluation(name, context, args, dims, key, count)
                    self._random.share(self.pipeline.from_last_stage)
                return output
            weights = self._weigher.weigh([args[0]], [samples]) if weighted else None
            with adjust_logs(self.module, weights):
                return self._whole(name, context, args, key, dims)

    def _evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> _Evaluation:
        """Return what is known of an evaluation step; its first batch is looked at.

        **Communicates**: then what the step does, and the results over all ranks.
        """
        key = name, *args[2:]
        known = self._met.get(key)
        look = self._divided_look
        if known is None or (look is not None and look.is_unsettled(key, args[1])):
            predicts, sizes = name == "predict_step", self._mesh.sizes
            known = _Evaluation(self._random_of(name), self._count, self.sequence is not None)
            self._met[key] = known
            if predicts:
                known.is_divided = False
            elif look is not None:
                tried = self._tried(name, context, args)
                known.is_divided = look.runs_divided(key, args[0], *tried)
            # Replicas may predict unequal numbers of batches.
            is_alone = predicts and self._has_replicas
            if sizes.world_size > 1 and not known.is_divided and not is_alone:
                with self._weigher.on_whole_sequences():
                    batch, dims = self._shown(args[0], self._dims_of(args[0], predicts=predicts))
                    self._meet(known, name, context, [batch, *args[1:]], dims)
        return known

    def _tried(
        self, name: str, context: StepContext, args: Sequence[Any]
    ) -> tuple[BatchDims, Look]:
        """Return which entries of a batch have a batch dim; and what runs the step without a trace,
        on whole and on divided sequences.
        """
        random = self._random_of(name)

        def run(batch: Any, samples: int, group: dist.ProcessGroup | None) -> tuple[Seen, bool]:
            self._random, size = random, samples if group is None else 0
            parts = [(batch, samples)]
            seen, _ = self._look(name, context, args[1:], parts, size=size, group=group)
            return seen, random.draws

        return self._dims.find(args[0], must_know=False), run

    def _meet(
        self,
        known: _Evaluation,
        name: str,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
    ) -> None:
        """Find out how an evaluation step draws, and whether parts of a batch log what it does."""
        size = dims.size or 1
        look = partial(self._look, name, context, args[1:], size=size)
        whole = [(args[0], size)]
        divides = (known.count > 1 or self._has_replicas) and size > 1 and not dims.unsure
        has_labels = divides and name != "predict_step"
        rules = self._first_look.rules(args[0], dims) if has_labels else []
        parts = choose_parts(args[0], dims, known.count, rules) if divides else whole
        self._random = known.random
        try:
            seen, is_random = run_parts(look, parts, whole[0])
        except ConfigurationError as error:  # it does not run on parts, or draws for all together
            known.count, known.random = 1, self._random_of(name)
            if self._has_replicas:
                say = rank_zero_warn if error.code == "LP311" else rank_zero_info
                say(f"{name} runs on the samples of each replica as if they were all: {error}")
                return
            self._random = known.random
            look(whole)
            return
        if self.pipeline is not None and (seen.leaves or seen.writes):
            known.count = 1  # what hooks of an epoch read, or it writes, is then of a whole batch
        if is_random:
            return
        others = self._first_look.judge_logs(seen, parts, known.count)
        if others or any(each.startswith(f"{name}()") for each in self._weigher.sums):
            known.count = 1
        if self._has_replicas:
            self._first_look.warn_of_logs(name, others)

    def _random_of(self, name: str) -> StepRandom:
        return StepRandom(self._mesh, self._device, lambda: self.seed, name)

    def before_backward(self) -> None:
        """Get ready for the backward of a whole step; a pipeline does so for every micro-batch."""
        if self.pipeline is None and not self.manual.is_used:
            self._sharding.before_backward()

    @contextmanager
    def backward(self, step: Step) -> Iterator[None]:
        """Surrounds the backward of a step, and closes it."""
        self._activity.begin("backward")
        self.reads.settle()
        try:
            # Under a pipeline the backward has run.
            with (
                self.manual.in_backward() if self.manual.is_used else nullcontext(),
                self._random.replay() if self.pipeline is None else nullcontext(),
                self._sharding.zero_weight.zero_gradients()
                if step.is_zero_weight
                else nullcontext(),
                self._sharding.backward_in_step() if self.manual.is_used else nullcontext(),
            ):
                yield
        finally:
            step.close()
        if self._copies is not None:
            self._copies.begin_next()

    def watch(self, optimizer: Optimizer) -> None:
        """Let a step that runs its own optimizers see what they have changed."""
        if self.manual.is_used:
            optimizer.register_step_pre_hook(lambda *_: self.reads.settle())
            optimizer.register_step_post_hook(lambda *_: self._sharding.after_update())

    def _open(self, args: Sequence[Any], opened: ExitStack) -> Sequence[Any]:
        """Return the arguments of a step with this rank's tokens of the batch."""
        if self.sequence is None:
            return args
        opened.callback(self.sequence.close)
        return self.sequence.open(args)

    def _dims_of(self, batch: Any, *, predicts: bool = False) -> BatchDims:
        """Return which entries of a batch have a batch dim, if it is divided."""
        if self.pipeline is None and (predicts or not self._has_replicas):
            return BatchDims()
        layout = self._batch_layout
        is_declared = layout.loss_weight is not None or layout.labels is not None
        must_know = self._count > 1 or (self._has_replicas and not is_declared)
        return self._dims.find(batch, must_know=must_know)

    def _cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return the micro-batches of a batch, which may be one, and their numbers of samples."""
        dims = self._dims_of(batch)
        return (
            ([batch], [dims.size or 1]) if self.pipeline is None else self.pipeline.cut(batch, dims)
        )

    @compares_world_sizes(lambda runner: (runner._mesh, runner._proves))
    def _look(
        self,
        name: str,
        context: StepContext,
        rest: Sequence[Any],
        parts: Sequence[tuple[Any, int]],
        *,
        size: int,
        made: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Seen, bool]:
        """Run a step on some samples, and on parts of them, without leaving a trace.

        The `size` is that of the batch, or 0 where the step may fail in the look alone. Samples
        that are `made` are no part of it. Updates of metrics on ranks of a `group` count together.

        **Communicates**: what the step does, and what `StepRandom.judge` does.
        """
        batches = [batch for batch, _ in parts]
        sight = LookAtStep(self.module, batches, sharpens=made, group=group)
        random = self._random
        if made:  # which says nothing of how the step draws, and may fail
            self._random, size = self._random_of(name), 0
        self._sharding.release()  # gathered weights are gone before they could be put back
        try:
            with (
                untouched(self.module),
                silent(self.module.trainer.loggers) as sight.has_written,
                torch.compiler.set_stance("force_eager"),
                self._random.look([n for _, n in parts], size, self._tokens_of(batches[0])),
            ):
                if self.pipeline is None:
                    seen = self._trial.run(name, context, batches, rest, sight)
                else:
                    refusal = self._random.refusal
                    seen = self.pipeline.look(context, batches, rest, refusal, name, sight)
                is_random = self._random.judge(divides=len(batches) > 1)
        finally:
            self._random = random
            self.form.reads_factors |= sight.losses.has_zero
            self._sharding.release()
            self._end_look()
        return seen, is_random

    def _end_look(self) -> None:
        for restart in self.after_look.values():
            restart()

    def _whole(
        self, name: str, context: StepContext, args: Sequence[Any], key: Any, dims: BatchDims
    ) -> Any:
        random = self._random.step(dims.size or 1, 1, self._tokens_of(args[0]), self._share)
        is_manual = name == "training_step" and self.manual.is_used
        call = self._sharding.call_with_backwards if is_manual else self._sharding.call
        counts, fills = self._trial.counts, self._weigher.fills
        counted = counts.summed(name, fills=fills) if counts.names else nullcontext()
        with context(), random, self._user_step(key, 0), counted:
            output = call(partial(self._run, getattr(self.module, name), args))
            if self.sequence is not None:
                self.sequence.check()
        return output

    def _run(self, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        with self.reads.in_step(), self.manual.in_step():
            return step(*args)

    @contextmanager
    def _microbatch_step(self, key: Any, microbatch: int) -> Iterator[None]:
        with self._user_step(key, microbatch), self.reads.in_step():
            yield

    @contextmanager
    def _user_step(self, key: Any, microbatch: int) -> Iterator[None]:
        """Surrounds the user's step."""
        self._in_step = True
        with self._random.user_step(key, microbatch):
            try:
                yield
            except (RuntimeError, ValueError) as error:
                refuse = None if self.pipeline is None else self._random.refuse
                raise_explained(self.module, error, refuse)
            finally:
                self._in_step = False

    def _check_tokens(self, batch: Any, *, has_labels: bool) -> None:
        if self._tensor_degree > 1:
            check_tokens(batch, self._batch_layout, has_labels=has_labels)

    def _tokens_of(self, batch: Any) -> int | None:
        return None if self._tensor_degree == 1 else shared_tokens(batch, self._batch_layout)
