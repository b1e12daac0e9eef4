"""Writer of a checkpoint that is one file: rank 0 makes it without the bytes of tensors, every rank
writes its boxes into it, and rank 0 adds the manifest.
"""

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.index import file_name, Index, MANIFEST, Manifest, TensorEntry
from lightning_par.checkpoint.optimizer_groups import split_states, torch_state
from lightning_par.checkpoint.pieces import Piece, unbroken_runs
from lightning_par.checkpoint.plain_file import append_records, make_blanks, write_skeleton
from lightning_par.checkpoint.storage import (
    ChecksumFile,
    FileRecord,
    publish,
    remove_path,
    sync_files,
    tensors_length,
    write_tensors,
)
from lightning_par.checkpoint.writer import (
    check_reports,
    encode_state,
    entries_of,
    merge_groups,
    merge_index,
    not_saved,
    Part,
    SaveMetadata,
    WriteReport,
)
from lightning_par.errors import describe
from lightning_par.upstream.tensor import storage_key

__all__ = ["Outline", "Skeleton", "begin_file", "commit_file", "outline", "write_slices"]


@dataclass(kw_only=True)
class Outline:
    """What one rank will write, without the bytes of its tensors; it sends this to rank 0.

    Attributes:
        report: Its index; the boxes have no file yet.
        values: Entries of the state dicts that are no tensors, as they are.
        groups: Parameter groups, as they are.
        state_names: As `Plain.state_names`.
        state: The rest of its state as JSON.
        room: Length of the record for tensors in that state; 0: there are none.
    """

    report: WriteReport
    values: Mapping[str, Any] = field(default_factory=dict)
    groups: Sequence[Any] = ()
    state_names: Sequence[str] = ()
    state: bytes = b""
    room: int = 0


@dataclass(kw_only=True)
class Skeleton:
    """The file before tensors are in it.

    Attributes:
        index: Index of all ranks.
        places: Record -> place of its first byte.
        starts: ``"weights/<name>"`` or ``"optimizer/<name>"`` -> place of the tensor's first byte;
            what the ranks need.
        loose: Record -> bytes of a tensor in the state of the Trainer, which rank 0 writes.
        files: Checksums of what is written already.
    """

    index: Index
    places: dict[str, int]
    starts: dict[str, int]
    loose: dict[str, Tensor]
    files: dict[str, FileRecord]


def outline(part: Part) -> Outline:
    """Return what a rank will write; errors are kept in the report.

    Args:
        part: With `plain`.
    """
    report = WriteReport(rank=part.rank, step=part.step, error=part.error)
    if part.error is not None:
        return Outline(report=report)
    assert part.plain is not None
    report.index = Index(
        weights=entries_of(part.weights, ""),
        optimizer=entries_of(part.optimizer, ""),
        groups=part.groups,
        values=dict(part.values),
    )
    return Outline(
        report=report,
        values=part.plain.values,
        groups=part.plain.groups,
        state_names=part.plain.state_names,
        state=encode_state(part),
        room=tensors_length(part.tensors) if part.tensors else 0,
    )


def begin_file(
    partial: Path, outlines: Sequence[Outline], part: Part, metadata: SaveMetadata
) -> Skeleton:
    """Write the file without the bytes of tensors; called on rank 0.

    Args:
        partial: File to write.
        outlines: Those of all ranks, in their order.
        part: What rank 0 writes.
        metadata: Names and their order.

    Raises:
        CheckpointError: A rank failed, or what they hold does not fit together.
        OSError: The disk is full, for example.
    """
    reports = [o.report for o in outlines]
    check_reports(reports, metadata.manifest.step)
    index = merge_index(reports, metadata.aliases, metadata.place)
    entries = {f"weights/{name}": entry for name, entry in index.weights.items()}
    entries |= {f"optimizer/{name}": entry for name, entry in index.optimizer.items()}
    blanks = make_blanks({name: (e.dtype, e.shape) for name, e in entries.items()})
    records = write_skeleton(partial, _whole(part, outlines, index, blanks, metadata))
    names = {storage_key(blank.untyped_storage()): name for name, blank in blanks.items()}
    starts, record_of, loose = {}, {}, {}
    for record, (storage, place) in records.items():
        name = names.get(storage_key(storage))
        if name is None:
            loose[record] = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        else:
            starts[name], record_of[name] = place, record
    index.weights = _in_records(index.weights, "weights", record_of)
    index.optimizer = _in_records(index.optimizer, "optimizer", record_of)
    ours: dict[str, bytes | int] = {}
    for rank, other in enumerate(outlines):
        ours[file_name("state", rank, part.world, "json")] = other.state
        if other.room:
            ours[file_name("state", rank, part.world)] = other.room
    appended = append_records(partial, ours)
    return Skeleton(
        index=index,
        places={
            **{name: place for name, (place, _) in appended.items()},
            **{record: place for record, (_, place) in records.items()},
        },
        starts=starts,
        loose=loose,
        files={
            name: _record_at(partial, place, length)
            for name, (place, length) in appended.items()
            if not isinstance(ours.get(name), int)  # which a rank has still to write
        },
    )


def _whole(
    part: Part,
    outlines: Sequence[Outline],
    index: Index,
    blanks: Mapping[str, Tensor],
    metadata: SaveMetadata,
) -> dict[str, Any]:
    """Return the checkpoint that Lightning would have made on one device, with blank tensors."""
    assert part.plain is not None
    values = {key: value for o in outlines for key, value in o.values.items()}
    whole = dict(part.plain.state)
    weights = {name: blanks[f"weights/{name}"] for name in index.weights}
    # Another tensor with the same storage, as tied weights have in a state dict.
    weights |= {name: weights[of].detach() for name, of in index.aliases.items()}
    weights |= _below("weights/", values)
    rank_of = {name: rank for rank, name in enumerate(metadata.state_order)}
    order = sorted(weights, key=lambda name: rank_of.get(name, len(rank_of)))
    whole["state_dict"] = OrderedDict((name, weights[name]) for name in order)
    if "optimizer_states" in whole:
        all_groups = merge_groups([o.groups for o in outlines if o.groups], metadata.place)
        found = {**_below("optimizer/", blanks), **_below("optimizer/", values)}
        names = dict.fromkeys(name for o in outlines for name in o.state_names)
        place = {name: i for i, name in enumerate(names)}
        order = sorted(found, key=lambda key: place.get(key.rpartition("/")[2], len(place)))
        entries = {key: found[key] for key in order}
        whole["optimizer_states"] = [
            torch_state(groups, split_states(number, entries))
            for number, groups in enumerate(all_groups)
        ]
    return whole


def _below(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)}


def _in_records(
    entries: Mapping[str, TensorEntry], kind: str, record_of: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Return entries whose boxes name the record that holds the whole tensor."""
    return {
        name: replace(
            entry,
            chunks=tuple(replace(c, file=record_of[f"{kind}/{name}"]) for c in entry.chunks),
        )
        for name, entry in entries.items()
    }


def _record_at(path: Path, place: int, length: int) -> FileRecord:
    with path.open("rb") as file:
        file.seek(place)
        return FileRecord(length, f"{zlib.crc32(file.read(length)):08x}")


def write_slices(
    partial: Path, part: Part, skeleton: Skeleton | None, starts: Mapping[str, int]
) -> WriteReport:
    """Write what one rank holds into the file, and fsync it.

    Args:
        partial: The file.
        part: What this rank writes.
        skeleton: On rank 0.
        starts: `Skeleton.starts`, and the places of the records for tensors in the state of a rank.

    Returns:
        The report of this rank, with checksums by the names that the manifest gives them. An error
        is reported in it and not raised: the other ranks wait for the report.
    """
    report = WriteReport(rank=part.rank, step=part.step, error=part.error)
    try:
        with ChecksumFile(partial, parts=True) as file:
            for kind, pieces in (("weights", part.weights), ("optimizer", part.optimizer)):
                for piece in pieces:
                    _write_box(file, starts[f"{kind}/{piece.box.name}"], piece)
                    report.files[f"{kind}/{piece.key}"] = file.record
            for record, values in ({} if skeleton is None else skeleton.loose).items():
                file.start_part(starts[record])
                file.write(values.cpu().numpy())
                report.files[record] = file.record
            if part.tensors:
                name = file_name("state", part.rank, part.world)
                file.start_part(starts[name])
                write_tensors(file, part.tensors)
                report.files[name] = file.record
        sync_files([partial])
    except FileNotFoundError:
        report.error = (
            f"{partial.name}, which rank 0 made, is not there: all nodes have to share the folder"
        )
    except Exception as error:
        report.error = describe(error)
    return report


def _write_box(file: ChecksumFile, start: int, piece: Piece) -> None:
    """Write a box of a tensor whose first byte is at `start`."""
    places, run = unbroken_runs(piece.box, piece.global_shape)
    file.start_part(start)
    size = piece.values.element_size()
    file.write_values(piece.values, (start + place * size for place in places), run)


def commit_file(
    partial: Path,
    final: Path,
    reports: Sequence[WriteReport],
    skeleton: Skeleton,
    manifest: Manifest,
) -> None:
    """Append the manifest and rename the file to its final path; called on rank 0.

    If anything fails, the hidden file is removed, and an existing checkpoint of that name stays.

    Args:
        partial: Hidden file into which all ranks have written.
        final: Final path of the checkpoint.
        reports: Reports of all ranks, in their order.
        skeleton: What `begin_file` gave.
        manifest: Manifest with an empty list of files.

    Raises:
        CheckpointError: A rank failed; names every such rank, and the cause.
    """
    try:
        check_reports(reports, manifest.step)
        manifest.places, manifest.files = skeleton.places, dict(skeleton.files)
        for report in reports:
            manifest.files |= report.files
        append_records(partial, {MANIFEST: manifest.encode(index=skeleton.index.to_json())})
        publish(partial, final)
    except Exception as error:
        remove_path(partial)
        raise not_saved(final, error) from error
