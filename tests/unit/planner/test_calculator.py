"""The calculator of docs/which_layout.md computes what the package computes; node runs it."""

import json
import re
import runpy
import shutil
import statistics
import subprocess
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_par.commands.prediction.planned_run import implementation
from lightning_par.errors import MeshError
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.run_settings import apply_layout
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.sizes import ParallelSizes

ROOT = Path(__file__).resolve().parents[3]
SITE = ROOT / "docs" / "site"
# Model, device, nodes, samples of a step; every dim of the last one is unlike the others.
MODELS = ("gpt2", "gpt3-6.7b", "llama3-70b", "mixtral mixtral-8x7b")
MACHINES = (("a100-40", 1, 24), ("h100", 3, 96), ("gh200", 16, 64), ("b200", 8, 256))
# A gated model with experts that are shared, dropout, an untied head, and heads of their own size.
ODD = TransformerShape(
    layers=7,
    model_dim=96,
    heads=6,
    kv_heads=2,
    head_dim=20,
    ff_dim=100,
    length=12_288,
    vocab=1009,
    gated=True,
    tied=False,
    experts=6,
    experts_per_token=2,
    shared_experts=1,
    dropout=True,
)


@cache
def data() -> dict[str, Any]:
    found: dict[str, Any] = runpy.run_path(str(SITE / "calculator_data.py"))["data"]()
    found["models"]["odd"] = asdict(ODD)
    return found


def node(expression: str, given: Any) -> Any:
    """Give the value of an expression of JavaScript over `L`, the formulas, and `given`."""
    program = shutil.which("node")
    if program is None:
        pytest.skip("needs node; on Debian: apt-get install nodejs")
    script = (
        f"const L = require({json.dumps(str(SITE / 'assets' / 'layouts.js'))});"
        "const given = JSON.parse(require('fs').readFileSync(0));"
        f"process.stdout.write(JSON.stringify({expression}));"
    )
    command = [program, "-e", script]
    said = subprocess.run(
        command, input=json.dumps(given), capture_output=True, text=True, check=True
    )
    return json.loads(said.stdout)


def machine(device: str, nodes: int, samples: int, offload: bool = False) -> dict[str, Any]:
    found = data()["devices"][device]
    return {**found, "devices": found["node"] * nodes, "samples": samples, "offload": offload}


def as_layout(values: dict[str, Any]) -> Layout:
    return Layout(**{**values, "sizes": ParallelSizes(**values["sizes"])})


def space(given: dict[str, Any]) -> LayoutSpace:
    names = ("devices", "node", "samples", "offload")
    return LayoutSpace(**{n: given[n] for n in names}, schedules=("1f1b",))


@pytest.mark.parametrize("model", [*MODELS, "odd"])
def test_layouts_memory_bytes_and_settings_are_those_of_the_package(model: str) -> None:
    shape = TransformerShape(**data()["models"][model])
    for at, place in enumerate(MACHINES):
        given = machine(*place, offload=at % 2 == 1)
        precision = sorted(data()["code"])[at % 3]
        code = implementation(precision, load_profile("h100"))
        made = node(
            "[...L.layouts(L.complete(given.shape), given.machine, given.limits)].map((l, i) => "
            "i % 20 ? {l} : {l, held: L.memory(L.complete(given.shape), l, given.code), "
            "bytes: L.traffic(L.complete(given.shape), l, given.code), "
            "yaml: L.yaml(l, given.machine, given.precision)})",
            {
                "shape": data()["models"][model],
                "machine": given,
                "limits": data()["limits"],
                "code": data()["code"][precision],
                "precision": precision,
            },
        )
        assert [as_layout(one["l"]) for one in made] == list(space(given).layouts(shape))
        planner = Planner(shape=shape, device=load_profile(place[0]), code=code)
        for one in made[::20]:
            layout = as_layout(one["l"])
            wanted = predict_memory(shape, layout, code)
            assert len(one["held"]["ranks"]) == len(wanted.ranks)
            for ours, theirs in zip(one["held"]["ranks"], wanted.ranks, strict=True):
                assert ours == pytest.approx(dict(theirs), rel=1e-12)
            assert one["held"]["peak_rank"] == wanted.peak_rank
            assert one["held"]["host"] == pytest.approx(wanted.host, rel=1e-12)
            assert one["bytes"] == pytest.approx(dict(planner.predict(layout).traffic), rel=1e-12)
            settings = apply_layout({}, layout, nodes=place[1], devices=given["node"])
            settings["trainer"]["precision"] = precision
            settings["data"].pop("class_path")
            assert yaml.safe_load(one["yaml"]) == settings


def test_sizes_of_a_model_are_those_of_the_package() -> None:
    found = node(
        "Object.values(given).map(m => [L.parameters(L.complete(m)), L.flops(L.complete(m), 3)])",
        data()["models"],
    )
    for values, (parameters, flops) in zip(data()["models"].values(), found, strict=True):
        shape = TransformerShape(**values)
        assert parameters == shape.parameters
        assert flops == pytest.approx(shape.flops(3), rel=1e-12)


def test_zero_fields_become_what_the_package_makes_of_them() -> None:
    given = {**asdict(ODD), "kv_heads": 0, "head_dim": 0, "ff_dim": 0}
    assert node("L.complete(given)", given) == asdict(TransformerShape(**given))


COMPARED = [
    ("gpt2", "a100-80", 1, 256),
    ("gpt3-6.7b", "h100", 1, 256),
    ("gpt3-6.7b", "a100-80", 8, 256),
    ("llama3-8b", "h100", 2, 256),
    ("llama3-70b", "h100", 1, 256),  # fits in no layout
    ("llama3-70b", "a100-80", 8, 256),
    ("llama3-70b", "a100-80", 32, 256),  # the worst that was found
    ("mixtral mixtral-8x7b", "h100", 8, 256),
]


def test_choice_is_nearly_as_fast_as_that_of_the_search_as_the_page_says() -> None:
    cases = [{"model": one[0], "machine": machine(*one[1:])} for one in COMPARED]
    given = {**data(), "code": data()["code"]["bf16-mixed"], "cases": cases}
    chosen = node(
        "given.cases.map(c => L.choose(L.complete(given.models[c.model]), c.machine, given.code, "
        "given.limits, 1))",
        given,
    )
    ratios = []
    for (model, device, *_), case, found in zip(COMPARED, cases, chosen, strict=True):
        shape = TransformerShape(**data()["models"][model])
        code = implementation("bf16-mixed", load_profile(device))
        planner = Planner(shape=shape, device=load_profile(device), code=code)
        try:
            best = planner.search(replace(space(case["machine"]), schedules=None), beam=4)
        except MeshError:  # neither finds one that fits
            assert found["fitting"] == 0, (model, device)
            assert found["least"]["held"]["peak"] > planner.limit
            continue
        ours = planner.predict(as_layout(found["best"][0]["layout"]))
        assert ours.memory.peak <= planner.limit
        ratios.append(ours.time.seconds / best.best[0].time.seconds)
    said = re.search(
        r"(\d+) % slower than the one that `search` finds on average, and (\d+) % at most",
        (ROOT / "docs" / "which_layout.md").read_text(),
    )
    assert said is not None
    assert 1 + int(said[1]) / 100 == pytest.approx(statistics.mean(ratios), abs=0.011)
    assert 1 + int(said[2]) / 100 == pytest.approx(max(ratios), abs=0.011)
    assert statistics.mean(ratios) < 1.15
