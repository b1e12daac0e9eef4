"""Files that the user's code writes while it runs without a trace."""

import builtins
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from pathlib import Path
from typing import Any

import torch

from lightning_par.upstream.functions import replaced

__all__ = ["files_aside"]

_COMPILERS = ("filelock", "huggingface_hub", "triton")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@contextmanager
def files_aside() -> Iterator[dict[Path, Path]]:
    """Let this thread write to copies of files inside, and remove the copies at the end.

    A file that `open`, `os.open` or `torch.save` opens for writing is copied into a folder of its
    own. A copy that is renamed becomes that of the new name: savers of checkpoints write a
    temporary file first. A file that the thread removes stays. Other threads, as those that save a
    checkpoint in the background, write to the files themselves. Gives file -> copy.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        aside = _Aside(Path(folder))
        # Savers write by many ways: safetensors by os.open, torch.save by name (which opens the
        # file in C++), Hugging Face and Lightning write a temporary file and rename it.
        for owner, name, stands_in in (
            (builtins, "open", aside.open),
            (io, "open", aside.open),
            (os, "open", aside.open_descriptor),
            (os, "rename", aside.rename),
            (os, "replace", aside.rename),
            (os, "remove", aside.remove),
            (os, "unlink", aside.remove),
            (os, "chmod", aside.chmod),
            (os, "symlink", aside.link),
            (os, "link", aside.link),
            (torch, "save", aside.save),
            (torch.serialization, "save", aside.save),
        ):
            stack.enter_context(
                replaced(owner, name, aside.around(getattr(owner, name), stands_in))
            )
        yield aside.copies


class _Aside:
    """Stands for the functions that write, rename and remove files.

    Args:
        folder: For the copies.

    Attributes:
        copies: File -> copy.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._thread, self._count = folder, threading.get_ident(), 0
        self.copies: dict[Path, Path] = {}

    def around(self, plain: Callable[..., Any], stands_in: Callable[..., Any]) -> Any:
        """Return a function that calls the one or the other."""

        def call(*args: Any, **kwargs: Any) -> Any:
            # Threads of the process group, of loaders and of loggers write their own files.
            if threading.get_ident() != self._thread or not _is_of_the_step():
                return plain(*args, **kwargs)
            return stands_in(plain, *args, **kwargs)

        return call

    def _copy_of(self, path: Path) -> Path:
        """Return the copy of a file, which is made of what is there."""
        if path not in self.copies:
            self._count += 1
            copy = self._folder / str(self._count) / path.name
            copy.parent.mkdir()
            # A file that is opened to append, or in "r+", has what is there already.
            if path.is_file():
                shutil.copyfile(path, copy)
            self.copies[path] = copy
        return self.copies[path]

    def _is_copied(self, path: Path) -> bool:
        """Whether a path is one that may be written aside: a file, or nothing yet."""
        is_ours = self._folder in path.parents
        return not is_ours and (path in self.copies or path.is_file() or not path.exists())

    def open(self, plain: Any, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file, or the copy."""
        # A descriptor, as from os.open, which has been redirected before.
        if isinstance(file, int):
            return plain(file, mode, *args, **kwargs)
        path = _absolute(file)
        if {*"wax+"}.intersection(mode) and self._is_copied(path):
            self._copy_of(path)
        # Also to read, so that the step finds what it has written.
        return plain(self.copies.get(path, file), mode, *args, **kwargs)

    def open_descriptor(self, plain: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """Open a file, or the copy, as `os.open` does."""
        if kwargs.get("dir_fd") is None:
            place = _absolute(path)
            if flags & _WRITES and self._is_copied(place):
                self._copy_of(place)
            # Also to read, as by `open`.
            path = self.copies.get(place, path)
        return int(plain(path, flags, *args, **kwargs))

    def rename(self, plain: Any, source: Any, target: Any, **kwargs: Any) -> None:
        """Let the copy of a file be that of another one."""
        one, other = _absolute(source), _absolute(target)
        if not self._is_copied(one) or kwargs:
            plain(source, target, **kwargs)
        elif one in self.copies or one.is_file():
            # The target's own content is not needed: a rename replaces it.
            self._copy_of(one)
            self.copies[other] = self.copies.pop(one)
        else:
            plain(source, target)  # raises that there is none

    def remove(self, plain: Any, path: Any, **kwargs: Any) -> None:
        """Forget a copy; what was there before stays."""
        place = _absolute(path)
        if not self._is_copied(place) or kwargs.get("dir_fd") is not None:
            plain(path, **kwargs)
        elif self.copies.pop(place, None) is None and not place.is_file():
            plain(path)  # raises that there is none

    def chmod(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        """Change the rights of a copy."""
        if isinstance(path, int) or _absolute(path) not in self.copies:
            plain(path, *args, **kwargs)
        else:
            plain(self.copies[_absolute(path)], *args, **kwargs)

    def link(self, plain: Any, *_: Any, **__: Any) -> None:
        """Make no link."""

    def save(self, plain: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Save to a copy: torch opens a file by itself that it is given by name."""
        if isinstance(f, str | os.PathLike):
            f = self._copy_of(_absolute(f)) if self._is_copied(_absolute(f)) else f
        plain(obj, f, *args, **kwargs)


def _absolute(path: Any) -> Path:
    return Path(os.fsdecode(path)).absolute()


def _is_of_the_step() -> bool:
    """Whether no compiler, whose files stay, opens a file."""
    # Frame 2 is the caller of the function that was replaced: 0 is this one, 1 is `call`.
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        package = name.partition(".")[0]
        if package in _COMPILERS or name.startswith(("torch._", "torch.utils.cpp")):
            return False
        # Frames of ours are reached only after those of the step have passed.
        if package == "lightning_par":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return True
