"""States of the optimizers of a rank in a file of its machine, for when its island comes back."""

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.checkpoint.storage import write_object
from lightning_par.dtensor import local_part
from lightning_par.upstream.dtensor import sharded_like

__all__ = ["KeptOptimizers"]


class KeptOptimizers:
    """The states of a rank's optimizers in one file, which is replaced at once.

    Args:
        path: The file.
        era: Name of the run; a file of another one is not read.
        optimizers: Those of this rank.
    """

    def __init__(self, path: Path, era: str, optimizers: Sequence[Optimizer]) -> None:
        self._path, self._era = path, era
        # In the order of the groups, which the same script makes again at its next start.
        self._held = [
            (optimizer.state, parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._read: list[dict[str, Any]] = []

    def save(self, moment: str) -> None:
        """Write the states, with the name of this moment, which all ranks of the island give."""
        states = [
            # Plain parts: a DTensor would need its mesh to be read again.
            {n: local_part(v) if isinstance(v, Tensor) else v for n, v in state.get(p, {}).items()}
            for state, p in self._held
        ]
        write_object(self._path, {"era": self._era, "moment": moment, "states": states})

    def read(self) -> str | None:
        """Read the file; return the moment of which it is, or None if it is not of this run, or of
        other parameters.
        """
        try:
            found = torch.load(self._path, weights_only=True)
        # There is no file, or it is not one that `save` has written whole.
        except (OSError, RuntimeError, pickle.UnpicklingError):
            return None
        if not isinstance(found, dict) or not {"era", "moment", "states"} <= found.keys():
            return None
        shapes = [local_part(parameter).shape for _, parameter in self._held]
        fits = len(shapes) == len(found["states"]) and all(
            not isinstance(value, Tensor) or value.ndim == 0 or value.shape == shape
            for shape, state in zip(shapes, found["states"], strict=True)
            for value in state.values()
        )
        if found["era"] != self._era or not fits:
            return None
        self._read = found["states"]
        return str(found["moment"])

    def load(self) -> None:
        """Give the optimizers what was read."""
        for (state, parameter), entries in zip(self._held, self._read, strict=True):
            for name, value in entries.items():
                # A step count without dims is whole everywhere.
                is_part = isinstance(value, Tensor) and value.ndim > 0
                shards = is_part and isinstance(parameter, DTensor)
                state[parameter][name] = sharded_like(value, parameter) if shards else value
        self._read = []

    def forget(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
