"""Checkpoint writer: what a rank writes, the steps of a save in either form, and folders.

What a save writes has a hidden name until rank 0 commits it.
"""

import contextlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

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
from lightning_par.checkpoint.json_encoding import Encoder
from lightning_par.checkpoint.optimizer_groups import merge_groups
from lightning_par.checkpoint.pieces import Piece
from lightning_par.checkpoint.storage import (
    ChecksumFile,
    DTYPES,
    FileRecord,
    partial_path,
    publish,
    remove_path,
    sync_files,
    tensors_length,
    write_json,
    write_tensors,
)
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError, describe

__all__ = [
    "FolderSave",
    "Part",
    "Plain",
    "Report",
    "Save",
    "SaveMetadata",
    "make_part",
]


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


@dataclass(frozen=True, kw_only=True)
class Plain:
    """What rank 0 writes for a rank into a checkpoint that is one file.

    Attributes:
        values: As `Part.values`, not encoded.
        groups: As `Part.groups`, not encoded.
        state_names: Names of optimizer states (``exp_avg``), in the optimizers' order.
        state: `Part.state` as JSON text.
        room: Length of the record for `Part.tensors`; 0: there are none.
    """

    values: Mapping[str, Any]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    state_names: Sequence[str]
    state: bytes
    room: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank writes of a checkpoint; made by `make_part`.

    Attributes:
        rank: Global rank.
        world: Number of ranks.
        step: Number of optimizer steps of the weights.
        weights: Local shards of the weights.
        optimizer: Local shards of the optimizer states, named ``"0/<weight>/exp_avg"``.
        state: The rest of the state by the Trainer's keys, encoded as JSON types.
        tensors: Key -> tensor, of all tensors inside `state`, `values` and `groups`.
        values: Entries of the state dicts that are no tensors, encoded; see `Index`.
        groups: Per optimizer its parameter groups: encoded options, and FQNs.
        dumped: For one file: what the Trainer dumped; of its state dict and its optimizers only
            that they are there. Used of rank 0.
        plain: For one file: what rank 0 writes for this rank; None: the checkpoint is a folder.
        error: Why this rank has nothing to write; None: it has.
    """

    rank: int
    world: int
    step: int = 0
    weights: Sequence[Piece] = ()
    optimizer: Sequence[Piece] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    dumped: Mapping[str, Any] = field(default_factory=dict)
    plain: Plain | None = None
    error: str | None = None

    @property
    def pieces(self) -> dict[str, Sequence[Piece]]:
        """Local shards by their kind."""
        return {"weights": self.weights, "optimizer": self.optimizer}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        shards = sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)
        return shards + sum(tensor.nbytes for tensor in self.tensors.values())

    def only(self, boxes: Container[Box]) -> "Part":
        """Return a copy with only some of the shards.

        Args:
            boxes: Boxes of the shards that this rank writes.
        """

        def chosen(pieces: Sequence[Piece]) -> list[Piece]:
            return [p for p in pieces if p.box in boxes]

        return replace(self, weights=chosen(self.weights), optimizer=chosen(self.optimizer))

    def on_cpu(self) -> "Part":
        """Return a copy with its weights and optimizer states copied to the CPU.

        Training may then go on while a background save writes the copy.
        """

        def copied(pieces: Sequence[Piece]) -> list[Piece]:
            return [replace(p, values=p.values.detach().to("cpu", copy=True)) for p in pieces]

        return replace(self, weights=copied(self.weights), optimizer=copied(self.optimizer))


def make_part(
    rank: int,
    world: int,
    *,
    step: int = 0,
    weights: Sequence[Piece],
    optimizer: Sequence[Piece] = (),
    state: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
    groups: Sequence[Sequence[Mapping[str, Any]]] = (),
    dumped: Mapping[str, Any] | None = None,
) -> Part:
    """Make the part of one rank: encode its state, check its dtypes.

    Args:
        rank: Global rank.
        world: Number of ranks.
        step: Number of optimizer steps of the weights.
        weights: Local shards of the weights.
        optimizer: Local shards of the optimizer states, named ``"0/<weight>/exp_avg"``.
        state: The rest of the state by the Trainer's keys, not encoded.
        values: Entries of the state dicts that are no tensors, named as in `Index.values`.
        groups: Per optimizer its parameter groups: options, and FQNs under ``"params"``.
        dumped: For one file: what the Trainer dumped, see `Part.dumped`.

    Raises:
        CheckpointError: A tensor has a dtype that safetensors lacks, or a value cannot be encoded;
            names it.
    """
    for piece in (*weights, *optimizer):
        if piece.values.dtype not in DTYPES.values():
            raise CheckpointError(
                "LP505",
                f"{piece.box.name} is of {piece.values.dtype}, which safetensors cannot hold.",
            )
    encoder = Encoder(file_name("state", rank, world))
    encode = encoder.encode
    part = Part(
        rank=rank,
        world=world,
        step=step,
        weights=weights,
        optimizer=optimizer,
        state={key: encode(value, key) for key, value in (state or {}).items()},
        values={key: encode(value, key) for key, value in (values or {}).items()},
        groups=[
            [{k: encode(v, f"param_groups.{k}") for k, v in g.items()} for g in o] for o in groups
        ],
        tensors=encoder.tensors,
    )
    if dumped is None:
        return part
    plain = Plain(
        values=values or {},
        groups=groups,
        # All states, as of some of them another rank may be the writer.
        state_names=list(dict.fromkeys(p.box.name.rpartition("/")[2] for p in optimizer)),
        state=json.dumps(part.state, allow_nan=False).encode(),
        room=tensors_length(part.tensors) if part.tensors else 0,
    )
    return replace(part, dumped=dumped, plain=plain)


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


class Save(ABC):
    """The steps of a save, in which every rank takes part.

    The ranks `outline` what they hold; rank 0 has the outlines of all ranks and will `prepare`;
    every rank will `write`; rank 0 has the reports of all ranks and will `commit`.

    Args:
        path: Final path.
        part: What this rank writes.
        metadata: What rank 0 adds.
    """

    def __init__(self, path: Path, part: Part, metadata: SaveMetadata) -> None:
        self.path, self.part = path, part
        self._metadata = metadata
        self._partial = partial_path(path)
        self._index = Index()
        self._files: dict[str, FileRecord] = {}

    def outline(self) -> Report:
        """Return what this rank holds, without its tensors."""
        part = self.part
        report = Report(rank=part.rank, step=part.step, plain=part.plain, error=part.error)
        report.index = Index(
            weights=_entries_of(part, "weights"),
            optimizer=_entries_of(part, "optimizer"),
            groups=part.groups,
            values=dict(part.values),
        )
        return report

    def prepare(self, outlines: Sequence[Report]) -> dict[str, int]:
        """Remove what a run that was killed has left, and make what all ranks write into.

        Args:
            outlines: Those of all ranks, in their order.

        Returns:
            What the ranks need to write: name -> place of its first byte.

        Raises:
            CheckpointError: A rank failed, or what they hold does not fit together; names every
                such rank, and the cause.
        """
        try:
            remove_path(self._partial)
            self._check_reports(outlines)
            self._index = self._merge_index(outlines)
            return self._lay_out(outlines)
        except Exception as error:
            raise self._failed(error) from error

    def hold(self) -> None:
        """Copy what is written in the background, as training goes on."""
        self.part = self.part.on_cpu()

    def write(self, starts: Mapping[str, int]) -> Report:
        """Write what this rank holds, and fsync it.

        Args:
            starts: What `prepare` gave.

        Returns:
            The report of this rank. An error is reported in it and not raised: the other ranks wait
            for the report.
        """
        report = Report(rank=self.part.rank, step=self.part.step)
        try:
            report.files = self._write(starts)
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
            for report in reports:
                self._files |= report.files
            self._metadata.manifest.files = self._files
            self._seal(reports)
            publish(self._partial, self.path)
        except Exception as error:
            raise self._failed(error) from error

    @abstractmethod
    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        """Make what all ranks write into; see `prepare`."""

    @abstractmethod
    def _write(self, starts: Mapping[str, int]) -> dict[str, FileRecord]:
        """Write what this rank holds; return what goes into `Report.files`."""

    @abstractmethod
    def _seal(self, reports: Sequence[Report]) -> None:
        """Write index and manifest."""

    def _failed(self, error: Exception) -> CheckpointError:
        """Remove what was written; return the error that says so."""
        with contextlib.suppress(OSError):  # the other ranks wait to be told
            remove_path(self._partial)
        cause = error.message if isinstance(error, CheckpointError) else f"rank 0: {error}"
        kept = self.path.exists()
        before = "what was there before is untouched" if kept else "nothing is left"
        return CheckpointError("LP508", f"{self.path} was not saved, {before}: {cause}")

    def _check_reports(self, reports: Sequence[Report]) -> None:
        """Check that no rank failed, and that all are at the same step."""
        # One kind of problem at a time: a rank that failed has no step and no files to compare.
        problems = [f"rank {r.rank}: {r.error}" for r in reports if r.error is not None]
        step = self._metadata.manifest.step
        if not problems:
            problems = [
                f"rank {r.rank} is at step {r.step}, rank {reports[0].rank} at step {step}"
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
            values={k: v for i in found for k, v in i.values.items()},
        )
        # A hook of the user may have left a tied weight out of the state dict.
        aliases = self._metadata.aliases.items()
        index.aliases = {name: of for name, of in aliases if of in index.weights}
        index.check_complete()
        return index


class FolderSave(Save):
    """A save as a folder, into which every rank writes files of its own."""

    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        return {}

    def _write(self, starts: Mapping[str, int]) -> dict[str, FileRecord]:
        part, folder = self.part, self._partial
        folder.mkdir(parents=True, exist_ok=True)
        state = file_name("state", part.rank, part.world, "json")
        files = {}
        tensors = {kind: {p.key: p.values for p in pieces} for kind, pieces in part.pieces.items()}
        for kind, values in {**tensors, "state": part.tensors}.items():
            if kind == "state":
                files[state] = write_json(folder / state, part.state)
            if values:
                name = file_name(kind, part.rank, part.world)
                with ChecksumFile(folder / name) as file:
                    # One after another, so that tensors are copied from the device one by one.
                    write_tensors(file, values)
                files[name] = file.record
        sync_files(folder / name for name in files)
        return files

    def _seal(self, reports: Sequence[Report]) -> None:
        folder, manifest = self._partial, self._metadata.manifest
        problems = [
            f"rank {r.rank} wrote {name}, which rank {reports[0].rank} does not see: all nodes "
            "have to share the folder"
            for r in reports
            for name in r.files
            if not (folder / name).exists()
        ]
        if problems:
            raise CheckpointError("LP508", "; ".join(problems))
        manifest.files[INDEX] = write_json(folder / INDEX, self._index.to_json())
        manifest.write(folder)  # last: a folder with a manifest is complete
        sync_files([folder / INDEX, folder / MANIFEST])


def _entries_of(part: Part, kind: str) -> dict[str, TensorEntry]:
    """Return the index of the shards that one rank writes; of one file, it names no records yet."""
    file = file_name(kind, part.rank, part.world) if part.plain is None else ""
    return merge_entries(
        {
            p.box.name: TensorEntry(
                p.values.dtype, p.global_shape, (Chunk(file, p.key, p.box.offset, p.box.shape),)
            )
        }
        for p in part.pieces[kind]
    )
