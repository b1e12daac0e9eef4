"""Running a step on a batch and on parts of it, and what to do about a batch that cannot be cut."""

from collections.abc import Callable, Sequence
from typing import Any

from lightning_par.engine.batch import find_batch_dims
from lightning_par.errors import ConfigurationError
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.step.step_report import StepReport

__all__ = ["RunParts", "cure_of_uncut", "run_parts"]

RunParts = Callable[..., tuple[StepReport, bool]]
"""Runs the step without gradients on some samples (and their number) and on their parts, and tells
whether it drew random numbers that cannot be cut; the same on every rank of the replica. With
``made=True`` the samples are not those of the batch, see `contrast.py`.
"""


def run_parts(
    run: RunParts,
    parts: Sequence[tuple[Any, int]],
    whole: tuple[Any, int],
    takes_whole: Callable[[StepReport], bool] | None = None,
    cure: str = "",
) -> tuple[StepReport, bool]:
    """Run a step on parts of a batch.

    Args:
        run: Runs it.
        parts: Some samples, and parts of them.
        whole: The batch, on which the step runs if it does not run on its parts.
        takes_whole: Whether what it did on the whole batch is enough; None: it is not.
        cure: What to do if it runs on the whole batch only.

    Raises:
        Exception: Of the user's step, if it fails on the whole batch, too.
        ConfigurationError: Of `run`, as where the step runs on the whole batch only.
    """
    try:
        return run(parts)
    except ConfigurationError as error:
        refusal = error
    if refusal.code == "LP303" and len(parts) > 1:
        # Not while the refusal is handled, which would be told first.
        # Outside of the handler: an error here would be shown as "during handling of another
        # one".
        seen, is_random = run([whole])
        if takes_whole is not None and takes_whole(seen):
            return seen, is_random
        told = refusal.message.rstrip(".")
        raise ConfigurationError(
            "LP303", f"{told}. With all {whole[1]} samples at once the step runs. {cure}"
        ) from refusal.__cause__
    raise refusal


def cure_of_uncut(batch: Any, microbatches: int, replicas: int) -> str:
    """Return what to do about a step that runs on whole batches only, such as those of graphs or
    boxes, whose rows name their sample by a number.

    Args:
        batch: That of a replica.
        microbatches: Into how many it is cut.
        replicas: Among how many the global batch is divided.
    """
    cure = ["use num_microbatches=1"] * (microbatches > 1)
    if replicas > 1:
        dims = find_batch_dims(batch, BatchLayout())
        cure.append(
            f"declare ParallelPlan(batch=BatchLayout(whole={(*dims.dims, *dims.others)!r}, "
            "loss_weight=lambda batch: ...)), where the function returns the number of samples or "
            "labels over which the loss of a batch is averaged"
        )
    return (
        "Write the step for any number of samples. If the batch dim of an entry is not dim 0, "
        "declare ParallelPlan(batch=BatchLayout(batch_dims={entry: dim})). If a batch cannot be "
        "cut, because its rows refer to their sample by a number (graphs, boxes), "
        f"{' and '.join(cure)}."
    )
