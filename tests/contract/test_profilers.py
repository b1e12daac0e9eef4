"""The profilers through the Trainer: what they log and write is what happened, nothing changes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from tests.contract.test_trainer import read_csv
from tests.support.browser import open_page
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer, Recorder
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.contract
MICROBATCHES, STEPS, KEPT = 3, 4, 2
Run = dict[str, Any]


class Losses(Recorder):
    """Has no hook on gradients, in which stages communicate."""

    on_before_optimizer_step = Callback.on_before_optimizer_step


def fit(rank: int, world: int, folder: Path, options: Run, names: list[str]) -> Run:
    """Train with the profilers of these names, in float64."""
    import lightning_par
    from lightning_par import callbacks

    torch.set_default_dtype(torch.float64)
    recorder = Losses()
    profilers = [
        getattr(callbacks, name)(folder=folder / "profile", keep_steps=KEPT) for name in names
    ]
    trainer = quiet_trainer(
        devices=world,
        strategy=lightning_par.Hybrid3DStrategy(**options),
        precision="64-true",
        max_steps=STEPS,
        log_every_n_steps=1,
        logger=CSVLogger(folder / "log") if profilers else False,
        callbacks=[recorder, *profilers],
    )
    data = ToyData(64)
    trainer.fit(ToyModule(), loader(data, 6), loader(ToyData(4), 4))
    return {
        "losses": recorder.losses,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    }


def check_pipeline_values(values: dict[str, float], stages: int) -> None:
    """Every rank's time adds up to the step, and every fraction is one."""
    of = {k.removeprefix("pipeline/"): v for k, v in values.items() if k.startswith("pipeline/")}
    for name in ("bubble", "bubble_predicted", "bubble_balanced"):
        assert 0 < of[name] < 1, name
    assert of["imbalance"] >= 0
    for r in range(stages):
        parts = {n: of[f"rank_{r}/{n}"] for n in ("compute", "exposed", "waited", "bubble")}
        idle = parts["bubble"] * of["step"]
        assert parts["compute"] + parts["exposed"] + idle == pytest.approx(of["step"])
        assert parts["compute"] > 0
        assert parts["waited"] >= 0
    mean = sum(of[f"rank_{r}/bubble"] for r in range(stages)) / stages
    assert of["bubble"] == pytest.approx(mean)


def check_communication_values(values: dict[str, float], tensor: int) -> None:
    """Bytes are those that the plan predicts, and nobody stands still longer than it lasts."""
    rows: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        if key.startswith("communication/"):
            name, _, column = key.removeprefix("communication/").rpartition("/")
            rows.setdefault(name, {})[column] = value
    used = {name for name, row in rows.items() if row["calls"]}
    assert {"pp_activations/send", "pp_gradients/send"} <= used
    assert ("tp/all_gather" in used) is (tensor > 1)
    assert "pp_shared_weights/all_reduce" in used  # of the tied head
    for name, row in rows.items():
        if not row["calls"]:
            assert set(row.values()) == {0}, name  # of the first step only
            continue
        if not name.endswith("broadcast"):
            assert row["sent"] == row["predicted"], name
        assert 0 < row["exposed"] <= row["time"] * (1 + 1e-6), name


def check_trace(path: Path, ranks: int, tensor: int) -> None:
    """Every action of every rank is there, and no result is used before it was made."""
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["ph"] for e in events} <= set("MXbesf")
    spans = [e for e in events if e["ph"] == "X" and "micro-batch" in e.get("args", {})]
    stages = ranks // tensor
    assert len(spans) == ranks * KEPT * MICROBATCHES * 2
    assert all(e["ts"] >= 0 and e["dur"] > 0 for e in spans)
    for rank in range(ranks):
        mine = sorted((e["ts"], e["dur"], e["name"]) for e in spans if e["pid"] == rank)
        assert {name[0] for *_, name in mine} == {str(rank // tensor)}
        ends = [start + length for start, length, _ in mine]
        assert all(a <= b[0] + 0.002 for a, b in zip(ends, mine[1:], strict=False))
    first = {(e["pid"] // tensor, e["name"]): e for e in reversed(spans)}
    for mb in range(MICROBATCHES):
        for stage in range(stages - 1):
            forward = first[stage, f"{stage}F{mb}"], first[stage + 1, f"{stage + 1}F{mb}"]
            backward = first[stage + 1, f"{stage + 1}B{mb}"], first[stage, f"{stage}B{mb}"]
            for made, used in (forward, backward):
                assert made["ts"] < used["ts"] + used["dur"]
    steps = {e["name"] for e in events if e.get("cat") == "step"}
    assert len(steps) == KEPT
    named = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert len(named) == ranks
    arrows = [e for e in events if e["ph"] in "sf"]
    assert len(arrows) == 2 * 2 * (stages - 1) * tensor * MICROBATCHES * KEPT


@pytest.mark.parametrize("layout", ["pp2", "pp2 tp2"])
def test_pipeline_profiler_logs_writes_and_changes_nothing(layout: str, tmp_path: Path) -> None:
    tensor = 2 if "tp2" in layout else 1
    options = {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": tensor,
        "num_microbatches": MICROBATCHES,
    }
    plain = run_ranks(fit, 2 * tensor, tmp_path, options, [], timeout=120)
    names = ["PipelineProfiler", "CommunicationProfiler"]
    results = run_ranks(fit, 2 * tensor, tmp_path, options, names, timeout=120)
    for result, without in zip(results, plain, strict=True):
        assert result["losses"] == without["losses"]
        pipeline = {k: v for k, v in result["metrics"].items() if k.startswith("pipeline/")}
        if tensor == 1:
            assert pipeline.items() <= results[0]["metrics"].items()
        check_pipeline_values(pipeline, 2)
        exposed = [v for k, v in pipeline.items() if k.endswith("/exposed")]
        assert all(v > 0 for v in exposed) if tensor > 1 else exposed
    rows = [row for row in read_csv(tmp_path / "log") if "pipeline/bubble" in row]
    assert len(rows) == STEPS
    for row in rows:
        check_pipeline_values(row, 2)
    for row in rows[1:]:  # in the first step, headers travel as well
        check_communication_values(row, tensor)
    check_trace(tmp_path / "profile" / "trace.json", 2 * tensor, tensor)
    text = (tmp_path / "profile" / "report.html").read_text()
    assert "bubble, measured" in text
    assert "<!--" not in text
    with open_page(tmp_path / "profile" / "report.html", tmp_path) as page:
        drawn = "document.querySelectorAll('#timeline rect.action').length"
        assert page.ask(drawn) > 0
        assert page.ask("document.querySelectorAll('#stages tbody tr').length") == 2
        cells = page.ask(
            "[...document.querySelectorAll('#communication td')].map(t => t.innerText)"
        )
        assert {"pp activations", "send"} <= set(cells)
        assert page.messages == []
        page.save_screenshot(tmp_path / "report.png")
    assert (tmp_path / "profile" / "timeline.png").stat().st_size > 10_000
