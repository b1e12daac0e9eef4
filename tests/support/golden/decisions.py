"""The record of every decision on the cases of ``tests/distributed/user_code``.

    python -m tests.support.golden.decisions --write FILE          # before a change
    python -m tests.support.golden.decisions --against FILE        # after it

Each case of `Cases` is trained on each layout. The record holds what must not change when files
move or mechanisms are merged: losses (bit-equal), a digest of the final weights, what the run
decided, its warnings and log lines, the code and text of a refusal, and the collectives of the last
step in their order. `--against` prints every cell that differs and ends with exit status 1.

A whole record takes 20 to 40 minutes on two cores; `--cases` and `--layouts` choose a part. The
numbers depend on the processor and on the version of torch, so that a record is compared on the
machine that wrote it.
"""

import argparse
import difflib
import hashlib
import importlib
import json
import logging
import re
import struct
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch.callbacks import Callback

from lightning_par.observe.collective_hooks import Call, CollectiveHook
from tests.support.ranks.api import close_ranks, RankError, run_ranks
from tests.support.user_code import Cases, train_case, world_of

__all__ = ["main", "record_cell"]

Cell = dict[str, Any]
_LAYOUTS = ("one", "tp2", "pp2", "tp2pp2", "zero0", "zero1", "zero3", "cp2")
"""What every case is trained on, beside the layouts that it names itself."""
_CHANGING = (
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (re.compile(r"/\S*/(\S+\.py)(:\d+)?"), r"\1"),
    (re.compile(r"/tmp/\S+"), "/tmp"),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|seconds|GiB|MiB)\b"), "N"),
    (re.compile(r"127\.0\.0\.1:\d+|localhost:\d+"), "HOST"),
)
"""Parts of a text that differ from run to run: addresses, lines of files, times, ports."""
_OF_LIGHTNING = (
    *("GPU available", "TPU available", "\U0001f4a1"),
    *("`isinstance(treespec", "`Trainer.fit`"),
)
"""Beginnings of lines that every run of Lightning prints."""


class _Calls(CollectiveHook):
    """Notes the collectives of a step."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int]] = []

    def _mark(self) -> None:
        return None

    def _on_call(self, call: Call, result: Any, began: Any) -> None:
        self.found.append((call.operation, call.group.size(), _bytes(call.tensors)))

    def _on_wait(self, awaited: Any, began: Any) -> None:
        pass

    def _on_copy(self, operation: str, tensor: torch.Tensor) -> None:
        self.found.append((operation, 1, _bytes(tensor)))

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit()

    def summary(self) -> dict[str, Any]:
        """Return calls and bytes by operation and size of group, and a digest of their order."""
        totals: dict[str, list[int]] = {}
        for operation, size, count in self.found:
            total = totals.setdefault(f"{operation} of {size}", [0, 0])
            total[0] += 1
            total[1] += count
        return {"order": hashlib.sha256(repr(self.found).encode()).hexdigest()[:16], **totals}


class _Decided(Callback):
    """Keeps what a run decided before the strategy is taken down, and clears `calls` each step."""

    def __init__(self, calls: _Calls) -> None:
        self.found: list[str] = []
        self.plan = ""
        self._calls = calls

    def on_train_batch_start(self, *_: Any) -> None:
        self._calls.found.clear()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        self.found = [str(decision) for decision in strategy.processes.decisions]
        self.plan = strategy.parallel_model.resolved.plan.as_code()


def record_cell(rank: int, world: int, file: str, name: str, layout: str) -> Cell:
    """Train one case on one layout, on this rank.

    Args:
        rank: Of this process.
        world: Number of processes.
        file: Name of the test module that holds the case.
        name: Of the case.
        layout: A name of `tests.support.user_code.LAYOUTS`, or "one" for `hybrid3d` on one device.

    Returns:
        What is compared, as values of JSON.
    """
    case = importlib.import_module(file).CASES.cases[name]
    calls = _Calls()
    decided = _Decided(calls)
    with _texts() as texts, calls:
        try:
            got = train_case(case, layout, rank, world, watches=[decided])
        except Exception as error:
            text = _constant(f"{type(error).__name__}: {error}".splitlines()[0])
            return {"crashed": text, "texts": texts}
    if "refused" in got:
        return {"refused": _constant(got["refused"]), "texts": texts}
    return {
        "losses": [struct.pack(">d", loss).hex() for loss in got["losses"]],
        "weights": _digest(got["weights"]),
        "decided": decided.found,
        "plan": decided.plan,
        "last step": calls.summary(),
        "texts": texts,
    }


@contextmanager
def _texts() -> Iterator[list[str]]:
    """Collect the log lines and warnings of what runs inside, in their order."""
    found: list[str] = []
    handler = logging.Handler()

    def note(text: str) -> None:
        if not text.startswith(_OF_LIGHTNING):
            found.append(_constant(text))

    handler.emit = lambda record: note(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(n) for n in ("lightning_par", "lightning.pytorch")]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: note(str(message))
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        try:
            yield found
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)


def _constant(text: str) -> str:
    for pattern, value in _CHANGING:
        text = pattern.sub(value, text)
    return text


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    if isinstance(tensors, list | tuple):
        return sum(map(_bytes, tensors))
    return 0


def _digest(weights: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        flat = weights[name].detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _cells(pattern: str, layouts: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
    folder = Path(__file__).parents[2] / "distributed" / "user_code"
    for path in sorted(folder.glob("test_*.py")):
        file = f"tests.distributed.user_code.{path.stem}"
        cases = getattr(importlib.import_module(file), "CASES", None)
        for name, case in cases.cases.items() if isinstance(cases, Cases) else ():
            if re.search(pattern, f"{path.stem}/{name}"):
                own = [layout for layout in case.cells if layout not in _LAYOUTS]
                chosen = [x for x in (*_LAYOUTS, *own) if not layouts or x in layouts]
                yield from ((file, name, layout) for layout in chosen)


def _record(file: str, name: str, layout: str) -> list[Cell]:
    """Train a cell; a cell that hangs or dies is recorded as such."""
    try:
        found = run_ranks(record_cell, world_of(layout), file, name, layout, timeout=180)
    except RankError as error:
        return [{"died": error.kind}]
    return list(found)


def main(arguments: list[str] | None = None) -> int:
    """Write a record, or compare with one; return the exit status.

    Args:
        arguments: Of the command line; None takes those of this process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with this record")
    parser.add_argument("--cases", default="", help="pattern of file/case: losses/masked")
    parser.add_argument("--layouts", default="", help="names of layouts, separated by commas")
    options = parser.parse_args(arguments)
    layouts = tuple(filter(None, options.layouts.split(",")))
    wanted = json.loads(options.against.read_text()) if options.against else {}
    found, differing = {}, 0
    try:
        for file, name, layout in _cells(options.cases, layouts):
            key = f"{file.rpartition('.')[2]}/{name}-{layout}"
            found[key] = json.loads(json.dumps(_record(file, name, layout)))
            if options.against and found[key] != wanted.get(key):
                differing += 1
                print(f"== {key}", *_difference(wanted.get(key), found[key]), sep="\n", flush=True)
            if options.write:
                options.write.write_text(json.dumps(found, indent=1, sort_keys=True))
    finally:
        close_ranks()
    print(f"{len(found)} cells recorded, {differing} differ")
    return 1 if differing else 0


def _difference(wanted: Any, found: Any) -> list[str]:
    lines = [json.dumps(x, indent=1, sort_keys=True).splitlines() for x in (wanted, found)]
    return list(difflib.unified_diff(*lines, "recorded", "now", n=1, lineterm=""))


if __name__ == "__main__":
    # Ranks look for `record_cell` in this module by its name, which is not "__main__" there.
    from tests.support.golden.decisions import main as imported_main

    sys.exit(imported_main())
