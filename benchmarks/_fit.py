"""Fits the planner's constants to measurements, from values that no table has seen."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from _published import a100_stages, Measured, MeasuredStage

from lightning_par.planner.constants import Constants

__all__ = ["START", "fit", "leave_out"]

_UNKNOWN, _GUESS, _KNOWN = 1.0, 0.3, 0.1
_SHARES = {
    "product": (0.8, _GUESS),
    "memory": (0.8, _GUESS),
    "link": (0.77, _KNOWN),
    "network": (0.7, _GUESS),
    "network_joint": (0.9, _KNOWN),
    "network_part": (0.7, _GUESS),
    "network_wait": (0.05, _GUESS),
    "network_part_wait": (0.05, _UNKNOWN),
    "network_start": (60e-6, _GUESS),
}
START: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "a100": {**_SHARES, "host": (20e-6, _GUESS), "stage_start": (500e-6, _UNKNOWN)},
    "h100": {**_SHARES, "product_fp8": (0.8, _GUESS)},
}
"""Where a fit begins and what it may move, each with the standard deviation of its logarithm.

Round shares of datasheets, of which two are known better, from the bus bandwidth of NCCL's own
tests: inside a node, and over whole nodes that use all their ports. Of two times no number was at
hand: what nodes add where groups share their ports, and what stages wait for their host.
"""
_STAGES: Mapping[str, Callable[[], Sequence[MeasuredStage]]] = {"a100": a100_stages, "h100": list}
"""Measurements of one device, on which every fit of its family rests besides."""

Values = npt.NDArray[np.float64]
_UNBOUNDED = ("network_wait", "network_part_wait", "network_start", "host", "stage_start")
_NOISE = 0.05
"""Scale of the errors' Cauchy distribution: most are small, and some runs were disturbed."""
_STEPS, _SHIFT, _ENOUGH = 30, 0.01, 1e-4


def fit(rows: Sequence[Measured], family: str) -> Constants:
    """Return the most likely constants, by the steps of Gauss and Newton.

    Errors are logarithms of predicted over measured. A run that is far off says little: what
    disturbed it is not known.
    """
    start, every = START[family], [*rows, *_STAGES[family]()]
    names, seconds = list(start), np.array([row.seconds for row in every])
    begin = np.log([value for value, _ in start.values()])
    precision = np.array([spread**-2 for _, spread in start.values()])
    most = np.where([name in _UNBOUNDED for name in names], math.inf, 0.0)  # not above the peak

    def errors(at: Values) -> Values:
        constants = Constants(**dict(zip(names, map(float, np.exp(at)), strict=True)))
        return np.log([row.estimate(constants) for row in every] / seconds)

    def unlikely(found: Values, at: Values) -> float:
        return float(np.log1p((found / _NOISE) ** 2).sum() + precision @ (at - begin) ** 2 / 2)

    at, found = begin, errors(begin)
    for _ in range(_STEPS):
        columns = [(errors(at + _SHIFT * unit) - found) / _SHIFT for unit in np.eye(len(names))]
        slope, weights = np.stack(columns, 1), 2 / (_NOISE**2 + found**2)
        uphill = slope.T @ (weights * found) + precision * (at - begin)
        curve = slope.T @ (weights[:, None] * slope) + np.diag(precision)
        step = np.linalg.solve(curve, uphill)
        shorter = (np.minimum(at - step / 2**halved, most) for halved in range(6))
        tried = ((there, errors(there)) for there in shorter)
        here = unlikely(found, at)
        better = next(((x, e) for x, e in tried if unlikely(e, x) < here), None)
        if better is None:
            break
        at, found = better
        if here - unlikely(found, at) < _ENOUGH:
            break
    return Constants(**dict(zip(names, map(float, np.exp(at)), strict=True)))


def leave_out(
    rows: Sequence[Measured], key: Callable[[Measured], str], family: str
) -> list[tuple[Measured, float, float, float]]:
    """Predict every group of rows by constants fitted on the others.

    Returns:
        For each row: predicted seconds, those at the others' median MFU, and those at the MFU of
        the most similar of the others.
    """
    found = []
    for group in sorted({key(row) for row in rows}):
        others = [row for row in rows if key(row) != group]
        constants = fit(others, family)
        typical = sorted(row.mfu for row in others)[len(others) // 2]
        for row in (row for row in rows if key(row) == group):
            nearest = min(others, key=row.distance).mfu
            found.append((row, row.predict(constants), row.at_mfu(typical), row.at_mfu(nearest)))
    return found
