"""Runs a function in a fork of this process, which leaves nothing behind.

The first samples of a run and the trace of its step are code of the user: it counts, collects,
writes, and takes the next file. A copy of the module alone would not keep that apart from the run;
a fork has copies of everything.
"""

import builtins
import fcntl
import io
import logging
import multiprocessing
import os
import pickle
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

__all__ = ["ForkError", "run_forked"]

_T = TypeVar("_T")
_LIMIT = 900.0  # seconds
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForkError(RuntimeError):
    """A fork of this process cannot do the work."""


def run_forked(function: Callable[[], _T]) -> _T:
    """Return what a function returns in a fork of this process.

    There, nothing is printed, logged or written to a file, and no process group is left, whose
    threads a fork does not have. It computes on the CPU, in one thread.

    Args:
        function: Its result is pickled.

    Raises:
        ForkError: The fork ended, took too long, or cannot compute gradients.
        Exception: Whatever the function raises; a RuntimeError with its text if that cannot be
            pickled.
    """
    # One way: the fork has nothing to ask.
    receiver, sender = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        # Of Python, in a process with threads. Data loaders fork such processes, too.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            _work(function, sender)
        finally:
            # Without cleanup: `atexit` and finalizers belong to the process that was forked.
            os._exit(0)
    sender.close()
    try:
        # A deadlock of the user's code in the fork must not stop the run.
        if not receiver.poll(_LIMIT):
            raise ForkError(f"this took more than {_LIMIT:.0f} s")
        succeeded, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        raise ForkError("the forked process ended without a result") from None
    finally:
        receiver.close()
        # Also if it has answered: threads of the user's may go on in it.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if succeeded:
        result: _T = value
        return result
    raise value


def _work(function: Callable[[], Any], sender: Connection) -> None:
    try:
        _detach(sender.fileno())
        message = pickle.dumps((True, function()))
    # Also SystemExit and KeyboardInterrupt, which would end the fork without an answer.
    except BaseException as error:
        message = _pickled(error)
    sender.send_bytes(message)


def _pickled(error: BaseException) -> bytes:
    try:
        message = pickle.dumps((False, error))
        # An exception may be pickled and yet not be made again, as with a constructor of its own.
        pickle.loads(message)
    except Exception:
        return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
    return message


def _detach(kept: int) -> None:
    """Cut this process off from all that it shares with the one that it is a fork of.

    Args:
        kept: The file descriptor that stays.
    """
    # Handlers of Lightning and of the launcher would act for the whole run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):  # noqa: PTH208 (names are numbers)
        number = int(name)
        # Sockets, pipes and files open for writing: what is written there is seen by others.
        if number not in (kept, null) and _is_shared(number):
            os.dup2(null, number)
    sys.stdout = sys.stderr = open(null, "w", closefd=False)  # noqa: SIM115
    _discard_writes()
    # Code that asks finds no process group: its threads were not forked.
    dist.group.WORLD = None
    # The threads that OpenMP and autograd had are gone.
    torch.set_num_threads(1)
    try:
        # CUDA in a fork fails at the first use of autograd's device threads: better to know now.
        torch.ones((), requires_grad=True).mul(1).backward()
    except RuntimeError:
        raise ForkError("after a backward on a GPU, a fork cannot compute gradients") from None


def _is_shared(number: int) -> bool:
    """Whether what is written to a file descriptor is seen outside of this process."""
    try:
        mode = os.fstat(number).st_mode
    except OSError:  # the folder itself was listed
        return False
    if stat.S_ISREG(mode):
        return bool(fcntl.fcntl(number, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR))
    return number in (1, 2) or stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def _discard_writes() -> None:
    """Let files that are opened by name, to be written, be the null device, and others stay."""
    opened, opened_by_descriptor, removed, saved = io.open, os.open, os.remove, torch.save
    own = set[Path]()  # temporary files, which are new and have names of their own

    def unwritten(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        writes = not isinstance(file, int) and {*"wax+"} & {*mode}
        mode = mode.replace("x", "w") if writes else mode
        return opened(os.devnull if writes else file, mode, *args, **kwargs)

    def unwritten_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_EXCL:
            own.add(Path(os.fsdecode(path)).absolute())
        elif flags & _WRITES:
            path, flags = os.devnull, flags & ~(os.O_CREAT | os.O_TRUNC)
        return opened_by_descriptor(path, flags, *args, **kwargs)

    def unremoved(path: Any, *_: Any, **options: Any) -> None:
        # With `dir_fd` it is a folder that is removed file by file, such as a temporary one.
        if options.get("dir_fd") is not None or Path(os.fsdecode(path)).absolute() in own:
            removed(path, **options)

    def unsaved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        # Torch opens a file by itself that it is given by name.
        saved(obj, io.BytesIO() if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

    replaced: list[tuple[Any, Any, tuple[str, ...]]] = [
        (builtins, unwritten, ("open",)),
        (io, unwritten, ("open",)),
        (os, unwritten_descriptor, ("open",)),
        # A file that is renamed goes: the target stays what it is.
        (os, unremoved, ("remove", "unlink", "rename", "replace")),
        (torch, unsaved, ("save",)),
        (torch.serialization, unsaved, ("save",)),
    ]
    for owner, function, names in replaced:
        for name in names:
            setattr(owner, name, function)
