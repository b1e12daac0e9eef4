"""What torchmetrics are given: data of one rank, of a replica, or of the global batch.

Hooks get the whole batch of their replica, on each of its context-parallel ranks, and numbers that
are joined over all replicas, such as the loss. A sum over all ranks would count such data several
times. So of what hooks give to a metric a digest is kept, which ranks compare before they reduce.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torchmetrics import Metric, MetricCollection

from lightning_par.engine.tensor_tree import broadcast_object, map_tensors, to_cpu
from lightning_par.mesh import ParallelMesh
from lightning_par.upstream.lightning import callbacks_of, trainer_of
from lightning_par.upstream.pytree import tree_leaves
from lightning_par.upstream.torchmetrics import set_update_count

__all__ = [
    "GIVEN",
    "UpdatesFollowed",
    "follow_given",
    "mark_joined",
    "metric_parts",
    "reach_of",
    "take_states",
]

GIVEN = "_lightning_par_given"
"""Attribute of a metric with its `_Given`."""
_JOINED = "_lightning_par_joined"
_KINDS = Metric, MetricCollection
_CONTAINERS = Mapping, list, tuple, nn.ModuleDict, nn.ModuleList
_SHORT = 128
"""Entries up to which a container may hold metrics, and is no data."""
_WHOLE = 2**20
"""Entries of a tensor up to which all of them count in its digest, each by its place."""
_FACTOR = 1_000_003


def metric_parts(
    module: pl.LightningModule, modules: Iterable[nn.Module] | None = None
) -> list[nn.Module]:
    """Return the metrics, and collections of them, in a module, in its callbacks, and in containers
    that are their attributes.

    Args:
        module: The user's LightningModule.
        modules: Those in it that may be metrics; others are found where they are its attributes.
            None: all.
    """
    trainer = trainer_of(module)
    owners = [module, *(callbacks_of(trainer) if trainer is not None else ())]
    found = {id(part): part for part in (module.modules() if modules is None else modules)}
    for owner in owners:
        found |= {id(part): part for part in _metrics_in(vars(owner), 4)}
    # By id, as the hash of a metric is of its state.
    return [part for part in found.values() if isinstance(part, _KINDS)]


def _metrics_in(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, _KINDS):
        yield from value.modules()
    elif isinstance(value, _CONTAINERS) and depth and len(value) <= _SHORT:
        for entry in value.values() if isinstance(value, Mapping | nn.ModuleDict) else value:
            yield from _metrics_in(entry, depth - 1)


class UpdatesFollowed:
    """Follows the updates of metrics, by a call or by `update`.

    Args:
        note: Called after each with the metric, the arguments, and the named ones.
        share: Called after an update of a collection with the first metric of a compute group, and
            with those of it that have not been updated: they refer to its state.
    """

    def __init__(
        self,
        note: Callable[[nn.Module, Any, dict[str, Any]], None],
        share: Callable[[Metric, Sequence[Metric]], None],
    ) -> None:
        self._note, self._share = note, share
        self._calls = 0  # under way; the updates that they make are theirs
        self._updated: set[int] = set()  # metrics, by the update of a collection that is under way

    def follow(self, parts: Iterable[nn.Module], *, looks: bool = True) -> ExitStack:
        """Follow metrics and collections until the result is closed.

        Args:
            parts: They.
            looks: Whether calls of `update` are followed as well.
        """

        # Functions, which the copy of a metric shares, unlike the objects of methods.
        def begin_call(*_: Any) -> None:
            self._calls += 1

        def end_call(metric: nn.Module, args: Any, kwargs: dict[str, Any], _: Any) -> None:
            self._calls -= 1
            self._see(metric, args, kwargs)

        opened = ExitStack()
        for part in parts:
            if isinstance(part, Metric):
                for handle in (
                    part.register_forward_pre_hook(begin_call),
                    part.register_forward_hook(end_call, with_kwargs=True),
                ):
                    opened.callback(handle.remove)
            if looks:
                is_metric = isinstance(part, Metric)
                opened.enter_context((self._metric if is_metric else self._collection)(part))
        return opened

    def _see(self, metric: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._note(metric, args, kwargs)
        self._updated.add(id(metric))

    @contextmanager
    def _metric(self, metric: Any) -> Iterator[None]:
        original = metric.update

        @wraps(original)
        def update(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if not self._calls:
                self._see(metric, args, kwargs)

        # `Metric.__init__` keeps its wrapped `update` in the instance, so it is replaced there.
        metric.__dict__["update"] = update
        try:
            yield
        finally:
            metric.__dict__["update"] = original

    @contextmanager
    def _collection(self, collection: Any) -> Iterator[None]:
        original = collection.update

        @wraps(original)
        def update(*args: Any, **kwargs: Any) -> None:
            self._updated = set()
            original(*args, **kwargs)
            for names in collection.compute_groups.values():
                first, *others = (getattr(collection, name) for name in names)
                if id(first) in self._updated:
                    # All of them in the first update, which finds the groups.
                    self._share(first, [m for m in others if id(m) not in self._updated])

        collection.__dict__["update"] = update
        try:
            yield
        finally:
            del collection.__dict__["update"]


@dataclass
class _Given:
    """What a metric was given since its reset.

    Attributes:
        digest: Of the data, and the number of updates that need not be of the global batch: [2]
            int64.
        owner: Id of the metric: a copy of it has been given nothing.
        updates: How many there were.
        left_out: How many of them were of a repeated sample, and were undone.
    """

    digest: Tensor
    owner: int
    updates: int = 0
    left_out: int = 0

    def is_all(self, metric: Metric) -> bool:
        """Return whether the metric was given nothing else."""
        # A metric that has seen nothing else than a repeated sample counts one update.
        more = metric.update_count - (self.updates - self.left_out)
        return more == 0 or (more == 1 and self.left_out > 0)


def mark_joined(value: Tensor) -> Tensor:
    """Return a tensor, of which `follow_given` knows that all replicas have the same."""
    setattr(value, _JOINED, True)
    return value


def follow_given(
    module: pl.LightningModule,
    modules: Iterable[nn.Module] | None = None,
    *,
    repeats: bool = False,
) -> ExitStack:
    """Note what metrics are given, until the result is closed.

    Args:
        module: The user's LightningModule.
        modules: See `metric_parts`.
        repeats: Whether this is a repeated sample, so that the updates are undone.
    """
    updates = UpdatesFollowed(partial(_note_given, repeats), _share_given)
    return updates.follow(metric_parts(module, modules))


def _note_given(repeats: bool, metric: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    assert isinstance(metric, Metric)
    held = _given_to(metric)
    if held is None or metric.update_count == 1:
        digest = torch.zeros(2, dtype=torch.int64, device=metric.device)
        held = metric.__dict__[GIVEN] = _Given(digest, id(metric))
    held.updates += 1
    held.left_out += repeats
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if leaf is not None]
    tensors = [torch.as_tensor(x) for x in leaves if isinstance(x, Tensor | np.ndarray)]
    numbers = [leaf for leaf in leaves if not isinstance(leaf, Tensor | np.ndarray)]
    given, unsure = held.digest.unbind()
    given = given * _FACTOR + zlib.crc32(repr(numbers).encode())
    is_sure: Any = all(isinstance(leaf, float) and leaf % 1 > 0 for leaf in numbers)
    for tensor in tensors:
        given = given * _FACTOR + _digest(tensor).to(given.device)
        is_sure = is_sure & _is_of_all(tensor)
    is_sure = torch.as_tensor(bool(leaves) and is_sure, device=given.device)
    held.digest = torch.stack([given, unsure + ~is_sure])


def _share_given(first: Metric, others: Sequence[Metric]) -> None:
    for metric in others:
        metric.__dict__[GIVEN] = replace(first.__dict__[GIVEN], owner=id(metric))


def _given_to(metric: Metric) -> _Given | None:
    held = metric.__dict__.get(GIVEN)
    return held if held is not None and held.owner == id(metric) else None


def _digest(tensor: Tensor) -> Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().flatten()
    bits = flat[:_WHOLE].double().view(torch.int64)
    bits = bits ^ (bits >> 32)  # the low bits of small integers are 0
    places = torch.arange(1, 2 * len(bits), 2, device=bits.device)
    rest = flat[_WHOLE:].sum(dtype=torch.float64).view(torch.int64)
    return (bits * places).sum() + rest + flat.numel()


def _is_of_all(tensor: Tensor) -> Tensor | bool:
    """Return whether this is a number of the global batch if all replicas have it: one that was
    joined, or with a fraction. A number of samples may be the same by chance.
    """
    if tensor.numel() != 1 or getattr(tensor, _JOINED, False):
        return tensor.numel() == 1
    number = tensor.detach().double().reshape(())
    return (number != number.round()) & number.isfinite()


def reach_of(
    metric: Metric, mesh: ParallelMesh, of_steps: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return the ranks over which a metric has to be reduced; None: each has the data of all.

    Args:
        metric: Its states become those of all data, where the result is None.
        mesh: Mesh of this run.
        of_steps: The ranks for what steps give to it; None: those that see other tokens.

    **Communicates**: the digest, over the ranks that see other tokens; perhaps the states.
    """
    group, held = mesh.token_group, _given_to(metric)
    of_steps = of_steps or group
    if group.size() == 1:
        return of_steps
    own = None
    if held is not None:
        number, unsure = held.digest.tolist() if held.is_all(metric) else (None, mesh.rank)
        own = (held.updates, number, unsure), held.left_out
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, (mesh.data_rank, own), group=group)
    if not any(given for _, given in every):  # only steps have updated it
        return of_steps
    of_replicas: dict[int, set[Any]] = {}
    for replica, given in every:
        of_replicas.setdefault(replica, set()).add(given and given[0])
    if any(len(different) > 1 for different in of_replicas.values()):
        return of_steps
    first, *others = (different.pop() for different in of_replicas.values())
    if first is None or first[2] or any(other != first for other in others):
        return mesh.data_group
    left_out = [given[1] for _, given in every]
    if any(left_out):
        source = dist.get_global_rank(group, left_out.index(0))
        take_states(metric, source, group)
    return None


def take_states(metric: Metric, source: int, group: dist.ProcessGroup) -> None:
    """Give a metric the states that it has on another rank.

    Args:
        metric: It.
        source: The global rank.
        group: Ranks that get the states.

    **Communicates**: the states.
    """
    held = {name: to_cpu(getattr(metric, name)) for name in metric.metric_state}
    states, count = broadcast_object((held, metric.update_count), source, group)
    for name, value in states.items():
        setattr(metric, name, map_tensors(value, lambda tensor: tensor.to(metric.device)))
    set_update_count(metric, count)
