"""Hugging Face models with the kernels of Liger: every layout computes what one process does.

The kernels run in triton's interpreter, on the CPU; they compute in float32. triton is large, and
not part of what the tests install:

    pip install liger-kernel triton
    TRITON_INTERPRET=1 pytest tests/distributed/models/test_liger.py
"""

import os
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch

from lightning_par import Hybrid3DStrategy
from lightning_par.errors import PlanError
from tests.support.models.huggingface import HFModule, PaddedText
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer, Recorder, Result
from tests.support.ranks.api import run_ranks

pytest.importorskip("liger_kernel")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

ONE: dict[str, Any] = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (1, {**ONE, "tensor_parallel_size": 2}),
    "tp2 whole": (1, {**ONE, "tensor_parallel_size": 2, "sequence_parallel": False}),
    "pp2": (1, {**ONE, "pipeline_parallel_size": 2}),
    "cp2": (1, {**ONE, "context_parallel_size": 2}),
    "zero1": (2, {**ONE, "zero_stage": 1}),
    "zero3": (2, {**ONE, "zero_stage": 3}),
}
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def train(strategy: Any, devices: int, batch_size: int, fused_loss: bool) -> Result:
    import_module("tests.support.triton_interpreter")  # before the kernels
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(fused_linear_cross_entropy=fused_loss)
    recorder, user = Recorder(), HFModule("llama")
    kinds = {type(part).__name__ for part in user.modules()}
    assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= kinds
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        max_epochs=1,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    data = [PaddedText(4, "llama")[i] for i in range(4)]
    if batch_size < 2:  # of a replica: every second row
        data = data[trainer.strategy.sizes.data_rank(trainer.global_rank) :: 2]
    trainer.fit(user, loader(data, batch_size))
    return {"losses": recorder.losses, "gradients": recorder.gradients}


def train_rank(rank: int, world: int, replicas: int, options: Any, fused_loss: bool) -> Result:
    return train(Hybrid3DStrategy(**options), world, 2 // replicas, fused_loss)


def train_one(rank: int, world: int, fused_loss: bool) -> Result:
    return train("auto", 1, 2, fused_loss)


@cache
def one_process(fused_loss: bool) -> Result:
    (result,) = run_ranks(train_one, 1, fused_loss, timeout=300, fresh=True)
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_liger_kernels_on_divided_models_equal_one_process(layout: str) -> None:
    """The fused loss, too, where the head is not divided."""
    replicas, options = LAYOUTS[layout]
    fused_loss = options["tensor_parallel_size"] == 1
    found = run_ranks(train_rank, 2, replicas, options, fused_loss, timeout=300, fresh=True)
    wanted = one_process(fused_loss)
    for result in found:
        torch.testing.assert_close(result["losses"], wanted["losses"], **CLOSE)
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for name, grad in got.items():
                torch.testing.assert_close(grad, want[name], **CLOSE)


def check_refusal(rank: int, world: int) -> None:
    with pytest.raises(PlanError, match=r"loss by a kernel of Liger.*fused_linear_cross_entropy="):
        train_rank(rank, world, 1, LAYOUTS["tp2"][1], True)


def test_fused_loss_of_a_divided_head_is_refused_with_what_to_do() -> None:
    run_ranks(check_refusal, 2, timeout=120, fresh=True)
