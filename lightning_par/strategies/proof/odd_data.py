"""Names the data where the mesh and one process agree on a loss or gradient that is none."""

import math
from collections.abc import Sequence
from statistics import median
from time import monotonic

from lightning_par.observe.report import StepRecord
from lightning_par.strategies.data.joined_batch import cut_replica, samples_of
from lightning_par.strategies.proof.judge import CannotProveError, Judge
from lightning_par.strategies.proof.parted_batch import PartedBatch

__all__ = ["Size", "find_odd", "size_of"]

_TIMES = 10.0
"""How many times the largest loss, or norm of the gradients, of the steps proved before is odd."""
_KNOWN = 3
"""Steps that have to be proved before anything finite is odd."""
_ROWS, _SECONDS = 64, 10.0
"""Up to so many rows are computed one by one, and up to so long."""

Size = tuple[float, float]
"""Largest absolute loss, and norm of the gradients, of a step."""


def size_of(noted: StepRecord) -> Size:
    """Return how large loss and gradients of a step are; 0 where gradients are not known.

    Args:
        noted: What the mesh computed.
    """
    gradients = [float(g.double().norm()) for g in (noted.gradients[-1] or {}).values()]
    return max(map(_absolute, noted.losses)), math.hypot(*gradients)


def find_odd(judge: Judge, before: Sequence[Size]) -> str | None:
    """Return what is odd about the data of a step that equals that of one process; None: nothing.

    Args:
        judge: What has compared the step.
        before: Sizes of finite steps that were proved before.
    """
    noted, what = judge.noted, ""
    loss, norm = size_of(noted)
    number = max(range(len(noted.losses)), key=lambda i: _absolute(noted.losses[i]))
    most = [max(each) for each in zip(*before, strict=True)] if len(before) >= _KNOWN else []
    if not math.isfinite(loss):
        what = f"its loss is {noted.losses[number]}"
    elif not math.isfinite(norm):
        what = "its gradients are not finite"
    elif most and loss > _TIMES * most[0] > 0:
        what = f"its loss {noted.losses[number]:.4g} is more than {_TIMES:g} times"
    elif most and norm > _TIMES * most[1] > 0:
        what = f"the norm {norm:.4g} of its gradients is more than {_TIMES:g} times"
    if not what:
        return None
    if math.isfinite(loss) and math.isfinite(norm):
        what += " the largest of the steps that were proved before"
    number = min(number, len(judge.given.batches) - 1)  # an optimizer may compute several losses
    start, rows = judge.given.start, _odd_rows(judge, number)
    return (
        f"{judge.step[0].upper()}{judge.step[1:]} (epoch {start.epoch}, batch "
        f"{start.batch + number}): {what}. A run on one process computes the same values, so "
        f"the cause is not the mesh or a device. Look at the data of this batch.{rows}"
    )


def _absolute(loss: float) -> float:
    return abs(loss) if math.isfinite(loss) else math.inf


def _odd_rows(judge: Judge, number: int) -> str:
    """Return which rows have an odd loss of their own, as a sentence; empty: that is not known."""
    batch, start = judge.joined[number], monotonic()
    if isinstance(batch, PartedBatch):
        return ""
    count, losses = samples_of(batch), dict[int, float]()
    if not 1 < count <= _ROWS:
        return ""
    for row in range(count):
        alone = cut_replica(batch, [1] * count, row)
        counted = judge.model.steps.has_valid_labels(alone)
        if counted is None or bool(counted):
            try:
                losses[row] = _absolute(judge.loss_of(alone, number))
            except CannotProveError:  # as of a step that needs several samples
                return ""
        if monotonic() - start > _SECONDS:
            return ""
    usual = _TIMES * median(losses.values()) if losses else math.inf
    odd = [row for row, loss in losses.items() if loss == math.inf or loss > usual]
    if not odd or len(odd) == len(losses):
        return ""
    named = ", ".join(map(str, odd[:8])) + (", ..." if len(odd) > 8 else "")
    rows = f"row {named} has" if len(odd) == 1 else f"rows {named} have"
    return (
        f" Computed one by one, {rows} an unusual loss (rows are counted from 0 in the global "
        "batch)."
    )
