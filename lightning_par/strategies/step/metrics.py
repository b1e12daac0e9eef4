"""torchmetrics of the user's module on a mesh: reduced over the right ranks, known to all stages.

Only the last pipeline stage gathers, as only there the user's step runs to its end.

A call of a metric returns its value for what it is called with, and Lightning logs that for a step.
Under a pipeline this is a micro-batch; `MetricsOfBatch` has the value for all of them.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torchmetrics import Metric, MetricCollection

from lightning_par.engine.tensor_tree import broadcast_object, map_tensors, to_cpu
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.step.step_traces import NOT_OF_PARTS, SAME_KIND
from lightning_par.upstream.pytree import tree_leaves
from lightning_par.upstream.torchmetrics import last_batch_value, set_update_count

__all__ = [
    "OF_METRIC",
    "LookAtMetrics",
    "MetricsOfBatch",
    "bind_metrics",
    "compare_metrics",
    "is_plain_metric",
]


def is_plain_metric(module: nn.Module) -> bool:
    """Return whether a module is a metric without parameters, which has nothing to gather. Metrics
    are copied while a run goes on.
    """
    return isinstance(module, Metric) and next(module.parameters(), None) is None


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
        # Once for a metric: a second fit binds anew, and would broadcast twice.
        if mesh.sizes.pipeline > 1 and "_lightning_par_compute" not in metric.__dict__:
            metric.__dict__["_lightning_par_compute"] = metric.compute
            source = mesh.rank_at("pp", rank_of_stage[-1])
            # Elsewhere states that come from there are no update, which would clear the cache.
            metric.compute_with_cache = mesh.rank == source and metric.compute_with_cache
            metric.compute = _shared_compute(metric, mesh, source, in_step)  # type: ignore[method-assign]


def _shared_compute(
    metric: Metric, mesh: ParallelMesh, source: int, in_step: Callable[[], bool]
) -> Callable[..., Any]:
    original = metric.compute

    def compute(*args: Any, **kwargs: Any) -> Any:
        # Inside a step only the last stage gets here, so that nobody would answer it.
        if not in_step():
            state = None
            # By `metric_state`, and not `state_dict`, which leaves out states that are not
            # persistent.
            if mesh.rank == source:
                values = {name: to_cpu(getattr(metric, name)) for name in metric.metric_state}
                state = (values, metric.update_count)
            values, count = broadcast_object(state, source, mesh.group("pp"))
            if mesh.rank != source:
                set_update_count(metric, count)
                for name, value in values.items():
                    setattr(metric, name, map_tensors(value, lambda t: t.to(metric.device)))
        # Reduces over `process_group`, on every stage with the states of the last one.
        return original(*args, **kwargs)

    return compute


class MetricsOfBatch:
    """What the metrics of a module are for a whole batch whose parts they are called with.

    Beside each metric, a copy gets the same updates and begins anew with every batch.

    Args:
        module: The user's LightningModule.
        looks: Whether a look at the step is followed: then calls of `Metric.update` count as well,
            and nothing is reduced over replicas.

    Attributes:
        is_new: Whether a batch begins; set it there, and the first update takes it away.
    """

    def __init__(self, module: nn.Module, *, looks: bool = False) -> None:
        # By id, as the hash of a metric is of its state.
        self._metrics = {
            id(metric): (name, metric)
            for name, metric in module.named_modules()
            if isinstance(metric, Metric)
        }
        collections = (m for m in module.modules() if isinstance(m, MetricCollection))
        self._collections = list(collections) if looks else []
        self._looks, self.is_new = looks, True
        self._copies: dict[int, Metric] = {}
        self._calls = 0  # under way; the updates that they make are theirs
        self._updated: set[int] = set()  # metrics, by the update of a collection that is under way

    def follow(self) -> ExitStack:
        """Let what the metrics are called with count, until the result is closed."""

        # Functions, which the copy of a metric shares, unlike the objects of methods.
        def begin_call(*_: Any) -> None:
            self._calls += 1

        def end_call(metric: nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
            self._calls -= 1
            self._update(metric, args, kwargs)

        opened = ExitStack()
        for _, metric in self._metrics.values():
            for handle in (
                metric.register_forward_pre_hook(begin_call),
                metric.register_forward_hook(end_call, with_kwargs=True),
            ):
                opened.callback(handle.remove)
            if self._looks:
                opened.enter_context(self._updates_counted(metric))
        for collection in self._collections:
            opened.enter_context(self._groups_counted(collection))
        return opened

    def value(self, metric: Metric) -> Any:
        """Return the value of a metric for the calls so far, as the last call returned it if none
        of them was seen.
        """
        copied = self._copies.get(id(metric))
        if copied is None or self.is_new or not copied.update_called:
            return last_batch_value(metric)
        return _computed(copied)

    def join(self, group: dist.ProcessGroup) -> None:
        """Let what all ranks of a group were called with count; drop what some were not.

        **Communicates**: the names of the metrics; `values` then their states.
        """
        own = [key for key, copied in self._copies.items() if copied.update_called]
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, [self._metrics[key][0] for key in own], group=group)
        # Replicas may update other metrics, as one whose batch has no sample of a class. A metric
        # that reduces on some of them only would hang.
        shared = set(every[0]).intersection(*every[1:])
        self._copies = {k: self._copies[k] for k in own if self._metrics[k][0] in shared}
        for copied in self._copies.values():
            for part in copied.modules():
                if isinstance(part, Metric):
                    part.process_group = group
                    part.distributed_available_fn = dist.is_initialized

    def values(self) -> dict[str, Any]:
        """Return FQN -> value of the metrics that were updated and can be computed."""
        found = {}
        for key, copied in self._copies.items():
            if copied.update_called:
                name, _ = self._metrics[key]
                try:
                    found[name] = _computed(copied)
                except Exception:  # the metric's own, of too few samples
                    continue
        return found

    def states(self) -> dict[str, dict[str, Any]]:
        """Return FQN -> states of the metrics that were updated; entries that are gathered are
        joined, however many updates gave them.
        """
        found = {}
        for key, copied in self._copies.items():
            if copied.update_called:
                parts = [part for part in copied.modules() if isinstance(part, Metric)]
                held = [getattr(part, name) for part in parts for name in part.metric_state]
                found[self._metrics[key][0]] = {str(n): _entries(s) for n, s in enumerate(held)}
        return found

    @contextmanager
    def _updates_counted(self, metric: Metric) -> Iterator[None]:
        original = metric.update

        @wraps(original)
        def update(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if not self._calls:
                self._update(metric, args, kwargs)

        # `Metric.__init__` keeps its wrapped `update` in the instance, so it is replaced there.
        metric.__dict__["update"] = update
        try:
            yield
        finally:
            metric.__dict__["update"] = original

    @contextmanager
    def _groups_counted(self, collection: MetricCollection) -> Iterator[None]:
        original = collection.update

        @wraps(original)
        def update(*args: Any, **kwargs: Any) -> None:
            self._updated = set()
            original(*args, **kwargs)
            for first, *others in collection.compute_groups.values():
                self._share(getattr(collection, first), [getattr(collection, n) for n in others])

        collection.__dict__["update"] = update
        try:
            yield
        finally:
            del collection.__dict__["update"]

    def _share(self, first: Metric, others: Sequence[Metric]) -> None:
        """Give the state of a metric to those of its compute group: the collection updates the
        first one only, and lets the others refer to its state.
        """
        if id(first) not in self._updated:
            return
        source = self._copies[id(first)]
        for metric in others:
            if id(metric) in self._updated:  # as in the first update, which finds the groups
                continue
            if id(metric) not in self._copies:
                self._copies[id(metric)] = self._copy(metric)
            copied = self._copies[id(metric)]
            for name in source.metric_state:
                state = map_tensors(getattr(source, name), lambda t: t.detach().clone())
                setattr(copied, name, state)
            set_update_count(copied, source.update_count)

    def _update(self, metric: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if id(metric) not in self._metrics:  # part of a copy
            return
        if self.is_new:
            self.is_new = False
            for held in self._copies.values():
                held.reset()
        copied = self._copies.get(id(metric))
        if copied is None:
            copied = self._copies[id(metric)] = self._copy(metric)
        copied.update(*args, **kwargs)
        self._updated.add(id(metric))

    def _copy(self, metric: nn.Module) -> Metric:
        parts = [part for part in metric.modules() if isinstance(part, Metric)]
        # What has no copy: a group, and a tensor with a graph, as of the value of the last call.
        known = {id(part.process_group): part.process_group for part in parts}
        for tensor in tree_leaves([list(vars(part).values()) for part in parts]):
            if isinstance(tensor, Tensor) and not tensor.is_leaf:
                known[id(tensor)] = tensor.detach()
        copied: Metric = copy.deepcopy(metric, known)  # type: ignore[assignment]
        copied.reset()
        for part in copied.modules():
            # `Metric.compute` reduces where this function says that ranks are there. Only a
            # metric that is reduced in every step has a value of all replicas for one step.
            if isinstance(part, Metric) and (self._looks or not part.dist_sync_on_step):
                part.distributed_available_fn = lambda: False
        return copied


def _entries(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state
    flat = [torch.as_tensor(leaf).flatten() for leaf in tree_leaves(state) if _is_number(leaf)]
    return torch.cat(flat) if flat else None


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, int | float | Tensor)


def _computed(copied: Metric) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the metric gives them as well
        return copied.compute()


class LookAtMetrics:
    """What the metrics of a module are for some samples, and for parts of them.

    Args:
        module: The user's LightningModule.
        group: Ranks whose updates by the whole count together, as they see other tokens; None: this
            rank's alone.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._whole = MetricsOfBatch(module, looks=True)
        self._parts = MetricsOfBatch(module, looks=True)

    def followed(self, index: int) -> ExitStack:
        """Surrounds the step on the whole, which is number 0, and on each part."""
        return (self._parts if index else self._whole).follow()

    def values(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return FQN -> value of the metrics, for the whole and for its parts, on the host.

        **Communicates**: over a group the names of the metrics, and their states.
        """
        if self._group is not None:
            self._whole.join(self._group)
        return to_cpu(self._whole.values()), to_cpu(self._parts.values())

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return FQN -> states of the metrics, for the whole and for its parts, on the host."""
        return to_cpu(self._whole.states()), to_cpu(self._parts.states())


OF_METRIC = "self."
"""Begins the name of a metric, beside those of logged numbers."""


def compare_metrics(
    whole: dict[str, Any], parts: dict[str, Any], tolerance: float
) -> dict[str, int]:
    """Return, for every metric, whether its value for a batch is that for the batch's parts
    together: `SAME_KIND`, or else `NOT_OF_PARTS`, as `compare_parts` says it of numbers.

    Args:
        whole: FQN -> value for the batch, on the host.
        parts: FQN -> value for its parts together.
        tolerance: Of roundings, relative.
    """
    # As numbers near 0: what is absolute is a hundredth of what is relative.
    kinds, nothing = {}, tolerance / 100  # as `compare_parts` has it
    for name in whole.keys() & parts.keys():
        values, others = (
            [torch.as_tensor(leaf) for leaf in tree_leaves(held[name]) if _is_number(leaf)]
            for held in (whole, parts)
        )
        is_same = len(values) == len(others) and all(
            one.shape == other.shape
            and torch.allclose(one.double(), other.double(), tolerance, nothing, equal_nan=True)
            for one, other in zip(values, others, strict=True)
        )
        kinds[OF_METRIC + name] = SAME_KIND if is_same else NOT_OF_PARTS
    return kinds
