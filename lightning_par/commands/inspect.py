"""Show what a checkpoint holds: mesh sizes, step, bytes; and verify all checksums."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from lightning_par.checkpoint.index import TensorEntry
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.commands import takes_file

__all__ = ["main", "make_parser"]

_KINDS = ("weights", "optimizer", "state")


def main(arguments: list[str]) -> int:
    """Print the contents of a checkpoint and verify its files.

    Args:
        arguments: What follows ``lightning-par inspect``.

    Returns:
        The exit status: 0, or 1 if a file is damaged.

    Raises:
        CheckpointError: The manifest or the index is missing or damaged.
    """
    options = make_parser().parse_args(arguments)
    reader = CheckpointReader(Path(options.path))
    print("\n".join(_summary(reader)))
    if options.tensors:
        print("\n".join(_tensors(reader.index.weights)))
    if options.no_verify:
        return 0
    problems = reader.problems(sorted(reader.manifest.files))
    count = len(reader.manifest.files)
    if not problems:
        print(f"verified: all {count} files have the length and checksum that were written")
        return 0
    print(f"damaged: {len(problems)} of {count} files")
    print("\n".join(f"  {problem}" for problem in problems))
    return 1


def _summary(reader: CheckpointReader) -> Iterator[str]:
    manifest, index = reader.manifest, reader.index
    mesh_sizes = " x ".join(f"{axis} {size}" for axis, size in manifest.layout.items() if size > 1)
    yield f"{reader.path}: step {manifest.step}, epoch {manifest.epoch}"
    yield f"written by {manifest.world_size} ranks: {mesh_sizes or '1 device'}"
    yield "versions: " + ", ".join(f"{name} {v}" for name, v in manifest.versions.items())
    for kind in _KINDS:
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


def _tensors(entries: dict[str, TensorEntry]) -> Iterator[str]:
    for name in sorted(entries):
        entry = entries[name]
        parts = f" in {len(entry.chunks)} parts" if len(entry.chunks) > 1 else ""
        yield f"{name} {list(entry.shape)} {str(entry.dtype).removeprefix('torch.')}{parts}"


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="lightning-par inspect", description=__doc__)
    takes_file(parser.add_argument("path", metavar="CHECKPOINT", help="a folder or a file"))
    parser.add_argument("--tensors", action="store_true", help="list every weight")
    parser.add_argument("--no-verify", action="store_true", help="do not read the files")
    return parser
