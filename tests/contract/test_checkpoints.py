"""What the Trainer offers for checkpoints works with folders, on every rank."""

import collections
import logging
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from safetensors.torch import load_file, save_file

from lightning_par.checkpoint.reader import CheckpointReader, is_checkpoint
from lightning_par.dtensor import local_part
from lightning_par.errors import CheckpointError, ConfigurationError
from tests.contract.subject import data, files, LAYOUTS, TalkativeModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, ranks, run_ranks

Run = dict[str, Any]
pytestmark = pytest.mark.contract


def fit(
    world: int,
    layout: str,
    callbacks: list[Callback],
    *,
    module: Any = None,
    strategy: Run | None = None,
    ckpt: Any = None,
    weights_only: bool | None = None,
    **trainer: Any,
) -> pl.Trainer:
    """Fit for two epochs of three steps."""
    import lightning_par

    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    options = {"max_epochs": 2, "devices": world, "enable_checkpointing": saves, **trainer}
    made = quiet_trainer(
        strategy=lightning_par.Hybrid3DStrategy(**LAYOUTS[layout], **(strategy or {})),
        callbacks=callbacks,
        **options,
    )
    replicas = LAYOUTS[layout].get("data_parallel_size", 1)
    made.fit(
        module or TalkativeModule(),
        data(12, 4, replicas),
        data(8, 4, replicas),
        ckpt_path=ckpt,
        weights_only=weights_only,
    )
    return made


def local_weights(module: Any) -> dict[str, torch.Tensor]:
    """What this rank holds of the parameters."""
    return {name: local_part(p).clone() for name, p in module.named_parameters()}


def same(trainer: pl.Trainer, module: Any, path: Any) -> bool:
    """Whether a checkpoint holds the weights that the module has."""
    before = local_weights(module)
    trainer.validate(module, data(8, 4, 1), ckpt_path=path, verbose=False)
    after = local_weights(module)
    return all(torch.equal(before[name], after[name]) for name in before)


# ---------------------------------------------------------------- ModelCheckpoint


def best_and_last(rank: int, world: int, folder: Path, layout: str, options: Run) -> Run:
    top = ModelCheckpoint(folder / "top", "{epoch}", "val_loss", save_top_k=1, save_last=True)
    link = True if options["async_save"] else "link"
    steps = ModelCheckpoint(
        folder / "steps", "{step}", every_n_train_steps=2, save_top_k=-1, save_last=link
    )
    module = TalkativeModule()
    made = fit(world, layout, [top, steps], module=module, strategy=options)
    made.strategy.barrier()
    found = {
        "files": files(folder),
        "best": Path(top.best_model_path).name,
        "linked": (folder / "steps" / "last.ckpt").is_symlink(),
        "complete": all(is_checkpoint(p) for p in folder.rglob("*.ckpt")),
        "form": {("file", "folder")[p.is_dir()] for p in folder.rglob("*.ckpt")},
        "hidden": [p.name for p in folder.rglob(".*")],
        "last is the end": same(made, module, "last"),
        "best of all": same(made, module, "best") == (top.best_model_path[-6] == "1"),
        "step 2 is another": not same(made, module, folder / "steps" / "step=2.ckpt"),
    }
    made.strategy.barrier()
    return found


@pytest.mark.parametrize(
    ("layout", "background", "form"),
    [
        ("tp2", False, "folder"),
        ("pp2", True, "file"),
        ("dp2", False, "folder"),
        ("dp2", True, "file"),
        pytest.param("tp2", True, "file", marks=pytest.mark.exhaustive),
        pytest.param("pp2", False, "folder", marks=pytest.mark.exhaustive),
    ],
)
def test_best_last_and_every_few_steps(
    layout: str, background: bool, form: str, tmp_path: Path
) -> None:
    options = {"async_save": background, "checkpoint_format": form}
    results = run_ranks(best_and_last, 2, tmp_path, layout, options, timeout=120)
    for result in results:
        best = result.pop("best")
        assert result == {
            "files": [
                *(f"steps/{name}.ckpt" for name in ("last", "step=2", "step=4", "step=6")),
                *(f"top/{name}" for name in sorted([best, "certificate.json", "last.ckpt"])),
            ],
            "linked": not background,
            "complete": True,
            "form": {form},
            "hidden": [],
            "last is the end": True,
            "best of all": True,
            "step 2 is another": True,
        }


def weights_alone(rank: int, world: int, folder: Path) -> Run:
    saver = ModelCheckpoint(folder, "weights", save_weights_only=True)
    module = TalkativeModule()
    made = fit(world, "dp2", [saver], module=module, strategy={"checkpoint_format": "folder"})
    made.strategy.barrier()
    found = {"same": same(made, module, folder / "weights.ckpt"), "files": []}
    found["files"] = sorted(p.name.partition("-")[0] for p in (folder / "weights.ckpt").iterdir())
    try:
        fit(world, "dp2", [], ckpt=folder / "weights.ckpt")
    except KeyError as error:
        found["error"] = str(error)
    return found


def test_weights_alone(tmp_path: Path) -> None:
    for result in run_ranks(weights_alone, 2, tmp_path, fresh=True):
        assert result["same"]
        assert set(result["files"]) == {"index.json", "manifest.json", "state", "weights"}
        assert "only the model" in result["error"]


# ---------------------------------------------------------------- exceptions


class Fails(Callback):
    """Raises in the second step, on some ranks; on the others once a file is there."""

    def __init__(self, failing: list[int], signal: Path | None = None) -> None:
        self.failing, self.signal = failing, signal

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            while trainer.global_rank not in self.failing and not self.signal.exists():
                time.sleep(0.01)
            raise KeyError("no such thing")


def fail(rank: int, world: int, folder: Path, layout: str, failing: list[int]) -> Run:
    signal = folder / "signal"
    saver = ModelCheckpoint(folder, "{step}", save_last=True, save_on_exception=True)
    options = {"timeout": timedelta(seconds=2)}
    with pytest.raises(KeyError, match="no such thing"):
        fit(world, layout, [saver, Fails(failing, signal)], strategy=options)
    signal.touch()
    return {"files": files(folder)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exception_on_all_ranks_saves(layout: str, tmp_path: Path) -> None:
    run_ranks(fail, 2, tmp_path, layout, [0, 1], fresh=True)
    assert files(tmp_path) == ["last.ckpt", "signal", "step=2.ckpt"]
    assert CheckpointReader(tmp_path / "step=2.ckpt").manifest.step == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_exception_on_one_rank_saves_nothing_and_ends(failing: int, tmp_path: Path) -> None:
    """The other rank stops when the first has given up waiting for it, or is ended by the watch of
    ranks if that takes long.
    """
    ended = None
    try:
        run_ranks(fail, 2, tmp_path, "dp2", [failing], fresh=True)
    except RankError as error:
        ended = error
    assert ended is None or ended.rank != failing, ended
    waited = f"post_mortem.rank{1 - failing}.json"  # of the rank that the watch has ended
    assert files(tmp_path) in (["signal"], [waited, "signal"])


@ranks(2, fresh=True)
def test_on_exception_checkpoint_is_whole(rank: int, world: int, tmp_path: Path) -> None:
    saver = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(KeyError, match="no such thing"):
        fit(world, "tp2", [saver, Fails([0, 1])])
    torch.distributed.barrier()
    assert is_checkpoint(tmp_path / "on_exception.ckpt")


# ---------------------------------------------------------------- trust


class Custom:
    """A hyper-parameter or a callback's state that only a pickle can hold."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


class Rich(Callback):
    """Has a state of many types."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loaded: Run = {}

    def state_dict(self) -> Run:
        return self.state

    def load_state_dict(self, state: Run) -> None:
        self.loaded = state


STATE = {
    "numbers": [1, 2.5, float("inf"), -0.0, True, None],
    "nested": {"a": (1, (2, 3)), 4: {5, 6}, "$": "x", "": frozenset({1})},
    "ordered": collections.OrderedDict(b=1, a=torch.tensor([1.5, 2.5], dtype=torch.bfloat16)),
    "counter": collections.Counter("hello"),
    "bytes": b"\x00\xff",
    "torch": (torch.float16, torch.device("cpu"), torch.Size([2, 3]), torch.tensor(True)),
    "path": Path("some/where"),
}


@ranks(2, fresh=True)
def test_state_of_callbacks_and_pickles_only_on_request(
    rank: int, world: int, tmp_path: Path
) -> None:
    fit(world, "tp2", [Rich(**STATE), ModelCheckpoint(tmp_path, "plain")])
    rich = Rich()
    fit(world, "tp2", [rich], ckpt=tmp_path / "plain.ckpt", max_epochs=3)
    tensor = rich.loaded["ordered"].pop("a")
    assert torch.equal(tensor, STATE["ordered"].pop("a"))
    assert tensor.dtype == torch.bfloat16
    assert rich.loaded == STATE
    assert list(map(type, rich.loaded["numbers"])) == list(map(type, STATE["numbers"]))
    fit(world, "tp2", [Rich(thing=Custom(3)), ModelCheckpoint(tmp_path, "odd")])
    with pytest.raises(CheckpointError, match=r"thing is an .*Custom.*pass weights_only=False"):
        fit(world, "tp2", [Rich()], ckpt=tmp_path / "odd.ckpt", max_epochs=3)
    rich = Rich()
    fit(world, "tp2", [rich], ckpt=tmp_path / "odd.ckpt", max_epochs=3, weights_only=False)
    assert rich.loaded == {"thing": Custom(3)}


class Hyper(TalkativeModule):
    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


class OwnIO(TorchCheckpointIO):
    """A plugin, which is given what rank 0 has gathered."""


@ranks(2, fresh=True)
def test_file_of_lightning_with_a_pickle_needs_trust(rank: int, world: int, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "a")
    fit(world, "tp2", [saver], module=Hyper(Custom(1)), plugins=[OwnIO()])
    torch.distributed.barrier()
    assert not is_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(
        CheckpointError, match=r"a\.ckpt holds Python objects.*pass weights_only=False"
    ):
        fit(world, "tp2", [], module=Hyper(), ckpt=tmp_path / "a.ckpt", max_epochs=3)
    trusted = {"ckpt": tmp_path / "a.ckpt", "weights_only": False}
    assert fit(world, "tp2", [], module=Hyper(), max_epochs=3, **trusted).global_step == 9


@ranks(2, fresh=True)
def test_pickled_hyper_parameters_are_left_out(rank: int, world: int, tmp_path: Path) -> None:
    fit(world, "dp2", [ModelCheckpoint(tmp_path, "a")], module=Hyper(Custom(1)))
    records = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("lightning_par").addHandler(handler)
    fit(world, "dp2", [], module=Hyper(), ckpt=tmp_path / "a.ckpt", max_epochs=3)
    assert any("hyper_parameters.thing" in r.getMessage() for r in records)


# ---------------------------------------------------------------- weights from elsewhere


class Loaded(Callback):
    """Keeps the weights that a fit began with."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        whole = trainer.strategy.gather_state_dict()
        self.weights = {name: value.clone() for name, value in whole.items()}


@ranks(2, fresh=True)
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("tp2", "index"),
        ("pp2", "file"),
        ("tp2", "folder"),
        *(
            pytest.param(layout, form, marks=pytest.mark.exhaustive)
            for layout, form in (("pp2", "index"), ("tp2", "file"), ("pp2", "folder"))
        ),
    ],
)
def test_fit_from_weights_in_safetensors(
    rank: int, world: int, layout: str, form: str, tmp_path: Path
) -> None:
    """Of the bare model, tied weights once, in one file or in several."""
    module = TalkativeModule()
    whole = {n: torch.randn_like(p) for n, p in module.model.named_parameters()}
    torch.distributed.broadcast_object_list(box := [whole])
    whole = box[0]
    path = tmp_path / "model.safetensors"
    if rank == 0:
        write_weights(path, whole, form)
    torch.distributed.barrier()
    target = {"file": path, "folder": tmp_path, "index": Path(f"{path}.index.json")}[form]
    seen = Loaded()
    made = fit(world, layout, [seen], module=module, ckpt=target)
    assert made.global_step == 6
    if rank == 0:
        assert "model.head.weight" in seen.weights
        assert "head.weight" not in whole
        for name, value in whole.items():
            assert torch.equal(seen.weights[f"model.{name}"], value), name
        assert torch.equal(seen.weights["model.head.weight"], whole["embed.weight"])


def write_weights(path: Path, whole: Run, form: str) -> None:
    import json

    if form == "file":
        save_file(whole, path)
        return
    names = list(whole)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: whole[n] for n in part}, path.with_name(file))
        assert load_file(path.with_name(file))
    places = {name: file for file, part in halves.items() for name in part}
    Path(f"{path}.index.json").write_text(json.dumps({"weight_map": places}))


# ---------------------------------------------------------------- what is refused


def test_forms_have_names_and_do_not_contradict() -> None:
    import lightning_par

    with pytest.raises(ConfigurationError, match=r"'zip' must be 'auto', 'file' or 'folder'"):
        lightning_par.Hybrid3DStrategy(checkpoint_format="zip")
    with pytest.raises(ConfigurationError, match="=True means checkpoint_format='folder', but"):
        lightning_par.Hybrid3DStrategy(checkpoint_format="file", save_distributed_checkpoint=True)
    chosen = lightning_par.Hybrid3DStrategy(save_distributed_checkpoint=False)
    assert chosen.options.checkpoint_format == "file"


@ranks(2, fresh=True)
def test_what_cannot_be_loaded_or_saved_is_refused(rank: int, world: int, tmp_path: Path) -> None:
    fit(world, "dp2", [ModelCheckpoint(tmp_path, "a")])
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(CheckpointError, match=r"neither a manifest\.json"):
        fit(world, "dp2", [], ckpt=tmp_path / "empty")
    folder = {"checkpoint_format": "folder"}
    with pytest.raises(ConfigurationError, match=r"AsyncCheckpointIO writes .* as one file"):
        fit(world, "dp2", [], plugins=[AsyncCheckpointIO()], strategy=folder)
    with pytest.raises(
        ConfigurationError, match=r"async_save=True has no effect with the plugin Async"
    ):
        fit(world, "dp2", [], plugins=[AsyncCheckpointIO()], strategy={"async_save": True})
    link = ModelCheckpoint(tmp_path, "b", save_last="link")
    with pytest.raises(ConfigurationError, match=r"save_last='link'.*Use save_last=True"):
        fit(world, "dp2", [link], strategy={"async_save": True})
    with pytest.raises(
        ConfigurationError, match=r"names of checkpoints have at least 256 bytes.*LP511"
    ):
        fit(world, "dp2", [ModelCheckpoint(tmp_path, "x" * 248 + "{epoch}-{step}")])
    with pytest.raises(CheckpointError, match=r"differs in parameter group 0 by model\.blocks\.0"):
        fit(world, "dp2", [], module=Frozen(), ckpt=tmp_path / "a.ckpt", max_epochs=3)
    with pytest.raises(CheckpointError, match=r"unexpected model\.blocks\.3"):
        fit(world, "dp2", [], module=Short(), ckpt=tmp_path / "a.ckpt", max_epochs=3)
    for options in ({}, folder):
        with pytest.raises(ConfigurationError, match=r"memory://x is in the memory of one process"):
            fit(world, "dp2", [ModelCheckpoint("memory://x", "a")], strategy=options)
    made = fit(world, "dp2", [], strategy={"checkpoint_format": "file"})
    with pytest.raises(ConfigurationError, match=r"'file' is not supported for the URL file://.*"):
        made.save_checkpoint(f"file://{tmp_path}/u.ckpt")
    made = fit(world, "dp2", [], strategy=folder)
    with pytest.raises(ConfigurationError, match=r"storage_options are for URLs.*Leave them out"):
        made.save_checkpoint(tmp_path / "u.ckpt", storage_options={"key": "a"})


class Frozen(TalkativeModule):
    """Trains all but one block."""

    def configure_optimizers(self) -> Any:
        kept = [p for n, p in self.named_parameters() if "blocks.0." not in n]
        return torch.optim.AdamW(kept, lr=1e-2)


class Short(TalkativeModule):
    """Has three blocks."""

    def __init__(self) -> None:
        super().__init__()
        del self.model.blocks[3]


@ranks(2)
def test_states_are_loaded_into_those_that_are_there(rank: int, world: int, tmp_path: Path) -> None:
    made = fit(world, "dp2", [], module=TalkativeModule())
    made.save_checkpoint(tmp_path / "same.ckpt")
    held = [s["exp_avg"].to_local() for s in made.optimizers[0].state.values()]
    before = [value.clone() for value in held]
    for value in held:
        value.zero_()
    checkpoint = made.strategy.load_checkpoint(tmp_path / "same.ckpt")
    made.strategy.load_optimizer_state_dict(checkpoint)
    after = [s["exp_avg"].to_local() for s in made.optimizers[0].state.values()]
    assert [x.data_ptr() for x in after] == [x.data_ptr() for x in held]
    assert all(map(torch.equal, after, before))
