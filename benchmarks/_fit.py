"""Fits the planner's constants to measurements: a pattern search from values no table has seen."""

import math
from collections.abc import Callable, Mapping, Sequence

from _published import Measured

from lightning_par.planner.constants import Constants

__all__ = ["START", "fit", "leave_out"]

_TRAFFIC = {
    "memory": 0.8,
    "link": 0.75,
    "network": 0.7,
    "network_joint": 0.7,
    "network_part": 0.7,
    "network_wait": 0.05,
}
START: Mapping[str, Mapping[str, float]] = {
    "a100": {"product": 0.8, **_TRAFFIC, "host": 20e-6},
    "h100": {"product": 0.8, "product_fp8": 0.8, **_TRAFFIC},
}
"""Where a fit begins and what it may move: round shares of datasheets, the same for every part."""

_UNBOUNDED = ("network_wait", "host")
_SMALL = 0.03
"""Errors below it count by their square."""
_PRIOR = {"a100": 0.001, "h100": 0.004}
"""Cost of a constant's distance from its start, squared, in logarithms: what the rows say nothing
of stays where it was. Chosen with an eye on the errors, once for each family."""


def fit(rows: Sequence[Measured], family: str) -> Constants:
    """Return the constants with the least error, by the pattern search of Hooke and Jeeves.

    Errors are logarithms of predicted over measured; large ones count by their size, small ones by
    its square.
    """
    begin = {name: math.log(value) for name, value in START[family].items()}

    def cost(at: Mapping[str, float]) -> float:
        if any(value > 0 for name, value in at.items() if name not in _UNBOUNDED):
            return math.inf  # more than the peak
        constants = Constants(**{name: math.exp(value) for name, value in at.items()})
        logs = (math.log(row.estimate(constants) / row.seconds) for row in rows)
        mean = sum(math.hypot(log, _SMALL) for log in logs) / len(rows)
        return mean + _PRIOR[family] * sum((at[name] - begin[name]) ** 2 for name in at)

    base, step = dict(begin), 0.24
    best = cost(base)
    while step > 0.02:
        here, found = _explore(cost, base, best, step)
        if found >= best - 1e-7:
            step /= 2
            continue
        # As far again in the direction that was good.
        further = {name: 2 * here[name] - base[name] for name in here}
        base, best = here, found
        here, found = _explore(cost, further, cost(further), step)
        if found < best:
            base, best = here, found
    return Constants(**{name: math.exp(value) for name, value in base.items()})


def _explore(
    cost: Callable[[Mapping[str, float]], float], at: dict[str, float], best: float, step: float
) -> tuple[dict[str, float], float]:
    """Move each constant a step up or down where that helps."""
    here = dict(at)
    for name in at:
        for way in (step, -step):
            there = {**here, name: here[name] + way}
            found = cost(there)
            if found < best:
                here, best = there, found
                break
    return here, best


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
