"""A checkpoint that is one file: what plain torch reads, and what is found when it is damaged."""

import gc
import itertools
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint
from tests.support.checkpoints import (
    expected,
    find_problems,
    holds,
    make_values,
    save_alone,
    write_file,
)


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


def test_the_directory_of_the_archive_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It names every tensor: each further look at it costs a large model more than its pickle.
    opened: list[str] = []

    class Counted(zipfile.ZipFile):
        def __init__(self, file: Any, mode: Any = "r", **options: Any) -> None:
            opened.append(mode)
            super().__init__(file, mode, **options)

    monkeypatch.setattr(zipfile, "ZipFile", Counted)
    write_file(tmp_path / "a.ckpt", 3)
    assert opened == ["a", "a"]


FILES = Path("/proc/self/fd")


def opened(path: Path) -> int:
    """How often this process has a file open now; the listing is open, too, and then gone."""
    return sum(link.is_symlink() and link.readlink() == path for link in list(FILES.iterdir()))


@pytest.mark.skipif(not FILES.is_dir(), reason="needs the list of this process's files")
def test_all_boxes_are_verified_through_one_descriptor_that_is_closed(file: Path) -> None:
    reader = CheckpointReader(file)
    names = sorted(reader.manifest.files)
    assert len(names) > 10
    assert reader.problems(names) == []
    assert opened(file) == 1
    del reader
    gc.collect()
    assert opened(file) == 0


def kept_places(path: Path, data: bytes) -> list[range]:
    """Where tensors, states, the pickle and the manifest are."""
    reader = CheckpointReader(path)
    sizes = {r: reader.manifest.files[r].length for r in reader.manifest.places if r[:5] != "data/"}
    for _, entry, chunk in reader.index.chunks():
        sizes[chunk.file] = entry.numel * entry.dtype.itemsize
    with zipfile.ZipFile(path) as archive:
        (info,) = [i for i in archive.infolist() if i.filename.endswith("manifest.json")]
    starts = {**reader.manifest.places, "manifest": data.index(b'{"checksum"')}
    sizes["manifest"] = info.file_size
    return [range(starts[name], starts[name] + size) for name, size in sizes.items() if size]


def flip(file: Path, data: bytes, at: int) -> None:
    file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])


def test_every_flipped_byte_of_tensors_manifest_and_states_is_found(file: Path) -> None:
    data = file.read_bytes()
    spans = kept_places(file, data)
    places = list(itertools.chain.from_iterable(spans))
    assert len(places) > 3000
    for at in [*random.Random(1).sample(places, 300), *(span[0] for span in spans)]:
        flip(file, data, at)
        assert find_problems(file) != [], at
    file.write_bytes(data)
    assert find_problems(file) == []


@pytest.mark.exhaustive
def test_no_flipped_byte_of_the_whole_file_changes_what_is_read(file: Path) -> None:
    """Between the records, and in the directory of the archive, some change nothing."""
    data = file.read_bytes()
    kept = set(itertools.chain.from_iterable(kept_places(file, data)))
    found = 0
    for at in range(len(data)):
        flip(file, data, at)
        if find_problems(file):
            found += 1
        else:
            assert at not in kept
            assert holds(file, 3), at
    assert len(kept) <= found < len(data)


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
