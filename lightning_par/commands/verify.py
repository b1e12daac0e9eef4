"""Train for a few steps on one process and on the configured mesh, and compare: equal, or the first
difference and its likely cause.

Takes the arguments of ``lightning-par fit``. Both runs are on the CPU, in float64 and without
dropout; an axis gets at most two ranks. Make the model small: --model.init_args...=...
"""

import argparse
from functools import partial
from itertools import chain, repeat
from typing import Any

from lightning_par.commands.run_config import configure, ConfiguredRun
from lightning_par.errors import ConfigurationError
from lightning_par.plan.lookup import find_plan
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.verification.layouts import check_batches, shrink
from lightning_par.verification.run_trace import Subject
from lightning_par.verification.verify import verify_subject

__all__ = ["first_batches", "main", "make_parser"]


def main(arguments: list[str]) -> int:
    """Print the table and the verdict.

    Args:
        arguments: What follows ``lightning-par verify``.

    Returns:
        The exit status: 0 if everything is equal, else 1.

    Raises:
        LightningParError: The configuration is invalid, or the batches do not divide.
    """
    options, rest = make_parser().parse_known_args(arguments)
    if options.steps < 1:
        raise ConfigurationError("LP902", f"--steps {options.steps} must be 1 or more.")
    make = partial(_make, tuple(rest), options.steps)
    subject = make()
    asked = subject.strategy.sizes
    check_batches(subject.batches, shrink(asked))
    plan = subject.strategy.options.plan or _plan_of(subject)
    report = verify_subject(make, asked, plan=plan, steps=options.steps, timeout=options.timeout)
    print(report)
    return 0 if report.equal else 1


def _plan_of(subject: Subject) -> Any:
    subject.module.configure_model()
    return find_plan(subject.module)


def _make(arguments: tuple[str, ...], steps: int) -> Subject:
    """Build module, batches and strategy; every process of the verification calls it."""
    run = configure(arguments, on_meta=False)
    strategy = run.trainer.strategy
    assert isinstance(strategy, MeshStrategy)
    return Subject(module=run.model, batches=first_batches(run, steps), strategy=strategy)


def first_batches(run: ConfiguredRun, steps: int) -> list[Any]:
    """Return the first training batches; if there are fewer, they repeat.

    Args:
        run: Its data are set up.
        steps: How many.
    """
    source = run.model if run.datamodule is None else run.datamodule
    # The Trainer would call these hooks, but only inside fit.
    source.prepare_data()
    if run.datamodule is not None:
        run.datamodule.setup("fit")
    loader = source.train_dataloader()
    found = [batch for batch, _ in zip(loader, range(steps), strict=False)]
    return list(chain.from_iterable(repeat(found, steps)))[:steps]


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-par verify",
        description=__doc__,
        epilog="All other arguments are those of lightning-par fit: --config my.yaml ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: 3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run")
    return parser
