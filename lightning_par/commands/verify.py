"""The command that compares a mesh, or another strategy, with one process."""

from functools import partial
from typing import TYPE_CHECKING

from lightning_par.commands import FitArguments, quick_imports
from lightning_par.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_par.commands.prediction.run_config import ConfiguredRun
    from lightning_par.sizes import ParallelSizes
    from lightning_par.verification.run_trace import Subject, Trace

__all__ = ["verify"]

_OF_ONE_STEP = """
--trainer.accelerator=cpu --trainer.num_nodes=1 --trainer.max_steps=1 --trainer.callbacks=null
--trainer.limit_val_batches=0 --trainer.num_sanity_val_steps=0 --trainer.logger=false
--trainer.enable_checkpointing=false --trainer.enable_progress_bar=false
--trainer.enable_model_summary=false
"""


def verify(*, steps: int = 3, timeout: float = 300.0, fit: FitArguments) -> int:
    """Train for a few steps on one process and on the configured mesh, and compare: equal, or the
    first difference and its likely cause.

    Takes the arguments of ``lightning-par fit``: ``--config my.yaml``. Both runs are on the CPU, in
    float64 and without dropout; an axis gets at most two ranks. Make a large
    model small, as by --model.init_args.num_layers=2. Exits with status 1 if there is a difference.

    With a strategy of Lightning's or of your own its first step is compared, in the precision of
    the Trainer and without callbacks: DDP on two ranks, others on as many as configured.

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
        from lightning_par.commands.prediction.run_config import configure
        from lightning_par.inference.lookup import find_plan
        from lightning_par.strategies.mesh_strategy import MeshStrategy
        from lightning_par.verification.verify import check_batches, shrink, verify_subject

    run = configure(fit, on_meta=False, any_strategy=True)
    if not isinstance(run.trainer.strategy, MeshStrategy):
        return _verify_other(run, tuple(fit), timeout)
    subject = _subject_of(run, steps)
    asked = run.strategy.sizes
    check_batches(subject.batches, shrink(asked))
    plan = run.strategy.options.plan
    if plan is None:
        subject.module.configure_model()
        plan = find_plan(subject.module)
    make = partial(_make, tuple(fit), steps)
    report = verify_subject(make, asked, plan=plan, steps=steps, timeout=timeout)
    print(report)
    return 0 if report.equal else 1


def _subject_of(run: "ConfiguredRun", steps: int) -> "Subject":
    from lightning_par.verification.run_trace import Subject

    return Subject(module=run.model, batches=run.first_batches(steps), strategy=run.strategy)


def _make(arguments: tuple[str, ...], steps: int) -> "Subject":
    """Build module, batches and strategy; every process of the verification calls it."""
    from lightning_par.commands.prediction.run_config import configure

    return _subject_of(configure(arguments, on_meta=False), steps)


def _verify_other(run: "ConfiguredRun", arguments: tuple[str, ...], timeout: float) -> int:
    """Compare the first step of a strategy that is not of this package, and print the report."""
    from lightning.pytorch.strategies import DDPStrategy

    from lightning_par.sizes import ParallelSizes
    from lightning_par.verification.processes import run_ranks

    strategy, ranks = run.trainer.strategy, run.trainer.num_devices * run.trainer.num_nodes
    sizes = ParallelSizes(data_replicate=min(ranks, 2) if type(strategy) is DDPStrategy else ranks)
    make = partial(_take_step, arguments)
    (first, _), *others = run_ranks(make, sizes, timeout=timeout, body=_prove)
    errors = [trace.error for trace, _ in ((first, None), *others) if trace.error is not None]
    print(f"not equal: the run failed: {errors[0]}" if errors else first.report)
    return 0 if not errors and first.report is not None and first.report.equal else 1


def _take_step(arguments: tuple[str, ...], ranks: int) -> "Trace":
    """Run the configured step on this rank, and return its report."""
    from lightning_par.callbacks import FirstStepProof
    from lightning_par.commands.prediction.run_config import configure
    from lightning_par.upstream.lightning import callbacks_of
    from lightning_par.verification.run_trace import describe_error, Trace

    words = (*arguments, *_OF_ONE_STEP.split(), f"--trainer.devices={ranks}")
    run, proof = configure(words, on_meta=False, any_strategy=True), FirstStepProof()
    callbacks_of(run.trainer).append(proof)
    try:
        run.trainer.fit(run.model, datamodule=run.datamodule)
    except Exception as error:
        return Trace(error=describe_error(error))
    return Trace(report=proof.report)


def _prove(make: "partial[Trace]", sizes: "ParallelSizes", rank: int) -> tuple["Trace", None]:
    """Run in one process of the verification."""
    return make(sizes.world_size), None
