"""Islands that come back, or stay away: when they meet the others, and what counts meanwhile."""

import time

import pytest
import torch
from torch import Tensor

from lightning_par.engine.data.islands.options import Outer
from tests.support.islands import Island, serving, SHAPES, together

FAST = {"optimizer": "average", "quantize": "none", "timeout": 60.0}


def start() -> dict[str, Tensor]:
    return {name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()}


def train(islands: list[Island], steps: int) -> None:
    """Let islands make steps in threads of their own; each subtracts 1 in a step."""

    def run(island: Island) -> None:
        for _ in range(steps):
            island.step(lambda name: torch.ones(SHAPES[name], dtype=torch.float64))

    together(*(lambda i=i: run(i) for i in islands))


def test_island_that_comes_back_meets_the_others_in_their_next_round() -> None:
    outer = Outer(**{**FAST, "every": 20, "fragments": 2})
    with serving() as server:
        first = Island(server.port, 0, outer, start())
        lost = Island(server.port, 1, outer, start(), "stages")
        together(first.join, lost.join)
        train([first, lost], 20)
        lost.close(finished=False)
        train([first], 7)
        # As if a step took 1,000 seconds; the second rank of the island comes some steps later.
        server.meeting._paces = {0: 10**9, 1: 10**9}
        server.meeting._merged_at = time.monotonic() - 7_000
        again = Island(server.port, 1, outer, start(), "stages", incarnation="second")
        again.ranks[0].join()
        server.meeting._merged_at -= 5_000
        again.ranks[1].join()
        train([again, first], 2)
        assert [rank.exchanges_next for rank in (*again.ranks, *first.ranks)] == [True] * 3
        train([again, first], 11)
        for rank in (*again.ranks, *first.ranks):
            last = rank.exchanges[-2:]
            assert [exchange.fragment for exchange in last] == [0, 1]
            assert [exchange.islands for exchange in last] == [[0, 1], [0, 1]]
        for island in (first, again):
            island.close()


def test_island_that_is_frozen_makes_steps_smaller_for_some_rounds_only() -> None:
    outer = Outer(**{**FAST, "every": 1, "grace": 0})
    with serving() as server:
        islands = [Island(server.port, i, outer, start()) for i in range(3)]
        together(*(island.join for island in islands))
        frozen, *others = islands
        held = server.meeting.weights
        assert held is not None

        def moves(moving: list[Island]) -> list[float]:
            """Let each of these islands in turn move by 1; return how far all weights moved."""
            found = []
            for island in moving:
                before = float(held.exact["a"][0, 0])
                train([island], 1)
                found.append(before - float(held.exact["a"][0, 0]))
            return found

        # Three islands are connected: after 2 x 3 rounds it counts no longer, until it is back.
        assert moves(others * 4) == pytest.approx([1 / 3] * 6 + [1 / 2] * 2)
        train([frozen], 1)
        assert moves(others) == pytest.approx([1 / 3] * 2)
        for island in islands:
            island.close()
