"""Islands whose parameters are divided between several servers."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_par.engine.data.islands.options import Outer
from lightning_par.errors import IslandError
from tests.support.islands import Island, serving, SHAPES, together


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}


def gradient(island: int, step: int, name: str) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * island + 10 * step + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=draw, dtype=torch.float64) * 0.1


def train(islands: list[Island], steps: range) -> None:
    def run(island: Island) -> None:
        for step in steps:
            island.step(lambda name, s=step: gradient(island.number, s, name), 1 + island.number)

    together(*(lambda i=i: run(i) for i in islands))


@pytest.mark.parametrize("overlap", [0, 1])
def test_several_servers_give_the_same_bits_as_one(overlap: int, tmp_path: Path) -> None:
    """Also where one of them ends and returns, and on islands of other meshes."""
    outer = Outer(every=3, overlap=overlap, quantize="int8", min_islands=2, timeout=60)

    def run(count: int) -> list[dict[str, Tensor]]:
        with ExitStack() as stack:
            states = [tmp_path / f"{count}-{number}" for number in range(count)]
            servers = [stack.enter_context(serving(state)) for state in states]
            address = ",".join(f"127.0.0.1:{server.port}" for server in servers)
            islands = [Island(address, i, outer, start(), m) for i, m in enumerate(meshes)]
            together(*(island.join for island in islands))
            train(islands, range(4))
            servers[-1].close()
            stack.enter_context(serving(states[-1], servers[-1].port))
            train(islands, range(4, 8))
            together(*(lambda r=r: r.finish(0) for island in islands for r in island.ranks))
            held = [set(server.meeting.weights.exact) for server in servers]
            assert sum(map(len, held)) == len(SHAPES) == len(set.union(*held))
            assert all(held)
            for island in islands:
                assert {rank.rounds for rank in island.ranks} == {3 * count}
                island.close()
            return [island.weights() for island in islands]

    meshes = ["stages", "columns"]
    wanted = run(1)
    for count in (2, 3):
        for found, one in zip(run(count), wanted, strict=True):
            assert all(torch.equal(found[name], one[name]) for name in SHAPES)


def test_island_that_divides_its_parameters_otherwise_is_refused() -> None:
    outer = Outer(every=1, grace=0, timeout=60)
    with serving() as first, serving() as second:
        addresses = [f"127.0.0.1:{server.port}" for server in (first, second)]
        right = Island(addresses[0], 0, outer, start())
        right.join()
        wrong = Island(",".join(addresses), 1, outer, start())
        wrong.join()
        with pytest.raises(IslandError, match="sent 300 of 401 entries of its update"):
            train([wrong], range(1))
        train([right], range(1))
        assert [exchange.islands for exchange in right.ranks[0].exchanges] == [[0]]
        right.close()
        wrong.close(finished=False)
