"""Compressed gradients: what each method computes, and that every mesh computes the same with it.

Top-k that sends everything loses nothing, hence with it every mesh has to equal one process.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import nn, Tensor
from torch.utils.data import ConcatDataset, DataLoader

import lightning_par
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.cuda_simulation import is_wanted
from tests.support.exhaustive import some
from tests.support.models.compression import (
    batches,
    by_definition,
    EACH,
    fit,
    of_torch,
    samples,
    STEPS,
    weights,
    WIDTH,
)
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import run_offloaded
from tests.support.parity import assert_parity, quiet_trainer, TOLERANCE
from tests.support.ranks.api import ranks, run_ranks

METHODS = ("fp16", "bf16", "int8", "topk", "powersgd")
LOSSLESS = {"method": "topk", "density": 1.0}
CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.mark.skipif(is_wanted(), reason="DistributedDataParallel wants a timer of CUDA itself")
@ranks(2)
@pytest.mark.parametrize("method", ["fp16", "bf16", "powersgd"])
def test_hooks_of_torch_give_the_weights_of_distributed_data_parallel(
    rank: int, world: int, method: str
) -> None:
    start = 2 if method == "powersgd" else 0
    trainer = fit(rank, world, {"method": method, "start_step": start})
    found = weights(trainer.lightning_module)
    for name, wanted in of_torch(rank, world, method, start).items():
        torch.testing.assert_close(found[name], wanted, **CLOSE)


@ranks(3)
@pytest.mark.parametrize("method", ["int8", "topk"])
def test_own_methods_give_the_weights_of_their_definition(
    rank: int, world: int, method: str
) -> None:
    trainer = fit(rank, world, {"method": method, "density": 0.03})
    found = weights(trainer.lightning_module)
    for name, wanted in by_definition(world, method, 0.03).items():
        torch.testing.assert_close(found[name], wanted, **CLOSE)


SENT = {"fp16": 1 / 4, "bf16": 1 / 4, "int8": 0.133, "topk": 0.03, "powersgd": 0.15}
"""Of the bytes of an all-reduce in float64, at most, on 2 ranks; "int8" fills up its blocks."""


class Count(Callback):
    """Counts the bytes that this rank sends in the backward of one step."""

    def __init__(self) -> None:
        self.sent = 0

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        groups = trainer.strategy.parallel_model.groups
        self.comm_volume = CommVolume(groups)
        self.comm_volume.__enter__()

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.comm_volume.__exit__(None, None, None)
        rows = [row for row in self.comm_volume.entries() if row.axis in ("data", "dp_replicate")]
        self.sent = sum(row.sent for row in rows)


@ranks(2)
def test_replicas_stay_equal_bit_for_bit_and_send_fewer_bytes(rank: int, world: int) -> None:
    whole = 8 * 2 * (WIDTH * WIDTH + WIDTH)
    for method in METHODS:
        count = Count()
        trainer = fit(rank, world, {"method": method, "rank": 2}, callbacks=[count])
        mine = torch.cat([w.flatten() for w in weights(trainer.lightning_module).values()])
        both = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(both, mine)
        assert torch.equal(*both)
        presence = 5 * 4  # a number for each parameter
        assert 0 < count.sent - presence <= 1.02 * SENT[method] * whole, method


MESHES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "dp2": ({}, 2, {}),
    "dp2, clipped, accumulating": (
        {},
        2,
        {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}, "size": 18},
    ),
    "dp2, a replica without labels": ({}, 2, {"module": {"masked": True}}),
    "tp2 x dp2": ({"tensor_parallel_size": 2}, 4, {"trainer": {"gradient_clip_val": 0.05}}),
    "pp2 x dp2": ({"pipeline_parallel_size": 2}, 4, {"trainer": {"gradient_clip_val": 0.05}}),
    "cp2 x dp2": ({"context_parallel_size": 2}, 4, {}),
    "tp2 x pp2 x dp2": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        8,
        {"trainer": {"gradient_clip_val": 0.05}},
    ),
}


PARTS = {"tp2 x dp2", "pp2 x dp2"}
"""Meshes that the last one holds."""


@pytest.mark.parametrize("name", some(MESHES, PARTS))
def test_lossless_compression_equals_one_process_on_every_mesh(name: str) -> None:
    sizes, world, run = MESHES[name]
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0, **sizes}
    options["gradient_compression"] = LOSSLESS
    assert_parity(
        "hybrid3d", options, world, 2, **{"batch_size": 4, "size": 12, "ignored": True, **run}
    )


def test_offloaded_optimizer_takes_compressed_gradients() -> None:
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0}
    run = {"batch_size": 2, "size": 12, "ignored": True}
    found = [
        run_offloaded(
            "hybrid3d",
            {**options, "offload_options": {}, "gradient_compression": chosen},
            2,
            run,
        )
        for chosen in (None, LOSSLESS, "int8")
    ]
    for whole, same, short in zip(*found, strict=True):
        assert whole["host_bytes"] == same["host_bytes"] > 0
        torch.testing.assert_close(same["losses"], whole["losses"], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(short["losses"], whole["losses"], rtol=0.02, atol=0)
        assert short["losses"] != whole["losses"]


class Bare(pl.LightningModule):
    """Its last blocks have no parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = (nn.Linear(WIDTH, WIDTH) for _ in "ab")
        self.blocks = nn.ModuleList([*linear, nn.Tanh(), nn.Tanh()])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def parallel_plan(self) -> lightning_par.ParallelPlan:
        return lightning_par.ParallelPlan(blocks="blocks")


@ranks(4)
def test_stage_without_parameters_takes_part(rank: int, world: int) -> None:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "stage_blocks": [2, 2]}
    strategy = lightning_par.Hybrid3DStrategy(
        **sizes, zero_stage=0, gradient_compression="int8", gather_after_run=False
    )
    trainer = quiet_trainer(
        strategy=strategy, devices=4, precision="64-true", max_epochs=1, limit_val_batches=0
    )
    trainer.fit(Bare(), batches(0, 1))
    assert strategy.parallel_model.compression is not None
    assert bool(list(trainer.lightning_module.parameters())) == (strategy.mesh.place["pp"] == 0)


def train_copies(rank: int, world: int, chosen: Any) -> dict[str, Any]:
    strategy = lightning_par.Hybrid3DStrategy(
        tensor_parallel_size=2, pipeline_parallel_size=2, zero_stage=0, gradient_compression=chosen
    )
    trainer = quiet_trainer(strategy=strategy, devices=world, max_epochs=1)
    module = ToyModule()
    trainer.fit(module, loader(ToyData(16), 2), loader(ToyData(4), 2))
    held = {}
    for name, p in module.named_parameters():
        is_sharded = hasattr(p, "placements") and any(x.is_shard() for x in p.placements)
        value = p.detach()
        held[name] = is_sharded, (value.to_local() if hasattr(value, "to_local") else value).clone()
    return {"place": dict(strategy.mesh.place), "held": held}


@pytest.mark.parametrize("method", some(["int8", "powersgd"], {"int8"}))
def test_every_copy_on_a_3d_mesh_stays_the_same(method: str) -> None:
    """Of tensor-parallel ranks, of the embedding that two stages hold, and of replicas."""
    results = run_ranks(train_copies, 8, {"method": method, "rank": 1}, timeout=120)
    seen: dict[Any, Tensor] = {}
    copies = 0
    for result in results:
        for name, (is_sharded, value) in result["held"].items():
            tied = "embed" if name in ("model.embed.weight", "model.head.weight") else name
            key = tied, result["place"]["tp"] if is_sharded else None
            copies += key in seen
            assert torch.equal(seen.setdefault(key, value), value), key
    assert copies > len(seen)


class Spoil(Callback):
    """One replica's gradient, its norm, or only its loss is infinite in one step."""

    def __init__(self, step: int, what: str) -> None:
        self.step, self.what = step, what

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index != self.step or trainer.global_rank != 1:
            return
        if self.what == "loss":
            pl_module.more = torch.inf
            return
        factor = torch.inf if self.what == "gradient" else 1e200
        spoil = lambda _, grads: (grads[0] * factor,)  # noqa: E731
        self.hook = pl_module.second.register_full_backward_pre_hook(spoil)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.more = 0.0
        if hasattr(self, "hook"):
            self.hook.remove()


@ranks(2)
@pytest.mark.parametrize(
    ("method", "what"),
    [
        pytest.param(m, w, marks=[] if (i + j) % 3 == 0 else [pytest.mark.exhaustive])
        for i, m in enumerate(("int8", "topk", "powersgd"))
        for j, w in enumerate(("gradient", "norm", "loss"))  # the default has each of them once
    ],
)
def test_step_that_is_left_out_leaves_no_trace(
    rank: int, world: int, method: str, what: str
) -> None:
    whole = samples(rank, world)
    skipped = 3
    kept = [i for i in range(len(whole)) if i // EACH != skipped]
    without = DataLoader(torch.utils.data.Subset(whole, kept), EACH)
    chosen = {"method": method, "rank": 1}
    skip = {"strategy": {"on_nonfinite": "skip"}}
    spoilt = fit(rank, world, chosen, callbacks=[Spoil(skipped, what)], **skip)
    clean = fit(rank, world, chosen, data=without, **skip)
    one, two = (weights(t.lightning_module) for t in (spoilt, clean))
    assert all(torch.equal(one[name], two[name]) for name in one)


class Save(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    rank: int, world: int, method: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.ckpt"
    chosen = {"method": method, "rank": 1, "start_step": 1}
    data = DataLoader(ConcatDataset([samples(rank, world, 1)] * STEPS), EACH)
    whole = fit(rank, world, chosen, data=data, callbacks=[Save(path, 3)])
    resumed = fit(rank, world, chosen, data=data, ckpt_path=path)
    assert resumed.global_step == STEPS
    one, two = (weights(t.lightning_module) for t in (whole, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)
    # Without what it remembers, it would not be; what does not fit is not loaded.
    for other in ({**chosen, "rank": 2}, {**chosen, "method": "bf16"}):
        changed = weights(fit(rank, world, other, data=data, ckpt_path=path).lightning_module)
        assert any(not torch.equal(one[name], changed[name]) for name in one)


@ranks(2)
def test_next_fit_begins_anew(rank: int, world: int) -> None:
    chosen = {"method": "topk", "start_step": 2}
    trainer = fit(rank, world, chosen)
    assert trainer.strategy.parallel_model.compression.state()["steps"] == STEPS
    trainer.fit(trainer.lightning_module, batches(rank, world))
    compression = trainer.strategy.parallel_model.compression
    assert compression.state()["steps"] == 0
    assert compression.state()["compressor"]["owed"] == {}


@ranks(1)
@pytest.mark.parametrize("method", METHODS)
def test_one_device_compresses_nothing(rank: int, world: int, method: str) -> None:
    trainer = fit(rank, world, method, data=batches(0, 1))
    assert trainer.strategy.parallel_model.compression is None
