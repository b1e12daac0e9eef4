"""Running the user's code without a word to the outside: loggers, the terminal, files."""

import builtins
import io
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_par.strategies.components.step_writes import logger_like, NO_RANK
from lightning_par.upstream.functions import replaced

__all__ = ["silent"]

_COMPILERS = ("filelock", "huggingface_hub", "triton")


@contextmanager
def silent(loggers: Sequence[Any]) -> Iterator[Callable[[], bool]]:
    """Inside, nothing that the user's code says or writes gets out.

    Loggers answer as on a rank that is not the first, what is printed or logged by `logging` is
    dropped, and files that are opened for writing are copies that go away. Gives what tells whether
    anything was printed, or a file written.

    Args:
        loggers: Those of the user's Trainer.
    """
    with ExitStack() as stack:
        for logger in loggers:
            kind = type(logger)
            stack.callback(setattr, logger, "__class__", kind)
            logger.__class__ = _silent_class(kind)
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(max(logging.ERROR, logging.root.manager.disable))
        stack.enter_context(replaced(rank_zero_only, "rank", NO_RANK))
        said = stack.enter_context(redirect_stdout(io.StringIO()))
        files = stack.enter_context(_files_aside())
        yield lambda: bool(said.tell() or files)


def _silent_class(kind: type) -> type:
    """Return a class like that of a logger, whose experiment and methods that log do nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        pass

    others = dict.fromkeys(("after_save_checkpoint", "finalize", "save"), nothing)
    return logger_like(kind, lambda _: nothing, **others, experiment=DummyLogger().experiment)


@contextmanager
def _files_aside() -> Iterator[dict[Path, Path]]:
    """Inside, what Python code opens for writing is a copy in a folder that is removed; gives the
    copies.
    """
    plain, aside = builtins.open, dict[Path, Path]()
    with ExitStack() as stack:

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if isinstance(file, int):
                return plain(file, mode, *args, **kwargs)
            path = Path(os.fsdecode(file)).absolute()
            is_written = bool({*"wax+"}.intersection(mode)) and _is_of_the_step()
            if is_written and path not in aside and (path.is_file() or not path.exists()):
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                copy = Path(folder, path.name)
                if path.is_file():
                    with plain(path, "rb") as source, plain(copy, "wb") as target:
                        shutil.copyfileobj(source, target)
                aside[path] = copy
            return plain(aside.get(path, file), mode, *args, **kwargs)

        stack.enter_context(replaced(builtins, "open", opened))
        stack.enter_context(replaced(io, "open", opened))
        yield aside


def _is_of_the_step() -> bool:
    """Whether no compiler, whose files stay, opens a file."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if package in _COMPILERS or name.startswith(("torch._", "torch.utils.cpp")):
            return False
        if package == "lightning_par":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return True
