"""The calculator of docs/which_layout.md computes what the package computes; node runs it."""

import json
import runpy
import shutil
import subprocess
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_par.commands.prediction.planned_run import implementation
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.plain_layout import plain_layout, SCHEDULE, ZERO_STAGES
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
    return LayoutSpace(
        **{n: given[n] for n in names}, schedules=(SCHEDULE,), zero_stages=ZERO_STAGES
    )


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
            "words: L.words(l), yaml: L.yaml(l, given.machine, given.precision)})",
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
            assert one["words"] == str(layout)
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
        "Object.values(given).map(m => L.parameters(L.complete(m)))",
        data()["models"],
    )
    for values, parameters in zip(data()["models"].values(), found, strict=True):
        assert parameters == TransformerShape(**values).parameters


def test_zero_fields_become_what_the_package_makes_of_them() -> None:
    given = {**asdict(ODD), "kv_heads": 0, "head_dim": 0, "ff_dim": 0}
    assert node("L.complete(given)", given) == asdict(TransformerShape(**given))


# Besides the common questions: what fits nowhere, many nodes, and an optimizer in CPU memory.
MORE = [
    ("llama3-70b", "h100", 1, 256, False),
    ("llama3-70b", "a100-80", 32, 256, False),
    ("gpt3-175b", "h100", 16, 96, False),
    ("mixtral mixtral-8x7b", "h100", 8, 256, False),
    ("gpt3-13b", "a100-40", 1, 256, True),
    ("odd", "a100-40", 3, 24, False),
]


def asked() -> list[tuple[str, str, int, int, bool]]:
    names = ("model", "device", "nodes", "samples")
    return [(*(one[n] for n in names), False) for one in data()["answers"]] + MORE


def test_calculator_and_search_give_the_same_plain_answer() -> None:
    cases = [{"model": one[0], "machine": machine(*one[1:])} for one in asked()]
    given = {**data(), "code": data()["code"]["bf16-mixed"], "cases": cases}
    chosen = node(
        "given.cases.map(c => L.choose(L.complete(given.models[c.model]), c.machine, given.code, "
        "given.limits, given.rule))",
        given,
    )
    fit = 0
    for (model, device, *_), case, found in zip(asked(), cases, chosen, strict=True):
        shape = TransformerShape(**data()["models"][model])
        code = implementation("bf16-mixed", load_profile(device))
        planner = Planner(shape=shape, device=load_profile(device), code=code)
        wanted = plain_layout(planner, space(case["machine"]))
        assert (found["best"] is None) == (wanted is None), (model, device)
        if wanted is None:
            assert found["fitting"] == 0
            assert found["least"]["held"]["peak"] > planner.limit
            continue
        fit += 1
        assert as_layout(found["best"]["layout"]) == wanted, (model, device)
        assert found["best"]["held"]["peak"] <= planner.limit
    assert len(asked()) - fit == 1


def test_answers_of_the_site_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SITE)  # as its scripts find each other
    made = runpy.run_path(str(SITE / "answers.py"))
    assert len(made["QUESTIONS"]) >= 20
    assert list(made["answers"]()) == data()["answers"]
