"""Writer of a checkpoint that is one file: rank 0 makes it without the bytes of tensors, every rank
writes its boxes into it, and rank 0 adds the manifest.
"""

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.index import Chunk, file_name, MANIFEST, TensorEntry
from lightning_par.checkpoint.optimizer_groups import merge_groups, split_states, torch_state
from lightning_par.checkpoint.part import Part, Plain
from lightning_par.checkpoint.pieces import Piece, unbroken_runs
from lightning_par.checkpoint.plain_file import append_records, make_blanks, write_skeleton
from lightning_par.checkpoint.storage import ChecksumFile, FileRecord, sync_files, write_tensors
from lightning_par.checkpoint.writer import Report, Save, SaveMetadata
from lightning_par.errors import CheckpointError
from lightning_par.upstream.tensor import storage_key

__all__ = ["FileSave"]


class FileSave(Save):
    """A save as one file: `prepare` writes all but the bytes of tensors; see `Save`."""

    def __init__(self, path: Path, part: Part, metadata: SaveMetadata) -> None:
        super().__init__(path, part, metadata)
        self._places: dict[str, int] = {}
        # Record -> bytes of a tensor in the state of the Trainer, such as that of a callback; only
        # rank 0 has any, and writes them.
        self._loose: dict[str, Tensor] = {}

    @property
    def _file(self) -> Path:
        assert isinstance(self._partial, Path)  # behind URLs there are folders only
        return self._partial

    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        index, world = self._index, self.part.world
        # Every tensor of every rank, at its global shape: the archive is that of one process.
        entries = {
            f"{kind}/{n}": e for kind, found in index.kinds.items() for n, e in found.items()
        }
        # A storage of its own for each, in no memory, so that its record can be told from the
        # others.
        blanks = make_blanks({name: (e.dtype, e.shape) for name, e in entries.items()})
        plains = [o.plain for o in outlines if o.plain is not None]
        ours: dict[str, bytes | int] = {}
        for rank, plain in enumerate(plains):
            ours[file_name("state", rank, world, "json")] = plain.state
            # The rank's tensors are on the rank still: their record is zeros until it writes
            # them.
            if plain.room:
                ours[file_name("state", rank, world)] = plain.room
        # After this the file has its full length (with holes), and every rank writes into it at
        # once.
        records, appended = write_skeleton(self._file, self._whole(plains, blanks), ours)
        names = {storage_key(blank.untyped_storage()): name for name, blank in blanks.items()}
        starts, record_of = {}, {}
        for record, (storage, place) in records.items():
            name = names.get(storage_key(storage))
            if name is None:
                # Not one of the blanks: a tensor inside the state of a callback, which only rank
                # 0 dumped. Seen as bytes, so that a view of it does not leave the rest of its
                # storage unwritten.
                bytes_of = torch.empty(0, dtype=torch.uint8, device=storage.device)
                self._loose[record] = bytes_of.set_(storage)
            else:
                starts[name], record_of[name] = place, record
        # Only now is it known which record of the archive holds which tensor.
        index.weights = _in_records(index.weights, "weights", record_of)
        index.optimizer = _in_records(index.optimizer, "optimizer", record_of)
        self._places = {name: place for name, (place, _) in appended.items()}
        self._places |= {record: place for record, (_, place) in records.items()}
        # Of what is already final: torch's own records and the states. Ranks report the rest.
        self._files = {
            name: _record_at(self._file, place, length)
            for name, (place, length) in appended.items()
            if not isinstance(ours.get(name), int)  # which a rank has still to write
        }
        # What the ranks are told; rank 0 broadcasts it, and no rank opens the archive to look.
        return {**starts, **self._places}

    def _whole(self, plains: Sequence[Plain], blanks: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the checkpoint that Lightning would have made on one device, its tensors blank."""
        index, metadata = self._index, self._metadata
        # Ranks of other stages know values that this one has not; of equal keys any is right.
        values = {key: value for plain in plains for key, value in plain.values.items()}
        whole = dict(self.part.dumped)
        # By name and not by rank: the same order as Lightning's, whatever the mesh, so that the
        # file equals one that a single device would have written.
        weights = {name: blanks[f"weights/{name}"] for name in index.weights}
        # Another tensor with the same storage, as tied weights have in a state dict.
        weights |= {name: weights[of].detach() for name, of in index.aliases.items()}
        weights |= _below("weights/", values)
        # The order of the model's `state_dict`: `load_state_dict` does not need it, but a file
        # that is compared or read by people does. What is not in it comes last.
        rank_of = {name: rank for rank, name in enumerate(metadata.state_order)}
        order = sorted(weights, key=lambda name: rank_of.get(name, len(rank_of)))
        whole["state_dict"] = OrderedDict((name, weights[name]) for name in order)
        if "optimizer_states" in whole:
            # Only of ranks that have optimizers: `merge_groups` wants the same number of each.
            all_groups = merge_groups([p.groups for p in plains if p.groups], metadata.place)
            found = {**_below("optimizer/", blanks), **_below("optimizer/", values)}
            names = dict.fromkeys(name for plain in plains for name in plain.state_names)
            # In the order in which the optimizer makes its states (`step` before `exp_avg`).
            place = {name: i for i, name in enumerate(names)}
            order = sorted(found, key=lambda key: place.get(key.rpartition("/")[2], len(place)))
            entries = {key: found[key] for key in order}
            whole["optimizer_states"] = [
                torch_state(groups, split_states(number, entries))
                for number, groups in enumerate(all_groups)
            ]
        return whole

    def hold(self) -> None:
        """Copy the tensors to the CPU: training may change them while they are written."""
        super().hold()
        self._loose = {name: v.to("cpu", copy=True) for name, v in self._loose.items()}

    def _write(self, starts: Mapping[str, int]) -> dict[str, FileRecord]:
        # Checked first: with O_CREAT a node without the shared folder would make a file of its
        # own.
        if not self._file.exists():
            raise CheckpointError(
                "LP508",
                f"this rank does not see the file {self._partial.name}, which rank 0 created. Save "
                "into a folder that all nodes share",
            )
        part, files = self.part, {}
        # Without truncation, and by `pwrite`: all ranks have the file open, each at its own
        # places.
        with ChecksumFile(self._partial, parts=True) as file:
            for kind, pieces in part.pieces.items():
                for piece in pieces:
                    _write_box(file, starts[f"{kind}/{piece.box.name}"], piece)
                    # The checksum is that of the box as this rank wrote it, which a reader
                    # computes in this order.
                    files[f"{kind}/{piece.key}"] = file.record
            for record, values in self._loose.items():
                file.start_part(starts[record])
                file.write(values.cpu().numpy())
                files[record] = file.record
            if part.tensors:
                name = file_name("state", part.rank, part.world)
                file.start_part(starts[name])
                write_tensors(file, part.tensors)
                files[name] = file.record
        # Before the report: rank 0 publishes when all reports are there, and then it must be on
        # disk.
        sync_files([self._partial])
        return files

    def _seal(self, reports: Sequence[Report]) -> None:
        manifest = self._metadata.manifest
        manifest.places = self._places
        content = manifest.encode(index=self._index.to_json())
        # Last of all: an archive without it is not yet a checkpoint, whatever else it holds.
        append_records(self._file, {MANIFEST: content})


def _below(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {k.removeprefix(prefix): v for k, v in entries.items() if k.startswith(prefix)}


def _in_records(
    entries: Mapping[str, TensorEntry], kind: str, record_of: Mapping[str, str]
) -> dict[str, TensorEntry]:
    """Return entries whose boxes name the record that holds the whole tensor."""
    found = {}
    for name, entry in entries.items():
        record = record_of[f"{kind}/{name}"]
        chunks = tuple(Chunk(record, c.key, c.offset, c.shape) for c in entry.chunks)
        found[name] = TensorEntry(entry.dtype, entry.shape, chunks)
    return found


def _record_at(path: Path, place: int, length: int) -> FileRecord:
    with path.open("rb") as file:
        # Read back: zipfile wrote it, and tells no checksum of what torch wrote.
        file.seek(place)
        return FileRecord(length, f"{zlib.crc32(file.read(length)):08x}")


def _write_box(file: ChecksumFile, start: int, piece: Piece) -> None:
    """Write a box of a tensor whose first byte is at `start`."""
    places, run = unbroken_runs(piece.box, piece.global_shape)
    # One part per box, so that its checksum does not depend on where in the file it lies.
    file.start_part(start)
    size = piece.values.element_size()
    file.write_values(piece.values, (start + place * size for place in places), run)
