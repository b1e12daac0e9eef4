"""torchmetrics of the user's module on a mesh: reduced over the right ranks, known to all stages.

Only the last pipeline stage gathers, as only there the user's step runs to its end.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_par.engine.tensor_tree import broadcast_object, map_tensors, to_cpu
from lightning_par.mesh import ParallelMesh
from lightning_par.upstream.torchmetrics import set_update_count

__all__ = ["bind_metrics"]


def bind_metrics(
    module: nn.Module,
    mesh: ParallelMesh,
    device: torch.device,
    rank_of_stage: Sequence[int],
    in_step: Callable[[], bool],
) -> None:
    """Make the torchmetrics of a module right on the mesh.

    They are reduced over the ranks that see other tokens only, and what the last pipeline stage
    gathered is given to the other stages when a metric is computed outside of a step.

    Args:
        module: The user's LightningModule.
        mesh: Its token group reduces.
        device: Of this rank; the metrics move there.
        rank_of_stage: The pipeline rank that holds each stage; the last one updates the metrics.
        in_step: Tells whether the user's step is running.
    """
    for metric in module.modules():
        if not isinstance(metric, Metric):
            continue
        metric.to(device)  # its states are no buffers, which are made where the parameters are
        if mesh.sizes.world_size == 1:
            continue  # it is right as it is; one that holds a group could not be copied
        if metric.process_group is None:
            metric.process_group = mesh.token_group
        if mesh.sizes.pipeline > 1 and "_lightning_par_compute" not in metric.__dict__:
            metric.__dict__["_lightning_par_compute"] = metric.compute
            source = mesh.rank_at("pp", rank_of_stage[-1])
            metric.compute = _shared_compute(metric, mesh, source, in_step)  # type: ignore[method-assign]


def _shared_compute(
    metric: Metric, mesh: ParallelMesh, source: int, in_step: Callable[[], bool]
) -> Callable[..., Any]:
    original = metric.compute

    def compute(*args: Any, **kwargs: Any) -> Any:
        # Inside a step only the last stage gets here, so that nobody would answer it.
        if not in_step():
            state = None
            if mesh.rank == source:
                values = {name: to_cpu(getattr(metric, name)) for name in metric.metric_state}
                state = (values, metric.update_count)
            values, count = broadcast_object(state, source, mesh.group("pp"))
            if mesh.rank != source:
                set_update_count(metric, count)
                for name, value in values.items():
                    setattr(metric, name, map_tensors(value, lambda t: t.to(metric.device)))
        return original(*args, **kwargs)

    return compute
