"""The command that exports checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from lightning_par.commands import PathName, quick_imports
from lightning_par.errors import ConfigurationError, raise_problems

__all__ = ["export"]


def export(
    *,
    ckpt: PathName,
    out: PathName,
    format: Literal["file", "huggingface"] = "file",  # noqa: A002 - the option's name
    max_shard_gb: float = 5.0,
    below: str = "",
    trust: bool = False,
) -> None:
    """Write a checkpoint as one file: its weights as .safetensors, or everything as the .ckpt that
    a plain Trainer reads; or as a folder that from_pretrained of Hugging Face reads.

    Args:
        ckpt: The checkpoint, a folder, a file or a URL.
        out: model.safetensors, name.ckpt, or the folder of ``--format huggingface``.
        format: file: as the suffix of --out says; huggingface: a folder with config.json and
            model.safetensors.
        max_shard_gb: Most bytes of a file of weights in that folder, in 1e9 bytes.
        below: Only the weights of this module, named from it: ``--below model``.
        trust: Read pickles in it, which may run code (.ckpt only).

    Raises:
        CheckpointError: The checkpoint is damaged, or holds a pickle and is not trusted.
        ConfigurationError: The suffix of `out` names no format, or options exclude each other.
    """
    path, is_folder = Path(out), format == "huggingface"
    raise_problems(
        ConfigurationError, "LP905", list(_problems(path, is_folder, max_shard_gb, below, trust))
    )
    with quick_imports():
        from lightning_par.checkpoint.export import export_checkpoint, export_weights
        from lightning_par.checkpoint.file_system import place_of
        from lightning_par.checkpoint.reader import CheckpointReader
        from lightning_par.huggingface import export_folder

    reader = CheckpointReader(place_of(ckpt))
    if is_folder:
        names = export_folder(reader, path, max_shard_bytes=int(max_shard_gb * 1e9))
        size = sum(file.stat().st_size for file in path.iterdir())
        held, more = f"{len(names)} tensors", f"; from_pretrained({str(path)!r}) reads it"
    else:
        if path.suffix == ".ckpt":
            export_checkpoint(reader, path, unpickle=trust)
            held = f"step {reader.manifest.step}"
        else:
            held = f"{len(export_weights(reader, path, below=below))} tensors"
        size, more = path.stat().st_size, ""
    print(f"{path}: {held}, {size:,} bytes{more}")


def _problems(
    out: Path, is_folder: bool, max_shard_gb: float, below: str, trust: bool
) -> Iterator[str]:
    is_file = out.suffix in (".safetensors", ".ckpt")
    if is_folder and is_file:
        yield (
            f"--out {out} is the name of a file, but --format huggingface writes a folder. Use "
            "the name of a folder."
        )
    if is_folder and (below or trust):
        yield "--below and --trust are not supported with --format huggingface. Leave them out."
    if is_folder and max_shard_gb <= 0:
        yield f"--max-shard-gb {max_shard_gb} must be more than 0."
    if not is_folder and not is_file:
        yield (
            f"--out {out} has to end in .safetensors, which exports the weights, or in .ckpt, "
            "which exports the whole checkpoint for a Trainer without lightning_par."
        )
    if not is_folder and out.suffix == ".ckpt" and below:
        yield "--below selects weights, so it needs --out NAME.safetensors."
