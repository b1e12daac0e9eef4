"""Broadcast of a batch, or of an object, from the first rank of a replica to the others."""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import map_tensors
from lightning_par.mesh import ParallelMesh

__all__ = ["BatchBroadcast", "broadcast_object", "to_cpu"]


def broadcast_object(value: Any, source: int, group: dist.ProcessGroup) -> Any:
    """Return the object that the global rank `source` gives, on every rank of `group`.

    **Communicates**: two broadcasts, of the pickled object's length and of the object.
    """
    if group.size() == 1:
        return value
    box = [value if dist.get_rank() == source else None]
    dist.broadcast_object_list(box, source, group=group, device=torch.device("cpu"))
    return box[0]


def to_cpu(tree: Any) -> Any:
    """Return the nest with every tensor detached and on the CPU."""
    return map_tensors(tree, lambda t: t.detach().cpu())


class BatchBroadcast:
    """Gives every rank of a replica the batch of its first rank.

    Data loader workers are seeded by global rank, so that augmentations, and the order of a shuffle
    without a seed, would differ between the ranks that hold parts of one model. Nothing would fail:
    the gradients would be wrong.

    Args:
        mesh: Its replica group gets the batch of the group's first rank.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group = mesh.replica_group
        self._source = dist.get_global_rank(mesh.replica_group, 0)
        self._is_source = mesh.rank == self._source
        self._header = b""

    def broadcast(self, batch: Any) -> Any:
        """Return the first rank's batch.

        Args:
            batch: This rank's batch, of which only the first rank's is used; tensors arrive on
                the kind of device where they are there.

        **Communicates**: over the replica, 16 bytes, then what is not a tensor if it changed, then
        every tensor.
        """
        if self._group.size() == 1:
            return batch
        text, tensors = _pickle_without_tensors(batch) if self._is_source else (b"", [])
        skeleton = io.BytesIO(self._agree_on(text))
        specs = pickle.load(skeleton)
        devices = {d.type for _, _, d in specs}
        local = torch.device("cpu" if devices <= {"cpu"} else "cuda")
        received = []
        for index, (shape, dtype, device) in enumerate(specs):
            at = device if device.type == "cpu" else local
            buffer = (
                tensors[index].contiguous()
                if self._is_source
                else torch.empty(shape, dtype=dtype, device=at)
            )
            dist.broadcast(buffer, self._source, group=self._group)
            received.append(buffer)
        if self._is_source:
            return batch
        return _TensorUnpickler(skeleton, received).load()

    def _agree_on(self, text: bytes) -> bytes:
        """Return the text of the first rank; it is sent only when it changed."""
        changed = int(self._is_source and text != self._header)
        note = torch.tensor([changed, len(text)])
        dist.broadcast(note, self._source, group=self._group)
        if int(note[0]):
            buffer = torch.empty(int(note[1]), dtype=torch.uint8)
            if self._is_source:
                buffer = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            dist.broadcast(buffer, self._source, group=self._group)
            self._header = buffer.numpy().tobytes()
        return self._header


class _TensorPickler(pickle.Pickler):
    """Pickles a batch without its tensors, which it collects in `tensors`."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        place = self._places.setdefault(id(value), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(value)
        return place


class _TensorUnpickler(pickle.Unpickler):
    """Builds a batch that `_TensorPickler` pickled around the tensors that have arrived."""

    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]


def _pickle_without_tensors(batch: Any) -> tuple[bytes, list[Tensor]]:
    """Return the shapes of the tensors and the batch without them, pickled, and the tensors."""
    file = io.BytesIO()
    pickler = _TensorPickler(file)
    pickler.dump(batch)
    specs = [(tuple(t.shape), t.dtype, t.device) for t in pickler.tensors]
    return pickle.dumps(specs) + file.getvalue(), pickler.tensors
