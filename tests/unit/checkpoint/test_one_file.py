"""A checkpoint that is one file: what plain torch reads, and what is found when it is damaged."""

import random
import zipfile
from pathlib import Path

import pytest
import torch

from lightning_par.checkpoint.reader import CheckpointReader, find_problems, is_checkpoint
from tests.support.checkpoints import expected, holds, make_values, save_alone, write_file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_file(tmp_path / "a.ckpt", 3)


@pytest.mark.parametrize("mmap", [False, True])
def test_plain_torch_reads_it(file: Path, mmap: bool) -> None:
    found = torch.load(file, weights_only=True, mmap=mmap)
    assert list(found) == ["state_dict", "optimizer_states", "epoch", "tensor"]
    weights = make_values(3)
    for name, value in weights.items():
        assert torch.equal(found["state_dict"][name], value), name
        assert found["state_dict"][name].dtype == value.dtype
    assert found["state_dict"]["tied"].data_ptr() == found["state_dict"]["table"].data_ptr()
    (optimizer,) = found["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": list(range(len(weights)))}]
    for number, value in enumerate(weights.values()):
        assert torch.equal(optimizer["state"][number]["exp_avg"], -value)
    assert torch.equal(found["tensor"], torch.full((3,), 3))


def test_reader_gives_what_a_folder_gives(file: Path) -> None:
    assert is_checkpoint(file)
    assert find_problems(file) == []
    assert holds(file, 3)
    assert not holds(file, 4)
    reader = CheckpointReader(file)
    assert torch.equal(reader.weights()["tied"], expected(3)["table"])
    assert reader.files.bytes_read == 7 * 5 * 4
    assert reader.manifest.world_size == 2


def test_every_flipped_byte_of_tensors_manifest_and_states_is_found(file: Path) -> None:
    data = file.read_bytes()
    reader = CheckpointReader(file)
    sizes = {r: reader.manifest.files[r].length for r in reader.manifest.places if r[:5] != "data/"}
    for _, entry, chunk in reader.index.chunks():
        sizes[chunk.file] = entry.numel * entry.dtype.itemsize
    spans = [(reader.manifest.places[record], size) for record, size in sizes.items()]
    with zipfile.ZipFile(file) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("manifest.json")]
    spans.append((data.index(b'{"checksum"'), info.file_size))
    places = [at for low, size in spans for at in range(low, low + size)]
    assert len(places) > 3000
    generator = random.Random(1)
    chosen = [*generator.sample(places, 300), *(low for low, size in spans if size)]
    for at in chosen:
        file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
        assert find_problems(file) != [], at
    file.write_bytes(data)
    assert find_problems(file) == []


def test_truncated_file_is_none(file: Path) -> None:
    data = file.read_bytes()
    for at in (0, 10, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:at])
        assert find_problems(file) != [], at


def test_only_rank_saves_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    for seed in (1, 2):
        save_alone(path, seed, as_file=True)
        assert holds(path, seed)
    save_alone(path, 3)
    assert path.is_dir()
    save_alone(path, 4, as_file=True)
    assert holds(path, 4)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
