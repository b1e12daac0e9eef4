"""Whether a loss depends on numbers of the batch that each replica makes of its own rows.

Note [Uncut numbers]: a collate function may count the labels of a batch, by which the step divides
a sum. Parts of that batch have the same number, so that their losses add up; those of replicas do
not, as each replica counts its own labels, and one process all of them. So the step runs with other
numbers, too. If the loss follows them, they have to be the same in one process: they are not if
replicas have different ones, or if they are what a rule of the loss counts. Likewise weights that a
collate function divides by their sum, or rewards without their mean: the numbers of the samples
differ, and yet have the sum 0, the sum 1 or the mean 1 on each replica.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import batch_entry, BatchDims, take_samples
from lightning_par.engine.tensor_tree import children, rebuild
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.modes import WithoutDropout
from lightning_par.strategies.start.padding import difference_of
from lightning_par.strategies.start.uncut_batch import RunParts
from lightning_par.strategies.step.batch_weights import LossRule

__all__ = ["check_uncut_numbers"]


def check_uncut_numbers(
    module: pl.LightningModule,
    mesh: ParallelMesh,
    rules: Sequence[LossRule],
    batch: Any,
    dims: BatchDims,
    run: RunParts,
    tolerance: float,
) -> None:
    """Refuse a step whose loss depends on what a replica counts outside of it; see Note [Uncut
    numbers].

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run, with several replicas.
        rules: The rule of its loss, and others that count.
        batch: That of this replica.
        dims: Which entries have a batch dim.
        run: Runs the step on some samples.
        tolerance: Relative difference of losses that is rounding.

    Raises:
        ConfigurationError: On every rank.

    **Communicates**: the numbers, over the replicas; then what the step does.
    """
    numbers = dict(_numbers(batch, dims.dims))
    counts = [float(rule.weigh(batch, dims.size or 1)) for rule in rules] if numbers else []
    own = {path for path, number in numbers.items() if number > 1 and number in counts}
    held: list[Any] = [(numbers, own, _scaled(batch, dims))] * mesh.sizes.data
    dist.all_gather_object(held, held[0], group=mesh.data_group)
    names = {path for given, *_ in held for path in given}
    names = {path for path in names if len({given.get(path) for given, *_ in held}) > 1}
    if rules[0].is_sum:
        names |= set.intersection(*(counted for _, counted, _ in held))
    names |= set.intersection(*(paths for *_, paths in held))
    if not names:
        return
    is_cut = dims.size is not None and not dims.unsure
    taken = take_samples(batch, dims, [*range(min(dims.size or 1, 2))]) if is_cut else batch
    count = min(dims.size or 1, 2) if is_cut else 1
    parts = [(taken, count), (taken, count), (_with_other(names, taken), count)]
    try:
        with WithoutDropout():
            losses = run(parts, made=True)[0].losses
    except ConfigurationError:  # the step does not take them, on any rank
        return
    # A step that draws random numbers has other losses anyway.
    follows = difference_of(losses[:2]) == 0 and difference_of(losses[1:]) > tolerance
    dist.all_gather_object(held, follows, group=mesh.data_group)
    if any(held):
        raise ConfigurationError(
            "LP309",
            f"{type(module).__name__}.training_step: its loss depends on the batch entries "
            f"{', '.join(map(repr, sorted(names)))}, which the data loader of each replica "
            "computes from its own rows, such as a number of labels or normalized weights. A run "
            "on one process computes them from the rows of all replicas, so the loss would "
            "differ. Compute these values in the step from the tensors of the batch, as in "
            "(labels != -100).sum(); or use data_parallel_size=1. No weight was changed.",
        )


def _scaled(batch: Any, dims: BatchDims) -> set[str]:
    """Return the entries whose numbers differ between samples, and have the sum 0, the sum 1 or the
    mean 1, as no samples have by chance.
    """
    found = set()
    for path, dim in dims.dims.items():
        entry = batch_entry(batch, path) if path else None
        if not isinstance(entry, Tensor) or entry.layout is not torch.strided:
            continue
        if entry.is_floating_point() and not dim and len(entry) > 1:
            rows = entry.double().flatten(1).sum(1) if entry.ndim > 1 else entry.double()
            near = 1e-6 * float(rows.abs().sum())
            differ = float(rows.max() - rows.min()) > 1e3 * near
            # Whole numbers, such as labels, may have such a sum by chance.
            is_whole = not (rows % 1).any()
            total = float(rows.sum())
            if differ and not is_whole and any(abs(total - n) <= near for n in (0, 1, len(rows))):
                found.add(path)
    return found


def _numbers(node: Any, cut: Collection[str], path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a batch that no sample has for itself, with their paths; entries in
    `cut` hold samples.
    """
    if path in cut:
        return
    if (number := _number_of(node)) is not None:
        yield path, number
    held = children(node) or []
    # A list of numbers has one for each sample.
    if not all(_number_of(value) is not None for _, value in held):
        for key, value in held:
            yield from _numbers(value, cut, f"{path}.{key}" if path else str(key))


def _number_of(node: Any) -> float | None:
    if isinstance(node, Tensor):
        node = None if node.ndim else node.item()
    if isinstance(node, bool) or not isinstance(node, int | float):
        return None
    return float(node) if math.isfinite(float(node)) else None


def _with_other(paths: Collection[str], node: Any, path: str = "") -> Any:
    """Return a batch with other numbers in the entries `paths`."""
    if path in paths:
        return node * 2 + 1
    held = children(node)
    if not held:
        return node
    below = [(key, f"{path}.{key}" if path else str(key), value) for key, value in held]
    return rebuild(node, [(key, _with_other(paths, value, name)) for key, name, value in below])
