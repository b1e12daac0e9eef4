"""The command that predicts a configured layout."""

from lightning_par.commands import FitArguments, quick_imports
from lightning_par.commands.prediction.machine import Machine
from lightning_par.planner.report import as_values, describe, format_table

__all__ = ["forecast"]


def forecast(*, machine: Machine, fit: FitArguments) -> int:
    """Predict time and memory of a configured run on a machine that need not be here.

    Exits with status 1 if the run does not fit in memory. (``lightning-par predict`` is
    Lightning's: it runs a trained model.)

    Args:
        machine: What runs on what.
        fit: More arguments of fit.

    Raises:
        LightningParError: The configuration or the profile is invalid.
    """
    with quick_imports():
        from lightning_par.commands.prediction.planned_run import PlannedRun

    run = PlannedRun(machine, fit)
    found = run.planner.predict(run.layout())
    fits = found.memory.peak <= run.planner.limit
    if not run.show(found, {**as_values(found), "fits": fits}):
        print(f"{run.describe(found.layout.samples)}\n\n{format_table([found])}\n")
        print(describe(found))
        if not fits:
            print(
                f"does not fit: pipeline rank {found.memory.peak_rank} needs "
                f"{found.memory.peak / 2**30:.1f} GiB, but {run.planner.limit / 2**30:.1f} GiB may "
                "be used. lightning-par search finds a layout that fits."
            )
    return 0 if fits else 1
