"""Folders of checkpoints, which every host has to see: each rank writes its part there."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_par.checkpoint.file_system import place_of, UrlPath
from lightning_par.errors import CheckpointError
from lightning_par.strategies.processes.hosts import HostOf

__all__ = [
    "check_folder_is_shared",
    "check_path_is_shared",
    "checkpoint_folders",
    "last_behind_url",
]

_CURE = (
    "Use a folder on a file system that all hosts share: ModelCheckpoint(dirpath=...) or "
    "Trainer(default_root_dir=...). With Trainer(enable_checkpointing=False) no checkpoints are "
    "saved."
)


def checkpoint_folders(trainer: pl.Trainer) -> list[str]:
    """Return the folders, or URLs, below which a Trainer saves checkpoints."""
    logger = trainer.loggers[0].save_dir if trainer.loggers else None
    default = str(logger or trainer.default_root_dir)
    saving = trainer.checkpoint_callbacks
    found = [str(getattr(callback, "dirpath", None) or default) for callback in saving]
    return list(dict.fromkeys(found))


def last_behind_url(trainer: pl.Trainer) -> str | None:
    """Return the newest checkpoint that ``ckpt_path="last"`` stands for, if it is behind a URL.

    Lightning would look for it on the disk, find none, and train from the start: what fsspec lists
    has no protocol.
    """
    found = dict[str, Any]()
    for callback in trainer.checkpoint_callbacks:
        folder = place_of(getattr(callback, "dirpath", None) or "")
        if not isinstance(callback, ModelCheckpoint) or not isinstance(folder, UrlPath):
            continue
        begin, end = callback.CHECKPOINT_NAME_LAST, callback.FILE_EXTENSION
        for name in folder.names():
            if name.startswith(begin) and name.endswith(end):
                time = (folder / name).written_at()
                found |= {} if time is None else {str(folder / name): time}
    return max(found, key=lambda url: found[url]) if found else None


def check_folder_is_shared(folder: str, hosts: Sequence[HostOf]) -> None:
    """Refuse a folder in which some hosts do not see what rank 0 writes.

    Every rank has to call this; the folder is that of rank 0, and need not exist yet.

    Args:
        folder: Where checkpoints go.
        hosts: For every rank where it is.

    Raises:
        CheckpointError: On every rank, naming the hosts.

    **Communicates**: a path from rank 0 to all, then one truth value between all.
    """
    mark: Any = None
    if dist.get_rank() == 0:
        place = Path(folder).absolute()
        # The nearest folder that exists: that of the checkpoints is made later.
        place = next(parent for parent in (place, *place.parents) if parent.is_dir())
        with suppress(OSError):  # saving will say why nothing can be written there
            mark = tempfile.NamedTemporaryFile(dir=place, prefix=".lightning_par-")  # noqa: SIM115
    box = [folder, None if mark is None else mark.name]
    try:
        # Reached by all ranks, also where rank 0 could not write: then there is nothing to look
        # for.
        dist.broadcast_object_list(box, 0)
        blind = [] if box[1] is None else _blind_hosts(Path(box[1]), hosts)
    finally:
        if mark is not None:
            # After the gather in `_blind_hosts`: every rank has looked. Closing removes the file.
            mark.close()
    if blind:
        raise CheckpointError(
            "LP513",
            f"{_say(blind)} not see files that rank 0 on host {hosts[0].name} writes to {box[0]}, "
            f"the folder of checkpoints. Every rank writes its part into this folder. {_CURE}",
        )


def check_path_is_shared(path: str, hosts: Sequence[HostOf]) -> None:
    """Refuse a checkpoint that some hosts see, and others do not.

    Every rank has to call this.

    Args:
        path: File or folder.
        hosts: For every rank where it is.

    Raises:
        CheckpointError: On every rank, naming the hosts that do not see it.

    **Communicates**: one truth value, between all ranks.
    """
    blind = _blind_hosts(Path(path), hosts)
    # Seen by nobody: it does not exist, which the reader says better.
    if blind and len(blind) < len({host.name for host in hosts}):
        raise CheckpointError("LP513", f"{_say(blind)} not see {path}, but other hosts do. {_CURE}")


def _blind_hosts(path: Path, hosts: Sequence[HostOf]) -> list[str]:
    """Return the names of the hosts on which a path is not there."""
    seen: list[Any] = [None] * len(hosts)
    dist.all_gather_object(seen, path.exists())
    return list(dict.fromkeys(h.name for h, sees in zip(hosts, seen, strict=True) if not sees))


def _say(names: Sequence[str]) -> str:
    return f"host{'s' * (len(names) > 1)} {', '.join(names)} do{'es' * (len(names) == 1)}"
