"""Watches optimizer steps of a run, the first and those asked for, and proves them; see Note [Order
of a proof].
"""

import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_par.engine.data.equal_copies import differing_copies, error_of_copies
from lightning_par.engine.memory.garbage import few_collections
from lightning_par.engine.rng import collect_random_states, fork_all_rng
from lightning_par.errors import VerificationError
from lightning_par.observe.outside import data_of, outside_state
from lightning_par.observe.report import StartValues, StepRecord
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.by_blocks import compare_by_blocks, TooLongError
from lightning_par.strategies.proof.cadence import Cadence
from lightning_par.strategies.proof.fault import find_fault, passing_fault
from lightning_par.strategies.proof.gathering import (
    from_first,
    gather_batches,
    gather_gradients,
    gather_optimizers,
    gather_state,
    gather_trained,
    global_loss,
)
from lightning_par.strategies.proof.judge import (
    agree,
    CannotProveError,
    Differs,
    Judge,
    numbers_of,
    REHEARSE,
)
from lightning_par.strategies.proof.odd_data import find_odd, Size, size_of
from lightning_par.strategies.proof.on_difference import follow
from lightning_par.strategies.proof.one_process import GivenStep
from lightning_par.strategies.proof.parted_batch import why_not_parted
from lightning_par.strategies.proof.second_step import copy_parts, MeshStep
from lightning_par.strategies.proof.short_memory import names_the_proof
from lightning_par.strategies.proof.skeleton import reason_of_run, Skeleton
from lightning_par.strategies.proof.updates import (
    gather_left_gradients,
    has_stepped,
    NotedUpdates,
)
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.absent_parameter import END_OF_HOOK

__all__ = ["LONGEST", "NOT_PROVED", "StepProof"]

NOT_PROVED = "is not proved to equal that of one process"
LONGEST = 300.0
"""Seconds that the first proof of a budget may take, where the model is compared by blocks."""
_REMEMBERED = 32
"""Proved steps whose loss and gradients tell what is odd."""
_logger = logging.getLogger(__name__)


class StepProof:
    """Notes what the mesh computes in an optimizer step, and compares it with one process: in the
    first one, and in later ones where ``verify`` asks for some.

    Args:
        skeleton: From `take_skeleton`.
        options: Of the strategy.
        device: Device of this rank.
        seed: Of the run.

    Attributes:
        is_over: Whether nothing is to be noted any more.
        outcome: On rank 0, once it is known: "equal", what was left out, or why it is not known.
        outcomes: On rank 0: every step that was to be proved -> "equal", "in part: ...", "not
            proved: ..." or "differs (code)", for the certificate; what a budget chooses in one
            entry.
    """

    def __init__(
        self, skeleton: Skeleton | str | None, options: MeshOptions, device: torch.device, seed: int
    ) -> None:
        self._skeleton, self._options, self._device = skeleton, options, device
        self.is_over = skeleton is None
        self._model: ParallelModel | None = None
        self.outcome, self.outcomes = "", dict[str, str]()
        every, share = options.verify_every, options.verify_share
        self._cadence, self._is_later = Cadence(every=every, share=share, seed=seed), False
        self._step = -1  # the last step that began
        self._sizes: deque[Size] = deque(maxlen=_REMEMBERED)
        self._later, self._is_told = Counter[str](), False
        self._forget()

    def _forget(self) -> None:
        self._given: GivenStep | None = None
        self._noted, self._own_loss = StepRecord(), 0.0
        self._args: Sequence[Any] = ()  # what the first batch of the step gave `training_step`
        self._parts: list[Tensor] = []
        self._plugin: Precision | None = None
        self._accumulates, self._batch = False, -1
        self._by_blocks = ""  # why no whole step is compared, as of a model that is too large
        self._updates: NotedUpdates | None = None
        self._deferred = False  # what the optimizer on the host does without the proof

    def close(self) -> None:
        """Prove nothing any more, and let go of everything."""
        self._end_step()
        self.is_over, self._skeleton = True, None

    def _end_step(self) -> None:
        """Let go of what was noted of a step."""
        if self._updates is not None:
            self._updates.close()
        if self._model is not None:
            self._model.module.__dict__.pop("on_train_batch_end", None)
            self._model.gradients.before_refusal = None
            if self._model.host is not None and not self._by_blocks:
                self._model.host.defers = self._deferred
        self._model = None
        self._forget()

    def end_run(self) -> None:
        """Let go of a step that did not end; a run without a step, as of validation, leaves the
        proof to the next one.
        """
        if self._model is not None:
            self.close()
        self._cadence.pause()

    @names_the_proof()
    def begin(self, model: ParallelModel, plugin: Precision, args: Sequence[Any]) -> None:
        """Note what a training step starts from.

        Args:
            model: The model on the mesh.
            plugin: Precision plugin.
            args: The batch of this replica, and what else `training_step` takes.

        **Communicates**: in a step that is due, whether it is proved; then the weights and the
        batches, to rank 0.
        """
        trainer = model.module.trainer
        if "setup_optimizers" in vars(trainer.strategy):
            return  # the learning rate finder trains with an optimizer of its own
        if self._model is None and not (self._is_due(model.module) and self._start(model, plugin)):
            return
        batch = trainer.fit_loop.total_batch_idx
        if batch == self._batch:
            return  # an optimizer computes the loss once more
        assert self._given is not None
        self._batch = batch
        self._args = self._args or args
        self._given.arguments.append(args[1:])
        self._given.random_states.append(collect_random_states(self._device))
        with fork_all_rng(self._device):  # what gathers objects may draw numbers
            own = None if model.steps.repeats else args[0]
            self._given.batches.append(gather_batches(own, model.mesh))

    def _is_due(self, module: pl.LightningModule) -> bool:
        """Whether a step begins that is to be proved."""
        begins, self._step = module.global_step != self._step, module.global_step
        return begins and self._cadence.next is not None and self._step >= self._cadence.next

    def why_not(
        self, module: pl.LightningModule, plugin: Precision, layout: BatchLayout
    ) -> str | None:
        """Return why the first step cannot be proved, the same on every rank; empty: it can; None:
        nobody asked for it.

        Args:
            module: The user's LightningModule.
            plugin: Precision plugin.
            layout: What is declared of its batches.

        **Communicates**: the reason of rank 0, to all.
        """
        return None if self.is_over else from_first(self._reason(module, plugin, layout))

    def _reason(self, module: pl.LightningModule, plugin: Precision, layout: BatchLayout) -> str:
        reason = reason_of_run(self._skeleton, module)
        if not reason and layout.local_statistics:
            reason = why_not_parted(module)
        return reason

    def _outside(self, module: pl.LightningModule) -> Callable[[], None]:
        if not isinstance(self._skeleton, Skeleton):
            return lambda: None
        callbacks: Any = getattr(module.trainer, "callbacks", ())
        return outside_state([*module.modules(), *callbacks, *data_of(module.trainer)])

    @property
    def _which(self) -> str:
        """The step, at the start of a sentence."""
        return f"Step {self._step}" if self._is_later else "The first step"

    def _follow(self, module: pl.LightningModule) -> str:
        """Give the skeleton what steps have changed in attributes; return why that fails."""
        skeleton = self._skeleton
        if not isinstance(skeleton, Skeleton):
            return ""  # on another rank
        try:
            with fork_all_rng(torch.device("cpu")):
                skeleton.follow(module)
        except Exception as error:  # whatever a copy of the user's objects raises
            return f"the module cannot be copied ({type(error).__name__}: {error})."
        return ""

    def _put_off(self, model: ParallelModel, plugin: Precision) -> tuple[int | None, str, str]:
        """Return, on rank 0, the step that is proved in place of this one, why none is, and why it
        is compared by blocks.
        """
        later = self._cadence.put_off(self._step)
        if later is not None:
            return later, "", ""
        reason = self._reason(model.module, plugin, model.resolved.plan.batch)
        reason = reason or (self._follow(model.module) if self._is_later else "")
        skeleton, by_blocks = self._skeleton, ""
        if getattr(plugin, "scaler", None) is not None:
            by_blocks = (
                "the loss is scaled, and a step whose gradients overflow is skipped, so there may "
                "be no update to compare"
            )
        return None, reason, getattr(skeleton, "too_large", "") or by_blocks

    def _start(self, model: ParallelModel, plugin: Precision) -> bool:
        self._cadence.begin()
        found = from_first(self._put_off(model, plugin) if dist.get_rank() == 0 else None)
        later, reason, self._by_blocks = found
        if later is not None:
            self._cadence.next = later
            return False
        if reason:
            which = self._which
            self.close()
            self.outcome = f"{which} {NOT_PROVED}: {reason}"
            self._note(f"not proved: {reason.removesuffix('.')}")
            self._refuse_if_asked()
            rank_zero_info(self.outcome)
            return False
        self._model, self._plugin = model, plugin
        step, held = model.module.global_step, model.module.trainer.optimizers
        continues = step > 0 or any(map(has_stepped, held))
        is_whole = not self._by_blocks
        states = gather_optimizers(model, held) if continues and is_whole else None
        start = StartValues(
            tensors=gather_state(model) if is_whole else {},
            global_step=step,
            epoch=model.module.current_epoch,
            batch=model.module.trainer.fit_loop.batch_idx,
            continues=continues,
            optimizers=states,
            groups=numbers_of(held),
            put_outside=self._outside(model.module),
            trains=gather_trained(model),
            gradients=gather_left_gradients(model) if is_whole else {},
            is_later=self._is_later,
            learns=any(float(g.get("lr", 1.0)) for o in held for g in o.param_groups),
        )
        self._given = GivenStep(start=start)
        if is_whole:
            self._parts = copy_parts(model.module)
        if is_whole and model.host is not None:
            self._deferred = model.host.defers
            model.host.defers |= model.host.shows_update
        elif is_whole:
            self._updates = NotedUpdates(model, plugin, self._noted, follows=states is not None)
        self._watch_end(model)
        return True

    def _watch_end(self, model: ParallelModel) -> None:
        """Let the proof follow the hooks of the step, or precede the error of one not finite."""
        after = model.module.on_train_batch_end

        @functools.wraps(after)
        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            after(*args, **kwargs)
            if not self._accumulates:
                model.steps.reads.agree(END_OF_HOOK)
                with model.steps.reads.paused():
                    self._prove()

        def before_refusal() -> None:
            with model.steps.reads.paused():
                self._prove()

        model.module.__dict__["on_train_batch_end"] = on_train_batch_end
        model.gradients.before_refusal = before_refusal

    def after_backward(self, weighted: Tensor) -> None:
        """Note the loss and the gradients of a backward, before any hook sees them.

        Args:
            weighted: Loss of this rank, weighted.

        **Communicates**: in a step that is proved, one number over all ranks, and the gradients to
        rank 0.
        """
        model = self._model
        if model is None:
            return
        self._accumulates = not model.sharding.synchronizes
        if self._by_blocks:
            return
        self._noted.losses.append(global_loss(model, weighted, self._device))
        self._own_loss = float(weighted.detach())
        host = model.host
        sees = host is None or (host.defers and host.shows_update)
        sees = sees and not self._accumulates
        self._noted.gradients.append(gather_gradients(model) if sees else None)

    @names_the_proof()
    @few_collections()
    def _prove(self) -> None:
        """Compare the step with that of one process.

        Raises:
            VerificationError: On every rank, if they differ.

        **Communicates**: the weights after the step, to rank 0; then the verdict, and the next step
        that is proved. Where the step draws random numbers or differs, also what a second forward
        and backward does.
        """
        model = self._model
        assert model is not None
        model.module.__dict__.pop("on_train_batch_end", None)
        which, is_later, is_whole = self._which, self._is_later, not self._by_blocks
        try:
            with fork_all_rng(self._device):
                verdict = self._compare(model)
        finally:
            self._end_step()
        if isinstance(verdict, VerificationError):
            if self._options.on_difference != "warn":
                self.close()
            follow(verdict, model.module.trainer, self._options.on_difference)
        self._choose_next(verdict.seconds if isinstance(verdict, TooLongError) else 0.0)
        if isinstance(verdict, VerificationError):
            self.outcome = f"{which} differs from that of one process ({verdict.code})."
            self._note(f"differs ({verdict.code})")
        elif isinstance(verdict, CannotProveError):
            self.outcome = f"{which} {NOT_PROVED}: {verdict}."
            self._note(f"not proved: {verdict}")
            self._refuse_if_asked()
            if dist.get_rank() == 0 and not self._is_told:
                _logger.warning(self.outcome)
            self._is_told = is_later and self._cadence.share is not None
        elif is_whole and (is_later or not self.outcome):
            self.outcome = self.outcome or "equal"
            self._note("equal")
            rank_zero_info(f"{which} on {model.mesh.sizes} equals that of one process.")
        self._is_later = True

    def _choose_next(self, forecast: float) -> None:
        cadence = self._cadence
        cadence.end(self._step, forecast)
        if cadence.share is not None:
            cadence.next = from_first(cadence.next)
        if cadence.next is None:
            self.close()

    def _note(self, outcome: str) -> None:
        """Note what came out; of the many steps that a budget chooses, how often."""
        if self._cadence.share is None or not self._is_later:
            self.outcomes[f"training step {self._step}"] = outcome
            return
        self._later[outcome] += 1
        counted = (f"{count} {outcome}" for outcome, count in self._later.items())
        self.outcomes["later training steps"] = "; ".join(counted)

    def _refuse_if_asked(self) -> None:
        """Raise if the step has to be proved, and was not.

        Raises:
            VerificationError: On every rank, with ``verify="first_step"``.
        """
        if self._options.verify == "first_step":
            raise VerificationError(
                "LP804",
                'verify="first_step" ends a run whose first step cannot be compared with one '
                f'process. {self.outcome} With verify="auto" the run trains without this '
                "comparison, and logs the reason.",
            )

    def _compare(self, model: ParallelModel) -> CannotProveError | VerificationError | None:
        """Return the error of a step that differs, or why that is not known; None: it is equal."""
        assert self._plugin is not None
        assert self._given is not None
        step, judge = self._taken(model, self._given, self._plugin), self._make_judge(model)
        if self._by_blocks:
            return self._compare_by_blocks(step, judge)
        model.sharding.release()
        if not self._is_later:  # of which only the parameters right after the update are compared
            self._noted.state = gather_state(model)
        verdict = agree(lambda: judge.judge())  # type: ignore[union-attr]
        if judge is not None and judge.notes:
            self._note_part("; ".join(judge.notes))
        if verdict == REHEARSE:
            step = step.rehearsal(gather_state(model) if self._is_later else self._noted.state)
            if not step.can_repeat:
                return CannotProveError("the step draws random numbers")
            if reason := from_first(self._follow(model.module)):
                return CannotProveError(reason.removesuffix("."))
            trains = gather_trained(model)  # hooks of the step may have frozen some
            if judge is not None:
                start = replace(judge.given.start, trains=trains)
                judge.given = replace(judge.given, start=start)
            step = step.take()
            verdict = agree(lambda: judge.judge_rehearsal(step.record, step.tensors))  # type: ignore[union-attr]
        if isinstance(verdict, Differs):
            repeats = step.can_repeat and not from_first(self._follow(model.module))
            return find_fault(verdict, judge, step, repeats=repeats)
        if verdict is None:
            if copies := differing_copies(model.module, model.mesh, self._device, buffers=False):
                return error_of_copies(copies)
            self._look_at_data(judge)
        assert verdict is None or isinstance(verdict, CannotProveError)
        return verdict

    def _compare_by_blocks(
        self, step: MeshStep, judge: Judge | None
    ) -> CannotProveError | VerificationError | None:
        """Do as `_compare`, with a model that is too large to be whole on rank 0."""
        if reason := from_first(self._follow(step.model.module)):
            return CannotProveError(reason.removesuffix("."))
        step = step.rehearsal({})
        is_paid = self._is_later or self._cadence.share is None
        verdict = compare_by_blocks(step, judge, *([] if is_paid else [LONGEST]))
        if isinstance(verdict, Differs):
            if compare_by_blocks(step, judge) is None:
                text = from_first(None if judge is None else passing_fault(judge))
                return VerificationError("LP807", text)
            return VerificationError("LP801", verdict.text)
        if verdict is None:
            self._note_part(
                "only loss and gradients of one batch were compared, block by block and without "
                f"dropout, since {self._by_blocks}; hooks and the update were not compared"
            )
        return verdict

    def _note_part(self, notes: str) -> None:
        self.outcome = f"{self._which} is proved in part: {notes}."
        self._note(f"in part: {notes}")
        rank_zero_info(self.outcome)

    def _make_judge(self, model: ParallelModel) -> Judge | None:
        """Return what compares, on rank 0."""
        if not isinstance(self._skeleton, Skeleton):
            return None
        assert self._plugin is not None
        assert self._given is not None
        return Judge(
            skeleton=self._skeleton,
            model=model,
            options=self._options,
            plugin=self._plugin,
            device=self._device,
            given=self._given,
            noted=self._noted,
        )

    def _taken(self, model: ParallelModel, given: GivenStep, plugin: Precision) -> MeshStep:
        """Return what the mesh needs to take the step again."""
        return MeshStep(
            model=model,
            plugin=plugin,
            options=self._options,
            device=self._device,
            args=self._args,
            random_states=given.random_states[0],
            step=given.start.global_step,
            drops=True,
            parts=self._parts,
            tensors=given.start.tensors,
            record=self._noted,
            own_loss=self._own_loss,
        )

    def _look_at_data(self, judge: Judge | None) -> None:
        """Warn if the batch gives an odd loss or gradient, which one process computes, too."""
        odd = agree(lambda: find_odd(judge, self._sizes))  # type: ignore[arg-type]
        if judge is None or isinstance(odd, CannotProveError):
            return
        if odd is None:
            self._sizes.append(size_of(judge.noted))
        else:
            self.outcomes[f"data of training step {self._step}"] = odd
            _logger.warning(odd)
