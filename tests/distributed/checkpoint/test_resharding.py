"""Any layout goes on where any other stopped: same bits loaded, same training afterwards."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.exhaustive import some
from tests.support.parity import TOLERANCE
from tests.support.resharding import differences, LAYOUTS, PLAIN, run_layout, world_of

CHAIN = [
    "tp2 pp2 dp2",
    "pp2",
    "dp2 offload",
    "tp2 dp2",
    "one",
    "tp2 offload",
    "dp2 zero 3",
    "tp2 pp2",
    "zbv",
    "dp2 zero 1",
    "tp2",
    "pp2 dp2",
]
SHORT = ["tp2 pp2 dp2", "dp2 offload", "zbv", "tp2 dp2"]
START, STEPS = 1, 2


def assert_same_training(results: list[dict[str, Any]], wanted: dict[str, Any], start: int) -> None:
    """Compare with the uninterrupted run of one process from a step on; replicas log their own
    loss.
    """
    losses = torch.tensor([result["losses"] for result in results], dtype=torch.float64).mean(0)
    assert len(losses)
    expected = torch.tensor(wanted["losses"][start : start + len(losses)], dtype=torch.float64)
    torch.testing.assert_close(losses, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chain", some(["short", "whole"], {"whole"}))
def test_chain_of_layouts_trains_like_one_uninterrupted_process(chain: str, tmp_path: Path) -> None:
    """Every layout once as the source and once as the target; in from a plain Trainer's file, by
    turns through folders and files, and out to a plain Trainer.
    """
    layouts = {"short": SHORT, "whole": CHAIN}[chain]
    total = STEPS * (len(layouts) + 2)
    (wanted,) = run_layout(PLAIN, tmp_path, steps=total, save_at=STEPS, save_to=tmp_path / "0.ckpt")
    state, source = wanted["saved"], tmp_path / "0.ckpt"
    assert source.is_file()
    for link, layout in enumerate(layouts, 1):
        target = tmp_path / f"{link}.ckpt"
        steps = STEPS * (link + 1)
        form = ("file", "folder")[link % 2]
        results = run_layout(
            layout,
            tmp_path,
            steps=steps,
            source=source,
            save_at=steps,
            save_to=target,
            checkpoint_format=form,
        )
        assert len(results) == world_of(layout)
        assert differences(results[0]["loaded"], state, layout) == []
        assert_same_training(results, wanted, STEPS * link)
        assert target.is_dir() == (form == "folder")
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
        state, source = results[0]["saved"], target
    (last,) = run_layout(PLAIN, tmp_path, steps=total, source=source)
    assert differences(last["loaded"], state) == []
    assert_same_training([last], wanted, total - STEPS)
    end, uninterrupted = last["end"], wanted["end"]
    torch.testing.assert_close(end["weights"], uninterrupted["weights"], rtol=0, atol=1e-9)
    assert end["data"] == uninterrupted["data"]


def test_every_rank_writes_its_own_share(tmp_path: Path) -> None:
    """No tensor is written twice, and the ranks write about as much."""
    layout, target = "tp2 pp2 dp2", tmp_path / "a.ckpt"
    (first, *_) = run_layout(
        layout, tmp_path, steps=1, save_at=1, save_to=target, checkpoint_format="folder"
    )
    files = sorted(target.glob("optimizer-*"))
    assert [f.name for f in files] == [f"optimizer-{r:05d}-of-00008.safetensors" for r in range(8)]
    held = sum(
        value.numel() * value.element_size()
        for state in first["saved"]["optimizers"][0]["state"].values()
        for value in state.values()
    )
    lengths = [f.stat().st_size - header_length(f) for f in files]
    assert sum(lengths) == held
    assert max(lengths) < 2 * min(lengths)


def header_length(file: Path) -> int:
    """Bytes before the data of a safetensors file."""
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


class Sources:
    """A checkpoint of every layout, and what it holds, made when it is first asked for."""

    def __init__(self, folder: Path, form: str) -> None:
        self.folder, self.form = folder, form
        self.start = folder / "start.ckpt"
        options = {"save_at": START, "save_to": self.start}  # as torch initializes
        (self.wanted,) = run_layout(PLAIN, folder, steps=START + 2 * STEPS, **options)
        self._made: dict[str, dict[str, Any]] = {}

    def path(self, layout: str) -> Path:
        return self.folder / f"{layout}.ckpt"

    def state(self, layout: str) -> dict[str, Any]:
        """What is in the checkpoint at `path`."""
        if layout not in self._made:
            stop = START + STEPS
            options = {"save_to": self.path(layout), "checkpoint_format": self.form}
            results = run_layout(
                layout, self.folder, steps=stop, save_at=stop, source=self.start, **options
            )
            assert self.path(layout).is_dir() == (self.form == "folder")
            self._made[layout] = results[0]["saved"]
        return self._made[layout]


@pytest.fixture(scope="module", params=["folder", "file"])
def sources(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"), request.param)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_goes_on_from_every_layout(sources: Sources, source: str, layout: str) -> None:
    state, path = sources.state(source), sources.path(source)
    results = run_layout(layout, sources.folder, steps=START + 2 * STEPS, source=path)
    assert differences(results[0]["loaded"], state, f"{source} to {layout}") == []
    assert_same_training(results, sources.wanted, START + STEPS)
    if world_of(layout) > 1:
        whole = {name: tuple(w.shape) for name, w in state["weights"].items()}
        assert any(shape != whole[name] for name, shape in results[0]["shapes"].items()) or (
            len(results[0]["shapes"]) < len(whole)
        )
