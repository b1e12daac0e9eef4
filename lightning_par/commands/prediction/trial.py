"""Tries layouts of a run on this machine: a few steps of each, in processes of their own.

``python -m lightning_par.commands.prediction.trial TIMES ...`` is such a process; the other
arguments are those of ``lightning-par fit``.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_par.checkpoint.progress import advance, counted
from lightning_par.commands.prediction.run_config import configure
from lightning_par.errors import LightningParError
from lightning_par.planner.run_settings import apply_layout
from lightning_par.planner.shapes import Layout
from lightning_par.verification.rehearse import VALUE_CALLBACKS

__all__ = ["Trial", "main", "run_process", "try_layouts"]

_WARM_UP, _TIMED = 3, 5
"""Steps that are not timed, and those whose median counts."""
_GRACE_SECONDS = 10.0
"""Time that a process gets to end its ranks before they are killed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of a layout that was tried.

    Attributes:
        layout: The layout.
        seconds: Median time of a step, from the end of one to the end of the next; None: it failed.
        problem: Why it failed.
    """

    layout: Layout
    seconds: float | None = None
    problem: str = ""


def try_layouts(
    settings: Mapping[str, Any],
    layouts: Sequence[Layout],
    *,
    devices: int,
    accelerator: str,
    arguments: Sequence[str],
    timeout: float,
) -> list[Trial]:
    """Train for a few steps with each layout on this machine, one after the other.

    Args:
        settings: As `apply_layout` takes them.
        layouts: What to try.
        devices: Of this machine.
        accelerator: Their kind, as the Trainer names it.
        arguments: More arguments of ``lightning-par fit``.
        timeout: Seconds after which a layout is given up.

    Returns:
        A trial for each layout, in their order.
    """
    found = []
    with counted("layouts", "trying layouts", len(layouts)):
        for layout in layouts:
            run = apply_layout(settings, layout, nodes=1, devices=devices, accelerator=accelerator)
            with tempfile.TemporaryDirectory() as folder:
                found.append(_try(layout, run, Path(folder), arguments, timeout))
            advance("layouts")
    return found


def _try(
    layout: Layout,
    settings: dict[str, Any],
    folder: Path,
    arguments: Sequence[str],
    timeout: float,
) -> Trial:
    # What the run writes goes with the folder.
    settings["trainer"] |= {
        "default_root_dir": str(folder),
        "max_steps": _WARM_UP + _TIMED,
        "max_epochs": -1,
        "max_time": None,
        "fast_dev_run": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    config, times, log = folder / "run.yaml", folder / "times.json", folder / "log"
    config.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    words = [str(times), f"--config={config}", *arguments]
    status = run_process([sys.executable, "-m", __spec__.name, *words], log, timeout)
    written = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    if status == 0 and "seconds" in written:
        return Trial(layout=layout, seconds=written["seconds"])
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    problem = written.get("problem") or (said[-1] if said else f"it ended with status {status}")
    if status is None:
        problem = f"it had not ended after {timeout:g} s"
    return Trial(layout=layout, problem=problem)


def run_process(command: Sequence[str], log: Path, timeout: float) -> int | None:
    """Run a command, and leave nothing that it started.

    Args:
        command: Its words.
        log: File for what it says.
        timeout: Seconds after which it is ended.

    Returns:
        Its exit status; None: it took too long.
    """
    with log.open("wb") as said:
        # A session of its own: its ranks end with it, and Ctrl-C comes here.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and those that it has started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _StepClock(Callback):
    """Writes the median time of an optimizer step, on rank 0.

    Args:
        path: File to write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ends: list[float] = []

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step == len(self._ends):
            return  # batches are accumulated
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize(trainer.strategy.root_device)
        self._ends.append(time.perf_counter())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ends = self._ends[_WARM_UP - 1 :]
        if trainer.is_global_zero and len(ends) > 1:
            took = [after - before for before, after in pairwise(ends)]
            self._path.write_text(json.dumps({"seconds": statistics.median(took)}))


def main(arguments: list[str]) -> None:
    """Train for the few steps, and write the time of one.

    Args:
        arguments: The file to write, and those of ``lightning-par fit``.
    """
    path, rest = Path(arguments[0]), arguments[1:]
    try:
        run = configure(rest, on_meta=False)
        trainer: Any = run.trainer
        kept = [c for c in trainer.callbacks if not isinstance(c, VALUE_CALLBACKS)]
        trainer.callbacks, trainer.loggers = [*kept, _StepClock(path)], []
        trainer.fit(run.model, run.datamodule)
    except Exception as error:
        ours = error if isinstance(error, LightningParError) else None
        text = ours.message if ours else f"{type(error).__name__}: {error}"
        if not path.exists():  # the first rank that fails knows why
            path.write_text(json.dumps({"problem": text}), encoding="utf-8")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
