"""Folders of ``save_pretrained``: into any layout, and out again."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DistributedSampler

from lightning_par import cli, Hybrid3DStrategy
from lightning_par.errors import CheckpointError
from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.observe.modes import DoublePrecision
from tests.support.models.huggingface import auto_class, HFModule, MODELS, PaddedText
from tests.support.models.toy_gpt import loader
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks

STEPS = 2
SIZES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
ZERO = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 2,
    "zero_stage": 3,
}
EXPERTS = {**ZERO, "expert_parallel_size": 2, "zero_stage": 1}


def fit(module: Any, family: str, **options: Any) -> pl.Trainer:
    """Train two steps in float64 from where the module, or ``ckpt_path``, begins."""
    torch.set_default_dtype(torch.float64)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        use_distributed_sampler=False,
        **options,
    )
    ours = isinstance(trainer.strategy, Hybrid3DStrategy)
    with DoublePrecision():
        data, replicas = PaddedText(8, family), trainer.strategy.sizes.data if ours else 1
        place = trainer.strategy.sizes.data_rank(trainer.global_rank) if ours else 0
        order = DistributedSampler(data, replicas, place, shuffle=False)
        samples = loader(data, 4 // replicas, sampler=order)
        trainer.fit(module, samples, samples, ckpt_path=ckpt_path)
    return trainer


def train_rank(rank: int, world: int, family: str, folder: Path, sizes: Any, out: Path) -> None:
    module = HFModule(family, on_meta=True)
    strategy = Hybrid3DStrategy(**sizes)
    trainer = fit(module, family, devices=world, strategy=strategy, ckpt_path=str(folder))
    trainer.save_checkpoint(out)


def make_folder(family: str, folder: Path) -> nn.Module:
    """Save a random model in several files; give it back."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    model = MODELS[family]()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model


def logits_of(model: nn.Module, family: str) -> torch.Tensor:
    batch = next(iter(loader(PaddedText(3, family), 3)))
    with torch.no_grad(), DoublePrecision():
        return model.double().eval()(**batch).logits  # also its table of frequencies


@pytest.fixture(autouse=True)
def _default_dtype() -> Any:
    yield
    torch.set_default_dtype(torch.float32)


CASES = [
    ("mixtral", SIZES),
    ("mixtral", EXPERTS),
    pytest.param("llama tied", SIZES, marks=pytest.mark.exhaustive),
    pytest.param("qwen3", SIZES, marks=pytest.mark.exhaustive),
    pytest.param("gpt2", SIZES, marks=pytest.mark.exhaustive),
    ("bert", SIZES),
    pytest.param("llama", ZERO, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_folder_is_trained_and_exported_as_in_one_process(
    family: str, sizes: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Mixtral stores its experts one by one, and has them in one tensor in memory."""
    saved = make_folder(family, tmp_path / "saved")
    options = {"experts_implementation": "eager"} if family == "mixtral" else {}
    module = HFModule(family)
    module.model = auto_class(family).from_pretrained(tmp_path / "saved", **options)
    module.model.train()  # it comes back ready for predictions
    torch.testing.assert_close(module.model.state_dict(), saved.state_dict(), rtol=0, atol=0)
    fit(module, family, devices=1)
    wanted = logits_of(module.model, family)
    assert (wanted - logits_of(saved, family)).abs().max() > 1e-3

    out = tmp_path / "a.ckpt"
    world = 4 if sizes is SIZES else 2
    run_ranks(train_rank, world, family, tmp_path / "saved", sizes, out, timeout=120)
    words = ["export", "--ckpt", out, "--out", tmp_path / "exported", "--format", "huggingface"]
    words += ["--max-shard-gb", "2e-5"]
    monkeypatch.setattr(sys, "argv", ["lightning-par", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert "from_pretrained" in capsys.readouterr().out
    assert (tmp_path / "exported" / "model.safetensors.index.json").exists()
    model, info = auto_class(family).from_pretrained(
        tmp_path / "exported", output_loading_info=True, **options
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.float64
    torch.testing.assert_close(logits_of(model, family), wanted, rtol=0, atol=1e-10)


class Watch(Callback):
    """Notes what was held when the weights had been loaded."""

    def __init__(self, live: LiveBytes) -> None:
        self.live, self.seen = live, (0, 0)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = (
            self.live.peak,
            sum(p.nbytes for p in map(local, own_parameters(pl_module).values())),
        )


def local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def load_rank(rank: int, world: int, family: str, folder: Path) -> Any:
    torch.set_default_dtype(torch.float64)
    module = HFModule(family, on_meta=True)
    with LiveBytes() as live:
        watch = Watch(live)
        trainer = quiet_trainer(
            devices=world,
            strategy=Hybrid3DStrategy(**SIZES),
            precision="64-true",
            max_steps=1,
            limit_val_batches=0,
            callbacks=[watch],
        )
        samples = loader(PaddedText(4, family), 4)
        trainer.fit(module, samples, samples, ckpt_path=str(folder))
    return watch.seen


def test_loading_holds_the_own_shards_and_one_tensor(tmp_path: Path) -> None:
    """Counted, not measured: the bytes of all storages at every operation."""
    model = make_folder("mixtral wide", tmp_path / "saved")
    sizes = [p.nbytes for p in model.parameters()]
    seen = run_ranks(load_rank, 4, "mixtral wide", tmp_path / "saved", timeout=120)
    for peak, own in seen:
        assert own < 0.4 * sum(sizes)
        assert own <= peak <= own + 1.1 * max(sizes)  # and batches, positions


def test_weights_that_are_computed_are_read_by_from_pretrained(tmp_path: Path) -> None:
    """The model stores gates and values as one tensor, and has two."""
    make_folder("hrm", tmp_path)
    module = pretrained("hrm", tmp_path)
    fit(module, "hrm", devices=1)
    for told, weights in run_ranks(train_pretrained, 2, "hrm", tmp_path, timeout=120):
        assert ". Build the model with from_pretrained" in told
        torch.testing.assert_close(weights, module.state_dict(), rtol=0, atol=1e-10)


def pretrained(family: str, folder: Path) -> HFModule:
    """A module whose constructor has loaded the model."""
    module = HFModule(family, on_meta=True)
    module.model = auto_class(family).from_pretrained(folder)
    module.model.train()
    return module


def train_pretrained(rank: int, world: int, family: str, folder: Path) -> Any:
    """From the folder, which is refused, and as the refusal says."""
    torch.set_default_dtype(torch.float64)
    options = {"devices": world, "strategy": Hybrid3DStrategy(**ZERO)}
    with pytest.raises(CheckpointError, match="LP510") as caught:
        fit(HFModule(family, on_meta=True), family, ckpt_path=str(folder), **options)
    options["strategy"] = Hybrid3DStrategy(**ZERO)
    module = pretrained(family, folder)
    fit(module, family, **options)
    return str(caught.value), module.state_dict()
