"""Writer of a checkpoint that is one file: rank 0 makes it without the bytes of tensors, every rank
writes its boxes into it, and rank 0 adds the manifest.
"""

import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.index import file_name, MANIFEST, TensorEntry
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

    def _lay_out(self, outlines: Sequence[Report]) -> dict[str, int]:
        index, world = self._index, self.part.world
        entries = {
            f"{kind}/{n}": e for kind, found in index.kinds.items() for n, e in found.items()
        }
        blanks = make_blanks({name: (e.dtype, e.shape) for name, e in entries.items()})
        plains = [o.plain for o in outlines if o.plain is not None]
        records = write_skeleton(self._partial, self._whole(plains, blanks))
        names = {storage_key(blank.untyped_storage()): name for name, blank in blanks.items()}
        starts, record_of = {}, {}
        for record, (storage, place) in records.items():
            name = names.get(storage_key(storage))
            if name is None:
                bytes_of = torch.empty(0, dtype=torch.uint8, device=storage.device)
                self._loose[record] = bytes_of.set_(storage)
            else:
                starts[name], record_of[name] = place, record
        index.weights = _in_records(index.weights, "weights", record_of)
        index.optimizer = _in_records(index.optimizer, "optimizer", record_of)
        ours: dict[str, bytes | int] = {}
        for rank, plain in enumerate(plains):
            ours[file_name("state", rank, world, "json")] = plain.state
            if plain.room:
                ours[file_name("state", rank, world)] = plain.room
        appended = append_records(self._partial, ours)
        self._places = {name: place for name, (place, _) in appended.items()}
        self._places |= {record: place for record, (_, place) in records.items()}
        self._files = {
            name: _record_at(self._partial, place, length)
            for name, (place, length) in appended.items()
            if not isinstance(ours.get(name), int)  # which a rank has still to write
        }
        return {**starts, **self._places}

    def _whole(self, plains: Sequence[Plain], blanks: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the checkpoint that Lightning would have made on one device, its tensors blank."""
        index, metadata = self._index, self._metadata
        values = {key: value for plain in plains for key, value in plain.values.items()}
        whole = dict(self.part.dumped)
        weights = {name: blanks[f"weights/{name}"] for name in index.weights}
        # Another tensor with the same storage, as tied weights have in a state dict.
        weights |= {name: weights[of].detach() for name, of in index.aliases.items()}
        weights |= _below("weights/", values)
        rank_of = {name: rank for rank, name in enumerate(metadata.state_order)}
        order = sorted(weights, key=lambda name: rank_of.get(name, len(rank_of)))
        whole["state_dict"] = OrderedDict((name, weights[name]) for name in order)
        if "optimizer_states" in whole:
            all_groups = merge_groups([p.groups for p in plains if p.groups], metadata.place)
            found = {**_below("optimizer/", blanks), **_below("optimizer/", values)}
            names = dict.fromkeys(name for plain in plains for name in plain.state_names)
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
        if not self._partial.exists():
            raise CheckpointError(
                "LP508",
                f"{self._partial.name}, which rank 0 made, is not there: all nodes have to share "
                "the folder",
            )
        part, files = self.part, {}
        with ChecksumFile(self._partial, parts=True) as file:
            for kind, pieces in part.pieces.items():
                for piece in pieces:
                    _write_box(file, starts[f"{kind}/{piece.box.name}"], piece)
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
        sync_files([self._partial])
        return files

    def _seal(self, reports: Sequence[Report]) -> None:
        manifest = self._metadata.manifest
        manifest.places = self._places
        content = manifest.encode(index=self._index.to_json())
        append_records(self._partial, {MANIFEST: content})


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


def _write_box(file: ChecksumFile, start: int, piece: Piece) -> None:
    """Write a box of a tensor whose first byte is at `start`."""
    places, run = unbroken_runs(piece.box, piece.global_shape)
    file.start_part(start)
    size = piece.values.element_size()
    file.write_values(piece.values, (start + place * size for place in places), run)
