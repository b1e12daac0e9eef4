"""Write a checkpoint folder as one file: its weights as .safetensors, or everything as the .ckpt
that a plain Trainer reads.
"""

import argparse
from pathlib import Path

from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.single import export_checkpoint, export_weights
from lightning_par.errors import ConfigurationError

__all__ = ["main"]


def main(arguments: list[str]) -> int:
    """Export a checkpoint.

    Args:
        arguments: What follows ``lightning-par export``.

    Returns:
        The exit status, 0.

    Raises:
        CheckpointError: It is damaged, or holds a pickle and is not trusted.
        ConfigurationError: The name of the file says no format.
    """
    options = _parser().parse_args(arguments)
    out = Path(options.out)
    if out.suffix not in (".safetensors", ".ckpt"):
        raise ConfigurationError(
            f"--out {out}: the name has to end in .safetensors (weights) or .ckpt (everything, for "
            "a plain Trainer)."
        )
    if out.suffix == ".ckpt" and options.below:
        raise ConfigurationError("--below is for weights: use it with --out NAME.safetensors.")
    reader = CheckpointReader(Path(options.ckpt))
    if out.suffix == ".ckpt":
        export_checkpoint(reader, out, unpickle=options.trust)
        print(f"{out}: step {reader.manifest.step}, {out.stat().st_size:,} bytes")
        return 0
    names = export_weights(reader, out, below=options.below)
    print(f"{out}: {len(names)} tensors, {out.stat().st_size:,} bytes")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning-par export", description=__doc__)
    parser.add_argument("--ckpt", required=True, metavar="DIR", help="the checkpoint")
    parser.add_argument("--out", required=True, help="model.safetensors, or name.ckpt")
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
