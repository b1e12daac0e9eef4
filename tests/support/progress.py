"""Keeps what is shown of work, in place of a bar."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_par.checkpoint.progress import Advance

__all__ = ["Kept", "Terminal"]


class Terminal(io.StringIO):
    """Stands for a standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


class Kept:
    """Writes a line for every work that has been shown: name, unit, pieces done of how many.

    Args:
        path: Of a file, which processes of this one write to, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    @contextmanager
    def __call__(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        done: list[int] = []
        yield done.append
        with self.path.open("a") as file:
            file.write(f"{name}|{unit}|{sum(done)}|{total}\n")

    def works(self) -> list[tuple[str, str, int, int | None]]:
        rows = [line.split("|") for line in self.path.read_text().splitlines()]
        return [(n, u, int(done), None if t == "None" else int(t)) for n, u, done, t in rows]
