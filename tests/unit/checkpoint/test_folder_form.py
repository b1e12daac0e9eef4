"""A folder that is written here by hand: the form that every later version has to read."""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lightning_par.checkpoint.export import export_checkpoint
from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint
from tests.support.checkpoints import find_problems

TABLE = torch.arange(35, dtype=torch.float32).view(7, 5)
COUNT = torch.tensor(3)
AVERAGE = TABLE.bfloat16() / 2


def chunk(file: str, key: str, offset: list[int], shape: list[int]) -> dict[str, Any]:
    """Where a part of a tensor is."""
    return {"file": file, "key": key, "offset": offset, "shape": shape}


def entry(kind: str, name: str, dtype: str) -> dict[str, Any]:
    """Rows 0 to 3 of rank 0, rows 4 to 6 of rank 1."""
    files = [f"{kind}-0000{rank}-of-00002.safetensors" for rank in range(2)]
    chunks = [
        chunk(files[0], f"{name}[0:4, 0:5]", [0, 0], [4, 5]),
        chunk(files[1], f"{name}[4:7, 0:5]", [4, 0], [3, 5]),
    ]
    return {"dtype": dtype, "shape": [7, 5], "chunks": chunks}


STATE = "state-00000-of-00002.safetensors"
INDEX = {
    "weights": {
        "table": entry("weights", "table", "F32"),
        "count": {
            "dtype": "I64",
            "shape": [],
            "chunks": [chunk("weights-00001-of-00002.safetensors", "count", [], [])],
        },
    },
    "aliases": {"head": "table"},
    "optimizer": {"0/table/exp_avg": entry("optimizer", "0/table/exp_avg", "BF16")},
    "groups": [[{"lr": 0.5, "betas": {"$": "tuple", "items": [0.9, 0.99]}, "params": ["table"]}]],
    "values": {"weights/extra": "text", "optimizer/0/table/step": 7},
}
STATES = [
    {
        "epoch": 2,
        "loss": {"$": "float", "value": "inf"},
        "kept": {"$": "tensor", "file": STATE, "key": "0"},
        "lightning_par": {"seed": 1},
    },
    {"lightning_par": {"seed": 2}},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "old.ckpt"
    path.mkdir()
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        name, of_rank = f"[{rows.start}:{rows.stop}, 0:5]", f"{rank:05d}-of-00002"
        weights = {f"table{name}": TABLE[rows], **({"count": COUNT} if rank else {})}
        save_file(weights, path / f"weights-{of_rank}.safetensors")
        states = {f"0/table/exp_avg{name}": AVERAGE[rows]}
        save_file(states, path / f"optimizer-{of_rank}.safetensors")
        (path / f"state-{of_rank}.json").write_text(json.dumps(STATES[rank]))
    save_file({"0": TABLE[0]}, path / STATE)
    (path / "index.json").write_text(json.dumps(INDEX))
    manifest = {
        "kind": "lightning_par checkpoint",
        "format": 1,
        "world_size": 2,
        "layout": {"dp_shard": 2},
        "step": 7,
        "epoch": 2,
        "versions": {"torch": "2.9"},
        "files": {file.name: record_of(file.read_bytes()) for file in path.iterdir()},
    }
    body = f'"manifest": {json.dumps(manifest)}\n}}\n'
    first = f'{{"checksum": "crc32:{zlib.crc32(body.encode()):08x}",\n'
    (path / "manifest.json").write_text(first + body)
    return path


def record_of(data: bytes) -> dict[str, Any]:
    """What a manifest says of a file."""
    return {"length": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def test_everything_in_it_is_read(folder: Path) -> None:
    assert is_checkpoint(folder)
    assert find_problems(folder) == []
    reader = CheckpointReader(folder)
    assert (reader.manifest.step, reader.manifest.layout) == (7, {"dp_shard": 2})
    weights = reader.weights()
    assert {*weights} == {"table", "head", "count", "extra"}
    assert torch.equal(weights["table"], TABLE)
    assert torch.equal(weights["head"], TABLE)
    assert torch.equal(weights["count"], COUNT)
    assert weights["extra"] == "text"
    part = torch.empty(3, 2)
    reader.weights().find("table").read_box((3, 1), part)
    assert torch.equal(part, TABLE[3:6, 1:3])
    (optimizer,) = reader.optimizers()
    assert optimizer.groups == [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["table"]}]
    assert torch.equal(optimizer["state"][0]["exp_avg"], AVERAGE)
    assert optimizer["state"][0]["step"] == 7
    state = reader.state(0)
    assert (state["epoch"], state["loss"]) == (2, float("inf"))
    assert torch.equal(state["kept"], TABLE[0])
    assert reader.state(1) == STATES[1]


def test_it_is_exported_as_a_file_of_lightning(folder: Path) -> None:
    out = folder.with_name("plain.ckpt")
    export_checkpoint(CheckpointReader(folder), out)
    found = torch.load(out, weights_only=True)
    assert torch.equal(found["state_dict"]["head"], TABLE)
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], AVERAGE)
    assert "lightning_par" not in found
