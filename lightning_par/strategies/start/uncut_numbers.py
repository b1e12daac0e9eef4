"""Whether a loss depends on a number of the batch that each replica makes of its own rows.

Note [Uncut numbers]: a collate function may count the labels of a batch, by which the step divides
a sum. Parts of that batch have the same number, so that their losses add up; those of replicas do
not, as each replica counts its own labels, and one process all of them. So the step runs with other
numbers, too. If the loss follows them, they have to be the same in one process: they are not if
replicas have different ones, or if they are what a rule of the loss counts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor

from lightning_par.engine.batch import BatchDims, take_samples
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
    numbers = dict(_numbers(batch))
    counts = [float(rule.weigh(batch, dims.size or 1)) for rule in rules] if numbers else []
    own = {path for path, number in numbers.items() if number > 1 and number in counts}
    held: list[Any] = [(numbers, own)] * mesh.sizes.data
    dist.all_gather_object(held, held[0], group=mesh.data_group)
    names = {path for given, _ in held for path in given}
    names = {path for path in names if len({given.get(path) for given, _ in held}) > 1}
    if rules[0].is_sum:
        names |= set.intersection(*(counted for _, counted in held))
    if not names:
        return
    is_cut = dims.size is not None and not dims.unsure
    taken = take_samples(batch, dims, [*range(min(dims.size or 1, 2))]) if is_cut else batch
    count = min(dims.size or 1, 2) if is_cut else 1
    parts = [(taken, count), (taken, count), (_other_numbers(taken), count)]
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
            f"{type(module).__name__}.training_step: its loss depends on "
            f"{', '.join(sorted(names))} of the batch, which each replica has of its own rows, as "
            "where a collate_fn counts labels. One process has that of all rows, by which the loss "
            "would be another one. Compute it in the step, of the tensors of the batch, as "
            "(labels != -100).sum(), which is seen there; or use data_parallel_size=1. No weight "
            "was changed.",
        )


def _numbers(node: Any, path: str = "the batch") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a batch that no sample has for itself, with their paths."""
    if (number := _number_of(node)) is not None:
        yield path, number
    held = children(node) or []
    # A list of numbers has one for each sample.
    if not all(_number_of(value) is not None for _, value in held):
        for key, value in held:
            yield from _numbers(value, repr(str(key)) if path == "the batch" else f"{path}.{key}")


def _number_of(node: Any) -> float | None:
    if isinstance(node, Tensor):
        node = None if node.ndim else node.item()
    if isinstance(node, bool) or not isinstance(node, int | float):
        return None
    return float(node) if math.isfinite(float(node)) else None


def _other_numbers(node: Any) -> Any:
    if _number_of(node) is not None:
        return node * 2 + 1
    held = children(node)
    if not held or all(_number_of(value) is not None for _, value in held):
        return node
    return rebuild(node, [(key, _other_numbers(value)) for key, value in held])
