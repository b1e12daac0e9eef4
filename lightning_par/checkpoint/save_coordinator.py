"""Distributed saving: which rank writes what, in the foreground or background, all or nothing.

Note [One save in flight]: a background save has a process group of its own, so that its messages
cannot be matched with those of the training. The next save, a load and the end of the run wait for
it. A checkpoint whose removal is requested meanwhile is removed once the new one is complete, and
kept if the save fails.
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
from lightning_par.checkpoint.pieces import assign_writers
from lightning_par.checkpoint.storage import remove_path
from lightning_par.checkpoint.writer import commit, Part, write_part, WriteReport
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

__all__ = ["CheckpointSaver", "SaveMetadata"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SaveMetadata:
    """What rank 0 adds to the parts of all ranks to commit a checkpoint.

    Attributes:
        manifest: Manifest with an empty list of files.
        aliases: Further FQNs of tied weights -> FQN under which the weight is stored.
        place: Function from a parameter's FQN to its position in the model, which orders
            parameter groups.
    """

    manifest: Manifest
    aliases: Mapping[str, str]
    place: Callable[[str], int]


class CheckpointSaver:
    """Coordinator of distributed saves; every rank has one and calls the same methods.

    Args:
        timeout: Timeout of its collectives, after which a missing rank fails the save.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._held: list[tuple[Box, int]] | None = None
        self._assigned: frozenset[Box] = frozenset()
        self._running: Future[None] | None = None
        self._to_remove: list[Path] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process group, the future, and what was agreed with the other ranks."""
        return {**vars(self), "_group": None, "_held": None, "_running": None}

    def save(
        self, path: Path, part: Part, metadata: SaveMetadata, *, background: bool = False
    ) -> None:
        """Save a checkpoint; an existing one of that name is replaced when the new one is complete.

        Args:
            path: Folder to write, on a file system that all ranks share.
            part: Everything that this rank holds; of a shard that several ranks hold, one copy is
                written.
            metadata: Used on rank 0 only.
            background: Return as soon as the tensors are copied to the CPU. An error is then raised
                by the next `save` or `wait`.

        Raises:
            CheckpointError: On every rank, if any rank failed; the new checkpoint is removed.

        **Communicates**: an all-reduce of one number; if that says so, an all-gather of the names
        and sizes of all boxes; then a barrier, a gather of reports to rank 0, and a broadcast of
        the outcome.
        """
        self.wait()
        if part.rank == 0:
            # Not in the background: ModelCheckpoint links "last.ckpt" there as soon as we return.
            path.parent.mkdir(parents=True, exist_ok=True)
        part = part.only(self._assign(part))
        if not background:
            self._write(path, part, metadata)
            return
        copy, self._running = part.on_cpu(), Future()
        thread = Thread(
            target=self._write_in_background,
            args=(path, copy, metadata, self._running),
            daemon=True,
        )
        thread.start()

    def wait(self) -> None:
        """Wait for the background save, if one is running.

        Raises:
            CheckpointError: The background save failed.
        """
        running, self._running = self._running, None
        try:
            if running is not None:
                running.result()
        except CheckpointError:
            self._to_remove.clear()  # the new one is not there: the old ones stay
            raise
        self._remove_pending()

    def remove(self, path: Path) -> None:
        """Remove a checkpoint: now, or after the running background save has succeeded.

        Args:
            path: Checkpoint folder or file, which need not exist. Called on rank 0 only.
        """
        self._to_remove.append(path)
        if self._running is None:
            self._remove_pending()

    def _remove_pending(self) -> None:
        while self._to_remove:
            remove_path(self._to_remove.pop())

    def _assign(self, part: Part) -> frozenset[Box]:
        """Return the boxes that this rank writes.

        The assignment of the last save is used again unless the boxes of some rank have changed.
        """
        held = [(piece.box, piece.nbytes) for piece in (*part.weights, *part.optimizer)]
        if part.world == 1:
            return frozenset(box for box, _ in held)
        # MIN over the ranks: all must agree to skip the all-gather, or it would hang.
        known = torch.tensor(int(held == self._held))
        dist.all_reduce(known, dist.ReduceOp.MIN, group=self._save_group())
        if not int(known):
            everywhere: list[Any] = [None] * part.world
            dist.all_gather_object(everywhere, held, group=self._save_group())
            self._assigned, self._held = assign_writers(everywhere)[part.rank], held
        return self._assigned

    def _save_group(self) -> dist.ProcessGroup:
        if self._group is None:
            # gloo on CUDA, too: a save in a thread must not enqueue anything on the GPU.
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        return self._group

    def _write_in_background(
        self, path: Path, part: Part, metadata: SaveMetadata, outcome: "Future[None]"
    ) -> None:
        try:
            self._write(path, part, metadata)
        except BaseException as error:
            _log.error("%s", error)
            known = isinstance(error, CheckpointError)
            outcome.set_exception(error if known else _not_saved(path, error))
        else:
            outcome.set_result(None)

    def _write(self, path: Path, part: Part, metadata: SaveMetadata) -> None:
        partial = path.with_name(f".{path.name}.partial")
        if part.world == 1:
            shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
            _commit(partial, path, [write_part(partial, part)], metadata)
            return
        group = self._save_group()
        error: CheckpointError | None = None
        try:
            if part.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            dist.barrier(group)  # no rank writes before the leftovers are removed
            report = write_part(partial, part)
            reports: list[Any] | None = [None] * part.world if part.rank == 0 else None
            dist.gather_object(report, reports, group=group)
            if reports is not None:
                # Kept and not raised yet: the other ranks wait in the broadcast.
                try:
                    _commit(partial, path, reports, metadata)
                except CheckpointError as failure:
                    error = failure
            outcome = [None if error is None else str(error)]
            dist.broadcast_object_list(outcome, 0, group=group)
        except RuntimeError as failure:  # of gloo: a rank has died or timed out
            raise _not_saved(path, failure) from failure
        if outcome[0] is not None:
            raise CheckpointError(outcome[0]) from error


def _commit(partial: Path, path: Path, reports: list[WriteReport], metadata: SaveMetadata) -> None:
    commit(
        partial, path, reports, metadata.manifest, aliases=metadata.aliases, order=metadata.place
    )


def _not_saved(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} was not saved, because a rank did not take part: {error}")
