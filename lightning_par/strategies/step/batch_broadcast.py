"""Broadcast of a batch, or of an object, from the first rank of a replica to the others."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.engine.batch import map_tensors
from lightning_par.engine.tensor_tree import pack, PackedTree, unpack
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
        header, tensors = pack(batch) if self._is_source else (None, [])
        packed: PackedTree = pickle.loads(self._agree_on(pickle.dumps(header)))
        received = []
        for index, spec in enumerate(packed.specs):
            at = "cpu" if spec.device.type == "cpu" else "cuda"
            buffer = (
                tensors[index].contiguous()
                if self._is_source
                else torch.empty(spec.shape, dtype=spec.dtype, device=at)
            )
            dist.broadcast(buffer, self._source, group=self._group)
            received.append(buffer)
        if self._is_source:
            return batch
        return unpack(packed, received)

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
