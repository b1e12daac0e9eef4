"""Contents of values in a module are after code without a trace what they were before it."""

import gzip
import io
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, IO

import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import nn

from lightning_par.observe.isolate import untouched

OLD = "one\ntwo\nthree\n"


def nothing(file: IO[Any]) -> None:
    pass


def reads(file: IO[Any]) -> None:
    assert len(file.readline()) > 0


def writes(file: IO[Any]) -> None:
    file.write(_like(file, "written"))


def begins_anew(file: IO[Any]) -> None:
    file.seek(0)
    file.truncate()
    file.write(_like(file, "anew"))


def appends_a_lot(file: IO[Any]) -> None:
    file.seek(0, io.SEEK_END)
    file.write(_like(file, "much " * 10_000))


def _like(file: IO[Any], text: str) -> Any:
    is_text = isinstance(file, io.TextIOBase)
    return text if is_text else text.encode()


OPENED: list[Callable[[Path], IO[Any]]] = [
    lambda path: io.BytesIO(OLD.encode()),
    lambda path: io.StringIO(OLD),
    lambda path: path.open("r+b"),
    lambda path: path.open("r+b", buffering=0),
    lambda path: path.open("r+"),
    lambda path: path.open("a+"),
]


@pytest.mark.parametrize("place", [0, 4, len(OLD)])
@pytest.mark.parametrize("change", [nothing, reads, writes, begins_anew, appends_a_lot])
@pytest.mark.parametrize("opened", OPENED)
def test_a_file_keeps_what_it_holds_and_its_place(
    opened: Any, change: Any, place: int, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(OLD)
    module = nn.Module()
    module.file = file = opened(path)
    with file:
        file.seek(place)
        if change is reads and place == len(OLD):
            file.seek(place := 0)
        with untouched(module):
            change(file)
        assert file.tell() == place
        assert file.read() == _like(file, OLD)[place:]
        file.flush()
        assert path.read_text() == OLD
        # And it goes on being written, as in one process.
        file.write(_like(file, "four\n"))
        file.seek(0)
        assert file.read() == _like(file, OLD + "four\n")


def test_a_large_file_keeps_its_place_and_its_size(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 2**24 + 1
    path.write_bytes(b"a" * size)
    module = nn.Module()
    for place in (0, size):
        with path.open("r+b") as module.file:
            module.file.seek(place)
            with untouched(module):
                appends_a_lot(module.file)
            assert module.file.tell() == place
        assert path.read_bytes() == b"a" * size


@pytest.mark.parametrize("mode", ["w", "a", "wb", "ab"])
def test_a_log_that_is_only_written_ends_where_it_did(mode: str, tmp_path: Path) -> None:
    path, module = tmp_path / "log", nn.Module()
    with path.open(mode) as module.log:
        writes(module.log)
        with untouched(module):
            writes(module.log)
        writes(module.log)
    assert path.read_text() == "writtenwritten"


def test_files_that_have_no_place_are_left_alone(tmp_path: Path) -> None:
    module, text = nn.Module(), tmp_path / "text"
    text.write_text(OLD)
    with gzip.open(tmp_path / "packed", "wb") as module.packed, text.open() as module.lines:
        module.packed.write(b"one")
        assert next(module.lines) == "one\n"
        with untouched(module):  # a text file tells no place between two lines
            module.packed.write(b"two")
        assert next(module.lines) == "two\n"
    with gzip.open(tmp_path / "packed", "rb") as packed:
        assert packed.read() == b"onetwo"


def test_a_file_that_is_only_read_keeps_its_place(tmp_path: Path) -> None:
    path, module = tmp_path / "file", nn.Module()
    path.write_text(OLD)
    with path.open() as module.file:
        module.file.readline()
        with untouched(module):
            module.file.readline()
        assert module.file.read() == "two\nthree\n"


class Samples(list[int]):
    """A list that counts, as a data set of a user's class does."""

    reads = 0


def test_containers_and_iterators_give_afterwards_what_they_gave_before() -> None:
    module: Any = nn.Module()
    module.samples, module.order = Samples([1, 2]), OrderedDict(a=1)
    module.options, module.numbers = AttributeDict(steps=3), (n for n in range(4))
    assert next(module.numbers) == 0
    for _ in range(2):
        with untouched(module):
            module.samples.append(3)
            module.samples.reads += 1
            module.order.move_to_end("a")
            module.order["b"] = 2
            module.options["steps"] += 1
            assert [next(module.numbers), next(module.numbers)] == [1, 2]
    assert (module.samples, module.samples.reads) == ([1, 2], 0)
    assert (module.order, module.options) == (OrderedDict(a=1), {"steps": 3})
    assert list(module.numbers) == [1, 2, 3]


def test_a_buffer_that_holds_nothing_yet_is_still_one_afterwards() -> None:
    module: Any = nn.Module()
    module.register_buffer("mask", None)
    with untouched(module):
        module.mask = torch.ones(2)
    assert module.mask is None
    module.mask = torch.ones(2)
    assert [name for name, _ in module.named_buffers()] == ["mask"]
