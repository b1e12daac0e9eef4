"""Running the user's code without a word to the outside: loggers, the terminal, files, sockets."""

import functools
import io
import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, redirect_stderr, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import device_mesh

from lightning_par.engine.rng import fork_all_rng
from lightning_par.strategies.components.step_writes import logger_like, NO_RANK
from lightning_par.strategies.start.files_aside import files_aside
from lightning_par.upstream.functions import replaced

__all__ = ["silent", "single_process"]

_RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK")


@contextmanager
def silent(loggers: Sequence[Any]) -> Iterator[Callable[[], bool]]:
    """Inside, nothing that the user's code says or writes gets out.

    Loggers answer as on a rank that is not the first, what is printed or logged by `logging` is
    dropped, and files that are opened for writing are copies that go away. Gives what tells whether
    a logger was called, anything was printed, or a file written.

    Args:
        loggers: Those of the user's Trainer.
    """
    calls: list[str] = []
    with ExitStack() as stack:
        for logger in loggers:
            kind = type(logger)
            stack.callback(setattr, logger, "__class__", kind)
            logger.__class__ = _silent_class(kind, calls)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(max(logging.ERROR, logging.root.manager.disable))
        stack.enter_context(replaced(rank_zero_only, "rank", NO_RANK))
        said = stack.enter_context(redirect_stdout(io.StringIO()))
        files = stack.enter_context(files_aside())
        yield lambda: bool(calls or said.tell() or files)


def _silent_class(kind: type, calls: list[str]) -> type:
    """Return a class like that of a logger, which does nothing and notes what is called to log."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def noted(name: str) -> Callable[..., Any]:
        return lambda *_, **__: calls.append(name)

    def experiment(_: Any) -> Any:
        calls.append("experiment")
        return DummyLogger().experiment

    others = dict.fromkeys(("after_save_checkpoint", "finalize", "save"), nothing)
    return logger_like(kind, noted, **others, experiment=property(experiment))


@contextmanager
def single_process(
    device: torch.device, loggers: Sequence[Any] = (), world: dist.ProcessGroup | None = None
) -> Iterator[None]:
    """Inside, nothing says that this process is one of several, and nothing is told the user.

    Args:
        device: That of this rank.
        loggers: Those of the user's Trainer.
        world: A group of this rank alone, over which collectives go; None: torch.distributed is
            not initialized.
    """
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(fork_all_rng(device))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        stack.enter_context(silent(loggers))
        stack.enter_context(redirect_stderr(io.StringIO()))
        stack.enter_context(_without_sockets())
        hidden = {n: os.environ.pop(n) for n in _RANK_VARIABLES if n in os.environ}
        stack.callback(os.environ.update, hidden)
        stack.callback(setattr, dist.group, "WORLD", dist.group.WORLD)
        dist.group.WORLD = world
        if world is not None:
            for owner in (dist, device_mesh):
                made = replaced(owner, "new_group", _uncounted(owner.new_group))
                stack.enter_context(made)
        stack.enter_context(torch.enable_grad())
        yield


def _uncounted(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `new_group` whose groups have no number.

    torch names groups by a counter of each rank. One that this rank makes alone, as the Trainer
    does for a barrier, would give its later groups other names than those of the other ranks, and
    all of them would wait for each other.
    """

    @functools.wraps(plain)
    def new_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        options["use_local_synchronization"] = True
        return plain([0] if ranks is None else ranks, *args, **options)

    return new_group


@contextmanager
def _without_sockets() -> Iterator[None]:
    """Inside, what this thread sends through a socket is an error: it was sent on the mesh already.

    To drop it would leave a client waiting for an answer.
    """
    thread = threading.get_ident()

    def refusing(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def method(*args: Any) -> Any:
            if threading.get_ident() == thread:
                raise RuntimeError(f"it calls socket.{name}, which would send the same data twice")
            return plain(*args)

        return method

    with ExitStack() as stack:
        for name in ("connect", "send", "sendall", "sendto"):
            method = refusing(name, getattr(socket.socket, name))
            stack.enter_context(replaced(socket.socket, name, method))
        yield
