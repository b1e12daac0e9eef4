"""Distributed saving: which rank writes what, in the foreground or background, all or nothing.

Note [One save in flight]: a background save has a process group of its own, so that its messages
cannot be matched with those of the training. The next save, a load and the end of the run wait for
it. A checkpoint whose removal is requested meanwhile is removed once the new one is complete, and
kept if the save fails.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.checkpoint.claims import FolderClaims
from lightning_par.checkpoint.file_writer import (
    begin_file,
    commit_file,
    outline,
    Skeleton,
    write_slices,
)
from lightning_par.checkpoint.pieces import assign_writers
from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.storage import partial_path, remove_path
from lightning_par.checkpoint.writer import (
    commit,
    not_saved,
    Part,
    SaveMetadata,
    write_part,
    WriteReport,
)
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

__all__ = ["CheckpointSaver", "SaveMetadata"]

_log = logging.getLogger(__name__)


class _Ranks:
    """The ranks of a save: gathers to, and broadcasts from, rank 0.

    Args:
        part: Knows rank and world size.
        group: Their group; None: there is one rank.
    """

    def __init__(self, part: Part, group: dist.ProcessGroup | None) -> None:
        self.rank, self._world, self._group = part.rank, part.world, group

    def barrier(self) -> None:
        """Wait for all."""
        if self._group is not None:
            dist.barrier(self._group)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0; elsewhere None."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self._world if self.rank == 0 else None
        dist.gather_object(value, values, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]


class _FolderSave:
    """A save as a folder: `begin`, then `write` and `commit`, perhaps in another thread.

    Args:
        path: Final path.
        part: What this rank writes.
        metadata: What rank 0 adds.
        ranks: All of them.
    """

    def __init__(self, path: Path, part: Part, metadata: SaveMetadata, ranks: _Ranks) -> None:
        self.path, self.part, self.metadata, self.ranks = path, part, metadata, ranks
        self.partial = partial_path(path)

    def begin(self) -> None:
        """Remove what a run that was killed has left."""
        if self.ranks.rank == 0:
            remove_path(self.partial)
        self.ranks.barrier()  # no rank writes before

    def hold(self) -> None:
        """Copy what is written in the background, as training goes on."""
        self.part = self.part.on_cpu()

    def write(self) -> WriteReport:
        """Write what this rank holds."""
        return write_part(self.partial, self.part)

    def commit(self, reports: Sequence[WriteReport]) -> None:
        """Complete the checkpoint; on rank 0."""
        commit(
            self.partial,
            self.path,
            reports,
            self.metadata.manifest,
            aliases=self.metadata.aliases,
            order=self.metadata.place,
        )


class _FileSave(_FolderSave):
    """A save as one file, of which `begin` makes all but the bytes of tensors."""

    def begin(self) -> None:
        """Write the file without the bytes of tensors.

        Raises:
            CheckpointError: On every rank, if that failed.
        """
        outlines = self.ranks.gather(outline(self.part))
        self.skeleton: Skeleton | None = None
        answer: dict[str, int] | str = ""
        if outlines is not None:
            try:
                remove_path(self.partial)
                self.skeleton = begin_file(self.partial, outlines, self.part, self.metadata)
                answer = {**self.skeleton.starts, **self.skeleton.places}
            except Exception as error:
                remove_path(self.partial)
                answer = not_saved(self.path, error).message
        answer = self.ranks.broadcast(answer)
        if isinstance(answer, str):
            raise CheckpointError("LP508", answer)
        self.starts = answer

    def hold(self) -> None:
        """Copy what is written in the background, as training goes on."""
        super().hold()
        if self.skeleton is not None:
            loose = {name: v.to("cpu", copy=True) for name, v in self.skeleton.loose.items()}
            self.skeleton.loose = loose

    def write(self) -> WriteReport:
        """Write what this rank holds."""
        return write_slices(self.partial, self.part, self.skeleton, self.starts)

    def commit(self, reports: Sequence[WriteReport]) -> None:
        """Complete the checkpoint; on rank 0."""
        assert self.skeleton is not None
        commit_file(self.partial, self.path, reports, self.skeleton, self.metadata.manifest)


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
        self._claims = FolderClaims()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process group, the future, and what was agreed with the other ranks."""
        left = dict.fromkeys(("_group", "_held", "_running"))
        return {**vars(self), **left, "_claims": FolderClaims()}

    def save(
        self, path: Path, part: Part, metadata: SaveMetadata, *, background: bool = False
    ) -> None:
        """Save a checkpoint; an existing one of that name is replaced when the new one is complete.

        Args:
            path: Folder or file to write, on a file system that all ranks share.
            part: Everything that this rank holds; of a shard that several ranks hold, one copy is
                written. With `plain`, on every rank, it goes into one file.
            metadata: Used on rank 0 only.
            background: Return as soon as the tensors are copied to the CPU. An error is then raised
                by the next `save` or `wait`.

        Raises:
            CheckpointError: On every rank, if any rank failed; the new checkpoint is removed.

        **Communicates**: an all-reduce of one number; if that says so, an all-gather of the names
        and sizes of all boxes; for a folder a barrier, for one file a gather of names and states to
        rank 0 and a broadcast of places; a gather of reports to rank 0, and a broadcast of the
        outcome.
        """
        self.wait()
        if part.rank == 0:
            # Not in the background: ModelCheckpoint links "last.ckpt" there as soon as we return.
            path.parent.mkdir(parents=True, exist_ok=True)
            self._claim(path.parent)
        part = part.only(self._assign(part))
        ranks = _Ranks(part, None if part.world == 1 else self._save_group())
        made = _FolderSave if part.plain is None else _FileSave
        save = made(path, part, metadata, ranks)
        try:
            save.begin()
        except CheckpointError:
            raise
        except RuntimeError as failure:  # of gloo: a rank has died or timed out
            raise _lost_a_rank(path, failure) from failure
        if not background:
            _complete(save)
            return
        save.hold()
        self._running = Future()
        target = _complete_in_background
        Thread(target=target, args=(save, self._running), daemon=True).start()

    def _claim(self, folder: Path) -> None:
        if not self._claims.add(folder):
            _log.warning(
                "Another run saves into %s, too: each replaces checkpoints of the other that have "
                "the same name, such as last.ckpt. Give every run a folder of its own.",
                folder,
            )

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

    def release(self) -> None:
        """Give back the folders that this run has claimed."""
        self._claims.release()

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


def _complete_in_background(save: _FolderSave, outcome: "Future[None]") -> None:
    try:
        _complete(save)
    except BaseException as error:
        _log.error("%s", error)
        known = isinstance(error, CheckpointError)
        outcome.set_exception(error if known else _lost_a_rank(save.path, error))
    else:
        outcome.set_result(None)


def _complete(save: _FolderSave) -> None:
    """Write on every rank, and commit on rank 0.

    Raises:
        CheckpointError: On every rank, if any rank failed.
    """
    error: CheckpointError | None = None
    try:
        part = save.part
        size = sum(piece.nbytes for piece in (*part.weights, *part.optimizer))
        size += sum(tensor.nbytes for tensor in part.tensors.values())
        with counted("write", f"saving {save.path.name}", size):
            written = save.write()
        reports = save.ranks.gather(written)
        if reports is not None:
            # Kept and not raised yet: the other ranks wait in the broadcast.
            try:
                save.commit(reports)
            except CheckpointError as failure:
                error = failure
        outcome = save.ranks.broadcast(None if error is None else error.message)
    except RuntimeError as failure:  # of gloo: a rank has died or timed out
        raise _lost_a_rank(save.path, failure) from failure
    if outcome is not None:
        raise CheckpointError("LP508", outcome) from error


def _lost_a_rank(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "LP508", f"{path} was not saved, because a rank did not take part: {error}"
    )
