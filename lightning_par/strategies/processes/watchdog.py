"""Ranks that die, raise or stop: every process of the node ends, and says which rank and why.

Note [Two ways to end]: a rank whose peer is gone fails in its next collective, by itself on gloo.
Then the exception goes its way through Lightning and gets a note about the culprit. Where a
collective waits on (NCCL, or a rank that only computes), a thread ends the process after a grace.

Note [One traceback]: where a rank raised, the others fail because it is gone, and their tracebacks,
printed after its own, would be read first. One line of one rank of the node stands for them.

Note [A busy machine]: graces are counted in looks at the other ranks, a fixed time apart. Where the
machine is so busy that looks come late, the others are as late, and have more time to end.
"""

import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from lightning_par.engine.activity import Activity
from lightning_par.errors import LightningParError, PipelineError
from lightning_par.profiling.post_mortem import PostMortem
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.host_status import (
    ask_hosts,
    Causes,
    HostStatusServer,
    OtherHost,
)
from lightning_par.strategies.processes.rank_status import RankState, RankStatus, RankStatusFile
from lightning_par.strategies.processes.waiting_place import hook_of, RanksApart, WaitingPlace

__all__ = ["RankWatch", "is_communication_error", "open_status_file"]

_PERIOD = 0.2
"""Seconds between two looks."""
_LOADER = "torch.utils.data.dataloader"
_LOST_WORKER = (
    "a worker process of the data loader was killed, perhaps because the machine was out of memory"
)
_SETTLE = 1.5
"""Seconds in which a failure of communication looks for its cause."""
_GRACE = 2.0
"""Seconds in which a rank may end by itself once another one failed."""
_KILL = 3.0
"""Seconds after which ranks that do not end are killed."""
_WRITE = 1.0
"""Seconds in which the reason may be written to the folder of the run."""
_LEAVE = 30.0
"""Seconds, at least, in which a rank that handles an exception may save and clean up; the timeout
of collectives where that is longer.
"""
_APART = 20
"""Looks at the other ranks, of which one also sees where this rank waits."""
_NAMED = 3
_COMMUNICATION = re.compile(r"gloo/|NCCL|ProcessGroup")
_logger = logging.getLogger(__name__)


def open_status_file(
    rank: int,
    local_rank: int,
    activity: Activity,
    sizes: ParallelSizes,
    server: HostStatusServer | None,
) -> tuple[RankStatusFile | None, list[OtherHost]]:
    """Open the status file of this node, and find those who know about other nodes.

    Every rank has to call this.

    Args:
        rank: Global rank of this process.
        local_rank: Its rank on this node.
        activity: What this process is doing.
        sizes: Sizes of the mesh.
        server: Where others ask about this node; None if they ask another rank, or nobody.

    Returns:
        None if the ranks of this node share no folder for temporary files; the other hosts.

    **Communicates**: a few names, between all ranks.
    """
    name = socket.gethostname()
    path = None
    if local_rank == 0:
        # The node's size is not known yet: room for every rank costs 700 bytes each.
        # In the folder for temporary files, which ranks of a node share, containers perhaps not.
        path = str(RankStatusFile.create(dist.get_world_size()))
    asked = None if server is None else (server.address, server.port)
    offers: list[Any] = [None] * dist.get_world_size()
    # Name and first rank: containers may have the same host name.
    dist.all_gather_object(offers, ((name, rank - local_rank), path, asked))
    nodes: dict[tuple[str, int], list[int]] = {}
    for other, (node, _, _) in enumerate(offers):
        nodes.setdefault(node, []).append(other)
    ranks = nodes.pop((name, rank - local_rank))
    file = None
    # Another mount of /tmp: these ranks then go unwatched, and the run works.
    with suppress(OSError):
        file = RankStatusFile(Path(offers[ranks[0]][1] or ""), ranks, rank, activity)
    # Every rank has opened it, or has failed to.
    dist.barrier()
    if path is not None:
        Path(path).unlink()  # whoever has opened it keeps it; nothing is left behind
    others = []
    for (host, _), members in nodes.items():
        if offers[members[0]][2] is not None:
            address, port = offers[members[0]][2]
            described = [sizes.describe(r) for r in members]
            others.append(OtherHost(name=host, ranks=described, address=address, port=port))
    return file, others


class RankWatch:
    """Watches the ranks of this node; see Note [Two ways to end].

    Args:
        file: Status file of this node.
        sizes: Sizes of the mesh, which tell the place of a rank.
        timeout: Timeout of the process groups.
        others: The other hosts of the run, which are asked if no rank here is the cause.
        server: Answers them; closed with this.
        speaks: Whether this process says what all ranks of this node find alike.
        leave: Keeps what is known of the end of this rank.

    Attributes:
        sizes: As given.
    """

    def __init__(
        self,
        file: RankStatusFile,
        sizes: ParallelSizes,
        timeout: timedelta | None,
        others: Sequence[OtherHost] = (),
        server: HostStatusServer | None = None,
        *,
        speaks: bool = True,
        leave: Callable[[PostMortem], object] = bool,
    ) -> None:
        self._leave_behind = leave
        self._file, self.sizes, self._others_hosts, self._server = file, sizes, others, server
        self._speaks = speaks
        self._host = f" on host {socket.gethostname()}" if others else ""
        if server is not None:
            # Set here, as it needs the file; until then it tells nothing.
            server.tell = lambda: self._causes(self._file.look())
        self._timeout = timedelta(minutes=30) if timeout is None else timeout
        self._stopping, self._speaking = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join()
        if self._server is not None:
            self._server.close()
        self._file.close()

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks of an exception of this one, which takes no time.

        From then on neither they nor the thread of this rank end it, whatever it explains.
        """
        fault = _fault_of(error)
        said = f"{type(fault).__name__}: {fault}".partition("\n")[0]
        if _has_lost_worker(fault):
            said = f"{said}: {_LOST_WORKER}"
        status = RankStatus.CUT_OFF if is_communication_error(error) else RankStatus.FAILED
        # The thread says where this rank waits, and must not overwrite its failure.
        with self._speaking:
            self._file.say(status, said)

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks of an exception of this one, and the user of its cause.

        If this rank failed in communication and no rank of the node died or raised, it waits up to
        3 s for the others; those that neither failed nor ended by then are killed. It
        waits as long for the end of one that raised; see Note [One traceback].
        """
        self.tell(error)
        if _has_lost_worker(_fault_of(error)):
            error.add_note(_LOST_WORKER)
        # This rank is itself the cause: the others are told, and it ends at once.
        if not is_communication_error(error):
            if not isinstance(error, LightningParError) and self.sizes.world_size > 1:
                error.add_note(f"on {self._name(self._mine())}, in {self._mine().activity}")
            return
        # A connection may break before the lock of the dead process is free.
        _look_for(_SETTLE, self._is_settled)
        causes = self._find_causes(self._file.look())
        said, hook = self._describe(causes), hook_of(error)
        self._keep(said)
        if causes.dead and hook:
            said += (
                f" Another possible cause: in {hook} the two ranks called different collectives, "
                f"which can end a process that uses gloo. In {hook}, move calls that communicate "
                "out of `if trainer.is_global_zero`, so that every rank makes them."
            )
        error.add_note(said)
        if causes.failed and not causes.dead:
            _print_instead_of_traceback(said, said if self._speaks else "")
            _look_for(_KILL, lambda: not self._raised())
        _look_for(_KILL - _SETTLE, lambda: self._is_settled() or not self._unresponsive())
        # Nobody died or raised: some wait for ever, and are not to stay as orphans.
        if not self._is_settled():
            self._kill_unresponsive()

    def _is_settled(self) -> bool:
        """Whether the cause is a rank that ends by itself; then the connections to it break."""
        return any(s.is_dead or s.status is RankStatus.FAILED for s in self._others())

    def _mine(self) -> RankState:
        return next(s for s in self._file.look() if s.rank == self._file.rank)

    def _others(self) -> list[RankState]:
        return [s for s in self._file.look() if s.rank != self._file.rank]

    def _raised(self) -> list[RankState]:
        """Return the ranks that have not yet ended after an exception of their own."""
        return [s for s in self._others() if s.status is RankStatus.FAILED and s.is_alive]

    def _unresponsive(self) -> list[RankState]:
        return [s for s in self._others() if s.status is RankStatus.RUNNING and s.is_alive]

    def _kill_unresponsive(self) -> None:
        for state in self._unresponsive():
            # Before the rank, whose children the system hands to another process.
            workers = _workers_of(state.pid)
            for pid in (state.pid, *workers):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _watch(self) -> None:
        looks, count, place = 0, 0, WaitingPlace()  # looks since the first failure was seen
        apart = RanksApart()
        while not self._stopping.wait(_PERIOD):
            states, now = self._file.look(), time.monotonic()
            mine = next(s for s in states if s.rank == self._file.rank)
            count += 1
            # Rarely: it reads all frames, and two looks have to be some seconds apart.
            if count % _APART == 0 and mine.status is RankStatus.RUNNING:
                self._say_place(place.look())
                # Only if all ranks of the run are on this node: places of others are not known.
                if not self._others_hosts and (places := apart.look(states)):
                    self._end_apart(places)
            if mine.status is not RankStatus.RUNNING:
                # It is on its way; what Lightning and callbacks do there may take a while.
                if now - mine.when > max(_LEAVE, self._timeout.total_seconds()):
                    text = "%s raised %s, but its process has not ended since. It waits here:"
                    _logger.critical(text, self._name(mine), mine.fault)
                    faulthandler.dump_traceback(all_threads=True)
                    _leave()
                continue
            failed = (RankStatus.FAILED, RankStatus.CUT_OFF)
            if not any(s.is_dead or s.status in failed for s in states):
                looks = 0
                continue
            # See Note [A busy machine]: not by the clock.
            looks += 1
            if looks * _PERIOD > _GRACE:
                self._end(states)

    def _say_place(self, place: str) -> None:
        with self._speaking:
            if self._mine().status is RankStatus.RUNNING:
                self._file.say(RankStatus.RUNNING, place)

    def _end_apart(self, places: Mapping[int, str]) -> None:
        """End this process; see Note [Ranks apart] in `waiting_place.py`."""
        waits = [f"{self.sizes.describe(rank)} in {place}" for rank, place in places.items()]
        if self._speaks:
            told = PipelineError(
                "LP713",
                "the ranks wait for each other in different places, so none can continue: "
                f"{_few(waits)}. Every rank has to make each call that communicates: a forward of "
                "the model, save_checkpoint, all_gather, log(..., sync_dist=True). Move such calls "
                "out of `if trainer.is_global_zero`; print or write files there only. Let all "
                "ranks make the same decision, such as should_stop, by "
                "trainer.strategy.broadcast(value) or "
                "trainer.strategy.reduce_boolean_decision(value, all=False).",
            )
            _logger.critical("%s", told)
            self._keep(told.message)
        # Their looks come at other times; a rank that vanished at once would be the cause they
        # name.
        for _ in range(3):  # in which the others see the same
            self._say_place(places[self._file.rank])
            time.sleep(_APART * _PERIOD)
        _leave()

    def _end(self, states: Sequence[RankState]) -> None:
        """End this process, whose main thread waits for ranks that are gone."""
        said = self._describe(self._find_causes(states))
        if not any(state.status is RankStatus.FAILED for state in states):
            _logger.critical("%s\nThis rank waited here:", said)
            faulthandler.dump_traceback(all_threads=True)
        elif self._speaks:  # see Note [One traceback]
            _logger.critical("%s", said)
        self._keep(said)
        # Others of this node end in the same way, each with its own words.
        time.sleep(_KILL - _GRACE)
        self._kill_unresponsive()
        _leave()

    def _keep(self, said: str) -> None:
        rank, when = self._file.rank, time.strftime("%Y-%m-%d %H:%M:%S")
        name = self.sizes.describe(rank)
        found = PostMortem(rank=rank, name=name, when=when, summary=said)
        # Whoever must end this process does not wait for a file system that hangs.
        writer = threading.Thread(target=self._leave_behind, args=(found,), daemon=True)
        writer.start()
        writer.join(_WRITE)

    def _name(self, state: RankState) -> str:
        return f"{self.sizes.describe(state.rank)}{self._host}"

    def _causes(self, states: Sequence[RankState]) -> Causes:
        """Return what the ranks of this node say."""
        failed = [s for s in states if s.status is RankStatus.FAILED]
        # The first one to raise: those after it mostly follow from it.
        failed.sort(key=lambda s: s.when)
        running = [s for s in states if s.status is RankStatus.RUNNING and not s.is_dead]
        now = time.monotonic()
        waiting = [(now - s.activity.since, s) for s in running]
        ended = [s for s in states if s.status is RankStatus.ENDED]
        return Causes(
            dead=[f"{self._name(s)} has died, in {s.activity}" for s in states if s.is_dead],
            failed=[f"{self._name(s)} raised {s.fault} in {s.activity}" for s in failed],
            stopped=[self._say_unresponsive(s, t) for t, s in waiting if s.is_stopped],
            waiting=[(t, self._say_unresponsive(s, t)) for t, s in waiting if not s.is_stopped],
            ended=[f"{self._name(s)} has ended" for s in ended],
        )

    def _find_causes(self, states: Sequence[RankState]) -> Causes:
        """Return what the ranks of this node say or, if none of them is the cause, all others."""
        causes = self._causes(states)
        # Only then over the network: an answer may take two seconds.
        if not causes.dead and not causes.failed:
            causes.add(ask_hosts(self._others_hosts))
        return causes

    def _describe(self, causes: Causes) -> str:
        """Say which rank or host is the cause, what it was doing, and what to do."""
        own = self._mine()
        return f"{self._name(own)}, in {own.activity}, cannot continue: {self._say(causes)}"

    def _say(self, causes: Causes) -> str:
        if causes.dead:
            return (
                f"{_few(causes.dead)}. Its process was killed or crashed without an error "
                "message. If the machine was out of memory, `dmesg` says so. Restart from the "
                "last checkpoint (ckpt_path='last')."
            )
        if causes.failed:
            return (
                f"{_few(causes.failed)}. The traceback of that rank shows the cause: correct that "
                "error."
            )
        if causes.silent:
            return f"{_few(causes.silent)}. Restart from the last checkpoint (ckpt_path='last')."
        unresponsive = causes.stopped or [text for _, text in sorted(causes.waiting, reverse=True)]
        if unresponsive:
            return (
                f"{_few(unresponsive)}. Look at what the rank does there. If it is only slow, "
                f"pass the strategy a larger timeout= than {self._timeout}."
            )
        if causes.ended:
            return (
                f"{_few(causes.ended)} its run already, while other ranks still train. Give every "
                "replica the same number of batches."
            )
        return (
            "every rank has lost its connection to other ranks, so the cause is the network "
            "between them."
        )

    def _say_unresponsive(self, state: RankState, seconds: float) -> str:
        why = f", and its process {state.pid} is stopped by a signal" if state.is_stopped else ""
        return f"{self._name(state)} has been in {state.activity} for {seconds:.0f} s{why}"


def _leave() -> NoReturn:
    """End this process at once, and the workers of its data loaders with it.

    Python ends them at its own exit only, and one that hangs in the user's code never looks whether
    its rank is there.
    """
    for worker in multiprocessing.active_children():
        worker.kill()
    os._exit(1)


def _workers_of(pid: int) -> list[int]:
    """Return the processes that multiprocessing started for a rank; none where nothing tells."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            # Behind the name, which may hold anything: the state, and the parent.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            # A loader forks a rank, whose command it keeps; other commands are the user's.
            command = (folder / "cmdline").read_bytes() if parent == pid else b""
            if command and command == Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def _print_instead_of_traceback(note: str, text: str) -> None:
    """Let Python log `text`, or nothing, for an error with this note that nobody has caught."""
    print_traceback = sys.excepthook

    def log_text(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        # Another error, raised after it, has its traceback.
        if note not in getattr(error, "__notes__", ()):
            print_traceback(kind, error, traceback)
        elif text:
            _logger.critical("%s", text)

    sys.excepthook = log_text


def _look_for(seconds: float, is_over: Callable[[], bool]) -> None:
    """Look until something is so, for some seconds; see Note [A busy machine]."""
    period = _PERIOD / 4
    for _ in range(round(seconds / period)):
        if is_over():
            return
        time.sleep(period)


def _few(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _NAMED} more"] if len(texts) > _NAMED else []
    return "; ".join([*texts[:_NAMED], *more])


def _fault_of(error: BaseException) -> BaseException:
    """Return what an exception is about: what ends a process without a word may have a cause."""
    return error.__cause__ if isinstance(error, SystemExit) and error.__cause__ else error


def _has_lost_worker(error: BaseException) -> bool:
    """Whether a loader's worker ended while it sent a batch, of which torch tells no more."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = {frame.f_globals.get("__name__") for frame, _ in frames}
    # Both kinds are also raised elsewhere, hence the frames.
    return isinstance(error, ConnectionError | EOFError) and _LOADER in modules


def is_communication_error(error: BaseException) -> bool:
    """Whether a rank failed only because it could not reach another one."""
    if isinstance(error, dist.DistError):
        return True
    # gloo and NCCL raise plain RuntimeErrors in places; their texts name them.
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None
