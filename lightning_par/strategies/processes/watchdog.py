"""Ranks that die, raise or stop: every process of the node ends, and says which rank and why.

Note [Two ways to end]: a rank whose peer is gone fails in its next collective, by itself on gloo.
Then the exception goes its way through Lightning and gets a note about the culprit. Where a
collective waits on (NCCL, or a rank that only computes), a thread ends the process after a grace.

Note [A busy machine]: graces are counted in looks at the other ranks, a fixed time apart. Where the
machine is so busy that looks come late, the others are as late, and have more time to end.
"""

import faulthandler
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from lightning_par.engine.activity import Activity
from lightning_par.errors import LightningParError
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.rank_status import RankState, RankStatus, RankStatusFile

__all__ = ["RankWatch", "is_communication_error", "open_status_file"]

_PERIOD = 0.2
"""Seconds between two looks."""
_SETTLE = 1.5
"""Seconds in which a failure of communication looks for its cause."""
_GRACE = 2.0
"""Seconds in which a rank may end by itself once another one failed."""
_KILL = 3.0
"""Seconds after which ranks that do not end are killed."""
_LEAVE = 30.0
"""Seconds, at least, in which a rank that handles an exception may save and clean up; the timeout
of collectives where that is longer.
"""
_NAMED = 3
_COMMUNICATION = re.compile(r"gloo/|NCCL|ProcessGroup")
_logger = logging.getLogger(__name__)


def open_status_file(rank: int, local_rank: int, activity: Activity) -> RankStatusFile | None:
    """Open the status file of this node; every rank has to call this.

    Args:
        rank: Global rank of this process.
        local_rank: Its rank on this node.
        activity: What this process is doing.

    Returns:
        None if the ranks of this node share no folder for temporary files.

    **Communicates**: a few names, between all ranks.
    """
    offers: list[tuple[str, int, str | None]] = [("", 0, None)] * dist.get_world_size()
    name = socket.gethostname()
    path = None
    if local_rank == 0:
        # The node's size is not known yet: room for every rank costs 330 bytes each.
        path = str(RankStatusFile.create(dist.get_world_size()))
    dist.all_gather_object(offers, (name, rank - local_rank, path))
    node = rank - local_rank
    ranks = [r for r, (host, first, _) in enumerate(offers) if (host, first) == (name, node)]
    file = None
    with suppress(OSError):
        file = RankStatusFile(Path(offers[ranks[0]][2] or ""), ranks, rank, activity)
    dist.barrier()
    if path is not None:
        Path(path).unlink()  # whoever has opened it keeps it; nothing is left behind
    return file


class RankWatch:
    """Watches the ranks of this node; see Note [Two ways to end].

    Args:
        file: Status file of this node.
        sizes: Sizes of the mesh, which tell the place of a rank.
        timeout: Timeout of the process groups.

    Attributes:
        sizes: As given.
    """

    def __init__(
        self, file: RankStatusFile, sizes: ParallelSizes, timeout: timedelta | None
    ) -> None:
        self._file, self.sizes = file, sizes
        self._timeout = timedelta(minutes=30) if timeout is None else timeout
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stopping.set()
        self._thread.join()
        self._file.close()

    def explain(self, error: BaseException) -> None:
        """Tell the other ranks of an exception of this one, and the user of its cause.

        If this rank failed in communication and no rank of the node died or raised, it waits up to
        3 s for the others; those that neither failed nor ended by then are killed.
        """
        cut_off = is_communication_error(error)
        status = RankStatus.CUT_OFF if cut_off else RankStatus.FAILED
        self._file.say(status, f"{type(error).__name__}: {error}".partition("\n")[0])
        if not cut_off:
            if not isinstance(error, LightningParError) and self.sizes.world_size > 1:
                error.add_note(f"on {self._name(self._mine())}, in {self._mine().activity}")
            return
        _look_for(_SETTLE, self._is_settled)
        error.add_note(self._describe(self._file.look()))
        _look_for(_KILL - _SETTLE, lambda: self._is_settled() or not self._unresponsive())
        if not self._is_settled():
            self._kill_unresponsive()

    def _is_settled(self) -> bool:
        """Whether the cause is a rank that ends by itself; then the connections to it break."""
        return any(s.is_dead or s.status is RankStatus.FAILED for s in self._others())

    def _mine(self) -> RankState:
        return next(s for s in self._file.look() if s.rank == self._file.rank)

    def _others(self) -> list[RankState]:
        return [s for s in self._file.look() if s.rank != self._file.rank]

    def _unresponsive(self) -> list[RankState]:
        return [s for s in self._others() if s.status is RankStatus.RUNNING and s.is_alive]

    def _kill_unresponsive(self) -> None:
        for state in self._unresponsive():
            with suppress(ProcessLookupError):
                os.kill(state.pid, signal.SIGKILL)

    def _watch(self) -> None:
        looks = 0  # since the first failure was seen
        while not self._stopping.wait(_PERIOD):
            states, now = self._file.look(), time.monotonic()
            mine = next(s for s in states if s.rank == self._file.rank)
            if mine.status is not RankStatus.RUNNING:
                # It is on its way; what Lightning and callbacks do there may take a while.
                if now - mine.when > max(_LEAVE, self._timeout.total_seconds()):
                    os._exit(1)
                continue
            failed = (RankStatus.FAILED, RankStatus.CUT_OFF)
            if not any(s.is_dead or s.status in failed for s in states):
                looks = 0
                continue
            looks += 1
            if looks * _PERIOD > _GRACE:
                self._end(states)

    def _end(self, states: Sequence[RankState]) -> None:
        """End this process, whose main thread waits for ranks that are gone."""
        _logger.critical("%s\nThis rank waited here:", self._describe(states))
        faulthandler.dump_traceback(all_threads=True)
        time.sleep(_KILL - _GRACE)
        self._kill_unresponsive()
        os._exit(1)

    def _name(self, state: RankState) -> str:
        return self.sizes.describe(state.rank)

    def _describe(self, states: Sequence[RankState]) -> str:
        """Say which rank is the cause, what it was doing, and what to do."""
        own = next(s for s in states if s.rank == self._file.rank)
        text = f"{self._name(own)}, in {own.activity}, could not go on: "
        dead = [f"{self._name(s)} is gone, in {s.activity}" for s in states if s.is_dead]
        if dead:
            return text + (
                f"{_few(dead)}. Its process was killed or crashed without a word; if it was short "
                "of memory, `dmesg` says so. Restart from the last checkpoint (ckpt_path='last')."
            )
        failed = [s for s in states if s.status is RankStatus.FAILED]
        if failed:
            failed.sort(key=lambda s: s.when)
            said = [f"{self._name(s)} raised {s.fault} in {s.activity}" for s in failed]
            return text + f"{_few(said)}. The traceback of that rank says where; mend that one."
        unresponsive = [s for s in states if s.status is RankStatus.RUNNING]
        if unresponsive:
            unresponsive = [s for s in unresponsive if s.is_stopped] or unresponsive
            unresponsive.sort(key=lambda s: s.activity.since)
            waiting = _few([self._say_unresponsive(s) for s in unresponsive])
            return text + (
                f"{waiting}. Look at what it does there; if it "
                f"is only slow, give the strategy more than timeout={self._timeout}."
            )
        ended = [f"{self._name(s)} has ended" for s in states if s.status is RankStatus.ENDED]
        if ended:
            return text + (
                f"{_few(ended)} its run already. Give every replica as many batches as the others."
            )
        return text + (
            "every rank of this node was cut off, hence the cause is the network or a rank of "
            "another node; see its log."
        )

    def _say_unresponsive(self, state: RankState) -> str:
        seconds = time.monotonic() - state.activity.since
        why = f", and its process {state.pid} is stopped by a signal" if state.is_stopped else ""
        return f"{self._name(state)} has been in {state.activity} for {seconds:.0f} s{why}"


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


def is_communication_error(error: BaseException) -> bool:
    """Whether a rank failed only because it could not reach another one."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None
