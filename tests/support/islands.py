"""Islands in threads of the test: a server, and ranks that hold boxes of tensors."""

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.checkpoint.pieces import Piece
from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.client import Place
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.engine.data.islands.shards import ShardedClient
from tests.support.one_gpu import backend

__all__ = [
    "KEY",
    "SHAPES",
    "SYNCHRONOUS",
    "Island",
    "boxes_of",
    "part_from_other_islands",
    "serving",
    "together",
]

KEY = b"the shared key of the tests"
SYNCHRONOUS = {"every": 1, "optimizer": "sgd", "lr": 1.0, "quantize": "none"}
"""Options with which islands equal one process."""
SHAPES = {"a": (7, 5), "b": (300,), "c": (3, 2, 11)}


@contextmanager
def serving(
    state: Path | None = None, port: int = 0, key: bytes = KEY, **options: Any
) -> Iterator[IslandServer]:
    server = IslandServer("127.0.0.1", port, key, state=state, **options)
    try:
        yield server
    finally:
        server.close()


def part_from_other_islands(folder: Path, island: int, rank: int, size: int) -> None:
    """Give this process a default group and an environment of its island alone.

    Args:
        folder: Of this run, on which the ranks of an island meet.
        island: Number of the island.
        rank: In the island.
        size: Its number of ranks.
    """
    dist.barrier()  # a rank that is started again must not have met the server before
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / f"store-{island}"), size)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls in threads; raise what one of them raised."""
    found: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            found[at] = calls[at]()
        except BaseException as error:
            found[at] = error

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def boxes_of(mesh: str) -> list[dict[Box, bool]]:
    """Boxes of every rank of an island, and whether that rank sends them.

    "one": a single rank; "columns": matrices cut along the last dim, vectors held by both ranks;
    "stages": the parameters divided between two ranks, of which both hold "b".
    """
    whole = {name: Box(name, (0,) * len(shape), shape) for name, shape in SHAPES.items()}
    if mesh == "one":
        return [dict.fromkeys(whole.values(), True)]
    if mesh == "stages":
        return [{whole["a"]: True, whole["b"]: False}, {whole["b"]: True, whole["c"]: True}]
    ranks: list[dict[Box, bool]] = [{}, {}]
    for name, shape in SHAPES.items():
        half = (shape[-1] + 1) // 2
        for rank, (low, size) in enumerate([(0, half), (half, shape[-1] - half)]):
            *rest, _ = shape
            cut = Box(name, (*[0] * len(rest), low), (*rest, size))
            ranks[rank][cut if rest else whole[name]] = bool(rest) or rank == 0
    return ranks


class Island:
    """An island whose ranks hold boxes of the same tensors, in the memory of one process."""

    def __init__(
        self,
        server: int | str,
        number: int,
        outer: Outer,
        weights: Mapping[str, Tensor],
        mesh: str = "one",
        key: bytes = KEY,
        incarnation: str = "first",
    ) -> None:
        self.number, self.outer = number, outer
        address = f"127.0.0.1:{server}" if isinstance(server, int) else server
        held = boxes_of(mesh)
        self.parts: list[dict[Box, Tensor]] = []
        self.ranks: list[ShardedClient] = []
        for rank, boxes in enumerate(held):
            parts = {box: _cut(weights[box.name], box).clone() for box in boxes}
            place = Place(
                server=address,
                key=key,
                island=number,
                rank=rank,
                world=len(held),
                incarnation=incarnation,
            )
            pieces = [Piece(box, SHAPES[box.name], value) for box, value in parts.items()]
            sends = frozenset(box for box, is_sent in boxes.items() if is_sent)
            sizes = {name: math.prod(shape) for name, shape in SHAPES.items()}
            client = ShardedClient(outer, place, pieces, sends, frozenset(SHAPES), sizes)
            self.parts.append(parts)
            self.ranks.append(client)

    def join(self) -> None:
        together(*(rank.join for rank in self.ranks))

    def step(self, gradient: Callable[[str], Tensor] | None, samples: int = 1) -> None:
        """Subtract a gradient on every rank, and exchange what is due."""

        def run(at: int) -> None:
            for box, part in self.parts[at].items():
                if gradient is not None:
                    part -= _cut(gradient(box.name), box)
            self.ranks[at].after_step(samples)

        together(*(lambda at=at: run(at) for at in range(len(self.ranks))))

    def weights(self) -> dict[str, Tensor]:
        """Return the whole weights; every rank that holds an entry has to hold the same bits."""
        found: dict[str, Tensor] = {}
        for parts in self.parts:
            for box, part in parts.items():
                tensor = found.setdefault(
                    box.name, torch.full(SHAPES[box.name], torch.nan, dtype=part.dtype)
                )
                here = _cut(tensor, box)
                assert here.isnan().all() or torch.equal(here, part)
                here.copy_(part)
        return found

    def close(self, *, finished: bool = True) -> None:
        for rank in self.ranks:
            if finished:
                rank.leave()
            else:
                rank.close()


def _cut(tensor: Tensor, box: Box) -> Tensor:
    ends = tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
    return tensor[ends]
