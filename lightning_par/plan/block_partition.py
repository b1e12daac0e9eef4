"""Cuts a chain of blocks into contiguous parts of nearly equal cost, exactly."""

from collections.abc import Sequence
from itertools import accumulate

__all__ = ["partition_blocks"]


def partition_blocks(weights: Sequence[int], edges: tuple[int, int], parts: int) -> list[int]:
    """Split blocks into contiguous parts with the smallest maximum; ties prefer even counts.

    Args:
        weights: Cost of every block, such as its number of parameters.
        edges: Additional cost of the first and of the last part (embedding and head).
        parts: 1 .. number of blocks; 1 if there are none.

    Returns:
        Number of blocks of every part.
    """
    total = [0, *accumulate(weights)]
    count = len(weights)

    # (cost, square of the number of blocks): squares decide between cuts of the same cost.
    def cost(lo: int, hi: int, part: int) -> tuple[int, int]:
        extra = (edges[0] if part == 0 else 0) + (edges[1] if part == parts - 1 else 0)
        return total[hi] - total[lo] + extra, (hi - lo) ** 2

    # best[hi]: the cheapest cut of the first `hi` blocks into the parts so far.
    best = {hi: (*cost(0, hi, 0), [hi]) for hi in range(count + 1)}
    for part in range(1, parts):
        grown: dict[int, tuple[int, int, list[int]]] = {}
        # Every part has a block at least.
        for hi in range(part + 1, count + 1):
            options = []
            for lo in range(part, hi):
                load, square = cost(lo, hi, part)
                worst, squares, counts = best[lo]
                options.append((max(worst, load), squares + square, [*counts, hi - lo]))
            grown[hi] = min(options)
        best = grown
    return best[count][2]
