"""Saving over all ranks: who writes what, in this thread or in the background, and what becomes of
a save that fails.

Note [One save in flight]: a save in the background has a process group of its own, so that its few
messages cannot meet those of the training. The next save, a load and the end of the run wait for
it. A checkpoint that is to be removed meanwhile is removed when the new one is whole, and kept if
that fails.
"""

import logging
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.pieces import share_out
from lightning_par.checkpoint.storage import remove_path
from lightning_par.checkpoint.writer import complete, Part, Report, write_part
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

__all__ = ["CheckpointSaver", "SaveOrder"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveOrder:
    """What rank 0 needs besides the parts to complete a checkpoint.

    Attributes:
        manifest: Without the files.
        aliases: Further names of tied weights.
        place: Place of a parameter's name in the model.
    """

    manifest: Manifest
    aliases: Mapping[str, str]
    place: Callable[[str], int]


class CheckpointSaver:
    """Saves what all ranks hold; every rank has one and calls the same methods.

    Args:
        timeout: After which a rank that does not answer is given up.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._held: list[tuple[Box, int]] | None = None
        self._mine: frozenset[Box] = frozenset()
        self._running: Future[None] | None = None
        self._doomed: list[Path] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave the process group, and what depends on the ranks, behind."""
        return {**vars(self), "_group": None, "_held": None, "_running": None}

    def save(self, path: Path, part: Part, order: SaveOrder, *, background: bool = False) -> None:
        """Save a checkpoint; what had that name stays until the new one is whole.

        Args:
            path: Where to; a folder that all ranks see.
            part: All that this rank holds; which of the ranks that hold the same writes it is
                decided here.
            order: Used on rank 0.
            background: Return as soon as the tensors are copied. What goes wrong is then raised by
                the next `save` or `wait`.

        Raises:
            CheckpointError: On every rank, if any rank failed; nothing is left of the new one.

        **Communicates**: names and sizes of all parts, the first time; then one number, a report of
        every rank to rank 0, and the outcome.
        """
        self.wait()
        if part.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)  # links may be put there at once
        part = part.only(self._share(part))
        if not background:
            self._write(path, part, order)
            return
        copy, self._running = part.on_cpu(), Future()
        thread = Thread(
            target=self._write_behind, args=(path, copy, order, self._running), daemon=True
        )
        thread.start()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            CheckpointError: It failed.
        """
        running, self._running = self._running, None
        try:
            if running is not None:
                running.result()
        except CheckpointError:
            self._doomed.clear()  # the new one is not there: the old ones stay
            raise
        self._remove_doomed()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint: now, or once the save in the background is known to have ended well.

        Args:
            path: Need not exist; only rank 0 gives one.
        """
        self._doomed.append(path)
        if self._running is None:
            self._remove_doomed()

    def _remove_doomed(self) -> None:
        while self._doomed:
            remove_path(self._doomed.pop())

    def _share(self, part: Part) -> frozenset[Box]:
        """Return the boxes that this rank writes. They change only if what some rank holds does."""
        held = [(piece.box, piece.nbytes) for piece in (*part.weights, *part.optimizer)]
        if part.world == 1:
            return frozenset(box for box, _ in held)
        known = torch.tensor(int(held == self._held))
        dist.all_reduce(known, dist.ReduceOp.MIN, group=self._own_group())
        if not int(known):
            everywhere: list[Any] = [None] * part.world
            dist.all_gather_object(everywhere, held, group=self._own_group())
            self._mine, self._held = share_out(everywhere)[part.rank], held
        return self._mine

    def _own_group(self) -> dist.ProcessGroup:
        if self._group is None:
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        return self._group

    def _write_behind(
        self, path: Path, part: Part, order: SaveOrder, outcome: "Future[None]"
    ) -> None:
        try:
            self._write(path, part, order)
        except BaseException as error:
            _log.error("%s", error)
            known = isinstance(error, CheckpointError)
            outcome.set_exception(error if known else _not_saved(path, error))
        else:
            outcome.set_result(None)

    def _write(self, path: Path, part: Part, order: SaveOrder) -> None:
        partial = path.with_name(f".{path.name}.partial")
        if part.world == 1:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
            _complete(partial, path, [write_part(partial, part)], order)
            return
        group = self._own_group()
        error: CheckpointError | None = None
        try:
            if part.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier(group)
            report = write_part(partial, part)
            reports: list[Any] | None = [None] * part.world if part.rank == 0 else None
            dist.gather_object(report, reports, group=group)
            if reports is not None:
                try:
                    _complete(partial, path, reports, order)
                except CheckpointError as failure:
                    error = failure
            outcome = [None if error is None else str(error)]
            dist.broadcast_object_list(outcome, 0, group=group)
        except RuntimeError as failure:  # a rank is gone
            raise _not_saved(path, failure) from failure
        if outcome[0] is not None:
            raise CheckpointError(outcome[0]) from error


def _complete(partial: Path, path: Path, reports: list[Report], order: SaveOrder) -> None:
    complete(partial, path, reports, order.manifest, aliases=order.aliases, order=order.place)


def _not_saved(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} was not saved, because a rank did not take part: {error}")
