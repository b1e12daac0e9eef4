"""Warnings, or refusals, of numbers that parts of a batch, or ranks, give unlike one process."""

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.contents import names_in
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.step.metrics import OF_METRIC
from lightning_par.strategies.step.returned import warn_of_results
from lightning_par.strategies.step.step_report import StepReport

__all__ = [
    "check_hyperparameters",
    "check_left_values",
    "check_tensor_ranks",
    "warn_of_logs",
    "warn_of_own_outputs",
]

_LOOPS = {"training_step": "train", "validation_step": "validation", "test_step": "test"}
_JOINS = frozenset({"all_gather", "all_gather_object", "all_reduce", "gather_object", "reduce"})


def warn_of_own_outputs(
    module: pl.LightningModule, step: str, seen: StepReport, replicas: int
) -> None:
    """Warn where a step leaves values in attributes that a hook of its epoch reads, or writes by
    itself: each replica does so with numbers of its own samples.

    Args:
        module: The user's LightningModule.
        step: Name of the step.
        seen: What the look at it saw.
        replicas: Their number.
    """
    if seen.writes:
        rank_zero_warn(
            f"{step} writes to a logger, the terminal or a file. Rank 0 writes only the values of "
            f"its own samples, which belong to one of {replicas} replicas (as with DDP). A run on "
            "one process writes the values of the whole batch. Use self.log(name, value); or call "
            "self.all_gather(value) on every rank, and write on rank 0."
        )
    loop = _LOOPS.get(step)
    for hook in (f"on_{loop}_epoch_end", f"on_{loop}_end"):
        names = names_in(getattr(type(module), hook, None))
        read = sorted(name for name in seen.leaves if name.rpartition(".")[2] in names)
        if read and not names & _JOINS:
            attributes = ", ".join(read)
            rank_zero_warn(
                f"{step} stores values in {attributes}, which {hook} reads. Each of {replicas} "
                "replicas has only the values of its own samples, so a mean over them may differ "
                "from the mean in a run on one process. Pass the values to a torchmetrics metric, "
                "which is synchronized over the replicas, or gather them in the hook: "
                "self.all_gather(values)."
            )
            return


def warn_of_logs(step: str, names: frozenset[str]) -> None:
    """Say which numbers are logged as the mean of what parts of a batch give, and which metrics
    get something else from parts than from a batch.
    """
    metrics = {name for name in names if name.startswith(OF_METRIC)}
    returned = {name for name in names if name.startswith(f"{step}()")}
    logged = names - metrics - returned
    warn_of_results(returned)
    if metrics:
        rank_zero_warn(
            f"{step} updates the metrics {', '.join(sorted(metrics))} once for each micro-batch "
            "and replica. The result differs from that of a run on one process, which updates them "
            "once with the whole batch. Pass a mean together with its number of entries "
            "(MeanMetric.update(value, weight)), or pass the entries themselves to the metric."
        )
    if logged:
        rank_zero_warn(
            f"{step} logs {', '.join(sorted(logged))}. The value for a batch is neither the mean "
            "nor the sum of the values for its micro-batches and replicas, so the logged mean "
            "differs from what a run on one process logs. Log the numbers from which the value is "
            "computed, and compute it at the end of the epoch; or use a torchmetrics metric, or "
            "reduce_fx='max'."
        )


def check_tensor_ranks(
    module: pl.LightningModule, mesh: ParallelMesh, seen: StepReport, tolerance: float
) -> None:
    """Refuse a loss that tensor-parallel ranks, which have the same samples, do not share.

    Args:
        module: The user's LightningModule.
        mesh: Mesh of this run.
        seen: What the step did on some samples.
        tolerance: Relative difference that roundings may make.

    Raises:
        ConfigurationError: On every rank.

    **Communicates**: the losses, over the ``tp`` axis.
    """
    degree = mesh.sizes.tensor
    found = [loss for losses in seen.losses for loss in losses]
    if degree == 1 or not found:  # a step without a backward has no loss
        return
    losses = torch.tensor(found, dtype=torch.float64, device=module.device)
    ends = torch.cat([losses, -losses])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=mesh.group("tp"))
    most, least = ends[: len(losses)], -ends[len(losses) :]
    if bool(((most - least) > tolerance * most.abs().clamp(min=1e-30)).any()):
        raise ConfigurationError(
            "LP310",
            f"{type(module).__name__}.training_step computes different losses on the {degree} "
            f"tensor-parallel ranks ({least[0]:.6g} to {most[0]:.6g} for the same "
            "samples).\nWhy: the loss uses an activation that is sharded, so each rank computes it "
            "from its own tokens or features.\nWhat to write: use sequence_parallel=False, or give "
            "the module whose output enters the loss a style that gathers it "
            "('sequence_gather_output' or 'colwise_gather_output') in ParallelPlan(tensor=...)."
            "\nNo weight was changed.",
        )


def check_left_values(seen: StepReport, sizes: ParallelSizes, *, follows: bool) -> None:
    """Refuse a loss that follows from what samples have left in attributes, where each micro-batch
    or replica would have its own.

    Args:
        seen: What the step did on some samples and on parts of them.
        sizes: Sizes of the mesh.
        follows: Whether that was seen on any replica.

    Raises:
        ConfigurationError: On every rank.
    """
    if follows:
        named = ", ".join(seen.leaves[:3]) or "attributes"
        raise ConfigurationError(
            "LP325",
            "the loss of training_step depends on values that an earlier training_step stored in "
            f"attributes of the module ({named}).\nWhy: on {sizes} each micro-batch and replica "
            "stores values of its own samples there, so the next loss would differ from that of a "
            "run on one process.\nWhat to write: log the number by self.log('x', x, "
            "sync_dist=True), and store trainer.callback_metrics['x'] in on_train_batch_end, where "
            "it is the value of the whole batch; or use num_microbatches=1 and "
            "data_parallel_size=1.\nNo weight was changed.",
        )


def check_hyperparameters(seen: StepReport, sizes: ParallelSizes, *, any_sets: bool) -> None:
    """Refuse a step that sets a hyperparameter of an optimizer to another value for each part.

    Args:
        seen: What the step did on some samples and on parts of them.
        sizes: Sizes of the mesh.
        any_sets: Whether that was seen on any replica.

    Raises:
        ConfigurationError: On every rank.
    """
    if any_sets:
        name = next(iter(seen.sets), "a hyperparameter of an optimizer")
        raise ConfigurationError(
            "LP325",
            f"training_step sets {name} to a different value for each part of a batch.\n"
            f"Why: on {sizes} training_step runs for each micro-batch and replica, and the value "
            "depends on the samples, or on how often training_step has run.\n"
            "What to write: set the value in on_train_batch_end, from outputs['loss'] or "
            "trainer.callback_metrics, which have the values of the whole batch; or use "
            "num_microbatches=1 if the value depends on the number of steps.\n"
            "No weight was changed.",
        )
