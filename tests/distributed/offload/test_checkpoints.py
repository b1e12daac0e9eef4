"""Checkpoints of an offloaded optimizer: masters, delayed updates, and what another layout reads.

That every layout reads what every other wrote is in test_resharding.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import ConcatDataset

import lightning_par
from lightning_par.callbacks import MixedPrecision
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer, Result
from tests.support.ranks.api import run_ranks
from tests.support.resharding import differences

STOP, STEPS = 2, 5
OFFLOAD: dict[str, Any] = {"offload_options": {}}
DELAYED: dict[str, Any] = {"offload_options": {"delayed_update": 1}}
MASTERS: dict[str, Any] = {}


class Keeper(Callback):
    """Keeps the whole state at the start, and saves after a step."""

    def __init__(self, save_to: Path | None) -> None:
        self.save_to, self.losses, self.loaded = save_to, [], {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loaded = whole(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if trainer.global_step == STOP and self.save_to is not None:
            trainer.save_checkpoint(self.save_to)


def whole(trainer: Any) -> dict[str, Any]:
    """Weights and states as one process would hold them, on rank 0."""
    strategy = trainer.strategy
    weights = {k: v.clone() for k, v in strategy.gather_state_dict().items()}
    states = strategy.parallel_model.states
    with strategy.parallel_model.in_parallel_form():
        held = states.gather_optimizer(trainer.lightning_module, trainer.optimizers[0])
    found = {k: dict(v) for k, v in held.get("state", {}).items()}
    return {
        "weights": weights,
        "states": {k: {n: t.clone() for n, t in v.items()} for k, v in found.items()},
    }


def go_on(
    rank: int,
    world: int,
    options: dict[str, Any],
    precision: str,
    steps: int,
    source: Path | None,
    save_to: Path | None,
) -> Result:
    keeper = Keeper(save_to)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 2}
    mixed = [MixedPrecision("bf16-true")] if precision == "masters" else []
    trainer = quiet_trainer(
        strategy=lightning_par.Hybrid3DStrategy(**{**sizes, **options}),
        devices=world,
        max_steps=steps,
        max_epochs=-1,
        precision="32-true" if mixed else precision,
        limit_val_batches=0,
        use_distributed_sampler=False,
        callbacks=[keeper, *mixed],
    )
    # All batches are alike, so that their order need not be resumed.
    data = loader(ConcatDataset([ToyData(4)] * STEPS), 4)
    trainer.fit(ToyModule(blocks=2), data, loader(ToyData(4), 4), ckpt_path=source)
    return {"losses": keeper.losses, "loaded": keeper.loaded, "end": whole(trainer)}


def run(
    options: dict[str, Any],
    precision: str,
    *,
    world: int = 2,
    steps: int = STEPS,
    source: Path | None = None,
    save_to: Path | None = None,
) -> list[Result]:
    found: list[Result] = run_ranks(
        go_on, world, options, precision, steps, source, save_to, timeout=120
    )
    return found


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        pytest.param(OFFLOAD, "bf16-true", id="synchronous-bf16-true"),
        pytest.param(DELAYED, "32-true", id="delayed-32-true"),
        pytest.param(OFFLOAD, "32-true", id="synchronous-32-true", marks=pytest.mark.exhaustive),
        pytest.param(DELAYED, "bf16-true", id="delayed-bf16-true", marks=pytest.mark.exhaustive),
    ],
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    options: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    saved = tmp_path / "a.ckpt"
    uninterrupted = run(options, precision, save_to=saved)
    resumed = run(options, precision, source=saved)
    for one, two in zip(resumed, uninterrupted, strict=True):
        assert one["losses"] == two["losses"][STOP:]
        assert differences(one["end"], two["end"]) == []
    names = {name for state in resumed[0]["loaded"]["states"].values() for name in state}
    # In float32 the master is the weight, and the state that of any Adam.
    master = {"master"} if precision == "bf16-true" else set()
    assert names == {"step", "exp_avg", "exp_avg_sq"} | master


def test_masters_go_from_the_host_to_the_device_and_back(tmp_path: Path) -> None:
    """With masters on the device a run goes on; with 1 rank and 2, and the bits stay."""
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    start = run(OFFLOAD, "bf16-true", steps=STOP, save_to=first)[0]["end"]
    on_device = run(MASTERS, "masters", world=1, steps=STOP + 1, source=first, save_to=second)
    assert differences(on_device[0]["loaded"], start) == []
    assert len(on_device[0]["losses"]) == 1
    third = tmp_path / "3.ckpt"
    begun = run(MASTERS, "masters", steps=STOP, save_to=third)[0]["end"]
    back = run(OFFLOAD, "bf16-true", world=1, steps=STOP + 1, source=third)
    assert differences(back[0]["loaded"], begun) == []


def test_stale_master_does_not_come_back(tmp_path: Path) -> None:
    """Weights trained in bfloat16 without masters carry old masters along; the weights count."""
    first = tmp_path / "1.ckpt"
    run(OFFLOAD, "bf16-true", steps=STOP, save_to=first)

    loaded = run(OFFLOAD, "bf16-true", world=1, steps=STOP + 1, source=first)[0]["loaded"]
    masters = [state["master"] for state in loaded["states"].values()]
    assert all(not torch.equal(m, m.bfloat16().float()) for m in masters)
    plain = run_ranks(overwrite, 1, first, tmp_path / "2.ckpt", timeout=120)[0]
    again = run(OFFLOAD, "bf16-true", world=1, steps=STOP + 1, source=tmp_path / "2.ckpt")
    weights = [w for name, w in again[0]["end"]["weights"].items() if name == plain["name"]]
    # One step of 1e-2 away from the weight that was given, not from the old master.
    assert float((weights[0].float() - plain["value"]).abs().max()) <= 0.05


def overwrite(rank: int, world: int, source: Path, target: Path) -> dict[str, Any]:
    """Save a checkpoint again with one weight set to 3 and its old master left in place."""

    class Set(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            with torch.no_grad():
                pl_module.model.blocks[0].mlp[0].bias.fill_(3.0)
            trainer.save_checkpoint(target)
            trainer.should_stop = True

    strategy = lightning_par.Hybrid3DStrategy(
        tensor_parallel_size=1, pipeline_parallel_size=1, **OFFLOAD
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=1,
        max_steps=STOP + 1,
        precision="bf16-true",
        limit_val_batches=0,
        callbacks=[Set()],
    )
    trainer.fit(ToyModule(blocks=2), loader(ToyData(4 * STEPS), 4), ckpt_path=source)
    return {"name": "model.blocks.0.mlp.0.bias", "value": 3.0}


def refuse(rank: int, world: int, source: Path) -> str:
    from lightning_par.errors import CheckpointError

    strategy = lightning_par.ZeROOffloadStrategy()
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=3)
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(ToyModule(blocks=2), loader(ToyData(8), 4), ckpt_path=source)
    return str(caught.value)


def save_sgd(rank: int, world: int, target: Path) -> None:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=1)
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1, limit_val_batches=0)
    trainer.fit(ToyModule("sgd", blocks=2), loader(ToyData(8), 4))
    trainer.save_checkpoint(target)


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    run_ranks(save_sgd, 1, tmp_path / "a.ckpt", timeout=120)
    (said,) = run_ranks(refuse, 1, tmp_path / "a.ckpt", timeout=120)
    assert "not Adam: its states lack step, exp_avg, exp_avg_sq" in said
