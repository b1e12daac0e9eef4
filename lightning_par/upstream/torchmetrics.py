"""The state of a `torchmetrics.Metric` that its constructor keeps to itself.

Attributes of instances: looked up when they are used.
"""

from typing import Any

from torch import nn
from torchmetrics import Metric

from lightning_par.upstream.presence import names_of

__all__ = ["last_batch_value", "set_last_batch_value", "set_update_count"]


def last_batch_value(metric: Metric) -> Any:
    """Return what the last `forward` of the metric returned, which `LightningModule.log` logs.

    `Metric.compute`, which is public, gives that of all batches.
    """
    with names_of("torchmetrics"):
        return metric._forward_cache


def set_last_batch_value(metric: nn.Module, value: Any) -> None:
    """Let `last_batch_value` be `value`, without an update of the metric.

    Args:
        metric: A `Metric`.
        value: What `LightningModule.log` is to find.
    """
    with names_of("torchmetrics"):
        _ = metric._forward_cache
    # Past `Metric.__setattr__`, which guards some names.
    metric.__dict__["_forward_cache"] = value


def set_update_count(metric: Metric, count: int) -> None:
    """Let the metric have been updated `count` times; `Metric.update_count` can only be read."""
    with names_of("torchmetrics"):
        _ = metric._update_count
    metric._update_count = count
