"""`verify`: train a module on one process and on a mesh, and compare every step."""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor

from lightning_par.checkpoint.progress import counted
from lightning_par.engine.batch import batch_size
from lightning_par.errors import ConfigurationError
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.proof.causes import (
    causes_of_dropout,
    find_causes,
    Findings,
    missed_patterns,
)
from lightning_par.upstream.lightning import forget_trainer
from lightning_par.verification.comparison import (
    compare_steps,
    differing_copies,
    unsummed_gradients,
    VerifyReport,
)
from lightning_par.verification.processes import run_ranks
from lightning_par.verification.run_trace import Subject, Trace

__all__ = ["check_batches", "compare_traces", "shrink", "verify", "verify_subject"]

_MAX_RANKS = 2
"""Two ranks show what is wrong with an axis, and the whole mesh runs on one machine."""
_Traces = Sequence[tuple[Trace, Trace | None]]


def verify(
    module: pl.LightningModule,
    batch: Any,
    strategy: MeshStrategy | str,
    *,
    steps: int = 3,
    devices: int | None = None,
    timeout: float = 300.0,
) -> VerifyReport:
    """Train a module for a few steps on one process and on a mesh, and compare every tensor.

    Both runs are in new processes on the CPU, in float64 and without dropout; an axis gets at most
    two ranks. `module` is not changed. Processes are spawned, so a script needs
    ``if __name__ == "__main__":``.

    Args:
        module: The user's LightningModule, which can be pickled.
        batch: Global batch (of all replicas together), such as ``next(iter(loader))``; or a list of
            batches, one per step. A list of tensors is one batch: a DataLoader makes it of pairs.
        strategy: The user's strategy, attached to a Trainer or not; or its registered name.
        steps: Number of steps, 1 or more; a shorter list of batches is repeated.
        devices: Number of ranks of the user's mesh; None: that of the strategy's Trainer, or the
            product of the sizes given.
        timeout: Seconds without an answer after which a run is ended.

    Returns:
        The verdict; print it for a table.

    Raises:
        ConfigurationError: A batch does not divide evenly among the replicas; or the strategy is
            none of this package.
        MeshError: The sizes do not divide the number of ranks.
    """
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if not isinstance(strategy, MeshStrategy):
        raise ConfigurationError(
            "LP903",
            f"verify(..., strategy={strategy!r}) needs a strategy of lightning_par, such as "
            "Hybrid3DStrategy(tensor_parallel_size=2), or its name, such as 'hybrid3d'.",
        )
    is_one = not isinstance(batch, list) or any(isinstance(entry, Tensor) for entry in batch)
    batches = [batch] if is_one else batch
    chosen = [batches[step % len(batches)] for step in range(steps)] if batches else []
    asked = _find_sizes(strategy, devices)
    check_batches(chosen, shrink(asked))
    # A Trainer cannot be pickled, and is not needed.
    # Shallow: the weights are copied by the pickle below.
    detached = copy.copy(module)
    forget_trainer(detached)
    subject = Subject(module=detached, batches=chosen, strategy=strategy)
    # Pickled here: torch.multiprocessing would pass the weights in shared memory, and the training
    # in the other process would change the user's module.
    make = partial(pickle.loads, pickle.dumps(subject))
    plan = strategy.options.plan or find_plan(module)
    return verify_subject(make, asked, plan=plan, steps=len(chosen), timeout=timeout)


def _find_sizes(strategy: MeshStrategy, devices: int | None) -> ParallelSizes:
    """Return the mesh sizes of a strategy, with "auto" resolved."""
    if devices is None and strategy.parallel_devices:
        return strategy.sizes
    options = strategy.options
    if devices is None:
        given = (
            options.tensor_parallel_size,
            options.pipeline_parallel_size,
            options.context_parallel_size,
            options.data_parallel_size,
        )
        # One replica of the user's mesh.
        devices = prod(size for size in given if size != "auto")
    return options.fit_sizes(devices, devices)


def shrink(sizes: ParallelSizes) -> ParallelSizes:
    """Return the same mesh axes with at most two ranks each.

    Args:
        sizes: The user's mesh sizes.
    """
    replicas = min(sizes.data, _MAX_RANKS)
    sharded = sizes.data_shard > 1
    return ParallelSizes(
        pipeline=min(sizes.pipeline, _MAX_RANKS),
        # HSDP shrinks to plain FSDP: the shards are what differs from one process.
        data_replicate=1 if sharded else replicas,
        data_shard=replicas if sharded else 1,
        context=min(sizes.context, _MAX_RANKS),
        tensor=min(sizes.tensor, _MAX_RANKS),
        expert=min(sizes.expert, _MAX_RANKS)
        if replicas * min(sizes.context, _MAX_RANKS) > 1
        else 1,
    )


def check_batches(batches: Sequence[Any], sizes: ParallelSizes) -> None:
    """Check that every batch divides evenly among the replicas.

    Args:
        batches: Global batches, one per step.
        sizes: Mesh sizes of the parallel run.

    Raises:
        ConfigurationError: There is no batch, or the number of its samples is not a multiple of the
            number of replicas.
    """
    if not batches:
        raise ConfigurationError(
            "LP802",
            "verify needs a batch for every step, but the data loader gave no batch. Give the "
            "data set more samples, or use a smaller batch_size.",
        )
    for number, batch in enumerate(batches):
        size = batch_size(batch)
        if size % sizes.data:
            raise ConfigurationError(
                "LP802",
                f"batch {number} has {size} samples, which cannot be divided equally over "
                f"{sizes.data} replicas. Use {-(-size // sizes.data) * sizes.data} samples.",
            )


def verify_subject(
    make: Callable[[], Subject],
    asked: ParallelSizes,
    *,
    plan: ParallelPlan | None,
    steps: int,
    timeout: float = 300.0,
) -> VerifyReport:
    """Train `make()` on one process and on a mesh, and report the differences.

    Args:
        make: Picklable function that returns a new subject.
        asked: Mesh sizes of the user's strategy.
        plan: Parallel plan of the model, if it has one.
        steps: Number of batches of a subject, to show how far the runs have come.
        timeout: Seconds without an answer after which a run is ended.
    """
    sizes = shrink(asked)
    # First alone, so that the two do not share the cores.
    with counted("steps", "training on one process", steps):
        alone = run_ranks(make, ParallelSizes(), timeout=timeout)
    with counted(
        "steps", f"training on {sizes}", steps
    ):  # with dropout in the model as many follow
        ranks = run_ranks(make, sizes, timeout=timeout)
    return compare_traces(alone[0][0], ranks, sizes, asked, plan)


def compare_traces(
    one: Trace,
    ranks: _Traces,
    sizes: ParallelSizes,
    asked: ParallelSizes,
    plan: ParallelPlan | None,
) -> VerifyReport:
    """Compare the traces of both runs, and diagnose a difference.

    Args:
        one: Trace of the run on one process.
        ranks: Traces of the parallel run without and with dropout, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.
        asked: Mesh sizes of the user's strategy.
        plan: Parallel plan of the model, if it has one.
    """
    # One fault mostly ends all ranks: the same text counts once.
    traces = [trace for trace, _ in ranks]
    failed = _errors("the run failed", (one, *traces))
    # A run that ended early has steps that cannot be compared with anything.
    rows, first = ((), None) if failed else compare_steps(one, traces)
    found = Findings(
        sizes=sizes,
        draws=one.draws,
        styles=traces[0 if first is None else first.rank or 0].styles,
        positions=plan.positions if plan is not None else None,
        unstyled=sorted({name for trace in traces for name in trace.unstyled}),
        copies=differing_copies(traces, sizes),
        unsummed=unsummed_gradients(one, traces, sizes),
    )
    # If only the mesh failed, a pattern that matches nothing is the likeliest cause.
    causes = [*(missed_patterns(found) if failed and one.error is None else ()), *failed]
    causes += find_causes(first, found)
    # Dropout is checked only where everything else is equal: its symptom would be the same.
    with_dropout = [trace for _, trace in ranks if trace is not None]
    refused = _errors("with dropout the run failed", with_dropout)
    causes += refused
    if first is None and not failed and not refused and len(with_dropout) == len(ranks):
        causes += causes_of_dropout(differing_copies(with_dropout, sizes))
    dropped = f"dropout was off: {one.dropouts} calls of it drew nothing"
    return VerifyReport(
        sizes=sizes,
        asked=asked,
        rows=rows,
        first=first,
        causes=tuple(causes),
        notes=(dropped,) if one.dropouts else (),
    )


def _errors(what: str, traces: Sequence[Trace]) -> list[str]:
    errors = dict.fromkeys(trace.error for trace in traces if trace.error is not None)
    return [f"{what}: {error}" for error in errors]
