"""Damage to a checkpoint is found and named; what fails leaves the previous one; no code runs."""

import contextlib
import errno
import json
import os
import pickle
import random
import re
import resource
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_par.checkpoint.index import Manifest
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.checkpoint.safetensors_weights import find_weights
from lightning_par.checkpoint.storage import FileRecord, write_json, write_object
from lightning_par.checkpoint.tensor_files import StoredTensor
from lightning_par.errors import CheckpointError
from tests.support.checkpoints import find_problems, holds, save_alone, write_folder

FLIPS, TRUNCATIONS = 200, 50


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "a.ckpt", 3)


def test_sound_checkpoint_has_no_problem(folder: Path) -> None:
    assert find_problems(folder) == []
    assert holds(folder, 3)
    assert not holds(folder, 4)
    names = {"manifest.json", "index.json"}
    for rank in range(2):
        names |= {f"{kind}-{rank:05d}-of-00002.safetensors" for kind in ("weights", "optimizer")}
        names |= {f"state-{rank:05d}-of-00002.{suffix}" for suffix in ("json", "safetensors")}
    assert {path.name for path in folder.iterdir()} == names


def places(folder: Path, count: int, seed: int) -> Iterator[tuple[Path, int]]:
    """Random bytes over all files; every file is hit."""
    files = sorted(folder.iterdir())
    generator = random.Random(seed)
    for number in range(count):
        path = files[number % len(files)]
        yield path, generator.randrange(path.stat().st_size)


def test_every_flipped_bit_is_found_and_its_file_named(folder: Path) -> None:
    missed = []
    for number, (path, at) in enumerate(places(folder, FLIPS, seed=1)):
        data = path.read_bytes()
        bit = 1 << (number % 8)
        path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
        problems = find_problems(folder)
        if len(problems) != 1 or path.name not in problems[0]:
            missed.append((path.name, at, bit, problems))
        path.write_bytes(data)
    assert missed == []
    assert find_problems(folder) == []


def test_every_truncation_is_found_and_its_file_named(folder: Path) -> None:
    missed = []
    for path, at in places(folder, TRUNCATIONS, seed=2):
        data = path.read_bytes()
        path.write_bytes(data[:at])
        problems = find_problems(folder)
        if len(problems) != 1 or path.name not in problems[0]:
            missed.append((path.name, at, problems))
        path.write_bytes(data)
    assert missed == []


def test_longer_missing_swapped_and_stale_files_are_named(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data + b"\0")
        assert path.name in find_problems(folder)[0]
        path.unlink()
        assert path.name in find_problems(folder)[0]
        path.write_bytes(data)
    one, two = sorted(folder.glob("weights-*"))
    swapped = folder / "swapped"
    one.rename(swapped)
    two.rename(one)
    swapped.rename(two)
    problems = " ".join(find_problems(folder))
    assert one.name in problems
    assert two.name in problems
    stale = write_folder(folder.with_name("old.ckpt"), 2)
    shutil.copytree(stale, folder.with_name("mixed.ckpt"))
    mixed = folder.with_name("mixed.ckpt")
    shutil.copy(write_folder(folder.with_name("new.ckpt"), 3) / one.name, mixed / one.name)
    (problem,) = find_problems(mixed)
    assert f"{one.name} is damaged: its checksum is" in problem


def test_manifest_of_a_newer_format_or_with_files_elsewhere_is_refused(folder: Path) -> None:
    manifest = Manifest.read(folder)
    manifest.files["../outside.json"] = FileRecord(1, "0")
    manifest.write(folder)
    assert "lists '../outside.json', a file outside" in find_problems(folder)[0]


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "state-00000-of-00002.json"])
def test_malformed_json_is_one_clear_error(folder: Path, name: str) -> None:
    """With checksums that fit, as from someone who writes them on purpose."""
    whole = json.loads((folder / name).read_bytes())
    value = whole["manifest"] if name == "manifest.json" else whole
    kinds = [None, 3, "x", [], {}, [[]], {"$": "path"}, {"$": "tensor", "file": "x"}, -1, 1e400]
    for key in [*value, "none of these"]:
        for other in kinds:
            spoil(folder, name, {**{k: v for k, v in value.items() if k != key}, key: other})
            read_or_refuse(folder)
        spoil(folder, name, {k: v for k, v in value.items() if k != key})
        read_or_refuse(folder)
    for other in (kinds[0], kinds[1], kinds[3], b"[" * 100_000, b'{"a":' * 100_000):
        spoil(folder, name, other)
        read_or_refuse(folder)


def spoil(folder: Path, name: str, value: object) -> None:
    """Write another value, with checksums that fit."""
    path = folder / name
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    if name == "manifest.json":
        body = b'"manifest": ' + text + b"}\n"
        path.write_bytes(f'{{"checksum": "crc32:{zlib.crc32(body):08x}",\n'.encode() + body)
        return
    path.write_bytes(text)
    manifest = Manifest.read(folder)
    manifest.files[name] = seal(path)
    manifest.write(folder)


def read_or_refuse(folder: Path) -> None:
    """Read all of a checkpoint; fail for any exception but the one that is promised."""
    with contextlib.suppress(CheckpointError):
        read_everything(folder)


def test_index_that_leads_elsewhere_is_refused(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_bytes())
    secret = folder.with_name("secret.safetensors")
    shutil.copy(folder / "weights-00000-of-00002.safetensors", secret)
    for file in ("../secret.safetensors", str(secret), "gone.safetensors"):
        index["weights"]["table"]["chunks"][0]["file"] = file
        spoil(folder, "index.json", index)
        with pytest.raises(CheckpointError, match=r"index\.json refers to .*, which is missing"):
            CheckpointReader(folder)


@pytest.mark.parametrize("name", ["manifest.json", "index.json", "weights-00000-of-00002"])
def test_links_and_pipes_are_refused(folder: Path, name: str) -> None:
    path = next(p for p in folder.iterdir() if p.name.startswith(name))
    path.rename(folder.with_name("elsewhere"))
    path.symlink_to(folder.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match="is a link, a pipe or a device"):
        read_everything(folder)
    path.unlink()
    os.mkfifo(path)
    assert "is a link, a pipe or a device" in " ".join(find_problems(folder))
    with pytest.raises(CheckpointError, match="is a link, a pipe or a device"):
        read_everything(folder)


def test_files_of_another_step_are_noticed(folder: Path) -> None:
    other = write_folder(folder.with_name("other.ckpt"), 4)
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        shutil.copy(other / path.name, path)
        problems = find_problems(folder)
        assert (problems != []) == (path.read_bytes() != data), path.name
        path.write_bytes(data)


# ---------------------------------------------------------------- a disk that is full


@contextlib.contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Makes writes behind this offset fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("form", ["folder", "file"])
def test_full_disk_at_any_offset_leaves_the_previous_checkpoint(form: str, tmp_path: Path) -> None:
    path, as_file = tmp_path / "a.ckpt", form == "file"
    save_alone(path, 1, as_file=as_file)
    files = [path] if as_file else path.iterdir()
    longest = max(file.stat().st_size for file in files)
    offsets = [longest * k // 20 for k in range(20)]
    for offset in offsets:
        with no_file_longer_than(offset), pytest.raises(CheckpointError) as caught:
            save_alone(path, 2, as_file=as_file)
        said = str(caught.value)
        assert "The checkpoint that was there before is unchanged" in said
        # torch says only that a part of it was not written.
        assert os.strerror(errno.EFBIG) in said or (as_file and "rank 0: " in said)
        assert find_problems(path) == []
        assert holds(path, 1)
        assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    save_alone(path, 2, as_file=as_file)
    assert holds(path, 2)


def test_full_disk_leaves_the_previous_single_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_object(path, {"x": torch.ones(5000)})
    for offset in (0, 100, 10_000, 19_000):
        with no_file_longer_than(offset), pytest.raises((OSError, RuntimeError)):
            write_object(path, {"x": torch.zeros(5000)})
        assert torch.equal(torch.load(path)["x"], torch.ones(5000))
        assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]
    write_object(path, {"x": torch.zeros(5000)})
    assert torch.equal(torch.load(path)["x"], torch.zeros(5000))


def test_a_folder_takes_the_place_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    write_object(path, 1)
    save_alone(path, 1)
    assert holds(path, 1)
    write_object(path, 1)
    assert torch.load(path) == 1
    path.unlink()
    save_alone(tmp_path / "b.ckpt", 5)
    path.symlink_to("b.ckpt")
    save_alone(path, 2)
    assert not path.is_symlink()
    assert holds(path, 2)
    assert holds(tmp_path / "b.ckpt", 5)


# ---------------------------------------------------------------- payloads


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_no_pickle_in_any_file_runs(folder: Path, tmp_path: Path) -> None:
    """Neither from a file that was replaced, nor if its checksum was mended, too."""
    trace = tmp_path / "it-ran"
    bomb = pickle.dumps(Payload(trace))
    kept = folder.with_name("kept")
    shutil.copytree(folder, kept)
    for path in sorted(folder.iterdir()):
        path.write_bytes(bomb)
        (problem,) = find_problems(folder)
        assert path.name in problem
        if path.name != "manifest.json":
            manifest = Manifest.read(folder)
            manifest.files[path.name] = seal(path)
            manifest.write(folder)
        with pytest.raises(CheckpointError, match=re.escape(path.name)):
            read_everything(folder)
        assert not trace.exists()
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
    read_everything(folder)
    pickle.loads(bomb)
    assert trace.exists()  # the payload works


def read_everything(folder: Path) -> None:
    reader = CheckpointReader(folder)
    dict(reader.weights())
    for optimizer in reader.optimizers():
        for entries in optimizer.states.values():
            for value in entries.values():
                assert not isinstance(value, StoredTensor) or value.read() is not None
    for rank in range(2):
        reader.state(rank)


def seal(path: Path) -> FileRecord:
    """The record that fits a file."""
    data = path.read_bytes()
    return FileRecord(len(data), f"{zlib.crc32(data):08x}")


def test_pickled_state_is_read_on_request_only(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1, {"bad": [Payload(trace)]}))
    with pytest.raises(
        CheckpointError,
        match=r"bad\[0\] is an object of the type .*Payload.*pass weights_only=False",
    ):
        reader.state(0)
    assert not trace.exists()
    reader.state(0, unpickle=True)
    assert trace.exists()


def test_pickled_hyper_parameters_are_left_out(tmp_path: Path) -> None:
    trace = tmp_path / "it-ran"
    state = {"hyper_parameters": {"lr": 0.5, "bad": Payload(trace)}}
    found = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1, state)).state(0)
    assert found["hyper_parameters"] == {"lr": 0.5}
    assert found["left_out"] == ["hyper_parameters.bad"]
    assert not trace.exists()


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    bomb = pickle.dumps(Payload(tmp_path / "it-ran"))
    (tmp_path / "model.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        find_weights(tmp_path / "model.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for content, says in (
        ({"weight_map": {"a": "../x.safetensors"}}, "lists '../x.safetensors'"),
        ({"no": 1}, "cannot be read as an index of safetensors files"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"gone\.safetensors"),
    ):
        write_json(index, content)
        with pytest.raises(CheckpointError, match=says):
            find_weights(index)
    with pytest.raises(CheckpointError, match="is no file with weights"):
        find_weights(tmp_path / "nothing.bin")
    assert not (tmp_path / "it-ran").exists()


def test_what_cannot_be_stored_is_named() -> None:
    from tests.support.checkpoints import part_of

    with pytest.raises(CheckpointError, match=r"odd\.0 is a function, which cannot be stored"):
        part_of(1, 0, state={"odd": {"0": lambda: 1}})
    cures = {
        torch.complex128: r"as real numbers, torch\.view_as_real\(tensor\)",
        torch.float8_e4m3fnuz: r"Convert it to one of torch\.bfloat16, .* or torch\.uint8\.",
    }
    for dtype, cure in cures.items():
        with pytest.raises(CheckpointError, match=rf"odd cannot be saved: .* {dtype}, .*{cure}"):
            part_of(1, 0, state={"odd": torch.zeros(2, dtype=dtype)})
    part_of(1, 0, state={"odd": torch.view_as_real(torch.zeros(2, dtype=torch.complex128))})
