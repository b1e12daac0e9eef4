"""Checkpoints behind URLs: each rank writes its part there, and any layout goes on from it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_par
from lightning_par.checkpoint.file_system import place_of, UrlPath
from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.errors import CheckpointError
from lightning_par.models import GPTModule
from tests.contract.subject import TalkativeModule
from tests.contract.test_checkpoints import fit, same
from tests.distributed.checkpoint.test_save_memory import growth, MIB, WHOLE, Wide, WIDTH
from tests.support.checkpoints import find_problems
from tests.support.cli_scripts import command
from tests.support.ranks.api import RankError, run_ranks
from tests.support.resharding import differences, go_on, world_of
from tests.support.url_stores import serve_s3, StoreOptions

Run = dict[str, Any]


@pytest.fixture(scope="module")
def moto_server() -> Iterator[StoreOptions]:
    """S3 on a port of this machine."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    store, stop = serve_s3()
    yield store
    stop()


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> StoreOptions:
    """A URL below which nothing is yet, and how to reach it."""
    if request.param == "disk":
        made = StoreOptions(f"disk://{tmp_path}")
    else:
        served = request.getfixturevalue("moto_server")
        made = StoreOptions(f"{served.root}/{tmp_path.name}", served.options)
    made.use()
    return made


def url_of(text: Any) -> UrlPath:
    """The URL of a text."""
    found = place_of(text)
    assert isinstance(found, UrlPath)
    return found


def go_on_at(rank: int, world: int, store: StoreOptions, *given: Any, **options: Any) -> Run:
    """Train as `go_on` does, and reach a store."""
    store.use()
    return go_on(rank, world, *given, **options)


def run_at(store: StoreOptions, layout: str, folder: Path, **options: Any) -> list[Run]:
    """Run `go_on_at` on all ranks of a layout."""
    given = go_on_at, world_of(layout), store, layout, folder
    found: list[Run] = run_ranks(*given, timeout=150, **options)
    return found


CHAIN = ["tp2", "dp2 zero 3", "pp2", "one", "tp2"]


def test_any_layout_goes_on_from_the_url_of_another(
    store: StoreOptions, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    source, state = None, {}
    for number, layout in enumerate(CHAIN, 1):
        target = f"{store.root}/{number}.ckpt"
        # One device saves the file that Lightning saves, unless it is told otherwise.
        form = {"checkpoint_format": "folder"} if number == len(CHAIN) else {}
        options = {"save_at": number, "save_to": target, "source": source, **form}
        results = run_at(store, layout, tmp_path, steps=number, **options)
        assert number == 1 or differences(results[0]["loaded"], state, layout) == []
        state, source = results[0]["saved"], target
        assert url_of(target).is_dir() == (layout != "one")
        if layout != "one":
            files = CheckpointReader(url_of(target)).manifest.files
            # Each rank has written: its state, and its share of the bytes.
            assert sum(name.startswith("state-") for name in files) >= world_of(layout)
            sizes = [files[n].length for n in files if n.startswith("weights-")]
            assert len(sizes) == world_of(layout)
            assert max(sizes) < 2 * min(sizes)
    made = lightning_par.load_from_checkpoint(GPTModule, target)
    weights = {name: value.float() for name, value in state["weights"].items()}
    assert differences(dict(made.state_dict()), weights) == []
    status, out, _ = command(monkeypatch, capsys, "inspect", target)
    assert (status, f"{target}: step {number}" in out, "verified: all" in out) == (0, True, True)


def train_at(rank: int, world: int, store: StoreOptions, layout: str, options: Run) -> Run:
    store.use()
    folder = f"{store.root}/top"
    top = ModelCheckpoint(folder, "{epoch}", "val_loss", save_top_k=1, save_last=True)
    module = TalkativeModule()
    made = fit(world, layout, [top], module=module, strategy=options)
    made.strategy.barrier()
    found: Run = {
        "names": sorted(n for n in url_of(folder).names() if n.endswith(".ckpt")),
        "best": [f"{url_of(top.best_model_path).name}", "last.ckpt"],
        "url": top.best_model_path.startswith(folder),
        "last is the end": same(made, module, "last"),
        "best of all": same(made, module, "best") == (top.best_model_path[-6] == "1"),
    }
    made.strategy.barrier()
    # A new run finds where to go on by itself.
    again = ModelCheckpoint(folder, "{epoch}", "val_loss", save_top_k=1, save_last=True)
    found["steps"] = fit(world, layout, [again], ckpt="last", max_epochs=3).global_step
    options = {"default_root_dir": f"{store.root}/root", "logger": False}
    fit(world, layout, [ModelCheckpoint(filename="a")], max_epochs=1, **options)
    found["default"] = url_of(f"{store.root}/root/checkpoints/a.ckpt").is_dir()
    return found


@pytest.mark.parametrize(("layout", "background"), [("tp2", False), ("pp2", True)])
def test_trainer_saves_removes_and_finds(
    layout: str, background: bool, store: StoreOptions
) -> None:
    options = {"async_save": background}
    for found in run_ranks(train_at, 2, store, layout, options, timeout=150):
        assert found.pop("names") == found.pop("best")
        assert found.pop("steps") == 9
        assert all(found.values()), found


def break_off(
    rank: int, world: int, store: StoreOptions, folder: Path, victim: int, at: int, kills: bool
) -> None:
    """Save at step 1, and let the store fail one rank in the save of step 2, or kill the rank."""
    store.use()
    path, done = f"{store.root}/last.ckpt", 0

    def breaking(original: Any) -> Any:
        def call(self: UrlPath, *given: Any, **options: Any) -> Any:
            nonlocal done
            done += 1
            if done < at:
                return original(self, *given, **options)
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the store is gone")

        return call

    go_on(rank, world, "tp2", folder, steps=1, save_at=1, save_to=path)
    kept = UrlPath.create, UrlPath.write_bytes
    if rank == victim:
        UrlPath.create, UrlPath.write_bytes = map(breaking, kept)  # type: ignore[method-assign]
    try:
        with pytest.raises(CheckpointError, match=r"last\.ckpt was not saved") as refused:
            go_on(rank, world, "tp2", folder, steps=2, source=path, save_at=2, save_to=path)
    finally:
        UrlPath.create, UrlPath.write_bytes = kept  # type: ignore[method-assign]
    assert kills or f"rank {victim}: OSError: the store is gone" in str(refused.value)
    assert kills or "The checkpoint that was there before is unchanged" in str(refused.value)


@pytest.mark.parametrize(
    ("victim", "at", "kills"),
    [
        (1, 1, False),
        (0, 6, True),
        pytest.param(1, 2, True, marks=pytest.mark.exhaustive),
        pytest.param(0, 3, True, marks=pytest.mark.exhaustive),
    ],
)
def test_save_that_breaks_off_leaves_the_one_before(
    victim: int, at: int, kills: bool, store: StoreOptions, tmp_path: Path
) -> None:
    given = break_off, 2, store, tmp_path, victim, at, kills
    if kills:
        with pytest.raises(RankError) as caught:
            run_ranks(*given, fresh=True, timeout=120)
        assert caught.value.kind == "died", caught.value
    else:
        run_ranks(*given, timeout=120)
    url = url_of(f"{store.root}/last.ckpt")
    assert find_problems(url) == []  # type: ignore[arg-type]
    assert CheckpointReader(url).manifest.step == 1
    target = {"save_at": 2, "save_to": str(url)}
    results = run_at(store, "pp2", tmp_path, steps=2, source=str(url), **target)
    assert results[0]["loaded"]["step"] == 1
    assert CheckpointReader(url).manifest.step == 2
    assert len(url.names()) == 2  # what was left is cleared away


def growth_at(rank: int, world: int, store: StoreOptions, options: Run) -> int:
    """Bytes by which a save lets the memory of this rank grow."""
    store.use()
    return growth(rank, world, f"{store.root}/a.ckpt", options)  # type: ignore[arg-type]


def test_no_rank_has_the_parts_of_others_in_memory(store: StoreOptions) -> None:
    # Of s3fs: a client keeps what it has not yet sent.
    block = {"default_block_size": 8 * MIB} if store.root.startswith("s3") else {}
    small = StoreOptions(store.root, {**store.options, **block})
    for found in run_ranks(growth_at, 2, small, {}, fresh=True, timeout=120):
        assert found <= 64 * MIB < WHOLE // 2 - 16 * MIB
    weight = lightning_par.load_from_checkpoint(Wide, f"{store.root}/a.ckpt").layer.weight
    assert weight.shape == (WIDTH, WIDTH)


def save_with_options(rank: int, world: int, store: StoreOptions, wrong: StoreOptions) -> Any:
    wrong.use()
    made = fit(world, "tp2", [])
    path = f"{store.root}/a.ckpt"
    with pytest.raises(CheckpointError, match="was not saved"):
        made.save_checkpoint(path)
    made.save_checkpoint(path, storage_options=store.options)
    made.strategy.barrier()


def test_options_of_a_store_are_those_of_fsspec(moto_server: StoreOptions, tmp_path: Path) -> None:
    store = StoreOptions(f"{moto_server.root}/{tmp_path.name}", moto_server.options)
    wrong = StoreOptions(store.root, {**store.options, "endpoint_url": "http://127.0.0.1:1"})
    run_ranks(save_with_options, 2, store, wrong, timeout=120)
    store.use()
    assert find_problems(url_of(f"{store.root}/a.ckpt")) == []  # type: ignore[arg-type]


def test_unfinished_save_is_no_checkpoint(store: StoreOptions, tmp_path: Path) -> None:
    file = url_of(f"{store.root}/a.ckpt/save-0/manifest.json")
    url_of(f"{store.root}/a.ckpt/save-0").mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"{}")
    trainer = pl.Trainer(
        strategy=lightning_par.Hybrid3DStrategy(), devices=1, accelerator="cpu", logger=False
    )
    with pytest.raises(CheckpointError, match=r"a\.ckpt is not a complete checkpoint.*LP501"):
        trainer.validate(
            TalkativeModule(), torch.utils.data.DataLoader([]), ckpt_path=f"{store.root}/a.ckpt"
        )
