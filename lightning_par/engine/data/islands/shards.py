"""A rank of an island whose parameters are divided between several servers.

Note [Several servers]: each holds a part of the parameters, and is a server like any other: it has
rounds, fragments, a state and a restart of its own. All ranks divide the parameters alike, by their
names and sizes. Movements leave for all servers before an answer of any is waited for, so that a
link carries the part of its own server only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_par.checkpoint.pieces import Piece
from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.client import Exchange, IslandClient, Place
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.weights import balance

__all__ = ["ShardedClient"]


class ShardedClient:
    """An `IslandClient` for each of the servers; see Note [Several servers].

    Args:
        outer: The options of the run.
        place: Where this rank is; `server` has the addresses of all servers, with commas between.
        pieces: Its parts of the parameters; their values are changed in place.
        sends: Which of their boxes this rank sends; another rank of the island holds the others.
        trained: Names of the parameters that change.
        sizes: Name -> entries, of all parameters of the model.

    Attributes:
        exchanges: What became of the exchanges with all servers so far.
    """

    def __init__(
        self,
        outer: Outer,
        place: Place,
        pieces: Sequence[Piece],
        sends: frozenset[Box],
        trained: frozenset[str],
        sizes: Mapping[str, int],
    ) -> None:
        servers = place.server.split(",")
        self.exchanges: list[Exchange] = []
        self._clients = []
        for server, names in zip(servers, balance(sizes, len(servers)), strict=True):
            mine = [piece for piece in pieces if piece.box.name in names]
            # All clients append to one list, in the order in which answers come.
            here = replace(place, server=server)
            client = IslandClient(outer, here, mine, sends, trained, self.exchanges)
            self._clients.append(client)
        self._order = [piece.box for piece in pieces]

    @property
    def step(self) -> int:
        """As of `IslandClient`; of the server that has heard of most."""
        return max(client.step for client in self._clients)

    @step.setter
    def step(self, step: int) -> None:
        for client in self._clients:
            client.step = step

    @property
    def place(self) -> Any:
        """As of `IslandClient`, of the first server."""
        return self._clients[0].place

    @property
    def era(self) -> str:
        """Random name of the run, of the first server."""
        return self._clients[0].era

    @property
    def rounds(self) -> int:
        """Exchanges so far, with all servers."""
        return len(self.exchanges)

    @property
    def sent(self) -> int:
        """Bytes sent by this rank, of everything."""
        return sum(client.sent for client in self._clients)

    @property
    def received(self) -> int:
        """Bytes received by this rank, of everything."""
        return sum(client.received for client in self._clients)

    @property
    def exchanges_next(self) -> bool:
        """Whether the next `after_step` sends a movement."""
        return any(client.exchanges_next for client in self._clients)

    def join(self) -> None:
        """Meet the servers, and take their weights; see `IslandClient.join`."""
        for client in self._clients:
            client.join()

    def after_step(self, samples: int, place: Any = None) -> None:
        """Exchange what is due after an optimizer step; see `IslandClient.send`."""
        for client in self._clients:
            # All movements leave before any answer is waited for.
            client.send(samples, place)
        for client in self._clients:
            client.settle()

    def finish(self, samples: int) -> None:
        """Exchange what is left, and take the shared weights; see `IslandClient.finish`."""
        for client in self._clients:
            client.finish(samples)

    def shared(self) -> dict[Box, Tensor]:
        """Return the parts of this rank as all islands share them, as of their last exchanges."""
        found = {box: part for client in self._clients for box, part in client.shared().items()}
        return {box: found[box] for box in self._order}

    def leave(self) -> None:
        """Tell the servers that this island has finished its run, and close."""
        for client in self._clients:
            client.leave()

    def close(self) -> None:
        """End the connections, also while something is on its way."""
        for client in self._clients:
            client.close()
