"""What `lightning-par inspect` says and `lightning-par export` writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lightning_par.checkpoint.export import export_weights
from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.part import make_part
from lightning_par.checkpoint.pieces import Piece
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.save_coordinator import CheckpointSaver
from lightning_par.checkpoint.writer import SaveMetadata
from lightning_par.dtensor import Box
from lightning_par.models import GPTModule
from tests.support.checkpoints import write_folder
from tests.support.cli_scripts import command
from tests.support.resharding import differences, PLAIN, run_layout, SIZES

pytestmark = pytest.mark.contract


@pytest.fixture(scope="module", params=["file", "folder"])
def trained(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of four ranks, and the whole state."""
    folder = tmp_path_factory.mktemp("trained")
    path = folder / "a.ckpt"
    form = {"checkpoint_format": request.param}
    results = run_layout("tp2 pp2", folder, steps=2, save_at=2, save_to=path, **form)
    return path, results[0]["saved"]


def test_inspect_says_what_is_there(trained: Any, monkeypatch: Any, capsys: Any) -> None:
    path, state = trained
    status, out, _ = command(monkeypatch, capsys, "inspect", path, "--tensors")
    numbers = sum(w.numel() for n, w in state["weights"].items() if n != "model.head.weight")
    assert status == 0
    for words in (
        f"{path}: step 2, epoch 0",
        "written by 4 ranks: pp 2 x tp 2",
        "weights: 4 files" if path.is_dir() else " parts, ",
        f"of {numbers:,} numbers (float64), 1 more names of tied ones",
        "1 optimizers",
        "model.embed.weight [257, 12] float64 in 2 parts",
        "verified: all",
    ):
        assert words in out, out
    assert f"torch {torch.__version__}" in out


def test_inspect_names_every_damaged_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = write_folder(tmp_path / "a.ckpt", 1)
    broken = sorted(path.glob("weights-*"))
    for file in broken:
        file.write_bytes(file.read_bytes()[:-1])
    status, out, _ = command(monkeypatch, capsys, "inspect", path)
    assert status == 1
    assert "damaged: 2 of" in out
    assert all(f"{file.name} is damaged: it has" in out for file in broken)
    assert command(monkeypatch, capsys, "inspect", path, "--no-verify")[0] == 0
    (path / "manifest.json").unlink()
    status, _, err = command(monkeypatch, capsys, "inspect", path)
    assert status == 1
    assert "it has no manifest.json" in err


def test_exported_weights_are_those_of_the_model(
    trained: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path, state = trained
    whole, bare = tmp_path / "whole.safetensors", tmp_path / "bare.safetensors"
    status, out, _ = command(monkeypatch, capsys, "export", "--ckpt", path, "--out", whole)
    assert (status, f"{len(state['weights'])} tensors" in out) == (0, True)
    assert differences(load_file(whole), state["weights"]) == []
    command(monkeypatch, capsys, "export", "--ckpt", path, "--out", bare, "--below", "model")
    model = GPTModule(overrides=SIZES)
    model.configure_model()
    model.model.double().load_state_dict(load_file(bare))
    found = {f"model.{name}": value for name, value in model.model.state_dict().items()}
    assert differences(found, state["weights"]) == []


def test_exported_checkpoint_goes_on_in_a_plain_trainer(
    trained: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    path, state = trained
    out = tmp_path / "plain.ckpt"
    assert command(monkeypatch, capsys, "export", "--ckpt", path, "--out", out)[0] == 0
    (again,) = run_layout(PLAIN, path.parent, steps=3, source=out)
    assert differences(again["loaded"], state) == []
    assert len(again["losses"]) == 1


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = write_folder(tmp_path / "a.ckpt", 1, {"callbacks": {"odd": object()}})
    start = ("export", "--ckpt", path, "--out")
    for more, says in (
        (["x.bin"], "has to end in .safetensors"),
        (["x.ckpt", "--below", "model"], "--below selects weights"),
        (
            ["x.safetensors", "--below", "nothing"],
            "--below nothing selects no weight of the checkpoint",
        ),
        (["x.ckpt"], "pass weights_only=False"),
    ):
        status, _, err = command(monkeypatch, capsys, *start, tmp_path / more[0], *more[1:])
        assert (status, says in err) == (1, True), err
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    assert command(monkeypatch, capsys, *start, tmp_path / "x.ckpt", "--trust")[0] == 0
    (path / "weights-00000-of-00002.safetensors").write_bytes(b"")
    status, _, err = command(monkeypatch, capsys, *start, tmp_path / "x.safetensors")
    assert (status, "weights-00000-of-00002.safetensors is damaged: it has 0 bytes" in err) == (
        1,
        True,
    )


def test_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    """Peak of what torch allocates; the file that it maps counts as allocated, too."""
    count, size = 24, 250_000
    values = {f"w{i}": torch.full((size,), float(i)) for i in range(count)}
    pieces = [Piece(Box(n, (0,), (size,)), (size,), v) for n, v in values.items()]
    path, manifest = tmp_path / "a.ckpt", Manifest(world_size=1)
    metadata = SaveMetadata(manifest=manifest, aliases={}, place=list(values).index)
    CheckpointSaver().save(path, make_part(0, 1, weights=pieces), metadata)
    reader, out = CheckpointReader(path), tmp_path / "out.safetensors"
    with torch.profiler.profile(profile_memory=True) as profile:
        export_weights(reader, out)
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    mapped = count * 4 * size
    assert mapped + 4 * size <= most <= mapped + 3 * 4 * size
    assert len(load_file(out)) == count
