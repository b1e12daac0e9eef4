"""Export of a checkpoint to one file: weights as safetensors, or a Lightning .ckpt."""

from collections.abc import Iterable
from pathlib import Path

from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.storage import (
    ChecksumFile,
    replacing,
    write_object,
    write_tensors,
)
from lightning_par.checkpoint.tensor_files import StoredTensor
from lightning_par.errors import CheckpointError

__all__ = ["OWN_STATE", "export_checkpoint", "export_weights", "verify_files"]

OWN_STATE = "lightning_par"
"""Key of the Trainer's state under which a strategy of this package stores its own."""


def export_weights(reader: CheckpointReader, path: Path, *, below: str = "") -> list[str]:
    """Write the weights as one safetensors file, with one tensor in memory at a time.

    Tied weights are written under each of their names, as in a `state_dict`.

    Args:
        reader: Reader of the checkpoint.
        path: File to write; an existing one is replaced when the new one is complete.
        below: FQN of a module: only its weights are written, with names relative to it. Empty: all
            weights.

    Returns:
        The names of the tensors in the file.

    Raises:
        CheckpointError: A file is damaged, or no weight is below that module.
    """
    verify_files(reader, ["weights"])
    weights = reader.weights()
    prefix = f"{below}." if below else ""
    # Entries that are no tensors (extra state of modules) have no place in safetensors.
    # `find` and not `weights[name]`, which would read every tensor to see what it is.
    stored: dict[str, StoredTensor] = {
        name.removeprefix(prefix): found
        for name, found in ((n, weights.find(n)) for n in weights)
        if name.startswith(prefix) and isinstance(found, StoredTensor)
    }
    if not stored:
        tops = sorted({name.partition(".")[0] for name in weights})
        raise CheckpointError(
            "LP509",
            f"--below {below} selects no weight of the checkpoint, since no name of a weight "
            f"begins with it. Pass one of these beginnings: {', '.join(map(repr, tops))}.",
        )
    # For the bar: of tied weights each name counts, as each is written.
    moves = sum(tensor.nbytes for tensor in stored.values())
    with (
        replacing(path) as partial,
        counted("write", f"writing {path.name}", moves),
        ChecksumFile(partial) as file,
    ):
        # transformers refuses a file that does not name its framework.
        write_tensors(file, stored, {"format": "pt"}, read=StoredTensor.read)
    return list(stored)


def export_checkpoint(
    reader: CheckpointReader, path: Path, *, unpickle: bool = False, optimizer: bool = True
) -> None:
    """Write a checkpoint as the .ckpt file that a Trainer on one device would have written.

    Args:
        reader: Reader of the checkpoint.
        path: File to write; an existing one is replaced when the new one is complete.
        unpickle: Whether pickles in the checkpoint may be loaded, which can run code.
        optimizer: Whether the states of optimizers are written, too.

    Raises:
        CheckpointError: A file is damaged, or holds a pickle and `unpickle` is false.
    """
    verify_files(reader, ["weights", "state", *(["optimizer"] if optimizer else [])])
    # The state of rank 0 is that of the Trainer; the files of other ranks only hold their own part.
    state = reader.state(0, unpickle=unpickle)
    # Lightning's own strategies would not know what to do with these two.
    state.pop(OWN_STATE, None)
    state.pop("left_out", None)
    weights = reader.weights(unpickle=unpickle)
    optimizers = reader.optimizers(unpickle=unpickle) if optimizer else []
    entries = [
        # Through `states`, which gives unread tensors; `o["state"]` would read them while
        # counting.
        entry
        for o in optimizers
        for states in o.states.values()
        for entry in states.values()
    ]
    entries += [weights.find(name) for name in weights]
    stored = [entry for entry in entries if isinstance(entry, StoredTensor)]
    with counted("read", f"reading {reader.path.name}", sum(entry.nbytes for entry in stored)):
        # Here all of it is read: `torch.save` pickles a dict, and wants every tensor in memory.
        state["state_dict"] = dict(weights)
        if optimizers:
            state["optimizer_states"] = [
                # A plain dict: a `.ckpt` that named classes of ours could not be loaded without
                # this package.
                {**o, "state": {i: dict(entries) for i, entries in o["state"].items()}}
                for o in optimizers
            ]
    write_object(path, state)


def verify_files(reader: CheckpointReader, kinds: Iterable[str]) -> None:
    """Compare files with their checksums before an export.

    Args:
        reader: Reader of the checkpoint.
        kinds: Kinds of files, as in `CheckpointReader.data_files`.

    Raises:
        CheckpointError: A file is missing or damaged; lists every such file.
    """
    problems = reader.problems(reader.data_files(*kinds))
    if problems:
        raise CheckpointError(
            "LP502",
            f"{reader.path} cannot be exported: {'; '.join(problems)}. Use another checkpoint.",
        )
