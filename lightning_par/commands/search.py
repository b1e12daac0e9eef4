"""Find the layout with the shortest predicted step on a machine that need not be here.

Other arguments are those of ``lightning-par fit``; the layout that the configuration asks for is
not looked at, but for the samples of a step.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import yaml

from lightning_par.commands import takes_file
from lightning_par.commands.layout_picture import draw_candidate
from lightning_par.commands.planned_run import add_machine_options, read_run
from lightning_par.commands.run_config import read_settings
from lightning_par.commands.trial import Trial, try_layouts
from lightning_par.errors import ConfigurationError, MeshError
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.report import as_values, describe, format_rejections, format_table
from lightning_par.planner.run_settings import apply_layout
from lightning_par.planner.search import SearchResult

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
    _check_tries(options)
    given = read_settings(options.config)
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
        expert_max_rows=run.options.expert_max_rows,
        accepts=run.accepts,
    )
    result = run.planner.search(space, keep=max(options.keep, options.tries))
    chosen, trials = result.best[0], list[Trial]()
    if options.tries:
        trials = _try(options, more, given, result, run.planner.device.accelerator)
        fastest = min(trials, key=_seconds)
        chosen = result.best[trials.index(fastest)]
    settings = apply_layout(
        given,
        chosen.layout,
        nodes=options.nodes,
        devices=options.devices,
        accelerator=run.planner.device.accelerator,
    )
    text = yaml.safe_dump(settings, sort_keys=False)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    if options.picture:
        draw_candidate(run.planner, chosen, options.picture)
    if options.json:
        json.dump({**_values(result, trials), "sources": run.sources}, sys.stdout, indent=1)
        print()
        return 0
    print(run.describe(space.samples, options.nodes, options.devices))
    print(_report(result))
    if trials:
        print(_tried(result, trials))
    print(f"\nwritten: {options.out}" if options.out else f"\nthe run:\n{text}")
    return 0


def _report(result: SearchResult) -> str:
    return "\n".join(
        [
            f"{result.considered} layouts, of which {result.fitting} fit\n",
            format_table(result.best),
            "",
            describe(result.best[0]),
            "\nwhy its neighbors lost:",
            format_rejections(result),
        ]
    )


def _check_tries(options: argparse.Namespace) -> None:
    if options.tries < 0 or options.seconds <= 0:
        raise ConfigurationError(
            "LP902",
            f"--try {options.tries} --try-seconds {options.seconds:g}: use 0 or more layouts, and "
            "more than 0 seconds for each.",
        )
    if options.tries and options.nodes > 1:
        raise ConfigurationError(
            "LP905",
            f"--try {options.tries} trains on this machine, and --nodes {options.nodes} are more: "
            "leave --try out, and run the first layouts with fit --trainer.max_steps=8 there.",
        )


def _try(
    options: argparse.Namespace,
    more: list[str],
    given: dict[str, Any],
    result: SearchResult,
    accelerator: str,
) -> list[Trial]:
    """Try the first layouts.

    Raises:
        MeshError: All of them failed.
    """
    trials = try_layouts(
        given,
        [one.layout for one in result.best[: options.tries]],
        devices=options.devices,
        accelerator=accelerator,
        arguments=more,
        timeout=options.seconds,
    )
    if all(trial.seconds is None for trial in trials):
        problems = "\n".join(f"- {trial.layout}: {trial.problem}" for trial in trials)
        raise MeshError("LP105", f"--try {options.tries}: no layout trains here.\n{problems}")
    return trials


def _seconds(trial: Trial) -> float:
    return math.inf if trial.seconds is None else trial.seconds


def _tried(result: SearchResult, trials: list[Trial]) -> str:
    """Return a line for every layout that was tried, the fastest first."""
    lines = ["\ntried on this machine, median step, s:"]
    for trial, one in sorted(zip(trials, result.best, strict=False), key=lambda t: _seconds(t[0])):
        if trial.seconds is None:
            lines.append(f"  failed  {trial.layout}: {trial.problem}")
        else:
            guess = f"predicted {one.time.seconds:.4g}"
            lines.append(f"  {trial.seconds:.4g}  {guess}  {trial.layout}")
    return "\n".join(lines)


def _values(result: SearchResult, trials: list[Trial]) -> dict[str, object]:
    return {
        "considered": result.considered,
        "fitting": result.fitting,
        "best": [as_values(one) for one in result.best],
        "rejections": [
            {"change": one.change, "layout": str(one.layout), "reason": one.reason}
            for one in result.rejections
        ],
        "tried": [
            {"layout": str(one.layout), "seconds": one.seconds, "problem": one.problem}
            for one in trials
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
    parser.add_argument("--offload", action="store_true", help="keep the optimizer on the host")
    parser.add_argument("--keep", type=int, default=5, help="layouts to print (default: 5)")
    parser.add_argument(
        "--try",
        dest="tries",
        type=int,
        default=0,
        metavar="N",
        help="train for 8 steps with each of the first N layouts on this machine, and take the "
        "fastest (default: 0)",
    )
    parser.add_argument(
        "--try-seconds",
        dest="seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="after which a layout is given up (default: 600)",
    )
    takes_file(parser.add_argument("--out", help="write the YAML to this file"))
    return parser
