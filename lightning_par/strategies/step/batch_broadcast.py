"""Objects and batches that all ranks of a replica have to agree on."""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_par.engine.batch import map_tensors
from lightning_par.engine.tensor_tree import pack, PackedTree, unpack
from lightning_par.mesh import ParallelMesh
from lightning_par.upstream.torchmetrics import set_update_count

__all__ = ["BatchSharing", "bind_metrics", "broadcast_object", "to_cpu"]


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


class BatchSharing:
    """Gives every rank of a replica the batch of its first rank.

    Data loader workers are seeded by global rank, so that augmentations, and the order of a shuffle
    without a seed, would differ between the ranks that hold parts of one model. Nothing would fail:
    the gradients would be wrong.

    Args:
        mesh: Its replica group shares.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._group = mesh.replica_group
        self._source = dist.get_global_rank(mesh.replica_group, 0)
        self._is_source = mesh.rank == self._source
        self._header = b""

    def share(self, batch: Any) -> Any:
        """Return the first rank's batch.

        Args:
            batch: This rank's; only the first rank's is used, tensors arrive on the device they
                have there.

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


def bind_metrics(
    module: nn.Module, mesh: ParallelMesh, rank_of_stage: Sequence[int], in_step: Any
) -> None:
    """Make the torchmetrics of `module` right on the mesh.

    They are reduced over the ranks that see other tokens only, and what the last pipeline stage
    gathered is given to the other stages when a metric is computed outside of a step.

    Args:
        module: The user's.
        mesh: Its token group reduces.
        rank_of_stage: The pipeline rank that holds each stage; the last one updates the metrics.
        in_step: Called without arguments; tells whether the user's step is running.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric):
            continue
        if metric.process_group is None:
            metric.process_group = mesh.token_group
        if mesh.sizes.pipeline > 1 and "_lightning_par_compute" not in metric.__dict__:
            metric.__dict__["_lightning_par_compute"] = metric.compute
            source = mesh.neighbor("pp", rank_of_stage[-1])
            metric.compute = _shared_compute(metric, mesh, source, in_step)  # type: ignore[method-assign]


def _shared_compute(metric: Metric, mesh: ParallelMesh, source: int, in_step: Any) -> Any:
    original = metric.compute

    def compute(*args: Any, **kwargs: Any) -> Any:
        if not in_step():
            state = None
            if mesh.rank == source:
                values = {name: to_cpu(value) for name, value in metric.metric_state.items()}
                state = (values, metric.update_count)
            values, count = broadcast_object(state, source, mesh.group("pp"))
            if mesh.rank != source:
                set_update_count(metric, count)
                for name, value in values.items():
                    setattr(metric, name, map_tensors(value, lambda t: t.to(metric.device)))
        return original(*args, **kwargs)

    return compute
