"""Tells whether software or a device is to blame for a step that differs from one process.

Note [Software or machine]: a fault of the software comes again whenever the same is computed; one
of a device, such as a flipped bit, does not. So the mesh takes forward and backward again, from the
weights that the step began with, and so does one process. Weights of which ranks hold copies are
compared first. Where these differ, a device has changed one, or code that runs on some ranks only;
but a sum that is missing makes them differ, too, so that the step is then taken again from the
values that the first rank of each axis holds, and software is to blame if it differs again. Else a
device is blamed only if three things hold: both are equal this time, one process computes what it
did the first time, and the mesh does not. Otherwise, as where hooks have changed attributes since,
the difference is one of the software. What the mesh computed otherwise the first time tells which
ranks it can be.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.dtensor import local_box
from lightning_par.engine.data.equal_copies import differing_copies, share_copies
from lightning_par.errors import VerificationError
from lightning_par.observe.compare import first_beyond, measure_backwards, Tolerance
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.proof.gathering import from_first
from lightning_par.strategies.proof.judge import agree, CannotProveError, Differs, Judge
from lightning_par.strategies.proof.on_difference import ENDS, host_name
from lightning_par.strategies.proof.second_step import copy_parts, MeshStep
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = ["find_fault", "passing_fault"]

_END = (
    f"{ENDS} Resume from the last checkpoint without that device. verify=False turns the "
    "comparison off."
)


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What one rank says of a step that was taken twice.

    Attributes:
        host: Its name.
        replica: Number of the replica, and of its part of the sequences.
        part: Its pipeline rank and tensor-parallel rank.
        losses: Its own loss of both times, weighted.
        boxes: Canonical name -> offset and shape of its part of the gradient.
    """

    host: str
    replica: tuple[int, int]
    part: tuple[int, int]
    losses: tuple[float, float]
    boxes: Mapping[str, tuple[Sequence[int], Sequence[int]]]


def find_fault(
    verdict: Differs, judge: Judge | None, first: MeshStep, *, repeats: bool
) -> VerificationError:
    """Return the error of a step that differs: LP807 for a device, else LP801.

    Args:
        verdict: How it differs, the same on every rank.
        judge: On rank 0, what has compared it.
        first: The step, with what the mesh has computed.
        repeats: Whether the mesh and one process can take it again.

    **Communicates**: checksums of all copies; then as forward and backward do, the gradients to
    rank 0, and what this finds to all.
    """
    model = first.model
    if verdict.kind == "write":
        return VerificationError("LP801", verdict.text)
    repeats = repeats and verdict.kind in ("loss", "gradient")
    # An update may follow from the software, and differ. An optimizer on the host would take
    # weights that are put back for those that the user has changed.
    with first.at_begin() if model.host is None else nullcontext():
        copies = differing_copies(model.module, model.mesh, first.device)
        if copies and repeats:
            share_copies(model.module, model.mesh, first.device)
            first = replace(first, parts=copy_parts(model.module))
    if not repeats:
        if copies:
            text = from_first(None if judge is None else _of_copies(judge, copies))
            return VerificationError("LP807", text)
        return VerificationError("LP801", verdict.text)
    second = first.take()
    ranks: list[Any] = [None] * dist.get_world_size()
    own = _describe(model, (first.own_loss, second.own_loss))
    dist.all_gather_object(ranks, own)
    found = agree(lambda: _judge_both(judge, first, second.record, ranks, copies))  # type: ignore[arg-type]
    if isinstance(found, CannotProveError):
        return VerificationError("LP801", verdict.text)
    text, is_device, hosts = found
    if not is_device:
        return VerificationError("LP801", text)
    error = VerificationError("LP807", text)
    error.hosts = hosts
    return error


def passing_fault(judge: Judge) -> str:
    """Return the text of LP807 for a batch that differed from one process once, and not again.

    Args:
        judge: What has compared it.
    """
    return (
        f"{_differed(judge)} Repeated from the same weights, the step is equal, so a device made "
        f"an error once. Which device made it is not known. {_END}"
    )


def _of_copies(judge: Judge, copies: str) -> str:
    return (
        f"{_differed(judge)} Copies of weights or buffers differ: {copies}. If code writes to "
        "them on some ranks only, such as a callback inside of `if trainer.is_global_zero`, "
        "change it to write on every rank. If there is no such code, the memory of a device is "
        f"faulty. {_END}"
    )


def _differed(judge: Judge) -> str:
    step = f"{judge.step[0].upper()}{judge.step[1:]}"
    return (
        f"{step} on {judge.model.mesh.sizes} differed from the same step on one process: "
        f"{judge.difference}."
    )


def _describe(model: ParallelModel, losses: tuple[float, float]) -> _Rank:
    canonical, at = model.resolved.canonical, model.mesh.place
    boxes = {}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad:
            box = local_box(name, parameter)
            boxes[canonical.get(name, name)] = box.offset, box.shape
    data = model.mesh.data_group
    return _Rank(
        host=host_name(),
        replica=(dist.get_rank(data), at["cp"]),
        part=(at["pp"], at["tp"]),
        losses=losses,
        boxes=boxes,
    )


def _judge_both(
    judge: Judge, first: MeshStep, mesh: StepRecord, ranks: Sequence[_Rank], copies: str
) -> tuple[str, bool, tuple[str, ...]]:
    """Compare both takes of the step.

    Args:
        judge: What has compared the first one.
        first: It.
        mesh: What the mesh computed in the second one.
        ranks: What each rank says.
        copies: Which copies of weights differed when the step began.

    Returns:
        The text of the error, whether a device is to blame, and the hosts that may have it.
    """
    difference, before, tolerance = judge.difference, judge.one, judge.tolerance
    assert difference is not None
    one = judge.take_again(first.tensors, drops=first.drops)
    comes_again = judge.judge_again(mesh)
    if comes_again is not None:
        again = (
            "the same forward and backward, repeated from the same weights, differs again: the "
            "software is at fault, and not a device."
        )
        text = judge.explain(difference, draws=before.draws, step=judge.step, again=again)
        return text, False, ()
    if copies:
        return _of_copies(judge, copies), True, ()
    changed = first_beyond(measure_backwards(first.record, mesh, tolerance))
    if changed is None or first_beyond(measure_backwards(one, before, tolerance)):
        text = judge.explain(difference, draws=before.draws, step=judge.step)
        return text, False, ()
    names, why = _suspects(ranks, first.record, mesh, tolerance)
    hosts = tuple(dict.fromkeys(ranks[rank].host for rank in names))
    said = f"one of the ranks {', '.join(map(str, names))}" if names[1:] else f"rank {names[0]}"
    text = (
        f"{_differed(judge)} Repeated from the same weights, the step is equal, so a device made "
        f"an error once. It is the device of {said} (host {', '.join(hosts)}), since {why}. {_END}"
    )
    return text, True, hosts


def _suspects(
    ranks: Sequence[_Rank], first: StepRecord, second: StepRecord, tolerance: Tolerance
) -> tuple[list[int], str]:
    """Return the ranks whose numbers tell that they may have computed something else, and why."""
    replicas, parts = {rank.replica for rank in ranks}, {rank.part for rank in ranks}
    changes = _changes(first, second, tolerance)
    of_loss = {rank.replica for rank in ranks if _has_other_loss(rank, tolerance)} or replicas
    of_gradients = {rank.part for rank in ranks if _holds(rank, changes)} or parts
    whys = []
    if of_loss != replicas:
        whys.append("only the loss of its replica differs between the two runs of the step")
    if of_gradients != parts:
        whys.append(
            "only gradients of its part of the model differ between the two runs of the step"
        )
    numbered = enumerate(ranks)
    found = [n for n, r in numbered if r.replica in of_loss and r.part in of_gradients]
    return found, " and ".join(whys) or (
        "the differences between the two runs of the step do not single out a rank"
    )


def _has_other_loss(rank: _Rank, tolerance: Tolerance) -> bool:
    one, other = rank.losses
    return not abs(one - other) <= tolerance.loss * max(1.0, abs(other))


def _changes(
    first: StepRecord, second: StepRecord, tolerance: Tolerance
) -> dict[str, tuple[Tensor, float]]:
    """Return how each gradient has changed, and up to which norm that is a rounding."""
    before, after = first.gradients[-1] or {}, second.gradients[-1] or {}
    all_norms = math.hypot(*map(tolerance.norm, after.values()))
    found = {}
    for name in before.keys() & after.keys():
        bound = tolerance.gradient * tolerance.norm(after[name]) + tolerance.nothing * all_norms
        change = (before[name].double() - after[name].double()).nan_to_num(math.inf)
        found[name] = change, bound
    return found


def _holds(rank: _Rank, changed: Mapping[str, tuple[Tensor, float]]) -> bool:
    """Whether the part of a rank of any gradient has changed."""
    for name, (offset, shape) in rank.boxes.items():
        if name in changed:
            change, bound = changed[name]
            part = change[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            if float(torch.linalg.vector_norm(part)) > bound:
                return True
    return False
