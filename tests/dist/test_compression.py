"""Compressed gradients: what each method computes, and that every mesh computes the same with it.

Top-k that sends everything loses nothing, hence with it every mesh has to equal one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn, Tensor
from torch.utils.data import ConcatDataset, DataLoader

import lightning_par
from lightning_par.engine.compression.methods import choose_compressor, GradientBucket
from lightning_par.engine.compression.options import GradientCompression
from lightning_par.engine.compression.reduction import CompressedGradients
from lightning_par.engine.ledger import Ledger
from tests.compression import (
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
from tests.offload import run_offloaded
from tests.parity import assert_parity, quiet_trainer, TOLERANCE
from tests.ranks import ranks, run_ranks
from tests.toy import loader, ToyData, ToyModule

METHODS = ("fp16", "bf16", "int8", "topk", "powersgd")
LOSSLESS = {"method": "topk", "density": 1.0}
CLOSE = {"rtol": 0, "atol": 1e-12}


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


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_everything_arrives_in_the_end(rank: int, world: int, method: str) -> None:
    """What was applied and what is remembered are together what was computed."""
    options = GradientCompression(method=method, density=0.05, rank=2)
    compressor = choose_compressor(options, dist.group.WORLD)
    torch.manual_seed(rank)
    computed = torch.zeros(WIDTH * WIDTH + 7, dtype=torch.float64)
    applied = torch.zeros_like(computed)
    for step in range(5):
        grads = [torch.randn(WIDTH, WIDTH).double(), torch.randn(7).double() * 10**step]
        bucket = GradientBucket(0, grads, is_last=True)
        computed += bucket.buffer()
        compressor.reduce(bucket)
        applied += world * bucket.buffer()
    held = compressor.state()
    left = held["error_dict" if method == "powersgd" else "owed"][0].clone()
    if method == "int8":  # each rank makes a part of the mean
        parts = [torch.zeros_like(held["made"][0]) for _ in range(world)]
        dist.all_gather(parts, held["made"][0])
        left += torch.cat(parts, 1).flatten()[: len(left)]
    dist.all_reduce(computed)
    dist.all_reduce(left)
    assert float(left.abs().max()) > 1e-3
    torch.testing.assert_close(applied + left, computed, rtol=1e-12, atol=1e-9)


SENT = {"fp16": 1 / 4, "bf16": 1 / 4, "int8": 0.133, "topk": 0.03, "powersgd": 0.15}
"""Of the bytes of an all-reduce in float64, at most, on 2 ranks; "int8" fills up its blocks."""


class Count(Callback):
    """Counts the bytes that this rank sends in the backward of one step."""

    def __init__(self) -> None:
        self.sent = 0

    def on_before_backward(self, trainer: Any, *_: Any) -> None:
        groups = trainer.strategy.parallelised.groups
        self.ledger = Ledger(groups)
        self.ledger.__enter__()

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.ledger.__exit__(None, None, None)
        rows = [row for row in self.ledger.entries() if row.axis in ("data", "dp_replicate")]
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


@pytest.mark.parametrize("name", MESHES)
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


@pytest.mark.parametrize("method", ["int8", "powersgd"])
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
    """One replica's gradient is infinite in one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == self.step and trainer.global_rank == 1:
            hook = pl_module.second.weight.register_hook(lambda g: g * torch.inf)
            trainer.spoilt = hook

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if hasattr(trainer, "spoilt"):
            trainer.spoilt.remove()


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_step_that_is_left_out_leaves_no_trace(rank: int, world: int, method: str) -> None:
    whole = samples(rank, world)
    skipped = 3
    kept = [i for i in range(len(whole)) if i // EACH != skipped]
    without = DataLoader(torch.utils.data.Subset(whole, kept), EACH)
    chosen = {"method": method, "rank": 1}
    skip = {"strategy": {"on_nonfinite": "skip"}}
    spoilt = fit(rank, world, chosen, callbacks=[Spoil(skipped)], **skip)
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
    # Without what it remembers, it would not be.
    other = {**chosen, "rank": 2, "density": 0.5, "method": "int8" if method == "topk" else "topk"}
    changed = weights(fit(rank, world, other, data=data, ckpt_path=path).lightning_module)
    assert any(not torch.equal(one[name], changed[name]) for name in one)


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_scale_of_the_loss_changes_no_bit(rank: int, world: int, method: str) -> None:
    """Powers of two, as of a `GradScaler`, from step to step another one."""
    options = GradientCompression(method=method, rank=1, density=0.1)
    found = []
    for scales in ([1.0] * 4, [2.0**16, 2.0**16, 2.0**15, 2.0**17]):
        parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        compressed = CompressedGradients([parameter], dist.group.WORLD, options)
        torch.manual_seed(rank)
        grads = []
        for scale in scales:
            parameter.grad = torch.randn(WIDTH, WIDTH) * scale
            compressed.reduce(scale)
            grads.append(parameter.grad / scale)
        found.append(grads)
    if method == "powersgd":  # torch makes columns orthogonal, which rounds
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two)
    else:
        assert all(map(torch.equal, *found))


@ranks(2)
def test_parameters_without_a_gradient(rank: int, world: int) -> None:
    """What one replica has counts half; what nobody has stays away."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    options = GradientCompression(method="topk", density=1.0)
    compressed = CompressedGradients(parameters, dist.group.WORLD, options)
    parameters[rank].grad = torch.full((4,), 2.0)
    compressed.reduce()
    assert parameters[2].grad is None
    for parameter in parameters[:2]:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0] * 4


@ranks(2)
def test_short_gradients_may_be_added_in_a_longer_type(rank: int, world: int) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    options = GradientCompression(method="int8", start_step=1)
    compressed = CompressedGradients([parameter], dist.group.WORLD, options, torch.float32)
    with Ledger({"data": dist.group.WORLD}) as ledger:
        parameter.grad = torch.tensor([1.0, 256.0 * (1 - rank)], dtype=torch.bfloat16)
        compressed.reduce()
    # Whether there is a gradient, whether it is finite, and two entries of 4 bytes.
    assert ledger.total(operation="all_reduce").payload == 4 + 4 + 2 * 4
    assert parameter.grad.tolist() == [1.0, 128.0]


@ranks(1)
@pytest.mark.parametrize("method", METHODS)
def test_one_device_compresses_nothing(rank: int, world: int, method: str) -> None:
    trainer = fit(rank, world, method, data=batches(0, 1))
    assert trainer.strategy.parallelised.compression is None
