"""The balance that is logged is that of all replicas and stages, and is the same on every rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_par
from lightning_par.callbacks import ExpertBalance
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.expert_load_plot import draw_expert_load
from tests.support.models.mixture import layout, make
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

SWITCH = {"routing": "switch", "experts_per_token": 1, "capacity_factor": 0.75}
NO_LOSS = {"auxiliary_weight": 0.0}  # it would be that of the micro-batches under a pipeline


def train(strategy: Any, devices: int, replicas: int, path: str) -> Any:
    """Report every step but the first of three; give what was reported, and the router's logits."""
    torch.manual_seed(5)
    torch.set_default_dtype(torch.float64)
    module, samples = make(**SWITCH, **NO_LOSS)
    balance = ExpertBalance(path)
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        callbacks=[balance],
        precision="64-true",
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    training = DataLoader(samples, batch_size=4 // replicas)
    trainer.fit(module, training, DataLoader(samples))
    logged = {k: float(v) for k, v in trainer.callback_metrics.items() if "experts/" in k}
    return balance.steps, balance.history, logged


def train_rank(rank: int, world: int, options: dict[str, Any], path: str) -> Any:
    strategy = lightning_par.Hybrid3DStrategy(**options)
    return train(strategy, world, options["data_parallel_size"], path)


def test_every_rank_reports_what_one_process_does(tmp_path: Path) -> None:
    try:
        steps, history, logged = train("auto", 1, 1, str(tmp_path / "one.svg"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert steps == [1, 2, 3]
    assert list(history[0]) == ["layer_0", "layer_1", "layer_2"]
    for layer in history[0].values():
        assert sum(layer.load) == 4 * 8  # samples, and the tokens of each that count
        assert 0 < layer.dropped < 32
    loads = torch.tensor(history[2]["layer_1"].load)
    shares = loads / loads.sum()
    assert logged["experts/layer_1/load_3"] == pytest.approx(float(shares[3]))
    entropy = float(torch.special.entr(shares).sum() / torch.tensor(4.0).log())
    assert logged["experts/layer_1/entropy"] == pytest.approx(entropy)
    assert logged["experts/layer_1/max_over_mean"] == pytest.approx(float(4 * shares.max()))
    dropped = history[2]["layer_1"].dropped / 32
    assert logged["experts/layer_1/dropped"] == pytest.approx(dropped)
    of_layers = [logged[f"experts/layer_{i}/entropy"] for i in range(3)]
    assert logged["experts/entropy"] == pytest.approx(sum(of_layers) / 3)
    options = layout(pp=2, dp=2, ep=2)
    for found in run_ranks(train_rank, 4, options, str(tmp_path / "ranks.svg"), timeout=120):
        assert found[0] == steps
        for got, want in zip(found[1], history, strict=True):
            assert list(got) == list(want)
            for name, layer in got.items():
                assert layer.load == want[name].load
                assert layer.dropped == want[name].dropped
                assert layer.z == pytest.approx(want[name].z, abs=1e-10)
        assert found[2] == pytest.approx(logged)
    pictures = [(tmp_path / f"{name}.svg").read_text() for name in ("one", "ranks")]
    assert pictures[0] == pictures[1]
    assert "layer 2" in pictures[0]


def test_a_model_without_experts_is_refused() -> None:
    trainer = quiet_trainer(
        devices=1, max_epochs=1, limit_val_batches=0, callbacks=[ExpertBalance()]
    )
    with pytest.raises(
        ConfigurationError, match=r"a Router of lightning_par\.models, but ToyModule has none"
    ):
        trainer.fit(ToyModule(), loader(ToyData(4), 4), loader(ToyData(4), 4))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    load = {"layer 0": [[1.0, 2.0]]}
    with pytest.raises(ConfigurationError, match=r"a\.gif'.*of the suffixes \.pdf, \.png, \.svg"):
        draw_expert_load(load, [1], tmp_path / "a.gif", title="t")
    with pytest.raises(
        ConfigurationError,
        match="no load of experts to draw: it was recorded for 0 layers at 1 steps",
    ):
        draw_expert_load({}, [1], tmp_path / "a.svg", title="t")
