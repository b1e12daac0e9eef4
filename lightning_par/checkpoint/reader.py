"""Checkpoint reader: what a folder or a file of this package holds, verified, by global names."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_par.checkpoint.file_system import current_of, Place, UrlPath
from lightning_par.checkpoint.index import file_name, INDEX, MANIFEST, well_formed
from lightning_par.checkpoint.json_encoding import Decoder, PickledValueError
from lightning_par.checkpoint.optimizer_groups import split_states, StoredOptimizer
from lightning_par.checkpoint.plain_file import read_manifest
from lightning_par.checkpoint.progress import counted
from lightning_par.checkpoint.stores import open_store
from lightning_par.checkpoint.tensor_files import StoredTensor, StoredTensors
from lightning_par.errors import CheckpointError

__all__ = ["CheckpointReader", "is_checkpoint", "no_checkpoint"]

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
"""Parts of the state that the Trainer never restores, so that pickles in them can be left out."""


def is_checkpoint(path: Place) -> bool:
    """Return whether a folder or a file is a checkpoint of this package, complete or not.

    Raises:
        CheckpointError: It is neither, or a file that cannot be read.
    """
    # A store has no such things, and its files are those of Lightning.
    is_file = isinstance(path, Path) and path.is_file()
    if isinstance(path, Path) and path.exists() and not (is_file or path.is_dir()):
        raise CheckpointError(
            "LP501",
            f"{path} is a pipe or a device, so it cannot be a checkpoint. Pass the path of a file "
            "or folder.",
        )
    if isinstance(path, Path) and is_file:
        return read_manifest(path) is not None
    # Either file: a folder without its manifest is to be reported as damaged, not as unknown.
    if isinstance(path, UrlPath) and path.is_page:
        return False
    folder = current_of(path)
    return folder != path or any((path / name).exists() for name in (MANIFEST, INDEX))


def no_checkpoint(folder: Place) -> CheckpointError:
    """Return the error of a folder that holds none."""
    return CheckpointError(
        "LP501",
        f"the folder {folder} is not a complete checkpoint: it has neither a manifest.json nor a "
        "model.safetensors. Pass the path of a complete checkpoint.",
    )


class CheckpointReader:
    """Reader of a checkpoint; manifest and index are verified at once, all else is not.

    Args:
        path: Folder or file.

    Attributes:
        path: Folder or file.
        manifest: Its manifest.
        index: Its index.
        files: Its tensors.

    Raises:
        CheckpointError: Manifest or index are missing, damaged or malformed.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self._store = open_store(path)
        self.manifest, self.index = self._store.manifest, self._store.index
        self.files = self._store.files

    def data_files(self, *kinds: str) -> list[str]:
        """Return the names of the files of these kinds: ``weights``, ``optimizer``, ``state``.

        Of one file they are the names of its boxes and records.
        """
        return [name for name in self.manifest.files if name.startswith(kinds)]

    def problems(self, names: Iterable[str]) -> list[str]:
        """Compare files with their checksums.

        Args:
            names: Names of files that the manifest lists.

        Returns:
            One message per missing or damaged file.
        """
        # An iterator is walked through twice.
        names = list(names)
        total = sum(self.manifest.files[name].length for name in names)
        with counted("verify", f"verifying {self.path.name}", total):
            found = [self._store.problem(name) for name in names]
        return [problem for problem in found if problem is not None]

    def weights(self, *, unpickle: bool = False) -> StoredTensors:
        """Return the weights as a lazy state dict.

        Args:
            unpickle: Whether pickles may be loaded, which can run code.

        Raises:
            PickledValueError: An entry is a pickle, and `unpickle` is false.
        """
        values = self._values("weights/", unpickle=unpickle)
        return StoredTensors.of_files(self.files, self.index.weights, self.index.aliases, values)

    def optimizers(self, *, unpickle: bool = False) -> list[StoredOptimizer]:
        """Return the optimizers, their tensors unread.

        Args:
            unpickle: Whether pickles may be loaded, which can run code.

        Raises:
            PickledValueError: An entry is a pickle, and `unpickle` is false.
        """
        decoder = self._decoder(unpickle=unpickle)
        tensors = {k: StoredTensor(self.files, e) for k, e in self.index.optimizer.items()}
        values = self._values("optimizer/", unpickle=unpickle)
        found = []
        for number, groups in enumerate(self.index.groups):
            # Values after tensors: both are named alike, and a name is in one of them.
            states = split_states(number, {**tensors, **values})
            with well_formed(f"{self.path}: the index"):
                options = [decoder.decode(group, "param_groups") for group in groups]
            found.append(StoredOptimizer(options, states))
        return found

    def _values(self, prefix: str, *, unpickle: bool) -> dict[str, Any]:
        decoder = self._decoder(unpickle=unpickle)
        with well_formed(f"{self.path}: the index"):
            return {
                key.removeprefix(prefix): decoder.decode(value, key)
                for key, value in self.index.values.items()
                if key.startswith(prefix)
            }

    def state(self, rank: int, *, unpickle: bool = False) -> dict[str, Any]:
        """Return what one rank stored besides weights and optimizer states.

        Args:
            rank: Rank that wrote it. Rank 0 stored the Trainer's state, the others only their own
                part, such as random states.
            unpickle: Whether pickles may be loaded, which can run code.

        Returns:
            The state by the Trainer's keys. If `unpickle` is false, pickled hyper-parameters are
            left out, and their names listed under ``"left_out"``.

        Raises:
            CheckpointError: A file is damaged, or anything else is a pickle and `unpickle` is
                false.
        """
        world = self.manifest.world_size
        name = file_name("state", rank, world, "json")
        encoded = self._read_json(name)
        with_tensors = file_name("state", rank, world)
        if with_tensors in self.manifest.files:
            self._verify(with_tensors)
        with well_formed(f"{self.path}: {name}"):
            return self._decode_state(encoded, self._decoder(unpickle=unpickle))

    def _decode_state(self, encoded: dict[str, Any], decoder: Decoder) -> dict[str, Any]:
        left_out: list[str] = []
        # Entry by entry: one pickle among the hyper-parameters costs only that entry.
        for part in _HYPER_PARAMETERS:
            given = encoded.get(part)
            # With a "$" the whole is of another type (or a pickle), and decoded as one below.
            if isinstance(given, dict) and "$" not in given:
                encoded[part] = {}
                for name, value in given.items():
                    try:
                        decoder.decode(value, f"{part}.{name}")
                        # Not the decoded one: all of `encoded` is decoded below.
                        encoded[part][name] = value
                    except PickledValueError:
                        left_out.append(f"{part}.{name}")
        state: dict[str, Any] = decoder.decode(encoded, "state")
        return {**state, "left_out": left_out} if left_out else state

    def _decoder(self, *, unpickle: bool) -> Decoder:
        return Decoder(self._store.state_tensor, unpickle=unpickle)

    def _verify(self, name: str) -> None:
        problems = self.problems([name])
        if problems:
            raise CheckpointError(
                "LP502",
                f"the checkpoint {self.path} cannot be used: {problems[0]}. Use another "
                "checkpoint.",
            )

    def _read_json(self, name: str) -> dict[str, Any]:
        if name not in self.manifest.files:
            raise CheckpointError(
                "LP502",
                f"the checkpoint {self.path} is damaged: its {MANIFEST} does not list {name}. Use "
                "another checkpoint.",
            )
        self._verify(name)
        with well_formed(f"{self.path}: {name}"):
            return dict(json.loads(self._store.read(name)))
