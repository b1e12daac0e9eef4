"""The command that runs one rank of a run alone."""

import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from json import dumps
from typing import Any, TYPE_CHECKING

from lightning_par.commands import FitArguments, PathName, quick_imports
from lightning_par.errors import ConfigurationError
from lightning_par.units import in_words

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback

    from lightning_par.verification.absent_ranks import LoneEnvironment
    from lightning_par.verification.rehearse import Rehearsal

__all__ = ["rehearse", "rehearse_config"]

_SHOWN = 24
"""Collectives that are printed; ``--json`` has all of them."""


def rehearse(
    *,
    config: PathName,
    nodes: int | None = None,
    devices: int | None = None,
    rank: int = 0,
    all_distinct: bool = False,
    json: bool = False,
    fit: FitArguments,
) -> None:
    """Set one rank of a run of any size up on this machine, without weights and without the other
    ranks, and run one optimizer step: peak memory by kind, bytes by mesh axis, the order of
    collectives, and every error of the real start.

    Neither the devices nor the memory of the real run are needed: the rank runs on the CPU, with
    tensors that have a shape and no memory.

    Args:
        config: Configuration file of the run, as for fit.
        nodes: Number of nodes; default: as configured.
        devices: Devices of each node; default: as configured.
        rank: Global rank.
        all_distinct: One rank of each kind: the first of every pipeline stage, and the last rank.
        json: Print JSON, for programs.
        fit: More arguments of fit.

    Raises:
        LightningParError: What the real run would refuse at its start.
    """
    with quick_imports():
        from lightning_par.commands.prediction.run_config import configure, trainer_number
        from lightning_par.verification.rehearse import distinct_ranks

    num_nodes = nodes or trainer_number(config, fit, "num_nodes") or 1
    number = devices or trainer_number(config, fit, "devices")
    if not isinstance(number, int) or number < 1:
        raise ConfigurationError(
            "LP905",
            f"trainer.devices={number!r} is no number of devices. Pass the number with --devices.",
        )
    arguments, ranks = [f"--config={config}", *fit], [rank]
    if all_distinct:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = configure([*arguments, *_overrides(num_nodes, number)], on_meta=True)
        ranks = distinct_ranks(run.strategy.sizes)
    found = [
        rehearse_config(arguments, num_nodes=num_nodes, devices=number, rank=each) for each in ranks
    ]
    if json:
        print(dumps([{**asdict(each), "peak": each.peak} for each in found], indent=1))
        return
    for each in found:
        print(*_describe(each), sep="\n")


def rehearse_config(
    arguments: Sequence[str], *, num_nodes: int, devices: int, rank: int
) -> "Rehearsal":
    """Rehearse one rank of a configured run in a process of its own, which leaves nothing behind.

    Args:
        arguments: Those of ``lightning-par fit``.
        num_nodes: Number of nodes.
        devices: Devices of a node.
        rank: Global rank.

    Raises:
        LightningParError: What the real run would refuse at its start.
    """
    from lightning_par.verification.rehearse import rehearse_apart

    make = partial(_make, tuple(arguments), num_nodes, devices)
    return rehearse_apart(make, num_nodes=num_nodes, devices=devices, rank=rank)


def _make(
    arguments: tuple[str, ...],
    num_nodes: int,
    devices: int,
    observer: "Callback",
    environment: "LoneEnvironment",
) -> "tuple[pl.Trainer, pl.LightningModule, Any]":
    from lightning_par.commands.prediction.run_config import configure

    # This process is the rehearsal's own. The run's own warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overrides = _overrides(num_nodes, devices)
        try:
            run = configure([*arguments, *overrides], on_meta=False, plugins=[environment])
        except SystemExit as ended:
            text = (
                "the arguments of fit have the error that is printed above. Correct the arguments."
            )
            raise ConfigurationError("LP905", text) from ended
    run.trainer.callbacks.append(observer)  # type: ignore[attr-defined]
    return run.trainer, run.model, run.datamodule


def _overrides(num_nodes: int, devices: int) -> list[str]:
    return [
        "--trainer.accelerator=cpu",
        f"--trainer.num_nodes={num_nodes}",
        f"--trainer.devices={devices}",
        "--trainer.max_steps=1",
        "--trainer.limit_val_batches=0",
        "--trainer.num_sanity_val_steps=0",
    ]


def _describe(found: "Rehearsal") -> Iterator[str]:
    yield f"{found.place}: {found.parameters:,} parameters"
    peak, setup = in_words(found.peak, 3), in_words(found.setup_peak, 3)
    yield f"  peak of a step {peak}, of the set-up {setup}"
    for kind, size in sorted(found.memory.items(), key=lambda item: -item[1]):
        yield f"    {kind:<22}{in_words(size, 3):>14}"
    yield f"  {'axis':<16}{'operation':<16}{'calls':>8}{'sent in a step':>20}"
    for e in found.volume:
        yield f"  {_axis(e.axis):<16}{e.operation:<16}{e.calls:>8,}{e.sent:>18,} B"
    yield f"  {sum(c.calls for c in found.collectives):,} collectives in order:"
    for c in found.collectives[:_SHOWN]:
        yield f"    {c.calls} x {c.operation} over {_axis(c.axis)}, {c.payload:,} bytes"
    if len(found.collectives) > _SHOWN:
        yield f"    and {len(found.collectives) - _SHOWN} more (--json has them)"
    yield (
        f"  rehearsed in {found.seconds:.1f} s of processor time and "
        f"{in_words(found.host_bytes, 3)} of host memory"
    )


def _axis(name: str) -> str:
    """Return a name of an axis to read; groups without one, as for tied weights, have a number."""
    return f"group {name}" if name.isdigit() else name
