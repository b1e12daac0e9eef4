"""Predict time and memory of a configured run on a machine that need not be here.

Other arguments are those of ``lightning-par fit``. (``lightning-par predict`` is Lightning's: it
runs a trained model.)
"""

import argparse
import json
import sys

from lightning_par.commands.layout_picture import draw_candidate
from lightning_par.commands.planned_run import add_machine_options, read_run
from lightning_par.planner.report import as_values, describe, format_table

__all__ = ["main", "make_parser"]


def main(arguments: list[str]) -> int:
    """Print the prediction of the layout that the configuration asks for.

    Args:
        arguments: What follows ``lightning-par forecast``.

    Returns:
        The exit status: 0, or 1 if the run does not fit in memory.

    Raises:
        LightningParError: The configuration or the profile is invalid.
    """
    options, more = make_parser().parse_known_args(arguments)
    run = read_run(options, more)
    found = run.planner.predict(run.layout())
    fits = found.memory.peak <= run.planner.limit
    if options.picture:
        draw_candidate(run.planner, found, options.picture)
    if options.json:
        json.dump({**as_values(found), "fits": fits, "sources": run.sources}, sys.stdout, indent=1)
        print()
        return 0 if fits else 1
    print(run.describe(found.layout.samples, options.nodes, options.devices), end="\n\n")
    print(format_table([found]))
    print()
    print(describe(found))
    if fits:
        return 0
    print(
        f"does not fit: {found.memory.peak / 2**30:.1f} GiB on pipeline rank "
        f"{found.memory.peak_rank}, of {run.planner.limit / 2**30:.1f}; lightning-par search finds "
        "a layout that does."
    )
    return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-par forecast",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_machine_options(parser)
    return parser
