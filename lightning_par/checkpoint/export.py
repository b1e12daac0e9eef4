"""A checkpoint folder as one file: its weights as safetensors, or all of it as Lightning has it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_par.checkpoint.reader import CheckpointReader, StoredOptimizer, StoredTensor
from lightning_par.checkpoint.storage import (
    file_order,
    replacing,
    write_object,
    write_tensors,
)
from lightning_par.errors import CheckpointError

__all__ = ["OWN_STATE", "export_checkpoint", "export_weights", "verify_files"]

OWN_STATE = "lightning_par"
"""Key under which a state holds what a strategy of this package adds to the Trainer's."""


def export_weights(reader: CheckpointReader, path: Path, *, below: str = "") -> list[str]:
    """Write the weights as one safetensors file; one tensor is in memory at a time.

    Tied weights are written under each of their names, as in a `state_dict`.

    Args:
        reader: Of the checkpoint.
        path: Where to; what is there stays until the new file is whole.
        below: Name of a module: only weights in it are written, named from it.

    Returns:
        The names.

    Raises:
        CheckpointError: A file is damaged, or there is no weight below that module.
    """
    verify_files(reader, ["weights"])
    weights = reader.weights()
    prefix = f"{below}." if below else ""
    stored: dict[str, StoredTensor] = {
        name.removeprefix(prefix): found
        for name, found in ((n, weights.find(n)) for n in weights)
        if name.startswith(prefix) and isinstance(found, StoredTensor)
    }
    if not stored:
        tops = sorted({name.partition(".")[0] for name in weights})
        raise CheckpointError(f"there is no weight below {below!r}; there are {', '.join(tops)}.")
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()}
    values = ((name, stored[name].read()) for name in file_order(specs))
    with replacing(path) as partial:
        write_tensors(partial, specs, values, {"format": "pt"})
    return list(stored)


def export_checkpoint(reader: CheckpointReader, path: Path, *, unpickle: bool = False) -> None:
    """Write a checkpoint as the file that a plain `Trainer` would have written.

    Args:
        reader: Of the checkpoint.
        path: Where to; what is there stays until the new file is whole.
        unpickle: Whether pickles in it may be read.

    Raises:
        CheckpointError: A file is damaged, or needs to be trusted.
    """
    verify_files(reader, ["weights", "optimizer", "state"])
    state = reader.state(0, unpickle=unpickle)
    state.pop(OWN_STATE, None)
    state.pop("left_out", None)
    state["state_dict"] = dict(reader.weights(unpickle=unpickle))
    optimizers = reader.optimizers(unpickle=unpickle)
    if optimizers:
        state["optimizer_states"] = [_numbered(optimizer) for optimizer in optimizers]
    write_object(path, state)


def _numbered(optimizer: StoredOptimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, which knows parameters by number."""
    numbers: dict[str, int] = {}
    groups = []
    for group in optimizer.groups:
        ids = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": ids})
    states = {
        number: {
            key: value.read() if isinstance(value, StoredTensor) else value
            for key, value in optimizer.states[name].items()
        }
        for name, number in numbers.items()
        if name in optimizer.states
    }
    return {"state": states, "param_groups": groups}


def verify_files(reader: CheckpointReader, kinds: Iterable[str]) -> None:
    """Refuse to export damaged files.

    Args:
        reader: Of the checkpoint.
        kinds: As in `CheckpointReader.data_files`.

    Raises:
        CheckpointError: With what is wrong with every damaged file.
    """
    problems = reader.problems(reader.data_files(*kinds))
    if problems:
        raise CheckpointError(f"{reader.folder} cannot be exported: {'; '.join(problems)}.")
