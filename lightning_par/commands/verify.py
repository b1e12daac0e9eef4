"""The command that compares a mesh with one process."""

from functools import partial
from typing import TYPE_CHECKING

from lightning_par.commands import FitArguments, quick_imports
from lightning_par.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_par.verification.run_trace import Subject

__all__ = ["verify"]


def verify(*, steps: int = 3, timeout: float = 300.0, fit: FitArguments) -> int:
    """Train for a few steps on one process and on the configured mesh, and compare: equal, or the
    first difference and its likely cause.

    Takes the arguments of ``lightning-par fit``: ``--config my.yaml``. Both runs are on the CPU, in
    float64 and without dropout; an axis gets at most two ranks. Make a large
    model small, as by --model.init_args.num_layers=2. Exits with status 1 if there is a difference.

    Args:
        steps: Training steps.
        timeout: Seconds for each run.
        fit: Arguments of fit.

    Raises:
        LightningParError: The configuration is invalid, or the batches do not divide.
    """
    if steps < 1:
        raise ConfigurationError("LP902", f"--steps {steps} must be 1 or more.")
    with quick_imports():
        from lightning_par.inference.lookup import find_plan
        from lightning_par.verification.verify import check_batches, shrink, verify_subject

    make = partial(_make, tuple(fit), steps)
    subject = make()
    asked = subject.strategy.sizes
    check_batches(subject.batches, shrink(asked))
    plan = subject.strategy.options.plan
    if plan is None:
        subject.module.configure_model()
        plan = find_plan(subject.module)
    report = verify_subject(make, asked, plan=plan, steps=steps, timeout=timeout)
    print(report)
    return 0 if report.equal else 1


def _make(arguments: tuple[str, ...], steps: int) -> "Subject":
    """Build module, batches and strategy; every process of the verification calls it."""
    from lightning_par.commands.run_config import configure
    from lightning_par.verification.run_trace import Subject

    run = configure(arguments, on_meta=False)
    return Subject(module=run.model, batches=run.first_batches(steps), strategy=run.strategy)
