"""Checkpoints below a URL: the one before is whole until the next one is."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_par import AutoParallelStrategy
from lightning_par.checkpoint import tensor_files
from lightning_par.checkpoint.file_system import CURRENT, place_of, UrlPath
from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint
from lightning_par.checkpoint.storage import remove_path
from lightning_par.errors import CheckpointError
from tests.support.checkpoints import expected, find_problems, holds, save_alone, write_folder
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.url_stores import DiskStore, StoreOptions


@pytest.fixture
def url(tmp_path: Path) -> UrlPath:
    """A URL at which nothing is yet."""
    store = StoreOptions(f"disk://{tmp_path}/store")
    store.use()
    found = place_of(f"{store.root}/a.ckpt")
    assert isinstance(found, UrlPath)
    return found


def test_it_holds_what_the_ranks_wrote_and_nothing_of_earlier_saves(
    url: UrlPath, tmp_path: Path
) -> None:
    for seed in (1, 2):
        write_folder(url, seed)
        assert is_checkpoint(url)
        assert find_problems(url) == []
        assert holds(url, seed)
    saved = [path.name for path in Path(url.key).iterdir() if path.is_dir()]
    assert url.names() == {CURRENT, *saved}
    assert len(saved) == 1
    # A copy of it on a disk is a checkpoint, too.
    shutil.copytree(url.key, tmp_path / "copy")
    assert is_checkpoint(tmp_path / "copy")
    assert holds(tmp_path / "copy", 2)


@pytest.mark.parametrize("block", [16, 64, 4 << 20])
def test_only_the_wanted_rows_are_loaded(
    block: int, url: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "_BLOCK", block)
    write_folder(url, 3)
    reader = CheckpointReader(url)
    table, wanted = reader.weights().find("table"), expected(3)["table"]
    for low, high, first, end in [(0, 7, 0, 5), (3, 5, 1, 4), (6, 7, 4, 5)]:
        out = torch.empty(high - low, end - first)
        before = reader.files.bytes_read
        table.read_box((low, first), out)
        assert torch.equal(out, wanted[low:high, first:end])
        assert reader.files.bytes_read - before == out.nbytes


def test_file_of_that_name_is_removed_like_a_folder(url: UrlPath) -> None:
    Path(url.key).parent.mkdir(parents=True)
    url.write_bytes(b"what Lightning saves")
    url.remove_saves()
    assert url.read_bytes(5) == b"what Lightning saves"[5:]
    remove_path(url)
    assert not url.exists()


def test_memory_of_one_process_is_a_store_like_others() -> None:
    url = place_of("memory://of_a_test/a.ckpt")
    assert isinstance(url, UrlPath)
    assert url.is_of_one_process
    write_folder(url, 1)
    save_alone(url, 2)
    assert find_problems(url) == []
    assert holds(url, 2)
    remove_path(url)
    assert not url.exists()


class BrokenError(Exception):
    """What the client of a store raises: no OSError."""


def break_at(number: int, monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> list[str]:
    """Let the n-th change of the store fail, and all that follow; return the changes.

    With `answers` false that one is done, and only its answer is lost.
    """
    done: list[str] = []

    def breaking(name: str) -> Any:
        original = getattr(DiskStore, name)

        def call(self: Any, *given: Any, **options: Any) -> Any:
            if name == "open" and given[1:] == ("rb",):
                return original(self, *given, **options)
            done.append(name)
            if len(done) > number or (len(done) == number and answers):
                raise BrokenError(f"change {len(done)}: {name}")
            found = original(self, *given, **options)
            if len(done) == number:
                raise BrokenError(f"answer of {number}: {name}")
            return found

        return call

    for name in ("open", "pipe_file", "makedirs", "rm"):
        monkeypatch.setattr(DiskStore, name, breaking(name))
    return done


@pytest.mark.parametrize("answers", [True, False])
def test_store_that_fails_leaves_the_old_or_the_new_one_whole(
    answers: bool, url: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, outcomes = 1, list[bool]()
    write_folder(url, seed)
    for number in range(1, 100):
        with monkeypatch.context() as patch:
            changes = break_at(number, patch, answers=answers)
            try:
                write_folder(url, seed + 1)
            except CheckpointError as error:
                said = str(error)
                assert f"{url} was not saved" in said
                assert "BrokenError: " in said
                assert "LP508" in said
        assert find_problems(url) == []
        new = holds(url, seed + 1)
        assert new or holds(url, seed)
        outcomes.append(new)
        seed += new
        if len(changes) < number:
            break
    assert outcomes.count(False) >= 8  # each file, the manifest and what makes it count
    assert outcomes.count(True) >= 2
    # What was left is cleared away by the next save.
    write_folder(url, 9)
    assert len(url.names()) == 2


def test_damage_is_found(url: UrlPath) -> None:
    write_folder(url, 1)
    (save,) = (path for path in Path(url.key).iterdir() if path.is_dir())
    file = save / "weights-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert [text.partition(" is ")[0] for text in find_problems(url)] == [file.name]
    file.write_bytes(content[:-1])
    assert "bytes instead of" in find_problems(url)[0]
    file.unlink()
    assert find_problems(url) == [f"{file.name} is missing"]
    (url / CURRENT).write_bytes(b"../other")
    with pytest.raises(CheckpointError, match=r"does not contain the name of a folder.*LP502"):
        CheckpointReader(url)


def test_unknown_protocol_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"cannot be reached: Protocol not known.*LP501"):
        place_of("nosuch://a/b.ckpt")


def test_store_that_does_not_answer_is_named(url: UrlPath, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise BrokenError("no such endpoint")

    monkeypatch.setattr(DiskStore, "cat_file", refuse)
    for read in (is_checkpoint, CheckpointReader):
        with pytest.raises(CheckpointError, match=r"a\.ckpt cannot be reached .*endpoint.*LP501"):
            read(url)


def test_address_of_a_page_is_that_of_a_file_of_lightning() -> None:
    page = place_of("https://localhost/a.ckpt?signature=1")
    assert isinstance(page, UrlPath)
    assert not is_checkpoint(page)  # nothing is asked: another address would be refused
    assert not page.is_dir()


def test_a_file_of_who_may_read_but_not_list_is_not_asked_for_more(
    url: UrlPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then a store answers "forbidden" where a key is not there."""
    Path(url.key).parent.mkdir(parents=True)
    Path(url.key).write_bytes(b"of Lightning")
    for name in ("cat_file", "info", "rm", "exists"):
        plain = getattr(DiskStore, name)

        def refuse(self: Any, path: Any, *args: Any, plain: Any = plain, **options: Any) -> Any:
            if not Path(self._strip_protocol(path)).exists():
                raise PermissionError(path)
            return plain(self, path, *args, **options)

        monkeypatch.setattr(DiskStore, name, refuse)
    assert not is_checkpoint(url)
    remove_path(url)
    assert not Path(url.key).exists()


class Silent(ToyModule):
    """Has no validation."""

    validation_step = None


def test_auto_parallel_takes_a_url_on_one_device(url: UrlPath) -> None:
    """Before it has chosen any sizes."""
    saved = ModelCheckpoint(str(url).rpartition("/")[0], "a")
    quiet_trainer(
        devices=1,
        strategy=AutoParallelStrategy(),
        max_steps=1,
        callbacks=[saved],
        enable_checkpointing=True,
    ).fit(Silent(), loader(ToyData(8), 4))
    assert url.exists()


def test_a_plugin_may_have_urls_of_its_own() -> None:
    held: dict[str, Any] = {}

    class Own(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            held[str(path)] = checkpoint

        def load_checkpoint(self, path: Any, map_location: Any = None, **_: Any) -> Any:
            return held[str(path)]

        def remove_checkpoint(self, path: Any) -> None:
            held.pop(str(path))

    def trainer(steps: int) -> Any:
        return quiet_trainer(devices=1, strategy="hybrid3d", max_steps=steps, plugins=[Own()])

    first = trainer(1)
    first.fit(Silent(), loader(ToyData(4), 4))
    first.save_checkpoint("own://a/x.ckpt")
    second = trainer(2)
    second.fit(Silent(), loader(ToyData(4), 4), ckpt_path="own://a/x.ckpt")
    assert second.global_step == 2
