"""Write a checkpoint as one file: its weights as .safetensors, or everything as the .ckpt
that a plain Trainer reads; or as a folder that from_pretrained of Hugging Face reads.
"""

import argparse
from pathlib import Path

from lightning_par.checkpoint.export import export_checkpoint, export_weights
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.commands import takes_file
from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.huggingface import export_folder

__all__ = ["main", "make_parser"]


def main(arguments: list[str]) -> int:
    """Export a checkpoint.

    Args:
        arguments: What follows ``lightning-par export``.

    Returns:
        The exit status, 0.

    Raises:
        CheckpointError: The checkpoint is damaged, or holds a pickle and ``--trust`` is not given.
        ConfigurationError: The suffix of ``--out`` names no format, or options exclude each other.
    """
    options = make_parser().parse_args(arguments)
    out = Path(options.out)
    if options.format == "huggingface":
        return _export_folder(Path(options.ckpt), out, options)
    if out.suffix not in (".safetensors", ".ckpt"):
        raise ConfigurationError(
            "LP905",
            f"--out {out}: the name has to end in .safetensors (weights) or .ckpt (everything, for "
            "a plain Trainer).",
        )
    if out.suffix == ".ckpt" and options.below:
        raise ConfigurationError(
            "LP905", "--below is for weights: use it with --out NAME.safetensors."
        )
    reader = CheckpointReader(Path(options.ckpt))
    if out.suffix == ".ckpt":
        export_checkpoint(reader, out, unpickle=options.trust)
        print(f"{out}: step {reader.manifest.step}, {out.stat().st_size:,} bytes")
        return 0
    names = export_weights(reader, out, below=options.below)
    print(f"{out}: {len(names)} tensors, {out.stat().st_size:,} bytes")
    return 0


def _export_folder(ckpt: Path, out: Path, options: argparse.Namespace) -> int:
    problems = []
    if out.suffix in (".safetensors", ".ckpt"):
        problems.append(f"--out {out}: --format huggingface writes a folder; give its name.")
    if options.below or options.trust:
        problems.append("--below and --trust are for files: leave them out.")
    if options.max_shard_gb <= 0:
        problems.append(f"--max-shard-gb {options.max_shard_gb} must be more than 0.")
    raise_problems(ConfigurationError, "LP905", problems)
    reader = CheckpointReader(ckpt)
    names = export_folder(reader, out, max_shard_bytes=int(options.max_shard_gb * 1e9))
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {len(names)} tensors, {size:,} bytes; from_pretrained({str(out)!r}) reads it")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="lightning-par export", description=__doc__)
    takes_file(
        parser.add_argument(
            "--ckpt", required=True, metavar="CHECKPOINT", help="a folder or a file"
        )
    )
    takes_file(
        parser.add_argument(
            "--out", required=True, help="model.safetensors, name.ckpt, or the folder of --format"
        )
    )
    parser.add_argument(
        "--format",
        choices=("file", "huggingface"),
        default="file",
        help="huggingface: a folder with config.json and model.safetensors",
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="of a file of weights in that folder, in 1e9 bytes (default: 5)",
    )
    parser.add_argument(
        "--below",
        default="",
        metavar="MODULE",
        help="only the weights of this module, named from it: --below model",
    )
    parser.add_argument(
        "--trust", action="store_true", help="read pickles in it, which may run code (.ckpt only)"
    )
    return parser
