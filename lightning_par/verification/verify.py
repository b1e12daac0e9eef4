"""From a module, a batch and a strategy to a verdict."""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_par.plan import find_plan, ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.verification.causes import differing_copies, find_causes, missed_patterns
from lightning_par.verification.comparison import compare_steps, first_difference, VerifyReport
from lightning_par.verification.layouts import check_batches, find_sizes, shrink
from lightning_par.verification.processes import run_ranks
from lightning_par.verification.run_trace import Subject, Trace

__all__ = ["judge", "verify", "verify_subject"]

_Traces = Sequence[tuple[Trace, Trace | None]]


def verify(
    module: pl.LightningModule,
    batch: Any,
    strategy: MeshStrategy,
    *,
    steps: int = 3,
    devices: int | None = None,
    timeout: float = 300.0,
) -> VerifyReport:
    """Train a module for a few steps on one process and on a layout, and compare everything.

    Both run in new processes on the CPU, in float64 and without dropout; an axis gets at most two
    ranks. `module` is left alone. As with everything that starts processes, a script needs
    ``if __name__ == "__main__":``.

    Args:
        module: The user's; it can be pickled.
        batch: Of all replicas together; or a list of batches, one per step.
        strategy: Of the user, attached to a Trainer or not.
        steps: How many, 1 or more; a list of batches is gone through again and again.
        devices: Number of ranks that "auto" divides; None: those of the Trainer, if there is one.
        timeout: Seconds that a run may take.

    Returns:
        The verdict; print it for a table.

    Raises:
        ConfigurationError: A batch cannot be divided among the replicas.
        MeshError: The sizes do not fit the devices.
    """
    batches = batch if isinstance(batch, list) else [batch]
    chosen = [batches[step % len(batches)] for step in range(steps)] if batches else []
    asked = find_sizes(strategy, devices)
    check_batches(chosen, shrink(asked))
    bare = copy.copy(module)
    bare._trainer = None
    subject = Subject(module=bare, batches=chosen, strategy=strategy)
    make = partial(pickle.loads, pickle.dumps(subject))  # shared memory would change the module
    return verify_subject(
        make, asked, plan=strategy.options.plan or find_plan(module), timeout=timeout
    )


def verify_subject(
    make: Callable[[], Subject],
    asked: ParallelSizes,
    *,
    plan: ParallelPlan | None,
    timeout: float = 300.0,
) -> VerifyReport:
    """Run what `make` gives on one process and on a layout, and judge.

    Args:
        make: Gives a new subject; it can be pickled.
        asked: Sizes of the user's layout.
        plan: Of the model, or None.
        timeout: Seconds that a run may take.
    """
    sizes = shrink(asked)
    alone = run_ranks(
        make, ParallelSizes(), parts=count_parts(make().strategy, sizes), timeout=timeout
    )
    ranks = run_ranks(make, sizes, parts=(1, 1), timeout=timeout)
    return judge(alone[0][0], ranks, sizes, asked, plan)


def count_parts(strategy: MeshStrategy, sizes: ParallelSizes) -> tuple[int, int]:
    """Return among how many replicas, and then micro-batches, a batch is divided.

    Args:
        strategy: Of the user.
        sizes: Of the layout that is run.
    """
    ranks = sizes.pipeline
    return sizes.data, strategy.options.microbatches(ranks) if ranks > 1 else 1


def judge(
    one: Trace,
    ranks: _Traces,
    sizes: ParallelSizes,
    asked: ParallelSizes,
    plan: ParallelPlan | None,
) -> VerifyReport:
    """Compare what was traced, and name the likely cause of a difference.

    Args:
        one: Of one process.
        ranks: Of the layout, in the order of the ranks: without dropout, and with it.
        sizes: Of the layout.
        asked: Of the user's layout.
        plan: Of the model, or None.
    """
    traces = [trace for trace, _ in ranks]
    errors = list(dict.fromkeys(t.error for t in (one, *traces) if t.error is not None))
    failed = [f"the run failed: {error}" for error in errors]
    if failed and one.error is None:
        failed = [*missed_patterns(traces, sizes), *failed]
    first = None if failed else first_difference(one, traces)
    causes = failed or find_causes(first, one, traces, sizes, plan or ParallelPlan())
    notes = []
    if one.dropouts:
        notes.append(f"dropout was off: {one.dropouts} calls of it drew nothing")
    with_dropout = [trace for _, trace in ranks if trace is not None]
    if first is None and not failed and len(with_dropout) == len(ranks):
        causes += _of_dropout(with_dropout, sizes)
    return VerifyReport(
        sizes=sizes,
        asked=asked,
        rows=() if failed else compare_steps(one, traces),
        first=first,
        causes=tuple(causes),
        notes=tuple(notes),
    )


def _of_dropout(ranks: Sequence[Trace], sizes: ParallelSizes) -> list[str]:
    """Say which parameter gives away that ranks drew differently where they must draw alike."""
    copies = differing_copies(ranks, sizes)
    if not copies:
        return []
    return [
        "dropout drawn differently per rank: everything is equal without dropout, but with it the "
        f"copies of {copies[0]} get different gradients on the tensor-parallel ranks. What every "
        "rank computes alike has to draw the same numbers: do not seed by rank, and give the "
        "module a style that says what it works on"
    ]
