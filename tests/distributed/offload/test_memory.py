"""What is estimated before a run is what the run holds and copies."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

import lightning_par
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.cuda_simulation import is_wanted
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import KINDS
from tests.support.parity import own_parameters, quiet_trainer, Result
from tests.support.ranks.api import ranks, run_ranks

ONE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
WHOLE = {**ONE, "zero_stage": 0}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "1 rank": (1, "zero_offload", {}),
    "stage 3, delayed": (2, "zero_offload", {"stage": 3, "delayed_update": 0}),
    "short moments": (2, "zero_offload", {"stage": 1, "state_dtype": "bfloat16"}),
    "tp2": (2, "hybrid3d", {**ONE, "tensor_parallel_size": 2, "offload_options": {}}),
    "pp2": (2, "hybrid3d", {**ONE, "pipeline_parallel_size": 2, "offload_options": {}}),
    "on the device": (2, "hybrid3d", {**ONE, "zero_stage": 2}),
    "top-k": (2, "hybrid3d", {**WHOLE, "gradient_compression": "topk"}),
    "int8": (2, "hybrid3d", {**WHOLE, "gradient_compression": "int8"}),
    "powersgd": (2, "hybrid3d", {**WHOLE, "gradient_compression": "powersgd"}),
}
STEPS = 3


class Scale(Callback):
    """Weighs what the rank holds, and counts what the steps after the first copy."""

    def __init__(self) -> None:
        self.comm_volume, self.found = CommVolume(), {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1:
            self.comm_volume.__enter__()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.comm_volume.__exit__()
        parallel_model = trainer.strategy.parallel_model
        parameters = [self.local(p) for p in own_parameters(pl_module).values()]
        states = [
            self.local(value)
            for state in trainer.optimizers[0].state.values()
            for value in state.values()
            if value.ndim
        ]
        self.found = {
            "parameters": sum(map(_bytes, parameters)),
            "host": 0 if parallel_model.host is None else parallel_model.host.host_bytes(),
            "states": sum(map(_bytes, states)),
            "remembered": _remembered(parallel_model.compression),
            "to_host": self.comm_volume.total(axis="host", operation="to_host").sent,
            "to_device": self.comm_volume.total(axis="host", operation="to_device").sent,
        }

    @staticmethod
    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _remembered(compression: Any) -> int:
    state = {} if compression is None else compression.state()["compressor"]
    kept = [part for name, part in state.items() if name != "bases"]  # which are small
    return sum(_bytes(tensor) for part in kept for tensor in part.values())


def weigh(rank: int, world: int, kind: str, options: dict[str, Any], precision: str) -> Result:
    scale = Scale()
    trainer = quiet_trainer(
        strategy=KINDS[kind](**options),
        devices=world,
        max_steps=STEPS,
        precision=precision,
        limit_val_batches=0,
        callbacks=[scale],
    )
    estimate = lightning_par.memory_estimate(ToyModule(), trainer.strategy)
    trainer.fit(ToyModule(), loader(ToyData(4 * STEPS * world), 4))
    return {"estimate": estimate, **scale.found}


@pytest.mark.parametrize("name", LAYOUTS)
def test_estimate_is_what_the_fullest_rank_holds(name: str) -> None:
    world, kind, options = LAYOUTS[name]
    precision = "bf16-true" if kind == "zero_offload" else "32-true"
    results = run_ranks(weigh, world, kind, options, precision, timeout=120)
    rows = {row.kind: row for row in results[0]["estimate"].rows}
    assert rows["parameters"].device == max(r["parameters"] for r in results)
    assert results[0]["estimate"].host == max(r["host"] for r in results)
    if "host" in name or (options.get("offload_options") is None and kind == "hybrid3d"):
        assert rows["optimizer"].device == max(r["states"] for r in results)
        assert all(r["to_host"] == 0 for r in results)
        kept = rows["compression"].device if "compression" in rows else 0
        padding = 8 * 256 if name == "int8" else 0
        assert 0 <= max(r["remembered"] for r in results) - kept <= padding
        assert ("gradient_compression" in options) == bool(kept)
        return
    for result in results:
        # Each way, each parameter once a step: 4 bytes of a bfloat16 one.
        moved = (STEPS - 1) * result["parameters"]
        assert result["to_host"] == moved
        # A delayed update comes a step later, the last one before `on_train_end`.
        assert result["to_device"] == moved + ("delayed" in name) * result["parameters"]
    if precision == "bf16-true":
        size = {"1 rank": 14, "stage 3, delayed": 16, "short moments": 10}[name]
        # The fullest rank: dim 0 of every parameter may divide unevenly.
        for result in results:
            assert result["host"] == size * result["parameters"] // 2


class Enormous(ToyModule):
    def __init__(self) -> None:
        super().__init__(blocks=1)

    def configure_model(self) -> None:
        if not hasattr(self, "large"):
            with torch.device("meta"):
                self.large = torch.nn.Linear(2**24, 2**22, bias=False)

    def parallel_plan(self) -> lightning_par.ParallelPlan:
        return lightning_par.ParallelPlan()


@ranks(1)
def test_start_up_refuses_what_the_host_cannot_hold(rank: int, world: int) -> None:
    """Before anything is allocated: the model is on meta."""
    trainer = quiet_trainer(strategy="zero_offload", devices=1, max_steps=1)
    says = "cannot hold the model: " + (
        r"every device needs 262144\.\d+ GiB without activations, but has 80\.00 GiB, and the host "
        r"needs 1048576\.\d+ GiB of CPU memory for its 1 ranks, but"
        if is_wanted()
        else r"the host needs 1310\d+\.\d+ GiB of CPU memory for its 1 ranks, but"
    )
    with pytest.raises(lightning_par.LightningParError, match=says):
        trainer.fit(Enormous(), loader(ToyData(4), 2), loader(ToyData(4), 2))
