"""Processes of a run in which every device is an island of its own.

Note [Server of a script]: where nothing names a server, the first process of a script is one, too.
Every `fit` has a server of its own, all at the same port, with another key: an island that begins
the next one early is not taken into the one that ends.
"""

import hmac
import logging
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_par.engine.data.islands.client import Place
from lightning_par.engine.data.islands.environment import ISLAND_VARIABLE, SERVER_VARIABLE
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.hosts import number_of, with_ranks
from lightning_par.strategies.processes.island_place import find_island, find_place
from lightning_par.strategies.processes.launcher import PreflightLauncher, refuse_prompt
from lightning_par.strategies.processes.mesh_processes import MeshProcesses

__all__ = ["DeviceIslands"]

_log = logging.getLogger(__name__)
_PERIOD = 0.2
"""Seconds between two looks at the processes of other islands."""
_HOME = "LIGHTNING_PAR_ISLANDS_HOME"
"""Environment variable that tells processes the port and the secret of the one that starts them."""


class _Home:
    """What this process knows of the server of its script; see Note [Server of a script].

    Attributes:
        is_first: Whether this process is the server.
        port: At which it listens; 0: at any that is free.
        key: Of the run that goes on.
        processes: Those that were started here, from island 1 on.
    """

    def __init__(self) -> None:
        given = os.environ.get(_HOME)
        self.is_first = given is None
        # The secret never leaves this machine's processes: it goes by their environment.
        port, _, secret = (given or f"0-{secrets.token_hex(32)}").partition("-")
        self.port, self._secret, self._runs = int(port), secret, 0
        self.key = b""
        self.processes: list[subprocess.Popen[bytes]] = []

    def next_run(self) -> None:
        """Make the key of the next run; every process counts alike, as all run the same script."""
        self._runs += 1
        self.key = hmac.digest(self._secret.encode(), str(self._runs).encode(), "sha256")

    def tell(self) -> str:
        """Return the value of the variable for other processes."""
        return f"{self.port}-{self._secret}"


_homes: list[_Home] = []
"""That of this process, for all of its Trainers, once there is one."""


def _home() -> _Home:
    if not _homes:
        _homes.append(_Home())
    return _homes[0]


class DeviceIslands(MeshProcesses):
    """Every process is an island: what the launcher counts as ranks are islands.

    Where this run is told that it is one of several islands itself, it is so many of them.

    Args:
        options: What the user chose; `outer` is given, and gets the number of the island.
    """

    def __init__(self, options: MeshOptions) -> None:
        super().__init__(options)
        assert options.outer is not None
        self._all_nodes = 1

    @property
    @override
    def num_local(self) -> int:
        """Processes of this node that are of the same island."""
        return 1

    @property
    def num_islands(self) -> int:
        """Number of islands, of all nodes."""
        return self._all_nodes * (len(self._devices) or 1)

    @override
    def attach(
        self,
        devices: list[torch.device],
        num_nodes: int,
        environment: ClusterEnvironment | None,
    ) -> ClusterEnvironment | None:
        # `attach` is called again by `set_up`, with the environment that was made here.
        if environment is not None and not isinstance(environment, _Alone):
            self._devices, self._all_nodes = devices, num_nodes
            found = with_ranks(environment, self.num_islands)
            assert found is not None
            island = number_of(found, num_nodes, len(devices))
            found.set_global_rank(island)
            found.set_world_size(self.num_islands)
            environment = _Alone(found)
            outer = self._options.outer
            assert outer is not None
            told = outer.island is not None or ISLAND_VARIABLE in os.environ
            # Sites number their islands one after another: those of site 0 first.
            site, sites = find_island(outer) if told else (0, 1)
            count = self.num_islands
            outer = replace(outer, island=site * count + island, islands=sites * count)
            self._options = replace(self._options, outer=outer)
        # For the rest of this package the run has one process.
        return super().attach(devices, 1, environment)

    @override
    def make_launcher(
        self, preflight: Callable[[pl.Trainer | None, Any], None]
    ) -> PreflightLauncher:
        # Raises where the sizes do not fit, before anything is started.
        _ = self.sizes
        assert isinstance(self._environment, _Alone)
        environment = self._environment.launched
        if self.num_islands > 1 and not environment.creates_processes_externally:
            refuse_prompt(self.num_islands)
        rest = preflight, self._explain
        launches = environment, len(self._devices), self._all_nodes
        self._launcher = _IslandLauncher(*launches, *rest, at_home=self._is_at_home)
        return self._launcher

    @property
    def _is_at_home(self) -> bool:
        outer = self._options.outer
        assert outer is not None
        return outer.server is None and SERVER_VARIABLE not in os.environ

    @override
    def find_place(self) -> Place:
        outer = self._options.outer
        assert outer is not None
        if not self._is_at_home:
            return find_place(outer, self.rank, self.world_size)
        assert outer.island is not None
        return Place(
            server=f"127.0.0.1:{_home().port}",
            key=_home().key,
            island=outer.island,
            rank=0,
            world=1,
            incarnation=secrets.token_hex(8),
        )


class _Alone(ClusterEnvironment):
    """The environment of an island of one process, of those that `launched` counts.

    Args:
        launched: Counts the processes of all islands.
    """

    def __init__(self, launched: ClusterEnvironment) -> None:
        super().__init__()
        self.launched = launched

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return self.launched.creates_processes_externally

    @property
    @override
    def main_address(self) -> str:
        return self.launched.main_address

    @property
    @override
    def main_port(self) -> int:
        return self.launched.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return 1

    @override
    def set_world_size(self, size: int) -> None:
        pass

    @override
    def global_rank(self) -> int:
        return 0

    @override
    def set_global_rank(self, rank: int) -> None:
        pass

    @override
    def local_rank(self) -> int:
        return self.launched.local_rank()

    @override
    def node_rank(self) -> int:
        return self.launched.node_rank()

    @override
    def teardown(self) -> None:
        self.launched.teardown()


class _IslandLauncher(PreflightLauncher):
    """Starts one process for each island of this node; one that ends does not end the others.

    Args:
        args: Those of `PreflightLauncher`.
        at_home: Whether the first process is the server.
    """

    def __init__(self, *args: Any, at_home: bool) -> None:
        super().__init__(*args)
        self._at_home = at_home
        self._server: IslandServer | None = None
        self._ended: set[int] = set()

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        # Only a fit has islands that exchange; a validation runs in each for itself.
        fits = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        if not self._at_home or not fits:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self._check_home()
        home = _home()
        # In every process, server or not, so that all have the key of the same run.
        home.next_run()
        if not home.is_first:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self._server = IslandServer("127.0.0.1", home.port, home.key)
        home.port = self._server.port
        # Of an earlier fit: those islands do not come to this one.
        lost = sum(process.poll() is not None for process in home.processes)
        self._server.meeting.expect(self.num_processes - lost)
        # A second fit starts no processes again: the first one's run the same script.
        self.procs = home.processes
        os.environ[_HOME] = home.tell()  # the other processes inherit it
        try:
            result = super().launch(function, *args, trainer=trainer, **kwargs)
            # The server must outlive the last island, which may be slower than this process.
            self._wait(self._server)
            return result
        except BaseException:
            for process in home.processes:  # without the server they cannot go on
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
            raise
        finally:
            os.environ.pop(_HOME, None)
            self._server.close()
            self._server = None

    def _check_home(self) -> None:
        """Refuse islands that cannot know where the first process is.

        Raises:
            ConfigurationError: They were not started by it, or are on several nodes.
        """
        known = bool(_homes) or _HOME in os.environ
        apart = self.num_nodes > 1 or (
            self.num_processes > 1
            and self.cluster_environment.creates_processes_externally
            and not known
        )
        if apart:
            raise ConfigurationError(
                "LP705",
                "strategy='islands' on several hosts, or under a launcher such as torchrun, needs "
                "the address of a server. Start one with lightning-par serve, and set "
                f"{SERVER_VARIABLE}=host:port and LIGHTNING_PAR_KEY for every process.",
            )

    @override
    def _observe_children(self, over: threading.Event) -> None:
        """Say which islands have ended with an error; the others go on."""
        _home().processes = self.procs
        while not over.wait(_PERIOD):
            self._note_ends()

    def _note_ends(self) -> None:
        # A status other than 0: one that has finished well is no loss.
        lost = [(i, p) for i, p in enumerate(_home().processes, 1) if p.poll()]
        new = [(island, process) for island, process in lost if island not in self._ended]
        for island, process in new:
            self._ended.add(island)
            _log.warning(
                "island %d (pid %d) has ended with status %d; the other islands continue without "
                "it",
                *(island, process.pid, process.returncode),
            )
        if new and self._server is not None:
            # Or the rounds would wait for islands that never come.
            self._server.meeting.expect(self.num_processes - len(lost))

    def _wait(self, server: IslandServer) -> None:
        """Serve until the other islands have finished, or have ended."""
        over = threading.Event()
        while any(
            process.poll() is None and island not in server.meeting.finished()
            for island, process in enumerate(_home().processes, 1)
        ):
            over.wait(_PERIOD)
        self._note_ends()
