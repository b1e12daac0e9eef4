"""How often the host waits for the device in a steady step of each layout: once, at most.

The one wait is for the verdict on the step: whether its loss and gradients are finite.
"""

import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lightning_par
from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.waits import record_traffic
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")

STEADY = 4
"""Number of the step that is looked at; earlier ones make groups, states and plans."""
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one device": (1, 1, {}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 1, {"pipeline_parallel_size": 2}),
    "zero1": (2, 2, {"data_parallel_size": 2}),
    "zero3": (2, 2, {"data_parallel_size": 2, "zero_stage": 3}),
    "cp2": (2, 1, {"context_parallel_size": 2}),
    "offload": (1, 1, {"offload_options": {}}),
}
OF_LIGHTNING = "lightning.pytorch.loops.training_epoch_loop._broadcast_sigterm_tensor"
"""Where Lightning's loop makes a tensor of whether SIGTERM came, and reads it, in every step of
several ranks. No public name of it can be overridden.
"""
SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


class Steady(Callback):
    """Records from the end of the step before to the end of the steady one."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEADY - 1:
            self.recording = record_traffic()
            self.traffic = self.recording.__enter__()
        elif trainer.global_step == STEADY:
            self.recording.__exit__(None, None, None)


class Reading(ToyModule):
    """Asks for the value of its loss in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


def steady_step(rank: int, world: int, replicas: int, options: dict[str, Any], kind: Any) -> Any:
    """What a rank waited for, copied and launched in a steady step."""
    torch.set_default_dtype(torch.float32)
    steady = Steady()
    options = dict.fromkeys(SIZES, 1) | {"data_parallel_size": replicas, **options}
    trainer = quiet_trainer(
        strategy=lightning_par.Hybrid3DStrategy(**options),
        devices=world,
        max_steps=STEADY + 1,
        gradient_clip_val=1.0,
        callbacks=[steady],
    )
    data = ToyData(64, ignored=True)
    trainer.fit(kind(), loader(data, 4 // replicas, pin_memory=True))
    return steady.traffic


class Copying(ToyModule):
    """Copies from memory that is not pinned in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.ones(1).to(loss.device, non_blocking=True).sum()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_steady_step_waits_once(name: str) -> None:
    world, replicas, options = LAYOUTS[name]
    found = run_ranks(steady_step, world, replicas, options, ToyModule, timeout=120)
    for rank, traffic in enumerate(found):
        sys.stdout.write(f"{name}, rank {rank}: {traffic}\n")
        ours = {key: n for key, n in traffic.waits.items() if OF_LIGHTNING not in key[-1]}
        assert sum(ours.values()) <= 1
        assert traffic.waits.total() - sum(ours.values()) <= 2


def bare_step(rank: int, world: int) -> Any:
    """What a rank launches in a step of a bare loop with FSDP2."""
    torch.set_default_dtype(torch.float32)
    module = ToyModule().cuda()
    mesh = init_device_mesh("cuda", (world,))
    for block in module.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module.model, mesh=mesh)
    optimizer = module.configure_optimizers()
    batches = iter(loader(ToyData(64, ignored=True), 2, pin_memory=True))
    for step in range(STEADY + 1):
        batch = {name: x.cuda(non_blocking=True) for name, x in next(batches).items()}
        with record_traffic() if step == STEADY else nullcontext() as traffic:
            loss = module.loss(batch)
            dist.all_reduce(loss.detach().clone())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return traffic


def test_zero_3_launches_little_more_than_fsdp2() -> None:
    """526 and 483; Lightning's loop and the weights of losses are in the first."""
    ours = run_ranks(steady_step, 2, *LAYOUTS["zero3"][1:], ToyModule, timeout=120)
    for found, bare in zip(ours, run_ranks(bare_step, 2), strict=True):
        counts = found.launches.total(), bare.launches.total()
        sys.stdout.write("zero3: {} launches, FSDP2: {}\n".format(*counts))
        assert counts[0] <= 1.15 * counts[1]


def test_a_step_that_reads_its_loss_or_copies_waits_once_more() -> None:
    kinds = ToyModule, Reading, Copying
    plain, *more = (run_ranks(steady_step, 1, 1, {}, kind)[0] for kind in kinds)
    assert [traffic.waits.total() - plain.waits.total() for traffic in more] == [1, 1]
