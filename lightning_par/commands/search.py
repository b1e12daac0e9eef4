"""Find the layout with the shortest predicted step on a machine that need not be here.

Other arguments are those of ``lightning-par fit``; the layout that the configuration asks for is
not looked at, but for the samples of a step.
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from lightning_par.commands import takes_file
from lightning_par.commands.planned_run import add_machine_options, read_run
from lightning_par.errors import ConfigurationError
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.report import as_values, describe, format_rejections, format_table
from lightning_par.planner.run_settings import apply_layout
from lightning_par.planner.search import Planner, SearchResult

__all__ = ["main", "make_parser"]


def main(arguments: list[str]) -> int:
    """Print the best layouts, where time and memory go in the first, and the YAML that runs it.

    Args:
        arguments: What follows ``lightning-par search``.

    Returns:
        The exit status, 0.

    Raises:
        LightningParError: Nothing fits, or the configuration or the profile is invalid.
    """
    options, more = make_parser().parse_known_args(arguments)
    run = read_run(options, more, as_configured=True)
    given = yaml.safe_load(Path(options.config).read_text(encoding="utf-8")) or {}
    if given.get("data", {}) is None:
        raise ConfigurationError(
            "LP905",
            "data: null leaves the samples of a batch to the model, and a layout sets them: move "
            "the loader into a data module whose constructor takes batch_size.",
        )
    space = LayoutSpace(
        devices=options.nodes * options.devices,
        node=options.devices,
        samples=options.samples or run.layout().samples,
        offload=options.offload,
        accepts=run.accepts,
    )
    result = run.planner.search(space, keep=options.keep)
    settings = apply_layout(
        given, result.best[0].layout, nodes=options.nodes, devices=options.devices
    )
    text = yaml.safe_dump(settings, sort_keys=False)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    if options.json:
        json.dump(_values(result), sys.stdout, indent=1)
        print()
        return 0
    print(_report(run.planner, space, result))
    print(f"\nwritten: {options.out}" if options.out else f"\nthe run:\n{text}")
    return 0


def _report(planner: Planner, space: LayoutSpace, result: SearchResult) -> str:
    return "\n".join(
        [
            f"{planner.shape.parameters / 1e9:.3g} billion parameters, {space.samples} samples of "
            f"{planner.shape.length} tokens a step, "
            f"{space.devices // space.node} x {space.node} {planner.device.name}",
            f"{result.considered} layouts, of which {result.fitting} fit\n",
            format_table(result.best),
            "",
            describe(result.best[0]),
            "\nwhy its neighbors lost:",
            format_rejections(result),
        ]
    )


def _values(result: SearchResult) -> dict[str, object]:
    return {
        "considered": result.considered,
        "fitting": result.fitting,
        "best": [as_values(one) for one in result.best],
        "rejections": [
            {"change": one.change, "layout": str(one.layout), "reason": one.reason}
            for one in result.rejections
        ],
    }


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-par search",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_options(parser)
    parser.add_argument(
        "--samples", type=int, help="of a step, all replicas; default: as configured"
    )
    parser.add_argument("--offload", action="store_true", help="keep the optimizer on the host")
    parser.add_argument("--keep", type=int, default=5, help="layouts to print (default: 5)")
    takes_file(parser.add_argument("--out", help="write the YAML to this file"))
    return parser
