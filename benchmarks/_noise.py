"""What noise alone costs: the regret of one who knows all times but the noise."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import numpy as np
from _published import Measured

__all__ = ["deviations", "noise_regrets"]

_DRAWS = 20_000


def deviations(pairs: Sequence[tuple[Measured, float]]) -> list[float]:
    """Return by how much runs are off from their line, as logarithms.

    A line is what differs in the micro-batch only, three runs or more; its median error is the
    forecast's, not the noise's, and is taken out.

    Args:
        pairs: Rows and their predicted seconds.
    """
    lines: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for row, predicted in pairs:
        sizes = row.layout.sizes
        found = math.log(row.seconds / predicted)
        lines[row.problem, sizes.tensor, sizes.pipeline].append(found)
    some = [line for line in lines.values() if len(line) > 2]
    return [error - median(line) for line in some for error in line]


def noise_regrets(
    pairs: Sequence[tuple[Measured, float]], noise: Sequence[float], first: int
) -> list[float]:
    """Return regrets, mean of the problems, in draws of noise around the predictions.

    In every draw the layouts with the shortest times without noise are taken, and the best of them
    is compared with the best of all.

    Args:
        pairs: Rows and their seconds without noise.
        noise: Logarithms, of which every run of a draw gets one.
        first: How many layouts are taken.
    """
    generator = np.random.default_rng(0)
    problems: dict[str, list[float]] = defaultdict(list)
    for row, predicted in pairs:
        problems[row.problem].append(predicted)
    found = []
    for times in problems.values():
        measured = np.sort(times) * np.exp(generator.choice(noise, size=(_DRAWS, len(times))))
        found.append(measured[:, :first].min(1) / measured.min(1) - 1)
    return [float(regret) for regret in np.mean(found, 0)]
