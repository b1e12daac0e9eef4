"""Watches optimizer steps of a run, the first and those asked for, and proves them; see Note [Order
of a proof].
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.rng import collect_random_states, fork_all_rng
from lightning_par.engine.tensor_tree import broadcast_object
from lightning_par.errors import VerificationError
from lightning_par.observe.outside import outside_state
from lightning_par.observe.report import StartValues, StepRecord
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.proof.gathering import (
    gather_batches,
    gather_state,
    gather_tensors,
    mean_over,
)
from lightning_par.strategies.proof.judge import CannotProveError, Judge, numbers_of, REHEARSE
from lightning_par.strategies.proof.one_process import GivenStep
from lightning_par.strategies.proof.second_step import rehearsed
from lightning_par.strategies.proof.skeleton import Skeleton
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.absent_parameter import END_OF_HOOK
from lightning_par.strategies.step.batch_weights import weigh

__all__ = [
    "LARGEST",
    "NOT_PROVED",
    "StepProof",
    "agree",
    "from_first",
    "reason_of_run",
    "take_skeleton",
]

LARGEST = 2**30
"""Bytes of parameters up to which ``verify="auto"`` proves the first step."""
_COPIES = 8
"""Parameters, gradients and two states, and what the mesh had, in units of the parameters."""
NOT_PROVED = "is not proved to equal that of one process"
_logger = logging.getLogger(__name__)
_HOW = 'verify="first_step" proves it, and `lightning-par verify` compares more of them.'


def take_skeleton(
    module: pl.LightningModule, verify: bool | str, world_size: int, rank: int
) -> Skeleton | str | None:
    """Return what the proof has to know of a module before it is put on a mesh.

    Args:
        module: The user's LightningModule, whole.
        verify: The option of the strategy.
        world_size: Number of ranks.
        rank: Global rank; only rank 0 gets a skeleton.

    Returns:
        On rank 0 the skeleton; a text if nothing can be proved; None if nothing is to be proved.
    """
    if verify is False or world_size == 1:
        return None
    size = sum(p.numel() * p.element_size() for p in module.parameters())
    if verify == "auto" and size > LARGEST:
        return f"the model has {size / 2**30:.1f} GiB of parameters, more than 1. {_HOW}"
    if rank:
        return ""
    free = available_memory()
    if verify == "auto" and free is not None and free < _COPIES * size:
        return f"it would need {_COPIES * size / 2**30:.1f} GiB on rank 0. {_HOW}"
    try:
        with fork_all_rng(torch.device("cpu")):  # copies of the user's objects may draw numbers
            return Skeleton(module, getattr(module.trainer, "callbacks", ()))
    except Exception as error:  # whatever a copy of the user's objects raises
        return f"the module cannot be copied ({type(error).__name__}: {error})."


class StepProof:
    """Notes what the mesh computes in an optimizer step, and compares it with one process: in the
    first one, and with ``verify="every N"`` in one after each N steps.

    Args:
        skeleton: From `take_skeleton`.
        options: Of the strategy.
        device: Device of this rank.

    Attributes:
        is_over: Whether nothing is to be noted any more.
        outcome: On rank 0, once it is known: "equal", what was left out, or why it is not known.
        outcomes: On rank 0: every step that was to be proved -> "equal", "in part: ..." or "not
            proved: ...", for the certificate.
    """

    def __init__(
        self, skeleton: Skeleton | str | None, options: MeshOptions, device: torch.device
    ) -> None:
        self._skeleton, self._options, self._device = skeleton, options, device
        self.is_over = skeleton is None
        self._model: ParallelModel | None = None
        self.outcome, self.outcomes = "", dict[str, str]()
        self._every, self._is_later = options.verify_every, False
        self._step, self._next = -1, 0  # the last step that began, and the next that is proved
        self._forget()

    def _forget(self) -> None:
        self._given: GivenStep | None = None
        self._noted = StepRecord()
        self._first: Sequence[Any] = ()  # what the first batch of the step gave `training_step`
        self._plugin: Precision | None = None
        self._accumulates, self._batch = False, -1
        self._deferred = False  # what the optimizer on the host does without the proof

    def close(self) -> None:
        """Prove nothing any more, and let go of everything."""
        self._end_step()
        self.is_over, self._skeleton = True, None

    def _end_step(self) -> None:
        """Let go of what was noted of a step."""
        if self._model is not None:
            self._model.module.__dict__.pop("on_train_batch_end", None)
            if self._model.host is not None:
                self._model.host.defers = self._deferred
        self._model = None
        self._forget()

    def end_run(self) -> None:
        """Let go of a step that did not end; a run without a step, as of validation, leaves the
        proof to the next one.
        """
        if self._model is not None:
            self.close()

    def begin(self, model: ParallelModel, plugin: Precision, args: Sequence[Any]) -> None:
        """Note what a training step starts from.

        Args:
            model: The model on the mesh.
            plugin: Precision plugin.
            args: The batch of this replica, and what else `training_step` takes.

        **Communicates**: in the first step, the weights and the batches, to rank 0.
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
        self._batch, self._first = batch, self._first or args
        self._given.arguments.append(args[1:])
        self._given.random_states.append(collect_random_states(self._device))
        with fork_all_rng(self._device):  # what gathers objects may draw numbers
            own = None if model.steps.repeats else args[0]
            self._given.batches.append(gather_batches(own, model.mesh))

    def _is_due(self, module: pl.LightningModule) -> bool:
        """Whether a step begins that is to be proved."""
        begins, self._step = module.global_step != self._step, module.global_step
        return begins and self._step >= self._next

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
        reason = reason_of_run(self._skeleton, module, layout)
        if not reason and getattr(plugin, "scaler", None) is not None:
            reason = "the loss is scaled (16-mixed), and steps that overflow are left out."
        return None if self.is_over else from_first(reason)

    def _outside(self, module: pl.LightningModule) -> Callable[[], None]:
        if not isinstance(self._skeleton, Skeleton):
            return lambda: None
        callbacks: Any = getattr(module.trainer, "callbacks", ())
        return outside_state([*module.modules(), *callbacks])

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

    def _start(self, model: ParallelModel, plugin: Precision) -> bool:
        reason = self.why_not(model.module, plugin, model.resolved.plan.batch)
        if not reason and self._is_later:
            reason = from_first(self._follow(model.module))
        if reason:
            self.close()
            self.outcome = f"{self._which} {NOT_PROVED}: {reason}"
            self._note(f"not proved: {reason.removesuffix('.')}")
            self._refuse_if_asked()
            rank_zero_info(self.outcome)
            return False
        self._model, self._plugin = model, plugin
        if model.host is not None:
            self._deferred = model.host.defers
            model.host.defers |= model.host.shows_update
        step, held = model.module.global_step, model.module.trainer.optimizers
        start = StartValues(
            tensors=self._gather_state(),
            global_step=step,
            epoch=model.module.current_epoch,
            continues=step > 0 or any(map(_has_stepped, held)),
            groups=numbers_of(held),
            put_outside=self._outside(model.module),
            is_later=self._is_later,
            learns=any(float(g.get("lr", 1.0)) for o in held for g in o.param_groups),
        )
        self._given = GivenStep(start=start)
        after = model.module.on_train_batch_end

        @functools.wraps(after)
        def on_train_batch_end(*args: Any, **kwargs: Any) -> None:
            after(*args, **kwargs)
            if not self._accumulates:
                model.steps.reads.agree(END_OF_HOOK)
                with model.steps.reads.paused():
                    self._prove()

        model.module.__dict__["on_train_batch_end"] = on_train_batch_end
        return True

    def after_backward(self, weighted: Tensor) -> None:
        """Note the loss and the gradients of a backward, before any hook sees them.

        Args:
            weighted: Loss of this rank, weighted.

        **Communicates**: in the first step, one number over all ranks, and the gradients to rank 0.
        """
        if self._model is None:
            return
        self._noted.losses.append(self._global_loss(weighted))
        sharding = self._model.sharding
        self._accumulates = not sharding.synchronizes
        host = self._model.host
        sees = sharding.synchronizes and (host is None or (host.defers and host.shows_update))
        self._noted.gradients.append(self._gather_gradients() if sees else None)

    def _global_loss(self, weighted: Tensor) -> float:
        assert self._model is not None
        mesh, pipeline = self._model.mesh, self._model.steps.pipeline
        if pipeline is None:
            return mean_over(weighted, mesh.token_group, self._device)
        loss = weighted.detach().cpu().double()
        return mean_over(weigh(loss, pipeline.last_weight.cpu()), mesh.data_group, self._device)

    def _gather_gradients(self) -> dict[str, Tensor]:
        assert self._model is not None
        named = ((n, p.grad) for n, p in self._model.module.named_parameters())
        return gather_tensors(named, self._model.resolved.canonical, self._model.mesh)

    def _gather_state(self) -> dict[str, Tensor]:
        assert self._model is not None
        model = self._model
        model.sharding.release()
        return gather_state(model.module, model.resolved.canonical, model.mesh)

    def _prove(self) -> None:
        """Compare the step with that of one process.

        Raises:
            VerificationError: On every rank, if they differ.

        **Communicates**: the weights after the step, to rank 0; then the verdict. Where the step
        draws random numbers, also what a second forward and backward does.
        """
        model = self._model
        assert model is not None
        model.module.__dict__.pop("on_train_batch_end", None)
        which, is_later = self._which, self._is_later
        try:
            with fork_all_rng(self._device):
                verdict = self._compare(model)
        finally:
            self._end_step()
            self._is_later = True
            if self._every is None:
                self.close()
            else:
                self._next = self._step + self._every
        if isinstance(verdict, CannotProveError):
            self.outcome = f"{which} {NOT_PROVED}: {verdict}."
            self._note(f"not proved: {verdict}")
            self._refuse_if_asked()
            if dist.get_rank() == 0:
                _logger.warning(self.outcome)
        elif verdict is not None:
            raise VerificationError("LP801", verdict)
        elif not self.outcome or is_later:
            self.outcome = self.outcome or "equal"
            self._note("equal")
            rank_zero_info(f"{which} on {model.mesh.sizes} equals that of one process.")

    def _note(self, outcome: str) -> None:
        self.outcomes[f"training step {self._step}"] = outcome

    def _refuse_if_asked(self) -> None:
        """Raise if the step has to be proved, and was not.

        Raises:
            VerificationError: On every rank, with ``verify="first_step"``.
        """
        if self._options.verify == "first_step":
            raise VerificationError(
                "LP804",
                f'verify="first_step": {self.outcome} verify="auto" trains on without the proof, '
                "and says so.",
            )

    def _compare(self, model: ParallelModel) -> Any:
        """Return what differs, or why that is not known; None: nothing."""
        self._noted.state = self._gather_state()
        assert self._plugin is not None
        assert self._given is not None
        judge = None
        if isinstance(self._skeleton, Skeleton):
            judge = Judge(
                skeleton=self._skeleton,
                model=model,
                options=self._options,
                plugin=self._plugin,
                device=self._device,
                given=self._given,
                noted=self._noted,
            )
        verdict = agree(lambda: judge.judge())  # type: ignore[union-attr]
        if judge is not None and judge.notes:
            self.outcome = f"{self._which} is proved in part: {'; '.join(judge.notes)}."
            self._note(f"in part: {'; '.join(judge.notes)}")
            rank_zero_info(self.outcome)
        if verdict != REHEARSE:
            return verdict
        reason = from_first(self._follow(model.module))
        if reason:
            return CannotProveError(reason.removesuffix("."))
        again = StepRecord()
        state = self._given.random_states[0]
        with rehearsed(model, self._plugin, self._first, state, self._device) as loss:
            again.losses.append(self._global_loss(loss))
            again.gradients.append(self._gather_gradients())
        return agree(lambda: judge.judge_rehearsal(again))  # type: ignore[union-attr]


def reason_of_run(
    skeleton: Skeleton | str | None, module: pl.LightningModule, layout: BatchLayout
) -> str:
    """Return why nothing of a run can be proved, as rank 0 knows it; empty: it can.

    Args:
        skeleton: From `take_skeleton`.
        module: The user's LightningModule.
        layout: What is declared of its batches.
    """
    if isinstance(skeleton, str) and skeleton:
        return skeleton
    callbacks: Any = getattr(module.trainer, "callbacks", ())
    if any(map(_tunes, callbacks)):
        return "a tuner has changed the run since it was set up."
    if layout.local_statistics:
        return "BatchLayout(local_statistics=True) accepts statistics of parts of a batch."
    return ""


def agree(judge: Callable[[], Any]) -> Any:
    """Return what rank 0 finds, or why it cannot be proved, on every rank."""
    verdict: Any = None
    if dist.get_rank() == 0:
        try:
            verdict = judge()
        except CannotProveError as reason:
            verdict = reason
        except Exception as error:  # of ours: the others wait for a verdict
            verdict = CannotProveError(f"{type(error).__name__}: {error}")
    return from_first(verdict)


def from_first(value: Any) -> Any:
    """Return what rank 0 has, on every rank."""
    world = dist.group.WORLD
    assert world is not None
    return broadcast_object(value, 0, world)


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it holds more than the zeros that some (LBFGS) write before their first closure."""
    states = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    return any(isinstance(v, Tensor) or bool(v) for state in states for v in state.values())


def _tunes(callback: Callback) -> bool:
    """Whether a callback looks for a learning rate or a batch size; the finder has one inside."""
    inside = type(callback).__module__.startswith("lightning.pytorch.tuner.")
    return inside or isinstance(callback, LearningRateFinder | BatchSizeFinder)
