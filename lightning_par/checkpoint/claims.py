"""Claims of folders, so that two runs that save into one are told so.

A claim is an advisory lock (`flock`) on the folder itself: nothing is left in it, and the system
drops the lock with the process, however that ends. Where folders cannot be locked, as on some
network file systems, nobody is told.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from lightning_par.checkpoint.storage import partials_of

__all__ = ["FolderClaims"]

_held: dict[tuple[int, int], list[int]] = {}
"""Device and inode of a folder -> descriptor, and how many claims of this process share it."""


class FolderClaims:
    """The folders into which one run of this process saves."""

    def __init__(self) -> None:
        self._mine: set[tuple[int, int]] = set()
        self._saved: dict[Path, tuple[int, int]] = {}

    def add(self, folder: Path) -> bool:
        """Claim a folder; return False if another process has claimed it.

        Args:
            folder: An existing folder.
        """
        # Not the path: two links to one folder are one folder, and two runs may name it
        # differently.
        found = folder.stat()
        key = (found.st_dev, found.st_ino)
        # Once per run, however often it saves: `release` gives back one claim per folder.
        if key in self._mine:
            return True
        # One descriptor per folder in a process. `flock` belongs to an open file, so that a
        # second descriptor of this process would be refused like another run's, e.g. for two
        # Trainers in one script.
        if key not in _held:
            try:
                descriptor = os.open(folder, os.O_RDONLY)
            except OSError:  # it may be written to, but not be read
                return True
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:  # no locks here
                os.close(descriptor)
                return True
            _held[key] = [descriptor, 0]
        _held[key][1] += 1
        self._mine.add(key)
        return True

    def note(self, path: Path) -> None:
        """Take note of a checkpoint that this run has saved."""
        # Unless another run has removed it already.
        with suppress(OSError):
            found = path.stat()
            self._saved[path] = found.st_dev, found.st_ino

    def is_of_another(self, path: Path) -> bool:
        """Return whether another run has saved to a path, or is about to.

        Args:
            path: Of a checkpoint in a folder that another process has claimed.
        """
        if not os.path.lexists(path):
            # Before a save is complete, what it writes into is there.
            return bool(partials_of(path))
        found = path.lstat()
        return self._saved.get(path) != (found.st_dev, found.st_ino)

    def release(self) -> None:
        """Give all folders back."""
        for key in self._mine:
            # The lock goes with the last run of this process that saves there; closing drops it.
            held = _held[key]
            held[1] -= 1
            if not held[1]:
                os.close(held[0])
                del _held[key]
        self._mine.clear()
