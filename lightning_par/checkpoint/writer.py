"""Checkpoint writer: what a rank writes, and checkpoints that are folders.

Every rank writes its files into a hidden folder, which rank 0 commits.
"""

import json
import shutil
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
from lightning_par.checkpoint.pieces import Piece
from lightning_par.checkpoint.storage import (
    ChecksumFile,
    DTYPES,
    FileRecord,
    publish,
    sync_files,
    write_json,
    write_tensors,
)
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError, describe

__all__ = [
    "Part",
    "Plain",
    "SaveMetadata",
    "WriteReport",
    "check_reports",
    "commit",
    "encode_state",
    "entries_of",
    "make_part",
    "merge_groups",
    "merge_index",
    "not_saved",
    "write_part",
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
    """What goes into the pickle of a checkpoint that is one file, not encoded.

    Attributes:
        state: What the Trainer dumped; of its state dict and its optimizers only that they are
            there. Used of rank 0.
        values: As `Part.values`.
        groups: As `Part.groups`.
        state_names: Names of optimizer states (``exp_avg``), in the optimizers' order.
    """

    state: Mapping[str, Any]
    values: Mapping[str, Any]
    groups: Sequence[Sequence[Mapping[str, Any]]]
    state_names: Sequence[str] = ()


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
        plain: What of it goes into a pickle, too; None: the checkpoint is a folder.
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
    plain: Plain | None = None
    error: str | None = None

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
    plain: Mapping[str, Any] | None = None,
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
        plain: For one file: what the Trainer dumped, see `Plain.state`.

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
    # All states, as of some of them another rank may be the writer.
    state_names = list(dict.fromkeys(p.box.name.rpartition("/")[2] for p in optimizer))
    encoder = Encoder(file_name("state", rank, world))
    encode = encoder.encode
    return Part(
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
        plain=None
        if plain is None
        else Plain(state=plain, values=values or {}, groups=groups, state_names=state_names),
    )


@dataclass(kw_only=True)
class WriteReport:
    """Result of `write_part` on one rank, which it sends to rank 0.

    Attributes:
        rank: Global rank.
        step: Number of optimizer steps of its weights.
        files: Name -> length and checksum of the files that it wrote.
        index: Index of what it wrote.
        error: Why it could not write; None: it could.
    """

    rank: int
    step: int = 0
    files: dict[str, FileRecord] = field(default_factory=dict)
    index: Index = field(default_factory=Index)
    error: str | None = None


def write_part(folder: Path, part: Part) -> WriteReport:
    """Write the files of one rank and fsync them.

    Args:
        folder: Folder of the files, created if it does not exist.
        part: What this rank writes.

    Returns:
        The report of this rank. An error is reported in it and not raised: the other ranks wait for
        the report.
    """
    report = WriteReport(rank=part.rank, step=part.step, error=part.error)
    if part.error is not None:
        return report
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.index.weights = _write_pieces(folder, "weights", part.weights, part, report)
        report.index.optimizer = _write_pieces(folder, "optimizer", part.optimizer, part, report)
        _write_state(folder, part, report)
        sync_files(folder / name for name in report.files)
    except Exception as error:
        report.error = describe(error)
    return report


def _write_pieces(
    folder: Path, kind: str, pieces: Sequence[Piece], part: Part, report: WriteReport
) -> dict[str, TensorEntry]:
    if not pieces:
        return {}
    name = file_name(kind, part.rank, part.world)
    with ChecksumFile(folder / name) as file:
        write_tensors(file, {piece.key: piece.values for piece in pieces})
    report.files[name] = file.record
    return entries_of(pieces, name)


def entries_of(pieces: Sequence[Piece], file: str) -> dict[str, TensorEntry]:
    """Return the index of shards that one rank writes.

    Args:
        pieces: The shards.
        file: Name of the file that holds them.
    """
    return merge_entries(
        {
            p.box.name: TensorEntry(
                p.values.dtype, p.global_shape, (Chunk(file, p.key, p.box.offset, p.box.shape),)
            )
        }
        for p in pieces
    )


def _write_state(folder: Path, part: Part, report: WriteReport) -> None:
    report.index.values, report.index.groups = dict(part.values), part.groups
    name = file_name("state", part.rank, part.world, "json")
    report.files[name] = write_json(folder / name, part.state)
    if part.tensors:
        name = file_name("state", part.rank, part.world)
        with ChecksumFile(folder / name) as file:
            write_tensors(file, part.tensors)
        report.files[name] = file.record


def encode_state(part: Part) -> bytes:
    """Return the state of a rank as JSON."""
    return json.dumps(part.state, allow_nan=False).encode()


def commit(
    folder: Path,
    final: Path,
    reports: Sequence[WriteReport],
    manifest: Manifest,
    *,
    aliases: Mapping[str, str],
    order: Callable[[str], int],
) -> None:
    """Write index and manifest and rename the folder to its final path; called on one rank.

    If anything fails, the hidden folder is removed, and an existing checkpoint of that name stays.

    Args:
        folder: Hidden folder into which all ranks have written.
        final: Final path of the checkpoint.
        reports: Reports of all ranks, in their order.
        manifest: Manifest with an empty list of files.
        aliases: Further FQNs of tied weights -> FQN under which the weight is stored.
        order: Function from a parameter's FQN to its position in the model.

    Raises:
        CheckpointError: A rank failed, or what they wrote does not fit together; names every such
            rank, and the cause.
    """
    try:
        check_reports(reports, manifest.step)
        _check_shared(folder, reports)
        index = merge_index(reports, aliases, order)
        for report in reports:
            manifest.files.update(report.files)
        manifest.files[INDEX] = write_json(folder / INDEX, index.to_json())
        manifest.write(folder)  # last: a folder with a manifest is complete
        sync_files([folder / INDEX, folder / MANIFEST])
        publish(folder, final)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise not_saved(final, error) from error


def not_saved(final: Path, error: Exception) -> CheckpointError:
    """Return the error of a save that failed, after its hidden folder or file is removed.

    Args:
        final: Path of the checkpoint.
        error: What failed on rank 0, or a `CheckpointError` that says what failed elsewhere.
    """
    cause = error.message if isinstance(error, CheckpointError) else f"rank 0: {error}"
    before = "what was there before is untouched" if final.exists() else "nothing is left"
    return CheckpointError("LP508", f"{final} was not saved, {before}: {cause}")


def merge_index(
    reports: Sequence[WriteReport], aliases: Mapping[str, str], order: Callable[[str], int]
) -> Index:
    """Return the index of what all ranks wrote.

    Args:
        reports: Reports of all ranks, in their order.
        aliases: Further FQNs of tied weights -> FQN under which the weight is stored.
        order: Function from a parameter's FQN to its position in the model.

    Raises:
        CheckpointError: A part of a tensor is missing or there twice.
    """
    index = Index(
        weights=merge_entries(r.index.weights for r in reports),
        aliases=dict(aliases),
        optimizer=merge_entries(r.index.optimizer for r in reports),
        groups=merge_groups([r.index.groups for r in reports if r.index.groups], order),
        values={k: v for r in reports for k, v in r.index.values.items()},
    )
    # A hook of the user may have left a tied weight out of the state dict.
    index.aliases = {k: v for k, v in index.aliases.items() if v in index.weights}
    index.check_complete()
    return index


def check_reports(reports: Sequence[WriteReport], step: int) -> None:
    """Check that no rank failed, and that all are at the same step.

    Raises:
        CheckpointError: With every rank that did, or is not.
    """
    # One kind of problem at a time: a rank that failed has no step and no files to compare.
    problems = [f"rank {r.rank}: {r.error}" for r in reports if r.error is not None]
    if not problems:
        problems = [
            f"rank {r.rank} is at step {r.step}, rank {reports[0].rank} at step {step}"
            for r in reports
            if r.step != step
        ]
    if problems:
        raise CheckpointError("LP508", "; ".join(problems))


def _check_shared(folder: Path, reports: Sequence[WriteReport]) -> None:
    problems = [
        f"rank {r.rank} wrote {name}, which rank {reports[0].rank} does not see: all nodes "
        "have to share the folder"
        for r in reports
        for name in r.files
        if not (folder / name).exists()
    ]
    if problems:
        raise CheckpointError("LP508", "; ".join(problems))


def merge_groups(
    parts: Sequence[Sequence[Sequence[Mapping[str, Any]]]], order: Callable[[str], int]
) -> list[list[dict[str, Any]]]:
    """Merge the parameter groups of all ranks: FQNs of all, options of one rank.

    FQNs are in the optimizer's order, by which torch numbers them. With a pipeline, a rank's groups
    hold the parameters of its stages only, and the model's order takes the place of that.

    Args:
        parts: Per rank that has optimizers, per optimizer its groups.
        order: Function from a parameter's FQN to its position in the model.
    """
    merged = []
    for optimizers in zip(*parts, strict=True):
        groups = []
        for group in zip(*optimizers, strict=True):
            given = {tuple(dict.fromkeys(part["params"])) for part in group}
            names = {name for part in given for name in part}
            params = sorted(names, key=order) if len(given) > 1 else list(*given)
            groups.append({**group[0], "params": params})
        merged.append(groups)
    return merged
