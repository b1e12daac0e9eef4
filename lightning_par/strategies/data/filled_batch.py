"""The batch of a replica that has no samples of the global one: it repeats one, which weighs 0.

Metrics learn nothing of it, neither by a step nor by a hook that gets the batch.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn, Tensor
from torchmetrics import Metric, MetricCollection

from lightning_par.observe.isolate import untouched
from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.torchmetrics import (
    last_batch_value,
    set_last_batch_value,
    set_update_count,
)

__all__ = ["counting_nowhere", "log_nothing", "updates_dropped"]


@contextmanager
def counting_nowhere(module: nn.Module, *, trains: bool) -> Iterator[None]:
    """Surrounds a step on a sample that counts nowhere: no metric learns of it.

    A metric that has seen nothing else gets empty states, as all ranks have to gather the same.

    Args:
        module: The user's LightningModule.
        trains: Whether a backward follows; else all attributes of the module are put back.
    """
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    counts = [metric.update_count for metric in metrics]
    with ExitStack() as kept:
        # In training the module goes on as after any step: only its metrics are kept.
        for part in metrics if trains else [module]:
            kept.enter_context(untouched(part))
        yield
        # Inside of the context: afterwards the states are those of before.
        pairs = zip(metrics, counts, strict=True)
        updated = [metric for metric, count in pairs if metric.update_count != count]
        empty = [
            (m, name, _empty_like(getattr(m, name))) for m in updated for name in m.metric_state
        ]
    for metric in updated:
        # Of each metric that the step updated, also if other ranks did: they gather in `compute`.
        _forget_value(metric)
    for metric, name, value in empty:
        if value is not None and not getattr(metric, name):
            setattr(metric, name, [value])


@contextmanager
def updates_dropped(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, what metrics, and collections of them, are given counts nowhere.

    Each update is undone at once, as a hook may compute the metric right after it.

    Args:
        modules: They and others, perhaps several times.
    """
    kinds, every = (Metric, MetricCollection), (p for module in modules for p in module.modules())
    parts = {id(part): part for part in every if isinstance(part, kinds)}
    is_inner = False  # a call updates, and a collection updates its metrics

    def dropping(part: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inner
            if is_inner:
                return original(*args, **kwargs)
            is_inner = True
            try:
                with counting_nowhere(part, trains=True):
                    return original(*args, **kwargs)
            finally:
                is_inner = False

        return run

    with ExitStack() as stack:
        for part in parts.values():
            for name in ("forward", "update"):
                made = dropping(part, getattr(part, name))
                stack.enter_context(replaced(part, name, made))
        yield


def _forget_value(metric: Metric) -> None:
    """Drop the value that a metric has cached, so that its next `compute` gathers from all ranks.

    The other ranks have updated the metric, so they gather; one that does not would be missed.
    """
    kept = {name: getattr(metric, name) for name in metric.metric_state}
    kept = {name: [*value] if isinstance(value, list) else value for name, value in kept.items()}
    count, last = metric.update_count, last_batch_value(metric)
    Metric.reset(metric)  # of it alone: a metric may have parts, or a reset of its own
    for name, value in kept.items():
        setattr(metric, name, value)
    set_update_count(metric, count or 1)
    set_last_batch_value(metric, last)


def _empty_like(state: Any) -> Tensor | None:
    """Return an entry without rows of a state that is a list; None for another state."""
    has_rows = isinstance(state, list) and state and isinstance(state[0], Tensor) and state[0].ndim
    return state[0][:0].detach().clone() if has_rows else None


def log_nothing(
    name: str, value: Any, options: dict[str, Any], weights: BatchWeights
) -> tuple[Any, dict[str, Any]]:
    """Return what to log so that nothing changes in what other replicas log.

    Args:
        name: Of the reduction.
        value: That is logged on the sample.
        options: Of `self.log`.
        weights: Of the batch.
    """
    value = torch.as_tensor(value, device=weights.total.device)
    value = value if value.is_floating_point() else value.float()
    # The neutral element of each reduction.
    nothing = {"max": -math.inf, "min": math.inf}.get(name, 0.0)
    if name in ("mean", "avg"):
        shares = options.get("sync_dist") and options.get("batch_size") is None
        # Lightning divides by the mean of these over the replicas.
        options = {**options, "batch_size": weights.samples if shares else 0}
    return torch.full_like(value, nothing), options
