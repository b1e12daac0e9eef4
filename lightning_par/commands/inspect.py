"""The command that shows and verifies a checkpoint."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_par.commands import PathName, quick_imports

if TYPE_CHECKING:
    from lightning_par.checkpoint.index import TensorEntry
    from lightning_par.checkpoint.reader import CheckpointReader

__all__ = ["inspect"]


def inspect(checkpoint: PathName, *, tensors: bool = False, no_verify: bool = False) -> int:
    """Show what a checkpoint holds: mesh sizes, step, bytes; and verify all checksums.

    Exits with status 1 if a file is damaged.

    Args:
        checkpoint: A folder, a file or a URL.
        tensors: List every weight.
        no_verify: Do not read the files.

    Raises:
        CheckpointError: The manifest or the index is missing or damaged.
    """
    with quick_imports():
        from lightning_par.checkpoint.file_system import place_of
        from lightning_par.checkpoint.reader import CheckpointReader

    reader = CheckpointReader(place_of(checkpoint))
    print(*_summary(reader), sep="\n")
    if tensors:
        print(*_tensors(reader.index.weights), sep="\n")
    if no_verify:
        return 0
    problems = reader.problems(sorted(reader.manifest.files))
    count = len(reader.manifest.files)
    if not problems:
        print(f"verified: all {count} files have the length and checksum that were written")
        return 0
    print(f"damaged: {len(problems)} of {count} files", *problems, sep="\n  ")
    return 1


def _summary(reader: "CheckpointReader") -> Iterator[str]:
    manifest, index = reader.manifest, reader.index
    mesh_sizes = " x ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1)
    yield f"{reader.path}: step {manifest.step}, epoch {manifest.epoch}"
    yield f"written by {manifest.world_size} ranks: {mesh_sizes or '1 device'}"
    yield "versions: " + ", ".join(f"{name} {v}" for name, v in manifest.versions.items())
    for kind in ("weights", "optimizer", "state"):
        names = [name for name in manifest.files if name.startswith((f"{kind}-", f"{kind}/"))]
        size = sum(manifest.files[name].length for name in names)
        # One file has a checksum for every part of a tensor.
        word = "parts" if manifest.places and kind != "state" else "files"
        yield f"{kind}: {len(names)} {word}, {size:,} bytes"
    numbers = sum(entry.numel for entry in index.weights.values())
    dtypes = sorted({str(entry.dtype).removeprefix("torch.") for entry in index.weights.values()})
    tied = f", {len(index.aliases)} more names of tied ones" if index.aliases else ""
    yield f"  {len(index.weights)} tensors of {numbers:,} numbers ({', '.join(dtypes)}){tied}"
    if index.groups:
        yield f"  {len(index.groups)} optimizers, {len(index.optimizer)} tensors of their states"


def _tensors(entries: "dict[str, TensorEntry]") -> Iterator[str]:
    for name in sorted(entries):
        entry = entries[name]
        parts = f" in {len(entry.chunks)} parts" if len(entry.chunks) > 1 else ""
        yield f"{name} {list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}{parts}"
