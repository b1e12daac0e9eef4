"""`capture` and `compare`: the proof of a step for loops of Fabric or of plain torch."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import whole
from lightning_par.engine.rng import (
    collect_random_states,
    fork_all_rng,
    restore_random_states,
    states_alike,
)
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.observe.compare import tolerance_of
from lightning_par.observe.isolate import isolated
from lightning_par.observe.modes import WithoutDropout
from lightning_par.observe.report import StepRecord
from lightning_par.observe.whole_tensors import norms_of_copies, whole_tensors
from lightning_par.strategies.proof.causes import StepReport
from lightning_par.strategies.proof.other_step import agree_elsewhere, gather_all, OtherStep, Share
from lightning_par.strategies.proof.silence import silent, single_process
from lightning_par.strategies.proof.updates import copies_of_gradients, with_gradients

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
) -> StepReport:
    """Take a step with a wrapped module and on one process, and compare loss and gradients.

    Dropout is off in both. Afterwards weights, gradients, buffers and generators are as before.

    Args:
        captured: From `capture`.
        model: What the loop calls: DDP, FSDP, a module of Fabric, or the module itself.
        batch: That of this rank.
        step: Takes a module and a batch, computes forward and backward as the loop does, and
            returns the loss; it steps no optimizer.
        replica: Number of this rank's replica; ranks of one replica have the same samples. None:
            each rank is one.

    Returns:
        The report, the same on every rank; `equal` says whether all is equal, `str` what differs.

    **Communicates**: as the step does; weights, gradients and batches, whole, to rank 0.
    """
    module, rank, ranks, world = captured.module, 0, 1, None
    if dist.is_initialized():
        rank, ranks, world = dist.get_rank(), dist.get_world_size(), dist.new_group([0])
    device = next(module.parameters()).device
    name = f"{type(model).__name__} on {ranks} {'ranks' if ranks > 1 else 'rank'}"

    def whole_of(**which: bool) -> dict[str, Tensor]:
        return whole_tensors(module, within=model, keeps=rank == 0, **which)

    with fork_all_rng(device):
        start = whole_of(buffers=True)
        own = Share.of(batch, rank if replica is None else replica, collect_random_states(device))
        shares = [gather_all(own)]
        with isolated(module), silent(()), WithoutDropout():
            restore_random_states(own.states, device)
            loss = whole(step(model, batch).detach()).double().reshape(1).clone()
            gradients = whole_of(gradients=True)
            copies = gather_all(norms_of_copies(module, model))
        if ranks > 1:
            dist.all_reduce(loss)

        def run(batches: list[Any], states: list[dict[str, Any]], drops: bool) -> StepRecord:
            with single_process(device, world=world):
                return _step_alone(captured, start, batches[0], step, states[0], device)

        def judge() -> StepReport:
            return OtherStep(
                strategy=name,
                module=module,
                noted=StepRecord(losses=[float(loss) / ranks], gradients=[gradients]),
                shares=shares,
                run=run,
                start=start,
                tolerance=tolerance_of(*(t.dtype for t in start.values())),
                copies=copies,
            ).judge()

        report = agree_elsewhere(judge, name)
    if world is not None:
        dist.destroy_process_group(world)
    return report


def _step_alone(
    captured: Captured,
    start: dict[str, Tensor],
    batch: Any,
    step: Callable[[nn.Module, Any], Tensor],
    states: dict[str, Any],
    device: torch.device,
) -> StepRecord:
    """Take a step on one process, and return what it computed."""
    record = StepRecord()
    try:
        module = copy.deepcopy(captured.plain)
        assert module is not None
        module.to(device).load_state_dict(start, strict=False)
        restore_random_states(states, device)
        with WithoutDropout():
            loss = step(module, map_tensors(batch, lambda tensor: tensor.to(device)))
        record.draws = not states_alike(states, collect_random_states(device))
        record.losses.append(float(loss.detach()))
        record.gradients.append(copies_of_gradients(with_gradients(module)))
    except Exception as error:  # of the user's step
        record.error = error
    return record
