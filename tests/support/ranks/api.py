"""Runs a test on several gloo ranks of this machine, in tenths of a second.

    @ranks(4)
    @pytest.mark.parametrize("size", [3, 5])
    def test_sum(rank, world, size): ...

The body runs on every rank with the default process group made; it must be at module level and its
parameters picklable. Ranks are kept between tests, one set per world size, because DTensor's first
use takes a process seconds. A set in which a rank fails, hangs or dies is killed, and the next test
gets a new one. Use ``fresh=True`` for a test that leaves something behind.

A rank looks as if torchrun had started it, hence a `Trainer` neither launches processes nor makes
another process group. Do not destroy the default group: DTensor caches the names of groups.
"""

import atexit
import contextlib
import functools
import inspect
import itertools
import operator
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from pathlib import Path

import pytest

from tests.support.cuda_simulation import is_wanted
from tests.support.ranks.environment import fixed_environment, world_environment

__all__ = ["RankError", "close_ranks", "ranks", "run_ranks"]

_ROOT = Path(__file__).resolve().parents[3]
_GRACE = 2.0
"""Seconds that the other ranks get to report once one has failed."""
_STACK_TIME = 10.0
"""Seconds that silent ranks get to print where they are, on a busy machine."""
_LOG_TAIL = 4000
_CALLS = 24
"""Calls of a stack that are shown, from the last one on."""
_COLLATERAL = re.compile(
    r"connection (closed|reset)|broken pipe|socket closed|gloo/|timed? ?out", re.IGNORECASE
)
"""What a rank says when it failed only because another one did."""


class RankError(AssertionError):
    """A rank raised, died, or did not answer; the text holds its traceback and its log.

    Args:
        text: The whole report.
        rank: The rank that most likely is the cause.
        kind: "error", "died", "hang", or "unconnected" if no test had begun.
    """

    def __init__(self, text, rank, kind):
        super().__init__(text)
        self.rank = rank
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class _RankSet:
    """The live ranks of one world size."""

    pids: list[int]
    connections: list[Connection]
    logs: list[Path]
    store: Path


@dataclass(frozen=True, kw_only=True)
class _Reply:
    """What became of one rank: kind is "ok", "skip", "error", "died", "hang" or "unconnected"."""

    kind: str
    message: str = ""
    traceback: str = ""
    time: float = float("inf")
    value: bytes = b""
    reusable: bool = False
    requests: bytes = b""

    @property
    def blame(self):
        """Sorts the likely cause first: own errors, deaths, errors caused by others, hangs."""
        collateral = self.kind == "error" and _COLLATERAL.search(self.message) is not None
        kinds = ["unconnected", "error", "died", "collateral", "hang", "skip", "ok"]
        return kinds.index("collateral" if collateral else self.kind), self.time


class _Zygote:
    """The handle on the zygote process and on the rank sets that it has forked."""

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._numbers = itertools.count()
        self._sets = {}
        ours, theirs = socket.socketpair()
        path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
        with theirs, (self._folder / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ranks.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **fixed_environment(), "PYTHONPATH": path},
                cwd=_ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._control = Connection(ours.detach())

    def run(self, job, world, *, timeout, fresh):
        """Runs `job` on `world` ranks; gives a reply and a log per rank; keeps a sound set.

        Once in many thousand times gloo closes a connection while it makes the default group,
        before anything of a test has run; then new ranks are started, once.
        """
        replies, logs = self._run(job, world, timeout, fresh)
        if any(reply.kind == "unconnected" for reply in replies):
            told = next(reply.message for reply in replies if reply.kind == "unconnected")
            warnings.warn(
                f"{world} ranks did not connect, and are started again: {told}", stacklevel=1
            )
            replies, logs = self._run(job, world, timeout, fresh)
        return replies, logs

    def _run(self, job, world, timeout, fresh):
        if not fresh and world in self._sets:
            members = self._sets.pop(world)
            self._signal(members, signal.SIGCONT)
        else:
            members = self._fork(world)
        replies, reusable = [], False
        try:
            for connection in members.connections:
                with contextlib.suppress(OSError):
                    connection.send({**job, "store": str(members.store)})
            replies = _collect(members, timeout)
            reusable = all(reply.reusable for reply in replies)
        finally:
            if fresh or not reusable:
                statuses = self._reap(members, replies)
            else:
                self._signal(members, signal.SIGSTOP)
                self._sets[world] = members
        if reusable:
            return replies, members.logs
        return list(map(_explain, replies, statuses)), members.logs

    def close(self):
        """Ends every process; gives the pids that are still there, which should be none."""
        pids = [pid for members in self._sets.values() for pid in members.pids]
        with contextlib.suppress(RuntimeError):
            for members in self._sets.values():
                self._reap(members, [])
        self._sets.clear()
        self._control.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        # What ended with its parent is there for a moment, longer on a busy machine.
        deadline = time.monotonic() + 20
        while any(map(_exists, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [pid for pid in pids if _exists(pid)]

    def _fork(self, world):
        number = next(self._numbers)
        logs = [self._folder / f"set-{number}-rank-{rank}.log" for rank in range(world)]
        connections = []
        with self._alive():
            self._control.send(("fork", [str(log) for log in logs]))
            for _ in range(world):
                ours, theirs = socket.socketpair()
                with theirs:
                    send_handle(self._control, theirs.fileno(), self._process.pid)
                connections.append(Connection(ours.detach()))
            pids = self._control.recv()
        store = self._folder / f"set-{number}-store"
        return _RankSet(pids=pids, connections=connections, logs=logs, store=store)

    def _signal(self, members, number):
        """Lets a set go on, or rest, because its gloo threads would wake all the time."""
        self._ask("signal", members.pids, number)

    def _reap(self, members, replies):
        """Kills the set; gives how each rank ended. The store's file goes only after the ranks."""
        dying = [reply.kind == "died" for reply in replies] or [False] * len(members.pids)
        statuses = self._ask("reap", dict(zip(members.pids, dying, strict=True)))
        for connection in members.connections:
            connection.close()
        members.store.unlink(missing_ok=True)
        return statuses

    def _ask(self, *request):
        with self._alive():
            self._control.send(request)
            return self._control.recv()

    @contextlib.contextmanager
    def _alive(self):
        try:
            yield
        except (EOFError, OSError) as error:
            log = _tail(self._folder / "zygote.log")
            raise RuntimeError(f"The zygote process of the ranks is gone:\n{log}") from error


@functools.cache
def _zygote():
    zygote = _Zygote()
    atexit.register(close_ranks)
    return zygote


def close_ranks():
    """Ends every rank and the zygote; gives the pids that are still there, which should be none."""
    if _zygote.cache_info().currsize == 0:
        return []
    zygote = _zygote()
    _zygote.cache_clear()
    atexit.unregister(close_ranks)
    return zygote.close()


def ranks(world, *, timeout=60.0, fresh=False, env=None):
    """Makes a test run on `world` gloo ranks.

    Args:
        world: Number of ranks.
        timeout: Seconds until ranks that have not answered are killed and the test fails.
        fresh: Whether the test gets ranks of its own, which are killed afterwards.
        env: Environment variables of the ranks during this test.

    Returns:
        A decorator for `test(rank, world, **params)`; the test takes `params` from pytest.
    """

    def decorate(body):
        @functools.wraps(body)
        def test(**params):
            __tracebackhide__ = True
            _run(body, world, (), params, timeout=timeout, fresh=fresh, env=env)

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(
            parameters=list(signature.parameters.values())[2:], return_annotation=None
        )
        test.rank_body = body
        return pytest.mark.distributed(test)

    return decorate


def run_ranks(fn, world, *args, timeout=60.0, fresh=False, env=None, **kwargs):
    """Calls `fn(rank, world, *args, **kwargs)` on `world` gloo ranks.

    Args:
        fn: A function at module level.
        world: Number of ranks.
        args: Picklable.
        timeout: Seconds until ranks that have not answered are killed.
        fresh: Whether to use ranks of its own, which are killed afterwards.
        env: Environment variables of the ranks during the call.
        kwargs: Picklable.

    Returns:
        What each rank returned, which must be picklable.

    Raises:
        RankError: A rank raised, died or did not answer in time.
    """
    __tracebackhide__ = True
    return _run(fn, world, args, kwargs, timeout=timeout, fresh=fresh, env=env)


def _run(fn, world, args, kwargs, *, timeout, fresh, env):
    __tracebackhide__ = True
    if "<" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__} is not at module level, hence unknown to the ranks.")
    job = {
        "module": fn.__module__,
        "file": str(Path(inspect.getfile(fn)).resolve()),
        "qualname": fn.__qualname__,
        "arguments": pickle.dumps((args, kwargs)),
        "world": world,
        "cwd": str(Path.cwd()),
        "sys_path": [str(Path(entry).resolve()) for entry in sys.path],
        "env": {**os.environ, **fixed_environment(), **world_environment(world), **(env or {})},
    }
    try:
        replies, logs = _zygote().run(job, world, timeout=timeout, fresh=fresh)
    except RuntimeError:
        close_ranks()
        raise
    rank, cause = min(enumerate(replies), key=lambda pair: pair[1].blame)
    if cause.kind == "skip":
        pytest.skip(cause.message)
    if cause.kind != "ok":
        raise RankError(_report(fn, replies, logs, rank, timeout), rank, cause.kind)
    if is_wanted():
        _check_order([pickle.loads(reply.requests) for reply in replies])
    return [pickle.loads(reply.value) for reply in replies]


def _check_order(records):
    """Raises where what the ranks asked of NCCL would hang, whoever makes the communicators."""
    from tests.support.cuda_simulation.order import check_order

    for shared in (False, True):
        check_order(records, shared=shared)


def _collect(members, timeout):
    """Waits for every rank; a rank still silent at the end prints its stack to its log."""
    deadline = time.monotonic() + timeout
    replies = [_Reply(kind="hang") for _ in members.pids]
    pending = {connection: rank for rank, connection in enumerate(members.connections)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = pending.pop(connection)
            replies[rank] = _receive(connection)
            if replies[rank].kind != "ok":
                deadline = min(deadline, time.monotonic() + _GRACE)
    if pending:
        _show_stacks([(members.pids[rank], members.logs[rank]) for rank in pending.values()])
    return replies


def _show_stacks(silent):
    """Asks silent ranks to print their stacks; waits until each has, or is too stuck to do so."""
    before = lengths = [_size(log) for _, log in silent]
    deadline = time.monotonic() + _STACK_TIME
    while time.monotonic() < deadline:
        for (pid, _), length, old in zip(silent, lengths, before, strict=True):
            if length <= old:
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        last, lengths = lengths, [_size(log) for _, log in silent]
        # A rank may begin its job only now, which empties its log.
        before = [min(pair) for pair in zip(before, lengths, strict=True)]
        if lengths == last and all(map(operator.gt, lengths, before)):
            return


def _receive(connection):
    try:
        kind, *rest = connection.recv()
    except (EOFError, OSError):
        return _Reply(kind="died", time=time.monotonic())
    if kind == "ok":
        return _Reply(kind="ok", value=rest[0], reusable=rest[1], requests=rest[2])
    message, text, when = rest
    return _Reply(kind=kind, message=message, traceback=text, time=when, reusable=kind == "skip")


def _explain(reply, status):
    """Says of a dead rank how it died."""
    if reply.kind != "died":
        return reply
    return _Reply(kind="died", message=status, time=reply.time)


def _report(fn, replies, logs, rank, timeout):
    """The text of a failure: the cause with its traceback and log, then a line per other rank."""
    cause, world = replies[rank], len(replies)
    shown = [rank]
    if cause.kind == "hang":
        shown = [other for other, reply in enumerate(replies) if reply.kind == "hang"]
        named = ", ".join(map(str, shown))
        text = f"rank {named} of {world} did not answer within {timeout:g} s in {fn.__name__}\n"
    else:
        text = f"rank {rank} of {world} failed in {fn.__name__}: {_first_line(cause.message)}\n"
    text += cause.traceback
    for other in shown:
        if log := _tail(logs[other]):
            text += f"--- log of rank {other} ---\n{log.rstrip()}\n"
    others = [(other, reply) for other, reply in enumerate(replies) if other not in shown]
    lines = [f"rank {other}: {reply.kind} {_first_line(reply.message)}" for other, reply in others]
    return text + "\n".join(line.rstrip() for line in lines)


def _first_line(text):
    return text.partition("\n")[0]


def _tail(log):
    """The end of a log; of a crash where the rank was: the beginning of the thread that crashed."""
    text = log.read_text(errors="replace") if log.exists() else ""
    crash = text.rfind("Fatal Python error")
    if crash < 0:
        return _innermost(text)[-_LOG_TAIL:]
    before = text[max(0, crash - _LOG_TAIL // 4) : crash]  # what C++ said: "terminate called ..."
    said, others, crashed = text[crash:].partition("Current thread")
    return before + (f"{said.splitlines()[0]}\n" + others + crashed if others else said)[:_LOG_TAIL]


def _innermost(text):
    """A log with the last calls only of every stack that a silent rank has printed into it."""
    kept, deep = [], 0
    for line in text.splitlines(keepends=True):
        deep = deep + 1 if line.startswith('  File "') and " in " in line else 0
        if deep <= _CALLS:
            kept.append(line)
    return "".join(kept)


def _size(log):
    return log.stat().st_size if log.exists() else 0


def _exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
