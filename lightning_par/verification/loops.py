"""`capture` and `compare`: the proof of a step for loops of Fabric or of plain torch."""

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import whole as as_whole
from lightning_par.engine.rng import (
    collect_random_states,
    fork_all_rng,
    restore_random_states,
    states_alike,
)
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.observe.compare import (
    Difference,
    first_beyond,
    measure_states,
    Tolerance,
    tolerance_of,
)
from lightning_par.observe.isolate import isolated
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.report import StepRecord
from lightning_par.observe.whole_tensors import norms_of_copies, whole_tensors
from lightning_par.strategies.proof.causes import causes_elsewhere, Elsewhere, StepReport
from lightning_par.strategies.proof.other_step import agree_elsewhere, gather_all, OtherStep, Share
from lightning_par.strategies.proof.silence import silent, single_process
from lightning_par.strategies.proof.updates import copies_of_gradients, take_over, with_gradients

__all__ = ["Captured", "capture", "compare"]

B = TypeVar("B")


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """A module before it was wrapped.

    Attributes:
        module: It; wrappers change its parts.
        plain: A copy, on rank 0.
    """

    module: nn.Module
    plain: nn.Module | None


def capture(module: nn.Module) -> Captured:
    """Return what `compare` needs of a module that is about to be wrapped or sharded in place.

    Args:
        module: Whole, on every rank, with its layers.
    """
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    with fork_all_rng(torch.device("cpu")):  # copies of the user's objects may draw numbers
        return Captured(module=module, plain=copy.deepcopy(module) if is_first else None)


def compare(
    captured: Captured,
    model: nn.Module,
    batch: B,
    step: Callable[[nn.Module, B], Tensor],
    *,
    replica: int | None = None,
    whole: Callable[[str], Mapping[str, Tensor]] | None = None,
    update: Callable[[nn.Module], None] | None = None,
    fresh: bool = False,
) -> StepReport:
    """Take a step with a wrapped module and on one process, and compare loss and gradients.

    Dropout is off in both. Afterwards weights, gradients, buffers and generators are as before. If
    the step computes no gradients, as in an evaluation, only what it returns is compared.

    Args:
        captured: From `capture`.
        model: What the loop calls: DDP, FSDP, a module of Fabric, or the module itself.
        batch: That of this rank.
        step: Takes a module and a batch, computes forward and backward as the loop does, and
            returns the loss; it steps no optimizer.
        replica: Number of this rank's replica; ranks of one replica have the same samples. None:
            each rank is one.
        whole: Given "weights" or "gradients", returns those of `model`, whole, by the names of the
            captured module. Every rank calls it; what rank 0 gets counts. Where ranks hold copies,
            return their mean, so that one that differs is seen. None: those of DDP, FSDP and
            DTensors are gathered.
        update: Takes a module with gradients, clips them and steps an optimizer as the loop does:
            for `model` a copy of the loop's, for another module a new one with the same states.
            None: the update is not compared.
        fresh: Whether the model has the weights that were captured. They are then compared, too.

    Returns:
        The report, the same on every rank; `equal` says whether all is equal, `str` what differs.

    **Communicates**: as the step does; weights, gradients and batches, whole, to rank 0.
    """
    rank, world = (dist.get_rank(), dist.new_group([0])) if dist.is_initialized() else (0, None)
    loop = _Loop(captured=captured, model=model, step=step, whole=whole, update=update)
    with ExitStack() as stack:
        if world is not None:
            stack.callback(dist.destroy_process_group, world)
        stack.enter_context(fork_all_rng(loop.device))
        states = collect_random_states(loop.device)
        shares = [gather_all(Share.of(batch, rank if replica is None else replica, states))]
        start = loop.whole_of("weights")
        noted, copies = loop.take_step(batch, states)

        def run(batches: list[Any], states: list[dict[str, Any]], drops: bool) -> StepRecord:
            with single_process(loop.device, world=world):
                return loop.take_step_alone(start, batches[0], states[0], noted)

        def judge() -> StepReport:
            tolerance = tolerance_of(*(t.dtype for t in start.values()))
            strayed = loop.measure_start(start, tolerance) if fresh else None
            if strayed is not None:
                causes = causes_elsewhere(strayed, Elsewhere(strategy=loop.name, replicas=1))
                return StepReport(strategy=loop.name, difference=strayed, causes=tuple(causes))
            return OtherStep(
                strategy=loop.name,
                module=loop.module,
                noted=noted,
                shares=shares,
                run=run,
                start=start,
                tolerance=tolerance,
                update=None if update is None else tolerance,
                copies=copies,
                clips=update is not None,
                may_evaluate=True,
            ).judge()

        return agree_elsewhere(judge, loop.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Loop:
    """What `compare` is given of the user's loop."""

    captured: Captured
    model: nn.Module
    step: Callable[[nn.Module, Any], Tensor]
    whole: Callable[[str], Mapping[str, Tensor]] | None
    update: Callable[[nn.Module], None] | None

    @property
    def module(self) -> nn.Module:
        """What holds the parameters of this rank."""
        return self.captured.module if self.whole is None else self.model

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def name(self) -> str:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return f"{type(self.model).__name__} on {ranks} {'ranks' if ranks > 1 else 'rank'}"

    def whole_of(self, what: str) -> dict[str, Tensor]:
        """Return weights (and buffers) or gradients, whole and copied, on rank 0."""
        if self.whole is not None:
            return {n: t.detach().to("cpu", copy=True) for n, t in self.whole(what).items()}
        which = {"gradients": what == "gradients", "buffers": what == "weights"}
        keeps = not dist.is_initialized() or dist.get_rank() == 0
        return whole_tensors(self.module, within=self.model, keeps=keeps, **which)

    def take_step(
        self, batch: Any, states: dict[str, Any]
    ) -> tuple[StepRecord, list[dict[str, float]]]:
        """Take the step on the ranks; return it, and the norms of the copies of each rank."""
        noted = StepRecord()
        with isolated(self.module), silent(()), WithoutDropout():
            restore_random_states(states, self.device)
            loss = as_whole(self.step(self.model, batch).detach()).double().reshape(1).clone()
            noted.gradients.append(self.whole_of("gradients"))
            has_copies = self.whole is None
            copies = gather_all(norms_of_copies(self.module, self.model) if has_copies else {})
            if self.update is not None:
                self.update(self.model)
                noted.handed.append(self.whole_of("gradients"))
                noted.updated = self.whole_of("weights")
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        noted.losses.append(float(loss))
        return noted, copies

    def take_step_alone(
        self,
        start: Mapping[str, Tensor],
        batch: Any,
        states: dict[str, Any],
        noted: StepRecord,
    ) -> StepRecord:
        """Take the step on one process, the update from the gradients that the ranks have."""
        record = StepRecord()
        try:
            module = copy.deepcopy(self.captured.plain)
            assert module is not None
            module.to(self.device).load_state_dict(start, strict=False)
            restore_random_states(states, self.device)
            with WithoutDropout():
                loss = self.step(module, map_tensors(batch, lambda tensor: tensor.to(self.device)))
            record.draws = not states_alike(states, collect_random_states(self.device))
            record.losses.append(float(loss.detach()))
            named = with_gradients(module)
            record.gradients.append(copies_of_gradients(named))
            if self.update is not None and noted.gradients[0]:
                take_over(noted.gradients[0], named)
                self.update(module)
                record.handed.append(copies_of_gradients(named))
                record.updated = {n: p.detach().cpu().clone() for n, p in module.named_parameters()}
        except Exception as error:  # of the user's step
            record.error = error
        return record

    def measure_start(self, start: Mapping[str, Tensor], tolerance: Tolerance) -> Difference | None:
        """Return the first weight that is not the one that was captured."""
        assert self.captured.plain is not None
        wanted = {n: p.detach().cpu() for n, p in self.captured.plain.named_parameters()}
        found = first_beyond(measure_states(wanted, start, wanted, tolerance))
        return found and replace(found, kind="start")
