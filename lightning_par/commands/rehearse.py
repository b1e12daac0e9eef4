"""Set one rank of a run of any size up on this machine, without weights and without the other
ranks, and run one optimizer step: peak memory by kind, bytes by mesh axis, the order of
collectives, and every error of the real start.

Takes the arguments of ``lightning-par fit``. Neither the devices nor the memory of the real run are
needed: the rank runs on the CPU, with tensors that have a shape and no memory.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_par.commands import takes_file
from lightning_par.commands.run_config import configure, ConfiguredRun, read_settings
from lightning_par.errors import ConfigurationError
from lightning_par.planner.rehearsal.absent_ranks import LoneEnvironment
from lightning_par.planner.rehearsal.rehearse import distinct_ranks, Rehearsal, rehearse_apart
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["main", "make_parser", "rehearse_config"]

_SHOWN = 24
"""Collectives that are printed; ``--json`` has all of them."""


def main(arguments: list[str]) -> int:
    """Print what the rehearsed ranks hold and send.

    Args:
        arguments: What follows ``lightning-par rehearse``.

    Returns:
        The exit status, 0.

    Raises:
        LightningParError: What the real run would refuse at its start.
    """
    options = make_parser().parse_known_args(arguments)
    known, rest = options
    num_nodes, devices = _counts(known)
    rest = [f"--config={known.config}", *rest]
    ranks = [known.rank]
    if known.all_distinct:
        ranks = _distinct(rest, num_nodes, devices)
    found = [rehearse_config(rest, num_nodes=num_nodes, devices=devices, rank=r) for r in ranks]
    if known.json:
        print(json.dumps([{**asdict(each), "peak": each.peak} for each in found], indent=1))
        return 0
    for each in found:
        print("\n".join(_describe(each)))
    return 0


def rehearse_config(
    arguments: Sequence[str], *, num_nodes: int, devices: int, rank: int
) -> Rehearsal:
    """Rehearse one rank of a configured run in a process of its own, which leaves nothing behind.

    Args:
        arguments: Those of ``lightning-par fit``.
        num_nodes: Number of nodes.
        devices: Devices of a node.
        rank: Global rank.

    Raises:
        LightningParError: What the real run would refuse at its start.
    """
    make = partial(_make, tuple(arguments), num_nodes, devices)
    return rehearse_apart(make, num_nodes=num_nodes, devices=devices, rank=rank)


def _make(
    arguments: tuple[str, ...],
    num_nodes: int,
    devices: int,
    observer: Callback,
    environment: LoneEnvironment,
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    # This process is the rehearsal's own. The run's own warnings stay.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")

    class Rehearsed(ConfiguredRun):
        @override
        def instantiate_trainer(self, **options: Any) -> pl.Trainer:
            return super().instantiate_trainer(plugins=[environment], **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = configure(
            [*arguments, *_overrides(num_nodes, devices)], on_meta=False, kind=Rehearsed
        )
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


def _distinct(arguments: Sequence[str], num_nodes: int, devices: int) -> list[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = configure([*arguments, *_overrides(num_nodes, devices)], on_meta=True)
    strategy = run.trainer.strategy
    assert isinstance(strategy, MeshStrategy)
    return distinct_ranks(strategy.sizes)


def _counts(options: argparse.Namespace) -> tuple[int, int]:
    """Return the numbers of nodes and of devices of a node: as given, or those of the file."""
    written = read_settings(options.config).get("trainer") or {}
    num_nodes = options.nodes or written.get("num_nodes", 1)
    devices = options.devices or written.get("devices")
    if not isinstance(devices, int) or devices < 1:
        raise ConfigurationError(
            "LP905",
            f"trainer.devices={devices!r} is no number of devices; say how many with --devices.",
        )
    return int(num_nodes), devices


def _describe(found: Rehearsal) -> list[str]:
    lines = [
        f"{found.place}: {found.parameters:,} parameters",
        f"  peak of a step {_size(found.peak)}, of the set-up {_size(found.setup_peak)}",
    ]
    kinds = sorted(found.memory.items(), key=lambda item: -item[1])
    lines += [f"    {kind:<22}{_size(size):>14}" for kind, size in kinds]
    lines.append(f"  {'axis':<16}{'operation':<16}{'calls':>8}{'sent in a step':>20}")
    lines += [
        f"  {_axis(e.axis):<16}{e.operation:<16}{e.calls:>8,}{e.sent:>18,} B" for e in found.volume
    ]
    lines.append(f"  {sum(c.calls for c in found.collectives):,} collectives in order:")
    lines += [
        f"    {c.calls} x {c.operation} over {_axis(c.axis)}, {c.payload:,} bytes"
        for c in found.collectives[:_SHOWN]
    ]
    if len(found.collectives) > _SHOWN:
        lines.append(f"    and {len(found.collectives) - _SHOWN} more (--json has them)")
    lines.append(
        f"  rehearsed in {found.seconds:.1f} s of processor time and "
        f"{_size(found.host_bytes)} of host memory"
    )
    return lines


def _size(size: int) -> str:
    """Return bytes in the largest unit of which there is one, to three places."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min(len(units) - 1, max(0, size.bit_length() - 1) // 10)
    return f"{size / 2 ** (10 * power):.{3 if power else 0}f} {units[power]}"


def _axis(name: str) -> str:
    """Return a name of an axis to read; groups without one, as for tied weights, have a number."""
    return f"group {name}" if name.isdigit() else name


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-par rehearse",
        description=__doc__,
        epilog="All other arguments are those of lightning-par fit.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    takes_file(parser.add_argument("--config", required=True, help="as for fit"))
    parser.add_argument("--nodes", type=int, help="default: trainer.num_nodes of the file")
    parser.add_argument("--devices", type=int, help="per node; default: trainer.devices of it")
    parser.add_argument("--rank", type=int, default=0, help="global rank (default: 0)")
    parser.add_argument(
        "--all-distinct",
        action="store_true",
        help="one rank of each kind: the first of every pipeline stage, and the last rank",
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser
