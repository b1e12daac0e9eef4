"""Checkpoint writer: the steps of a save in either form, and a save as a folder.

Files are written under a hidden name, and renamed once they are complete; of a URL see
Note [Saves to a store].
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_par.checkpoint.file_system import Place
from lightning_par.checkpoint.index import (
    Chunk,
    file_name,
    INDEX,
    Index,
    MANIFEST,
    Manifest,
    merge_entries,
    TensorEntry,
)
from lightning_par.checkpoint.optimizer_groups import merge_groups
from lightning_par.checkpoint.part import Part, Plain
from lightning_par.checkpoint.storage import (
    ChecksumFile,
    discard,
    FileRecord,
    missing_in,
    partial_path,
    publish,
    remove_left_over,
    sync_files,
    write_json,
    write_tensors,
)
from lightning_par.errors import CheckpointError, describe

__all__ = ["FolderSave", "Layout", "Report", "Save", "SaveMetadata"]


@dataclass(frozen=True, kw_only=True)
class SaveMetadata:
    """What rank 0 adds to the parts of all ranks to commit a checkpoint.

    Attributes:
        manifest: Manifest with an empty list of files.
        aliases: Further FQNs of tied weights -> FQN under which the weight is stored.
        place: Function from a parameter's FQN to its position in the model, which orders
            parameter groups.
        state_order: Keys of the whole model's state dict, in order; for one file.
    """

    manifest: Manifest
    aliases: Mapping[str, str]
    place: Callable[[str], int]
    state_order: Sequence[str] = ()


@dataclass(kw_only=True)
class Report:
    """What a rank tells rank 0: what it holds before it writes, and its files afterwards.

    Attributes:
        rank: Global rank.
        step: Number of optimizer steps of its weights.
        index: Index of what it writes.
        plain: As `Part.plain`.
        files: Name -> length and checksum of what it wrote.
        error: Why it cannot write; None: it can.
    """

    rank: int
    step: int
    index: Index = field(default_factory=Index)
    plain: Plain | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the ranks write, as rank 0 tells them.

    Attributes:
        partial: Name of the file or folder, until it is complete.
        starts: Of one file: name of a tensor or record -> its first byte.
    """

    partial: str
    starts: Mapping[str, int]


class Save(ABC):
    """The steps of a save, in which every rank takes part.

    In this order: `outline` on every rank; `prepare` on rank 0, with the outlines of all ranks;
    `write` on every rank; `commit` on rank 0, with the reports of all ranks. Communication is the
    caller's.

    Args:
        path: Final path.
        part: What this rank writes.
        metadata: What rank 0 adds.
    """

    def __init__(self, path: Place, part: Part, metadata: SaveMetadata) -> None:
        self.path, self.part = path, part
        self._metadata = metadata
        self._partial = partial_path(path)
        self._index = Index()
        self._files: dict[str, FileRecord] = {}

    def outline(self) -> Report:
        """Return what this rank holds, without its tensors."""
        part = self.part
        report = Report(rank=part.rank, step=part.step, plain=part.plain, error=part.error)
        # The outlines together are all that rank 0 has to know: it writes no bytes of other
        # ranks.
        report.index = Index(
            weights=_entries_of(part, "weights"),
            optimizer=_entries_of(part, "optimizer"),
            groups=part.groups,
            values=dict(part.values),
        )
        return report

    def prepare(self, outlines: Sequence[Report]) -> Layout:
        """Remove what a killed run has left, and make the file into which all ranks write.

        Args:
            outlines: Those of all ranks, in their order.

        Raises:
            CheckpointError: A rank failed, or what they hold does not fit together; names every
                such rank, and the cause.
        """
        try:
            # First: what another run is writing is no left-over, and is an error of this rank.
            self._check_reports(outlines)
            # By rank 0 alone, and before any rank writes: `write` comes after a broadcast.
            remove_left_over(self.path)
            self._index = self._merge_index(outlines)
            return Layout(partial=self._partial.name, starts=self._lay_out(outlines))
        # Whatever it is: the other ranks wait for an outcome, and have to hear of it.
        except Exception as error:
            raise self._failed(error) from error

    def hold(self) -> None:
        """Copy the tensors to the CPU: training may change them while they are written."""
        self.part = self.part.on_cpu()

    def write(self, layout: Layout) -> Report:
        """Write what this rank holds, and fsync it.

        Args:
            layout: What `prepare` gave.

        Returns:
            The report of this rank. An error is reported in it and not raised: the other ranks wait
            for the report.
        """
        report = Report(rank=self.part.rank, step=self.part.step)
        try:
            # The name is that of rank 0; each rank has made another one.
            self._partial = partial_path(self.path, layout.partial)
            report.files = self._write(layout.starts)
        except Exception as error:
            report.error = describe(error)
        return report

    def commit(self, reports: Sequence[Report]) -> None:
        """Add index and manifest, and rename what was written to its final path.

        If anything fails, what was written is removed, and an existing checkpoint of that name
        stays.

        Args:
            reports: Reports of all ranks, in their order.

        Raises:
            CheckpointError: A rank failed; names every such rank, and the cause.
        """
        try:
            self._check_reports(reports)
            # Names of files bear the rank, and boxes have one writer: no two reports name the
            # same.
            for report in reports:
                self._files |= report.files
            self._metadata.manifest.files = self._files
            self._seal(reports)
            publish(self._partial, self.path)
        except Exception as error:
            raise self._failed(error) from error

    @abstractmethod
    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        """Make the file into which all ranks write, if there is one; see `prepare`."""

    @abstractmethod
    def _write(self, starts: Mapping[str, int]) -> dict[str, FileRecord]:
        """Write what this rank holds; return what goes into `Report.files`."""

    @abstractmethod
    def _seal(self, reports: Sequence[Report]) -> None:
        """Write index and manifest."""

    def _failed(self, error: Exception) -> CheckpointError:
        """Remove what was written; return the error that says so."""
        kept = discard(self._partial, self.path)
        cause = error.message if isinstance(error, CheckpointError) else f"rank 0: {error}"
        # Nothing has been done to the final path before `publish`, whose last step may still
        # fail.
        before = (
            "The checkpoint that was there before is unchanged"
            if kept
            else ("The incomplete files were removed")
        )
        return CheckpointError(
            "LP508",
            f"{self.path} was not saved. {before}. Remove the cause, and save again. The cause "
            f"is: {cause}",
        )

    def _check_reports(self, reports: Sequence[Report]) -> None:
        """Check that no rank failed, and that all are at the same step."""
        # One kind of problem at a time: a rank that failed has no step and no files to compare.
        problems = [f"rank {r.rank}: {r.error}" for r in reports if r.error is not None]
        # Ranks at different steps (a hook that saves on some only) would give a mix of two
        # models.
        step = self._metadata.manifest.step
        if not problems:
            problems = [
                f"rank {r.rank} saves step {r.step}, but rank {reports[0].rank} saves step "
                f"{step}; call save_checkpoint on every rank after the same step"
                for r in reports
                if r.step != step
            ]
        if problems:
            raise CheckpointError("LP508", "; ".join(problems))

    def _merge_index(self, outlines: Sequence[Report]) -> Index:
        """Return the index of what all ranks write, complete."""
        found = [outline.index for outline in outlines]
        index = Index(
            weights=merge_entries(i.weights for i in found),
            optimizer=merge_entries(i.optimizer for i in found),
            groups=merge_groups([i.groups for i in found if i.groups], self._metadata.place),
            # Values that are no tensors are replicated; of stages, each has its own names.
            values={k: v for i in found for k, v in i.values.items()},
        )
        index.aliases = dict(self._metadata.aliases)
        index.check_complete()
        return index


class FolderSave(Save):
    """A save as a folder, into which every rank writes files of its own."""

    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        return {}

    def _write(self, starts: Mapping[str, int]) -> dict[str, FileRecord]:
        part, folder = self.part, self._partial
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, FileRecord] = {}
        for kind, pieces in part.pieces.items():
            # A rank that writes nothing of a kind has no file of it: `data_files` goes by the
            # manifest.
            self._write_tensors(kind, {piece.key: piece.values for piece in pieces}, files)
        state = file_name("state", part.rank, part.world, "json")
        files[state] = write_json(folder / state, part.state)
        self._write_tensors("state", part.tensors, files)
        # Each rank its own, before it reports: only the rank's node may have the bytes in its
        # cache.
        sync_files(folder / name for name in files)
        return files

    def _write_tensors(
        self, kind: str, tensors: Mapping[str, Tensor], files: dict[str, FileRecord]
    ) -> None:
        if tensors:
            name = file_name(kind, self.part.rank, self.part.world)
            with ChecksumFile(self._partial / name) as file:
                write_tensors(file, tensors)
            files[name] = file.record

    def _seal(self, reports: Sequence[Report]) -> None:
        folder, manifest = self._partial, self._metadata.manifest
        wrote = [(r.rank, name) for r in reports for name in r.files]
        # Of a store one list: a request for each file of each rank would take long.
        missing = missing_in(folder, [name for _, name in wrote])
        # On a node of its own disk a rank wrote successfully, and rank 0 would publish without
        # it.
        problems = [
            f"rank {reports[0].rank} does not see the file {name}, which rank {rank} wrote; save "
            "into a folder that all nodes share"
            for rank, name in wrote
            if name in missing
        ]
        if problems:
            raise CheckpointError("LP508", "; ".join(problems))
        manifest.files[INDEX] = write_json(folder / INDEX, self._index.to_json())
        manifest.write(folder)  # last: a folder with a manifest is complete
        # Again before the folder is renamed: `publish` syncs the folder itself, not what is in
        # it.
        sync_files([folder / INDEX, folder / MANIFEST])


def _entries_of(part: Part, kind: str) -> dict[str, TensorEntry]:
    """Return the index of the shards that one rank writes; of one file, it names no records yet."""
    # `_lay_out` fills it in, as soon as records have numbers.
    file = file_name(kind, part.rank, part.world) if part.plain is None else ""
    return merge_entries(
        {
            p.box.name: TensorEntry(
                p.values.dtype, p.global_shape, (Chunk(file, p.key, p.box.offset, p.box.shape),)
            )
        }
        for p in part.pieces[kind]
    )
