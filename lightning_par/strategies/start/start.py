"""The looks at a run's steps before they run on the mesh, and the proof of the first one.

A training step is looked at before the first batch, and again while several rules of its loss fit;
an evaluation step before the first batch of each data loader. `StepRunner` asks at these places and
knows nothing else of a look.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_par.engine.batch import BatchDims, take_samples
from lightning_par.engine.experts.router_balance import without_balance
from lightning_par.engine.memory.garbage import few_collections
from lightning_par.engine.pipeline.refusals import PassedOverError, SecondCallError
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.errors import ConfigurationError, PipelineError
from lightning_par.observe.contents import names_in_method
from lightning_par.observe.cross_entropies import LookAtLosses
from lightning_par.observe.isolate import untouched
from lightning_par.strategies.components.certificate import write_certificate
from lightning_par.strategies.components.step_attributes import kept_settings, settings
from lightning_par.strategies.data.weights_on_host import KnownWeights
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.evaluation_proof import EvaluationProof
from lightning_par.strategies.proof.silence import silent
from lightning_par.strategies.proof.skeleton import LARGEST
from lightning_par.strategies.proof.step_proof import StepProof
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.start.divided_step import DividedLook, Look
from lightning_par.strategies.start.end_of_run import EndOfRun
from lightning_par.strategies.start.first_look import FirstLook
from lightning_par.strategies.start.logged_means import learn_rule
from lightning_par.strategies.start.loss_rule import choose_parts
from lightning_par.strategies.start.own_outputs import warn_of_logs, warn_of_own_outputs
from lightning_par.strategies.start.padding import PaddingLook
from lightning_par.strategies.start.structure import Structure
from lightning_par.strategies.start.trial import try_step
from lightning_par.strategies.start.uncut_batch import run_parts
from lightning_par.strategies.start.uncut_numbers import check_uncut_numbers
from lightning_par.strategies.start.world_size import compares_world_sizes
from lightning_par.strategies.step.batch_statistics import check_batch_statistics
from lightning_par.strategies.step.batch_weights import LossRule
from lightning_par.strategies.step.metrics import LookAtMetrics
from lightning_par.strategies.step.pipelined_step import StepContext
from lightning_par.strategies.step.runner import EvaluationStep, StepRunner
from lightning_par.strategies.step.skipped_step import gives_none_alone
from lightning_par.strategies.step.step_report import StepReport

__all__ = ["RunStart"]

_GENERATES = {"generate", "past_key_values"}
"""Names that a step uses which generates text, or keeps a cache of it."""


class RunStart:
    """Looks at the steps of a run, and proves the first.

    Args:
        steps: Runs the user's steps; it asks this object from now on.
        decisions: Where the rule of the loss is noted; the certificate has them.
        proof: Compares the first step with one process.
        evaluations: Does so with the first batch of each evaluation.
        is_proved: Whether it can, on rank 0.

    Attributes:
        steps: As given.
        proof: As given.
        is_over: Whether no later training step has to be looked at, whatever its batch.
        after_look: Id of an object -> function of it that is called after every look at a step,
            which runs it on a few samples: what counts the first step begins anew.
    """

    def __init__(
        self,
        steps: StepRunner,
        decisions: Decisions,
        proof: StepProof,
        evaluations: EvaluationProof,
        *,
        is_proved: bool,
    ) -> None:
        self.steps, self.proof, self._is_proved = steps, proof, is_proved
        self._decisions, self._evaluations = decisions, evaluations
        module, mesh, layout = steps.module, steps.mesh, steps.batch_layout
        if (mesh.sizes.pipeline > 1 or mesh.sizes.shares > 1) and gives_none_alone(module):
            code = "LP406" if mesh.sizes.pipeline > 1 else "LP318"
            told = f"a step that returns None for its part of a batch ends the run ({code})"
            decisions.add("batches left out", told)
        self.after_look: dict[int, Callable[[], None]] = {}
        weigher, has_values = steps.weigher, steps.world.has_values
        # One look for all replicas: it holds the state of the run's rule.
        given = weigher, steps.form, decisions, steps.count, has_values
        self._first_look = FirstLook(module, mesh, layout, *given)
        divides = mesh.sizes.tensor > 1 or mesh.sizes.pipeline > 1
        is_held = mesh.sizes.world_size > 1
        self._structure = Structure(module, divides_blocks=divides) if is_held else None
        self._padding = PaddingLook(module, mesh, weigher, self._first_look.tolerance)
        self.is_over, self._has_begun = False, False
        self._end_of_run = EndOfRun(module, steps.weigher, self._first_look)
        self._divided_look: DividedLook | None = None
        if steps.sequence is not None:
            tolerance = self._first_look.tolerance
            self._divided_look = DividedLook(
                module, mesh, steps.sequence, layout, weigher, tolerance, has_values
            )
        self._met = dict[Any, EvaluationStep]()
        # From here on the runner asks this object; it holds no other reference to the start.
        steps.form.again = self._look_again
        steps.form.look_at_padding = self._look_at_padding
        steps.looks = self

    def prove(self, model: ParallelModel, plugin: Precision, args: Sequence[Any]) -> None:
        """Note what a training step starts from, see `StepProof.begin`."""
        self._check_structure()  # the proof gathers the parameters
        self.proof.begin(model, plugin, args)

    def _check_structure(self) -> None:
        if self._structure is not None:
            self._structure.check()
            self._structure = None

    def before_batch(self, context: StepContext, args: Sequence[Any]) -> None:
        """Try the first training step on divided sequences, and on whole ones.

        Args:
            context: Precision plugin's context of the step.
            args: The whole batch, and what else `training_step` takes.

        Raises:
            ConfigurationError: It computes something else on divided ones.

        **Communicates**: what the step does, and what was seen over all ranks.
        """
        # Only the first batch: later ones are divided in the same way.
        if self._divided_look is not None and not self._has_begun:
            self._divided_look.check_training(args[0], *self._tried("training_step", context, args))
            self._end_look()

    def before_training(
        self,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
        count: int,
        known: KnownWeights | None,
    ) -> None:
        """Look at the training step, if its loss has to be understood on this batch.

        Args:
            context: Precision plugin's context of the step.
            args: The batch of this replica, and what else `training_step` takes.
            dims: Which entries of the batch have a batch dim.
            count: Into how many micro-batches it is cut.
            known: How the rules of the loss weigh it, if the host knows that.

        Raises:
            ConfigurationError: The mesh cannot train as one process does; see `FirstLook.look`.

        **Communicates**: see `FirstLook.is_due`; then what the step does, and the results.
        """
        steps, looks, batch = self.steps, self._first_look, args[0]
        if not self._has_begun:
            self._has_begun = True
            self._check_structure()
            # Layers may be frozen in a hook of the fit: so not before the first batch.
            if not steps.batch_layout.local_statistics:
                check_batch_statistics(steps.module, steps.mesh, count)
        looks.share = steps.share
        if looks.is_due(batch, dims.size or 1, count, known):
            # With one replica and one micro-batch nothing was cut, and no dims had to be found
            # yet.
            found = dims if dims.size is not None else steps.dims.find(batch, must_know=False)
            few, found = self._shown(batch, found)
            run = partial(self._look, "training_step", context, args[1:], size=found.size or 1)
            looks.look(few, found, count, run)
            # size=0: the step may fail with the numbers of the last step, which tells nothing of
            # this one.
            at_end = partial(looks.look, few, found, count, partial(run, size=0))
            # After the look at the first step, with which it is compared.
            self._end_of_run.look(at_end, lambda: steps.weigher.weigh(*steps.cut(batch)))
            is_first = steps.form.has_to_stay and looks.looks == 1
            if is_first and steps.mesh.sizes.data > 1 and steps.batch_layout.loss_weight is None:
                rules = [steps.weigher.rule, *looks.rules(batch, found)]
                tolerance = looks.tolerance()
                check_uncut_numbers(steps.module, steps.mesh, rules, batch, found, run, tolerance)
            steps.weigher.compares_lengths |= is_first and steps.random.draws_more
            if steps.weigher.compares_lengths and steps.mesh.sizes.data > 1:
                self._padding.check(batch, found, run, draws=steps.random.draws_more)
            self._end_look()
        self.is_over = looks.is_over

    def _look_at_padding(self) -> None:
        """Look whether padding weighs in the loss of the present batch."""
        context, args, dims, _ = self.steps.begun
        run = partial(self._look, "training_step", context, args[1:], size=0)
        self._padding.check(args[0], dims, run, draws=self.steps.random.draws_more)

    def _look_again(self, may_stay: bool) -> None:
        """Look at the step of the present batch once more, as its loss has a new form or values."""
        context, args, dims, count = self.steps.begun
        run = partial(self._look, "training_step", context, args[1:], size=dims.size or 1)
        self._first_look.look_again(args[0], dims, count, run, self.steps.cut, may_stay)

    def evaluation(self, name: str, context: StepContext, args: Sequence[Any]) -> EvaluationStep:
        """Return what is known of an evaluation step; its first batch is looked at.

        Args:
            name: Of the step.
            context: Precision plugin's context of the step.
            args: The batch, and what else the step takes.

        **Communicates**: then what the step does, and the results over all ranks.
        """
        # By data loader (args[2:] is its number): each may give batches of another form.
        steps, key, look = self.steps, (name, *args[2:]), self._divided_look
        known, predicts, sizes = self._met.get(key), name == "predict_step", steps.mesh.sizes
        # Before the first training step, as in a sanity check, nobody knows how its loss weighs.
        is_judged = known is not None and (predicts or known.rule == steps.weigher.rule.name)
        unsettled = look is not None and look.is_unsettled(key, *args[1:2])
        if known is None or not is_judged or unsettled:
            known = EvaluationStep(
                random=steps.random_of(name), count=steps.count, is_divided=look is not None
            )
            generates = _GENERATES & names_in_method(type(steps.module), name)
            known.is_whole = steps.pipeline is not None and bool(generates)
            self._met[key] = known
            if predicts:
                known.is_divided = False
            elif look is not None:
                tried = self._tried(name, context, args)
                known.is_divided = look.runs_divided(key, args[0], *tried)
            # Replicas may predict unequal numbers of batches.
            is_alone = predicts and sizes.data > 1
            if sizes.world_size > 1 and not known.is_divided and not is_alone:
                # The step that is looked at sees whole sequences, so that its weights are those
                # of whole ones.
                with steps.weigher.on_whole_sequences():
                    dims = steps.dims_of(args[0], predicts=predicts)
                    batch, dims = self._shown(args[0], dims)
                    self._meet(known, name, context, [batch, *args[1:]], dims)
            known.rule = steps.weigher.rule.name
        return known

    def proved(
        self, name: str, args: Sequence[Any], known: EvaluationStep
    ) -> AbstractContextManager[list[Any]]:
        """Surrounds an evaluation step; see `EvaluationProof.proved`."""
        # Asked anew: the plugin is adopted, and the model put on the mesh, after this object is
        # made.
        strategy: Any = self.steps.module.trainer.strategy
        model, plugin = strategy.parallel_model, strategy.precision_plugin
        return self._evaluations.proved(model, plugin, name, args, known)

    def end_training(self, model: ParallelModel, options: MeshOptions) -> None:
        """Write the certificate of a run whose training has ended.

        Args:
            model: The model on its mesh.
            options: Of the strategy.

        **Communicates**: see `write_certificate`.
        """
        write_certificate(model, options, self._decisions, self.proof.outcomes, LARGEST)

    def _shown(self, batch: Any, dims: BatchDims) -> tuple[Any, BatchDims]:
        """Return what of a batch is looked at: one sample, if another replica has no more."""
        # A look has collectives for each part: replicas have to look at the same number of them.
        if self.steps.most > 1 or dims.size in (None, 1):
            return batch, dims
        return take_samples(batch, dims, [0]), replace(dims, size=1)

    def _tried(
        self, name: str, context: StepContext, args: Sequence[Any]
    ) -> tuple[BatchDims, Look]:
        """Return which entries of a batch have a batch dim; and what runs the step without a trace,
        on whole and on divided sequences.
        """
        steps = self.steps
        random = steps.random_of(name)

        def run(
            batch: Any, samples: int, group: dist.ProcessGroup | None
        ) -> tuple[StepReport, bool]:
            # On divided sequences failures are noted (size 0), as other ranks may not fail.
            steps.random, size = random, samples if group is None else 0
            parts = [(batch, samples)]
            seen, _ = self._look(name, context, args[1:], parts, size=size, group=group)
            return seen, random.draws

        return steps.dims.find(args[0], must_know=False), run

    def _meet(
        self,
        known: EvaluationStep,
        name: str,
        context: StepContext,
        args: Sequence[Any],
        dims: BatchDims,
        *,
        is_again: bool = False,
    ) -> None:
        """Find out how an evaluation step draws, and whether parts of a batch log what it does."""
        steps, looks, size = self.steps, self._first_look, dims.size or 1
        known.count = 1 if (is_whole := known.is_whole) else steps.count
        look = partial(self._look, name, context, args[1:], size=size, is_whole=is_whole)
        whole, has_replicas = [(args[0], size)], steps.mesh.sizes.data > 1
        divides = (known.count > 1 or has_replicas) and size > 1 and not dims.unsure
        rules = looks.rules(args[0], dims) if divides and name != "predict_step" else []
        # Also by the rule in use, as one that the training step was seen to make is none of them.
        told = [*rules, *([steps.weigher.rule] if rules else [])]
        parts = choose_parts(args[0], dims, known.count, told) if divides else whole
        steps.random = known.random
        try:
            seen, is_random = run_parts(look, parts, whole[0])
        except PipelineError as error:
            # It calls the model several times, or not, or a module that is no call of the model.
            cut = isinstance(error, SecondCallError | PassedOverError)
            is_wrong = error.code == "LP407" if is_whole else cut
            if is_again or not is_wrong:
                raise
            known.is_whole, known.random = not is_whole, steps.random_of(name)
            self._meet(known, name, context, args, dims, is_again=True)
            return
        except ConfigurationError as error:  # it does not run on parts, or draws for all together
            known.count, known.random = 1, steps.random_of(name)
            if has_replicas:
                known.is_of_replica = True
                say = rank_zero_warn if error.code == "LP311" else rank_zero_info
                say(f"{name} runs on the samples of each replica separately, since {error}")
                return
            steps.random = known.random
            look(whole)
            return
        if steps.pipeline is not None and (seen.leaves or seen.writes):
            known.count = 1  # what hooks of an epoch read, or it writes, is then of a whole batch
        if has_replicas:
            warn_of_own_outputs(steps.module, name, seen, steps.mesh.sizes.data)
        if not is_random:
            self._judge(known, name, rules, seen, parts)

    def _judge(
        self,
        known: EvaluationStep,
        name: str,
        rules: Sequence[LossRule],
        seen: StepReport,
        parts: Sequence[tuple[Any, int]],
    ) -> None:
        """Find out how an evaluation step logs what parts of a batch do, and say what it does not.

        **Communicates**: as `learn_rule` and `judge_logs` do.
        """
        steps, looks = self.steps, self._first_look
        has_replicas = steps.mesh.sizes.data > 1
        if has_replicas and not looks.looks and name != "predict_step":
            learn_rule(steps, rules, seen, parts, looks.tolerance())
        others = looks.judge_logs(seen, parts, known.count)
        if others or any(each.startswith(f"{name}()") for each in steps.weigher.sums):
            known.count = 1
        if has_replicas:
            known.told = others
            warn_of_logs(name, others)

    @compares_world_sizes(lambda start: (start.steps.mesh, start._is_proved))
    @few_collections()
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
        is_whole: bool = False,
    ) -> tuple[StepReport, bool]:
        """Run a step on some samples, and on parts of them, without leaving a trace.

        The `size` is that of the batch, or 0 where the step may fail in the look alone. Samples
        that are `made` are no part of it. Updates of metrics on ranks of a `group` count together.
        One that `is_whole` runs from its beginning to its end on every stage.

        **Communicates**: what the step does, and what `StepRandom.judge` does.
        """
        # Copies, as a step may write into its batch.
        steps, batches = self.steps, [map_tensors(batch, Tensor.clone) for batch, _ in parts]
        # Watched on every rank: some of what it gives is reduced over a group.
        watch = _LookWatch(steps, batches, sharpens=made, group=group)
        random = steps.random
        if made:  # which says nothing of how the step draws, and may fail
            steps.random, size = steps.random_of(name), 0
        # `untouched` notes parameters and puts them back: those of FSDP have to be the shards.
        steps.sharding.release()  # gathered weights are gone before they could be put back
        try:
            with (
                untouched(steps.module),
                kept_settings(steps.module),
                silent(steps.module.trainer.loggers) as watch.has_written,
                without_balance(),
                # Parts have other shapes, for each of which blocks would be compiled anew.
                torch.compiler.set_stance("force_eager"),
                self._end_of_run.watched() if name == "training_step" else nullcontext(),
                steps.random.look([n for _, n in parts], size, steps.tokens_of(batches[0])),
            ):
                if steps.pipeline is None or is_whole:
                    seen = try_step(steps, name, context, batches, rest, watch)
                else:
                    refusal = steps.random.refusal
                    seen = steps.pipeline.look(context, batches, rest, refusal, name, watch)
                # Inside, as `look` ends the states of the generators that are judged.
                is_random = steps.random.judge(divides=len(batches) > 1)
        # Also after an error that a caller takes as an answer: the next step runs as if nothing
        # was.
        finally:
            steps.random = random
            steps.form.reads_factors |= watch.losses.has_zero
            steps.sharding.release()
            self._end_look()
        return seen, is_random

    def _end_look(self) -> None:
        for restart in self.after_look.values():
            restart()


class _LookWatch:
    """Watches what a look at a step computes besides losses and logs.

    Args:
        steps: Run the user's steps.
        batches: Those on which it runs.
        sharpens: See `LookAtLosses`.
        group: See `LookAtMetrics`.

    Attributes:
        losses: Cross-entropies that the step computes.
        has_written: Tells whether it has written to a logger, the terminal or a file.
    """

    def __init__(
        self,
        steps: StepRunner,
        batches: Sequence[Any],
        *,
        sharpens: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._metrics = LookAtMetrics(steps.module, group)
        self.losses = LookAtLosses(batches, sharpens=sharpens)
        self.has_written: Callable[[], bool] = lambda: False
        self._module, self._ends = steps.module, dict[int, dict[str, Any]]()
        # Replicas each begin with the hyperparameters of the step; micro-batches follow each other.
        self._kept = kept_settings if steps.pipeline is None else nullcontext

    def followed(self, index: int) -> ExitStack:
        """Surrounds the step on the batch with this number."""
        stack = self._metrics.followed(index)
        stack.enter_context(self._kept(self._module))
        stack.callback(lambda: self._ends.update({index: settings(self._module)}))
        stack.enter_context(self.losses.of(index))
        return stack

    def report(
        self, *, losses: list[tuple[float, ...]], writes: bool = False, **seen: Any
    ) -> StepReport:
        """Return a report of what was watched, and of what else was seen.

        **Communicates**: see `LookAtMetrics.values`.
        """
        pairs = zip(self.losses.terms, losses, strict=False)
        whole, parts = self._ends.get(0, {}), self._ends.values()
        return StepReport(
            losses=losses,
            terms=[[sums.of(loss) for loss in each] for sums, each in pairs],
            metrics=self._metrics.values(),
            states=self._metrics.states(),
            calls=self.losses.seen,
            weights=self.losses.weights,
            writes=writes or self.has_written(),
            sets=tuple(n for n, v in whole.items() if any(part.get(n) != v for part in parts)),
            **seen,
        )
