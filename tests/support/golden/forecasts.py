"""What the planner forecasts, held against a record: whoever moves its code runs this before and
after.

    python -m tests.support.golden.forecasts [--only published search ...] [--write]

Texts and numbers are compared to the last bit. It prints what differs and exits with 1; an intended
change is written with `--write` and shows in the diff of `forecasts.json`.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_par import Hybrid3DStrategy, memory_estimate
from lightning_par.commands import find_command
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.inference.infer import infer_plan
from lightning_par.inference.lookup import find_plan
from lightning_par.models import GPTModule
from lightning_par.planner.block_trace import trace_shape
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile, reached
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.planner.step_time import StepCost
from lightning_par.sizes import ParallelSizes
from tests.support.models.user_encoders import labeled_rows, TorchEncoder

ROOT = Path(__file__).parents[3]
RECORD = Path(__file__).with_suffix(".json")
CLUSTERS = sorted(ROOT.glob("configs/clusters/*.yaml"))

sys.path.insert(0, str(ROOT / "benchmarks"))
import _published  # noqa: E402
import memory_by_layout  # noqa: E402
import published_predictions  # noqa: E402


def published() -> Iterator[tuple[str, Any]]:
    """Give seconds, bytes and traffic of every published run."""
    tables = published_predictions
    rows = [
        *_published.vtrain(),
        *_published.h100_tables(),
        *tables._table1(),
        *(row for scheme in ("ZeRO-3", "PTD") for row in tables._table2(scheme)),
        *(row for kind in ("full", "selective") for row in tables._korthikanti(kind)),
        *tables._torchtitan_a100(),
        *(row for column in tables._ZERO_BUBBLE for row in tables._zero_bubble(column)),
    ]
    for number, row in enumerate(rows):
        cost = StepCost(row.shape, row.layout, row.device, row.code, reached(row.device))
        found = cost.predict()
        memory = predict_memory(row.shape, row.layout, row.code)
        yield (
            f"{number} {row.table} {row.problem}: {row.layout}",
            [
                found.seconds,
                cost.estimate(),
                found.bubble,
                memory.peak,
                sum(sum(kinds.values()) for kinds in memory.ranks),
                sum(cost.traffic().values()),
            ],
        )


def layouts() -> Iterator[tuple[str, Any]]:
    """Give bytes by kind and seconds of the layouts of `benchmarks/memory_by_layout.py`."""
    device = load_profile("h100")
    code = implementation("32-true", device)
    shape = read_shape(memory_by_layout.MODEL, memory_by_layout.TOKENS)
    for name, case in memory_by_layout.CASES.items():
        memory = predict_memory(shape, case.layout, code)
        found = Planner(shape=shape, device=device, code=code).predict(case.layout)
        yield name, [list(map(dict, memory.ranks)), found.time.seconds, dict(found.traffic)]


def estimates() -> Iterator[tuple[str, Any]]:
    """Give `memory_estimate` of the same layouts, with and without what changes their states."""
    model = memory_by_layout.BenchModule(memory_by_layout.MODEL)
    model.configure_model()
    changes: Mapping[str, dict[str, Any]] = {
        "": {},
        "offload": {"offload_options": {}},
        "half, no delay": {
            "offload_options": {"offload_fraction": 0.5, "delayed_update": False},
        },
        "parameters": {"offload_options": {"offload_parameters": True}, "zero_stage": 3},
        "compressed": {"gradient_compression": "int8", "zero_stage": 0},
    }
    for (name, case), (change, more) in itertools.product(
        memory_by_layout.CASES.items(), changes.items()
    ):
        if case.recompute != "none":
            continue
        try:
            strategy = Hybrid3DStrategy(**{**case.options, **more})
            pl.Trainer(accelerator="cpu", devices=case.ranks, strategy=strategy, logger=False)
            found = memory_estimate(model, strategy)
        except Exception as error:  # a refusal is a text to hold as well
            yield f"{name}; {change}", f"{type(error).__name__}: {error}"
        else:
            yield f"{name}; {change}", [[r.kind, r.device, r.host] for r in found.rows]


def traced() -> Iterator[tuple[str, Any]]:
    """Give forecasts of models that are traced, and a digest of what is known of their parts."""
    rows = torch.zeros(2, 256, dtype=torch.long)
    text = {"input_ids": rows, "labels": rows}
    models: Mapping[str, tuple[Callable[[], pl.LightningModule], Any]] = {
        "gpt": (partial(GPTModule, preset="gpt3-13b", overrides={"num_layers": 4}), text),
        "llama": (partial(GPTModule, preset="llama2-7b", overrides={"num_layers": 4}), text),
        "encoder": (TorchEncoder, torch.utils.data.default_collate(labeled_rows(2))),
    }
    for (name, (make, example)), backward in itertools.product(models.items(), (False, True)):
        module = make()
        with record_construction():
            module.configure_model()
        plan = find_plan(module) or infer_plan(module, example=example)
        try:
            shape = trace_shape(module, plan, example, backward=backward)
        except Exception as error:
            yield f"{name}, backward {backward}", f"{type(error).__name__}: {error}"
            continue
        yield f"{name}, backward {backward}", _digest(repr(shape))
        device = load_profile("h100")
        planner = Planner(shape=shape, device=device, code=implementation("bf16-mixed", device))
        for sizes, again in itertools.product(
            ({}, {"tensor": 2, "pipeline": 2}, {"data_shard": 8, "context": 2}),
            ("none", "selective", "full"),
        ):
            layout = Layout(
                sizes=ParallelSizes(**sizes), micro_batch=2, microbatches=4, recompute=again
            )
            found = planner.predict(layout)
            yield (
                f"{name}, backward {backward}: {layout}",
                [
                    found.time.seconds,
                    found.memory.peak,
                    sum(found.traffic.values()),
                ],
            )


def search() -> Iterator[tuple[str, Any]]:
    """Give the best five of some searches, their settings, and why neighbors lost."""
    small = TransformerShape(
        layers=24, model_dim=2048, heads=16, length=2048, vocab=50_257, dropout=True
    )
    large = TransformerShape(layers=96, model_dim=12_288, heads=96, length=2048, vocab=50_257)
    experts = TransformerShape(
        layers=32, model_dim=4096, heads=32, kv_heads=8, ff_dim=14_336, length=8192, vocab=32_000,
        gated=True, tied=False, experts=8, experts_per_token=2,
    )  # fmt: skip
    spaces = {
        "small": (small, LayoutSpace(devices=16, samples=64)),
        "small, offloaded": (small, LayoutSpace(devices=8, samples=64, offload=True)),
        "large": (large, LayoutSpace(devices=256, samples=512)),
        "experts": (experts, LayoutSpace(devices=64, samples=128)),
        "fixed": (small, LayoutSpace(devices=8, samples=32, fixed=(("pipeline", 4),), pieces=8)),
    }
    for name, (shape, space) in spaces.items():
        found = Planner(shape=shape, device=load_profile("h100")).search(space)
        yield (
            name,
            {
                "counts": [found.considered, found.fitting],
                "best": [
                    [str(c.layout), c.time.seconds, c.memory.peak, c.mfu, sum(c.traffic.values())]
                    for c in found.best
                ],
                "blocks": [c.layout.blocks for c in found.best],
                "rejections": [f"{r.change}: {r.layout}: {r.reason}" for r in found.rejections],
            },
        )


def commands() -> Iterator[tuple[str, Any]]:
    """Give what `search` and `forecast` print of every cluster."""
    for path, name in itertools.product(CLUSTERS, ("search", "forecast")):
        yield f"{name} {path.stem}", _digest_long(_printed(name, path))


def rehearsals() -> Iterator[tuple[str, Any]]:
    """Give what rank 0 of every cluster holds and sends."""
    for path in CLUSTERS:
        (found,) = json.loads(_printed("rehearse", path, "--json"))
        del found["seconds"], found["host_bytes"]  # of this machine
        yield (
            path.stem,
            {
                "memory": found["memory"],
                "peaks": [found["peak"], found["setup_peak"]],
                "rest": _digest(json.dumps(found)),
            },
        )


def _printed(name: str, path: Path, *more: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        find_command(name)([f"--config={path}", *more])
    return text.getvalue()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest_long(text: str) -> list[str]:
    """Keep the lines that a reader looks at first, and a digest of all."""
    return [*text.splitlines()[:16], _digest(text)]


SECTIONS: Mapping[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "published": published,
    "layouts": layouts,
    "estimates": estimates,
    "traced": traced,
    "search": search,
    "commands": commands,
    "rehearsals": rehearsals,
}


def main() -> int:
    """Print what differs from the record, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--write", action="store_true", help="record what is found")
    options, say = parser.parse_args(), sys.stdout.write
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    changed = 0
    for section in options.only:
        # As JSON gives it back: tuples are lists there.
        found = json.loads(json.dumps(dict(SECTIONS[section]())))
        held = record.get(section, {})
        for name in sorted(held.keys() | found.keys()):
            if held.get(name) != found.get(name):
                changed += 1
                say(f"{section}: {name}\n  - {held.get(name)}\n  + {found.get(name)}\n")
        record[section] = found
        say(f"{section}: {len(found)} forecasts\n")
    if options.write:
        lines = (
            f"{json.dumps(section)}: {{\n"
            + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in entries.items())
            + "\n}"
            for section, entries in record.items()
        )
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
