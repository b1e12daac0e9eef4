"""Distributed saving: which rank writes what, in the foreground or background, all or nothing.

Note [One save in flight]: a background save has a process group of its own, so that its messages
cannot be matched with those of the training. The next save, a load and the end of the run wait for
it. A checkpoint whose removal is requested meanwhile is removed once the new one is complete, and
kept if the save fails.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.checkpoint.claims import FolderClaims
from lightning_par.checkpoint.file_system import Place, UrlPath
from lightning_par.checkpoint.file_writer import FileSave
from lightning_par.checkpoint.part import Part
from lightning_par.checkpoint.pieces import assign_writers
from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.storage import remove_path
from lightning_par.checkpoint.writer import FolderSave, Layout, Report, Save, SaveMetadata
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError, describe

__all__ = ["CheckpointSaver"]

_log = logging.getLogger(__name__)


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
        self._to_remove: list[Place] = []
        self._claims = FolderClaims()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the process group, the future, and what was agreed with the other ranks."""
        # A process group cannot be pickled, and the process that gets the copy has not yet agreed
        # on anything with the other ranks.
        left = dict.fromkeys(("_group", "_held", "_running"))
        return {**vars(self), **left, "_claims": FolderClaims()}

    def save(
        self, path: Place, part: Part, metadata: SaveMetadata, *, background: bool = False
    ) -> None:
        """Save a checkpoint; an existing one of that name is replaced when the new one is complete.

        Args:
            path: Folder or file to write, on a file system or store that all ranks share.
            part: Everything that this rank holds; of a shard that several ranks hold, one copy is
                written. With `plain`, on every rank, it goes into one file.
            metadata: Used on rank 0 only.
            background: Return as soon as the tensors are copied to the CPU. An error of writing is
                then raised by the next `save` or `wait`; what cannot be stored, at once.

        Raises:
            CheckpointError: On every rank, if any rank failed; the new checkpoint is removed.

        **Communicates**: an all-reduce of one number; if that says so, an all-gather of the names
        and sizes of all boxes; a gather of names to rank 0, for one file also of states, and a
        broadcast of places; a gather of reports to rank 0, and a broadcast of the outcome.
        """
        # Two saves at once would share the group, and their messages be matched wrongly. Every
        # rank waits, so an error of the last save is raised on all of them.
        self.wait()
        if part.rank == 0 and isinstance(path, Path):
            part = self._claim(path, part)
        # Before the outlines: of a box that several ranks hold only the writer reports it, or the
        # index would have it twice.
        part = part.only(self._assign(part))
        save: Save
        if part.plain is None:
            save = FolderSave(path, part, metadata)
        else:
            assert isinstance(path, Path)
            save = FileSave(path, part, metadata)
        # Also in a background save: here rank 0 sees that no rank failed, and what cannot be
        # stored is an error of `save` itself.
        layout = self._on_rank_0(save, save.prepare, save.outline())
        if not background:
            self._complete(save, layout)
            return
        # After the exchange: its messages are short, and the copy is what costs time.
        save.hold()
        self._running = Future()
        target = self._complete_in_background
        # A daemon: a hang of the file system must not keep the process from ending after an
        # error.
        Thread(target=target, args=(save, layout, self._running), daemon=True).start()

    def _on_rank_0(self, save: Save, step: Callable[[list[Report]], Any], report: Report) -> Any:
        """Gather reports to rank 0, call a step of the save there, and return its result on every
        rank.

        Args:
            save: The save, which knows the ranks.
            step: `Save.prepare` or `Save.commit`.
            report: Report of this rank.

        Raises:
            CheckpointError: On every rank, if the step raised it, or a rank does not take part.
        """
        part, error = save.part, None
        # Result of the step, and the message of its error.
        outcome: list[Any] = [None, None]
        reports: list[Any] | None = [report]
        try:
            if part.world > 1:
                reports = [None] * part.world if part.rank == 0 else None
                dist.gather_object(report, reports, group=self._save_group())
            if reports is not None:
                # Kept and not raised yet: the other ranks wait in the broadcast.
                try:
                    outcome[0] = step(reports)
                except CheckpointError as failure:
                    error, outcome[1] = failure, failure.message
            if part.world > 1:
                dist.broadcast_object_list(outcome, 0, group=self._save_group())
        except RuntimeError as failure:  # of gloo: a rank has died or timed out
            raise _lost_a_rank(save.path, failure) from failure
        result, problem = outcome
        if problem is not None:
            # On every rank alike: each leaves the save with the same error, and none goes on
            # training.
            raise CheckpointError("LP508", problem) from error
        return result

    def _complete(self, save: Save, layout: Layout) -> None:
        """Write on every rank, and commit on rank 0.

        Raises:
            CheckpointError: On every rank, if any rank failed.
        """
        with counted("write", f"saving {save.path.name}", save.part.nbytes):
            report = save.write(layout)
        # Reached by every rank, since `write` reports its error instead of raising it.
        self._on_rank_0(save, save.commit, report)
        if save.part.rank == 0:
            self.note(save.path)

    def _complete_in_background(self, save: Save, layout: Layout, running: "Future[None]") -> None:
        try:
            self._complete(save, layout)
        # All: nobody looks at this thread but by the future. Logged, too, as the run may end
        # before the next save or `wait` raises it.
        except BaseException as error:
            _log.error("%s", error)
            known = isinstance(error, CheckpointError)
            running.set_exception(error if known else _lost_a_rank(save.path, error))
        else:
            running.set_result(None)

    def _claim(self, path: Path, part: Part) -> Part:
        """Claim the folder of a checkpoint; return the part, with an error if it cannot be saved.

        The other ranks wait for the outline of this one, and are told of the error by `prepare`.
        """
        folder = path.parent
        try:
            # Not in the background: ModelCheckpoint links "last.ckpt" there as soon as we return.
            folder.mkdir(parents=True, exist_ok=True)
            is_alone = self._claims.add(folder)
        except OSError as error:
            return replace(part, error=describe(error))
        if self.is_taken(path):
            return replace(
                part,
                error="another run saves to the same path. Give every run its own folder",
            )
        if not is_alone:
            _log.warning(
                "Another run saves checkpoints into %s, too. A run replaces checkpoints of the "
                "other run that have the same name, such as last.ckpt. Give every run its own "
                "folder.",
                folder,
            )
        return part

    def is_taken(self, path: Place) -> bool:
        """Return whether another run saves to a path, on rank 0; of a URL nobody knows."""
        if isinstance(path, UrlPath):
            return False
        return not self._claims.add(path.parent) and self._claims.is_of_another(path)

    def note(self, path: Place) -> None:
        """Take note of a checkpoint that this run has saved otherwise, on rank 0."""
        if isinstance(path, Path):
            self._claims.note(path)

    def wait(self) -> None:
        """Wait for the background save, if one is running.

        Raises:
            CheckpointError: The background save failed.
        """
        # Forgotten first: an error is raised once, and not by every later call.
        running, self._running = self._running, None
        try:
            if running is not None:
                running.result()
        except CheckpointError:
            self._to_remove.clear()  # the new one is not there: the old ones stay
            raise
        # Only now: the new checkpoint is complete, so an older one may go (`save_top_k`).
        self._remove_pending()

    def release(self) -> None:
        """Give back the folders that this run has claimed."""
        self._claims.release()

    def remove(self, path: Place) -> None:
        """Remove a checkpoint: now, or after the running background save has succeeded.

        Args:
            path: Checkpoint folder or file, which need not exist. Called on rank 0 only.
        """
        self._to_remove.append(path)
        if self._running is None:
            self._remove_pending()

    def _remove_pending(self) -> None:
        while self._to_remove:
            path = self._to_remove.pop()
            try:
                remove_path(path)
            # By rank 0 alone, and only room is lost: the other ranks train on.
            except OSError as error:
                _log.warning(
                    "The old checkpoint %s could not be removed: %s. The run continues; "
                    "remove it yourself.",
                    path,
                    error,
                )

    def _assign(self, part: Part) -> frozenset[Box]:
        """Return the boxes that this rank writes.

        The assignment of the last save is used again unless the boxes of some rank have changed.
        """
        # In the order of the pieces, so that an equal list means an equal assignment.
        held = [(piece.box, piece.nbytes) for piece in (*part.weights, *part.optimizer)]
        if part.world == 1:
            return frozenset(box for box, _ in held)
        # MIN over the ranks: all must agree to skip the all-gather, or it would hang.
        # Names and sizes of all boxes are megabytes for large models; one number per save is not.
        known = torch.tensor(int(held == self._held))
        dist.all_reduce(known, dist.ReduceOp.MIN, group=self._save_group())
        if not int(known):
            everywhere: list[Any] = [None] * part.world
            dist.all_gather_object(everywhere, held, group=self._save_group())
            self._assigned, self._held = assign_writers(everywhere)[part.rank], held
        return self._assigned

    def _save_group(self) -> dist.ProcessGroup:
        # Made at the first save, which every rank reaches: `new_group` is a collective of the
        # world.
        if self._group is None:
            # gloo on CUDA, too: a save in a thread must not enqueue anything on the GPU.
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group
        return self._group


def _lost_a_rank(path: Place, error: BaseException) -> CheckpointError:
    return CheckpointError(
        "LP508",
        f"{path} was not saved, since some rank did not call save_checkpoint or failed ({error}). "
        "Call save_checkpoint on every rank, and look for the first error in the ranks' logs.",
    )
