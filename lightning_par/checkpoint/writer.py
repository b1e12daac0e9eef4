"""Writing a checkpoint: every rank its own files into a hidden folder, which one rank then
completes and renames.
"""

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
    DTYPES,
    file_order,
    FileRecord,
    publish,
    sync_files,
    write_json,
    write_tensors,
)
from lightning_par.dtensor import Box
from lightning_par.errors import CheckpointError

__all__ = ["Part", "Report", "complete", "make_part", "write_part"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one rank writes; `make_part` makes it.

    Attributes:
        rank: Who.
        world: Of how many.
        step: Optimizer steps that its weights have seen.
        weights: Its pieces of the weights.
        optimizer: Its pieces of the optimizer states, named ``"0/<weight>/exp_avg"``.
        state: Anything else, encoded.
        tensors: Of the state, the values and the groups.
        values: What belongs to weights and optimizer states and is no tensor, encoded; see `Index`.
        groups: For every optimizer its groups: encoded options, and names of parameters.
        error: Why there is nothing to write, or None.
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
    error: str | None = None

    def only(self, boxes: Container[Box]) -> "Part":
        """Return a copy with the pieces of these boxes."""

        def chosen(pieces: Sequence[Piece]) -> list[Piece]:
            return [p for p in pieces if p.box in boxes]

        return replace(self, weights=chosen(self.weights), optimizer=chosen(self.optimizer))

    def on_cpu(self) -> "Part":
        """Return a copy whose tensors of weights and optimizers no training step changes."""

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
) -> Part:
    """Encode what one rank writes besides its tensors.

    Args:
        rank: Who.
        world: Of how many.
        step: See `Part`.
        weights: See `Part`.
        optimizer: See `Part`.
        state: Anything, by name.
        values: By the names that `Index.values` says.
        groups: For every optimizer its groups: options, and under ``"params"`` names.

    Raises:
        CheckpointError: Something cannot be stored; names it.
    """
    for piece in (*weights, *optimizer):
        if piece.values.dtype not in DTYPES.values():
            raise CheckpointError(
                f"{piece.box.name} is of {piece.values.dtype}, which safetensors cannot hold."
            )
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
    )


@dataclass(kw_only=True)
class Report:
    """What one rank has written, or why it could not.

    Attributes:
        rank: Who.
        step: Of its weights.
        files: Name -> length and checksum.
        index: Of what it wrote.
        error: What went wrong, or None.
    """

    rank: int
    step: int = 0
    files: dict[str, FileRecord] = field(default_factory=dict)
    index: Index = field(default_factory=Index)
    error: str | None = None


def write_part(folder: Path, part: Part) -> Report:
    """Write the files of one rank; they are on the disk when this returns.

    Args:
        folder: Made if it is not there.
        part: What to write.

    Returns:
        What was written; if that failed, a report with the error, and nothing is raised.
    """
    report = Report(rank=part.rank, step=part.step, error=part.error)
    if part.error is not None:
        return report
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.index.weights = _write_pieces(folder, "weights", part.weights, part, report)
        report.index.optimizer = _write_pieces(folder, "optimizer", part.optimizer, part, report)
        _write_state(folder, part, report)
        sync_files(folder / name for name in report.files)
    except Exception as error:
        cause = error if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        report.error = str(cause)
    return report


def _write_pieces(
    folder: Path, kind: str, pieces: Sequence[Piece], part: Part, report: Report
) -> dict[str, TensorEntry]:
    if not pieces:
        return {}
    name = file_name(kind, part.rank, part.world)
    by_key = {piece.key: piece for piece in pieces}
    specs = {key: (piece.values.dtype, piece.box.shape) for key, piece in by_key.items()}
    values = ((key, by_key[key].values) for key in file_order(specs))
    report.files[name] = write_tensors(folder / name, specs, values)
    return merge_entries(
        {
            p.box.name: TensorEntry(
                p.values.dtype, p.global_shape, (Chunk(name, p.key, p.box.offset, p.box.shape),)
            )
        }
        for p in pieces
    )


def _write_state(folder: Path, part: Part, report: Report) -> None:
    report.index.values, report.index.groups = dict(part.values), part.groups
    name = file_name("state", part.rank, part.world, "json")
    report.files[name] = write_json(folder / name, part.state)
    if part.tensors:
        name = file_name("state", part.rank, part.world)
        specs = {key: (t.dtype, tuple(t.shape)) for key, t in part.tensors.items()}
        values = ((key, part.tensors[key]) for key in file_order(specs))
        report.files[name] = write_tensors(folder / name, specs, values)


def complete(
    folder: Path,
    final: Path,
    reports: Sequence[Report],
    manifest: Manifest,
    *,
    aliases: Mapping[str, str],
    order: Callable[[str], int],
) -> None:
    """Write index and manifest and give the checkpoint its name; one rank calls this.

    Whatever goes wrong, the hidden folder is removed and what had the name before stays.

    Args:
        folder: Where all ranks have written.
        final: The checkpoint.
        reports: Of all ranks.
        manifest: Without the files.
        aliases: Further names of tied weights.
        order: Place of a parameter's name in the model.

    Raises:
        CheckpointError: Names every rank that failed, and the cause.
    """
    try:
        _check_reports(folder, reports, manifest.step)
        index = Index(
            weights=merge_entries(r.index.weights for r in reports),
            aliases=dict(aliases),
            optimizer=merge_entries(r.index.optimizer for r in reports),
            groups=_merge_groups([r.index.groups for r in reports if r.index.groups], order),
            values={k: v for r in reports for k, v in r.index.values.items()},
        )
        index.aliases = {k: v for k, v in index.aliases.items() if v in index.weights}
        index.check_complete()
        for report in reports:
            manifest.files.update(report.files)
        manifest.files[INDEX] = write_json(folder / INDEX, index.to_json())
        manifest.write(folder)
        sync_files([folder / INDEX, folder / MANIFEST])
        publish(folder, final)
    except Exception as error:
        shutil.rmtree(folder, ignore_errors=True)
        cause = error if isinstance(error, CheckpointError) else f"rank 0: {error}"
        before = "what was there before is untouched" if final.exists() else "nothing is left"
        raise CheckpointError(f"{final} was not saved, {before}: {cause}") from error


def _check_reports(folder: Path, reports: Sequence[Report], step: int) -> None:
    """Refuse what cannot become a checkpoint."""
    problems = [f"rank {r.rank}: {r.error}" for r in reports if r.error is not None]
    if not problems:
        problems = [
            f"rank {r.rank} is at step {r.step}, rank {reports[0].rank} at step {step}"
            for r in reports
            if r.step != step
        ]
    if not problems:
        problems = [
            f"rank {r.rank} wrote {name}, which rank {reports[0].rank} does not see: all nodes "
            "have to share the folder"
            for r in reports
            for name in r.files
            if not (folder / name).exists()
        ]
    if problems:
        raise CheckpointError("; ".join(problems))


def _merge_groups(
    parts: Sequence[Sequence[Sequence[Mapping[str, Any]]]], order: Callable[[str], int]
) -> list[list[dict[str, Any]]]:
    """Give every group the parameters of all ranks, in the model's order; options are rank 0's."""
    merged = []
    for optimizers in zip(*parts, strict=True):
        groups = []
        for group in zip(*optimizers, strict=True):
            names = {name for part in group for name in part["params"]}
            groups.append({**group[0], "params": sorted(names, key=order)})
        merged.append(groups)
    return merged
