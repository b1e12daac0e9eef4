"""The command that finds the fastest layout."""

import math
import shlex
from pathlib import Path
from typing import Any, TYPE_CHECKING

import yaml

from lightning_par.commands import FitArguments, PathName, quick_imports
from lightning_par.commands.prediction.machine import Machine
from lightning_par.errors import ConfigurationError, MeshError
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.plain_layout import plain_layout
from lightning_par.planner.report import as_values, describe, format_rejections, format_table
from lightning_par.planner.run_settings import apply_layout, without_layout
from lightning_par.planner.search import Candidate, SearchResult

if TYPE_CHECKING:
    from lightning_par.commands.prediction.trial import Trial

__all__ = ["search"]


def search(
    *,
    machine: Machine,
    offload: bool = False,
    keep: int = 5,
    try_: int = 0,
    try_seconds: float = 600.0,
    out: PathName | None = None,
    fit: FitArguments,
) -> None:
    """Find the layout with the shortest predicted step on a machine that need not be here.

    Prints the best layouts, what the plain answer of the documentation would cost, where time and
    memory go in the first, and the YAML that runs it. The layout that the configuration asks for is
    not looked at, but for the samples of a step: it may be one of a strategy of Lightning.

    Args:
        machine: What runs on what.
        offload: Keep the optimizer on the host.
        keep: Layouts to print.
        try_: Train for 8 steps with each of the first N layouts on this machine, and take the
            fastest.
        try_seconds: Seconds after which a layout is given up.
        out: Write the YAML to this file.
        fit: More arguments of fit.

    Raises:
        LightningParError: Nothing fits, or the configuration or the profile is invalid.
    """
    with quick_imports():
        from lightning_par.commands.prediction.planned_run import PlannedRun
        from lightning_par.commands.prediction.trial import try_layouts

    run = PlannedRun(machine, fit, any_layout=True)
    nodes, devices, rest = run.nodes, run.devices, without_layout(fit)
    _check_tries(try_, try_seconds, nodes)
    given = _read(machine.config, machine.length if run.takes_length else None)
    space = LayoutSpace(
        devices=nodes * devices,
        node=devices,
        samples=machine.samples or run.layout().samples,
        offload=offload,
        expert_max_rows=run.options.expert_max_rows,
        accepts=run.accepts,
    )
    result = run.planner.search(space, keep=max(keep, try_))
    layout = plain_layout(run.planner, space)
    plain = run.planner.predict(layout) if layout else None
    trials: list[Trial] = []
    chosen, kind = result.best[0], run.planner.device.accelerator
    if try_:
        layouts = [one.layout for one in result.best[:try_]]
        trials = try_layouts(
            given, layouts, devices=devices, accelerator=kind, arguments=rest, timeout=try_seconds
        )
        chosen = result.best[_fastest(trials, try_)]
    settings = apply_layout(given, chosen.layout, nodes=nodes, devices=devices, accelerator=kind)
    text = yaml.safe_dump(settings, sort_keys=False)
    if out:
        Path(out).write_text(text, encoding="utf-8")
    if run.show(chosen, _values(result, plain, trials)):
        return
    print(run.describe(space.samples))
    print(_report(result, plain))
    if trials:
        print(_tried(result, trials))
    print(f"\nwritten: {out}" if out else f"\nthe run:\n{text}")
    if rest:
        print(f"Run it by: lightning-par fit --config {shlex.join([out or 'FILE', *rest])}")


def _read(config: str, length: int | None) -> dict[str, Any]:
    """Return what the configuration says, with another length of samples if one is given.

    Raises:
        ConfigurationError: It leaves the data to the model.
    """
    from lightning_par.commands.prediction.run_config import read_settings

    given = read_settings(config)
    if given.get("data", {}) is None:
        raise ConfigurationError(
            "LP905",
            "with data: null the model makes its own data loader, so search cannot set the batch "
            "size, which depends on the layout. Move the loader into a data module whose "
            "constructor has an argument batch_size.",
        )
    if length:
        given.setdefault("data", {}).setdefault("init_args", {})["length"] = length
    return given


def _report(result: SearchResult, plain: Candidate | None) -> str:
    return "\n".join(
        [
            f"{result.considered} layouts, of which {result.fitting} fit\n",
            format_table(result.best),
            _compare(plain, result.best[0]),
            "",
            describe(result.best[0]),
            "\nwhy its neighbors lost:",
            format_rejections(result),
        ]
    )


def _compare(plain: Candidate | None, best: Candidate) -> str:
    """Return what the plain answer costs beside the fastest layout."""
    name = "plain answer (docs/which_layout.md)"
    if plain is None:
        return f"{name}: none fits."
    if plain.layout == best.layout:
        return f"{name}: the first."
    slower = plain.time.seconds / best.time.seconds - 1
    size = f"{plain.memory.peak / 2**30:.1f} GiB"
    return f"{name}: {plain.layout}\n  {plain.time.seconds:.4g} s, {slower:+.1%}; {size}"


def _check_tries(tries: int, seconds: float, nodes: int) -> None:
    if tries < 0 or seconds <= 0:
        raise ConfigurationError(
            "LP902",
            f"--try {tries} must be 0 or more layouts, and --try-seconds {seconds:g} must be more "
            "than 0 seconds for each layout.",
        )
    if tries and nodes > 1:
        raise ConfigurationError(
            "LP905",
            f"--try {tries} trains layouts on this machine, but --nodes {nodes} asks for several "
            "machines. Leave --try out, and train the first layouts on those machines with fit "
            "--trainer.max_steps=8.",
        )


def _fastest(trials: "list[Trial]", tries: int) -> int:
    """Return the index of the fastest trial.

    Raises:
        MeshError: All of them failed.
    """
    if all(trial.seconds is None for trial in trials):
        problems = "\n".join(f"- {trial.layout}: {trial.problem}" for trial in trials)
        raise MeshError(
            "LP105",
            f"--try {tries}: none of the layouts that were tried could train on this machine. "
            f"Correct the first of these problems:\n{problems}",
        )
    return trials.index(min(trials, key=_seconds))


def _seconds(trial: "Trial") -> float:
    return math.inf if trial.seconds is None else trial.seconds


def _tried(result: SearchResult, trials: "list[Trial]") -> str:
    """Return a line for every layout that was tried, the fastest first."""
    lines = ["\ntried on this machine, median step, s:"]
    for trial, one in sorted(zip(trials, result.best, strict=False), key=lambda t: _seconds(t[0])):
        if trial.seconds is None:
            lines.append(f"  failed  {trial.layout}: {trial.problem}")
        else:
            guess = f"predicted {one.time.seconds:.4g}"
            lines.append(f"  {trial.seconds:.4g}  {guess}  {trial.layout}")
    return "\n".join(lines)


def _values(
    result: SearchResult, plain: Candidate | None, trials: "list[Trial]"
) -> dict[str, object]:
    return {
        "considered": result.considered,
        "fitting": result.fitting,
        "best": [as_values(one) for one in result.best],
        "plain": as_values(plain) if plain else None,
        "rejections": [
            {"change": one.change, "layout": str(one.layout), "reason": one.reason}
            for one in result.rejections
        ],
        "tried": [
            {"layout": str(one.layout), "seconds": one.seconds, "problem": one.problem}
            for one in trials
        ],
    }
