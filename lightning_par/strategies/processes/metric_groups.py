"""Groups of metrics that share their states in a `MetricCollection`.

torchmetrics forms them by the states after the first update: of few samples, as a micro-batch or a
replica has, the states of metrics may be equal that count other things. Then one counts for both.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.observe.contents import names_in_method
from lightning_par.upstream.functions import replaced

__all__ = ["groups_by_code"]


@contextmanager
def groups_by_code() -> Iterator[None]:
    """Inside, metrics of a collection come to share states only if their updates are the same code
    with the same settings.
    """
    original = MetricCollection.update

    @wraps(original)
    def update(self: MetricCollection, *args: Any, **kwargs: Any) -> None:
        before = len(self.compute_groups)
        original(self, *args, **kwargs)
        if len(self.compute_groups) < before:
            _separate(self)

    with replaced(MetricCollection, "update", update):
        yield


def _separate(collection: MetricCollection) -> None:
    """Give each metric whose update is another than that of its group a group and a state."""
    groups, found = collection.compute_groups, list[list[str]]()
    for names in groups.values():
        of_group = list[list[str]]()
        for name in names:
            metric: Any = getattr(collection, name)
            alike = (n for n in of_group if _updates_alike(getattr(collection, n[0]), metric))
            if (held := next(alike, None)) is not None:
                held.append(name)
                continue
            if of_group:  # which shares the states of the first one
                for state in metric.metric_state:
                    value = map_tensors(getattr(metric, state), Tensor.clone)
                    setattr(metric, state, value)
            of_group.append([name])
        found += of_group
    groups.clear()
    groups.update(enumerate(found))


def _updates_alike(one: Metric, other: Metric) -> bool:
    """Whether the updates of two metrics are the same code with the same settings."""
    names = {"update", *names_in_method(type(one), "update")}
    for name in names:
        kinds = [getattr(type(metric), name, None) for metric in (one, other)]
        if kinds[0] is not kinds[1]:
            return False
        values = (getattr(metric, name, None) for metric in (one, other))
        if not inspect.isfunction(kinds[0]) and not _is_same(*values):
            return False
    return True


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    try:
        return one is other or (type(one) is type(other) and bool(one == other))
    except (RuntimeError, TypeError, ValueError):  # of a comparison that has no truth
        return False
