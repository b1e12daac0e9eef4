"""Bytes on the host, counted where they are allocated, and those that would be page-locked."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.engine.offload.host_storage import allocate
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT
from lightning_par.observe.live_bytes import LiveBytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        (OffloadOptions(), 14, 14.5),
        (OffloadOptions(delayed_update=0), 16, 16.5),
        (OffloadOptions(state_dtype="bfloat16"), 10, 10.5),
        (OffloadOptions(offload_fraction=0.5), 7, 9),
    ],
    ids=["whole", "delayed", "short moments", "half"],
)
def test_host_takes_what_is_promised_per_parameter(
    options: OffloadOptions, least: float, most: float
) -> None:
    """Of a GPT in bfloat16: everything that is still allocated after a step."""
    model = GPT(GPTConfig(vocab_size=512, num_layers=3, model_dim=64, num_heads=4)).bfloat16()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    with LiveBytes(parameters) as live:
        worker = UpdateWorker(choose_kernel("torch", Path()), 1)
        host = HostOptimizer(optimizer, device=CPU, options=options, worker=worker)
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            host.begin(step, streams=False, largest=float("inf"))
            host.finish()
            for parameter in parameters:  # of the part on the device
                parameter.grad = None
            optimizer.step()
    entries = sum(p.numel() for p in parameters)
    assert least * entries <= live.now <= most * entries
    host.close()


@pytest.mark.parametrize("delayed", [False, 0])
@pytest.mark.parametrize("ranks", [8, 64])
def test_page_locked_memory_is_what_is_needed_to_less_than_a_hundredth(
    ranks: int, delayed: bool | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GPT-2 in bfloat16 on one of several ranks."""
    locked: list[int] = []
    where = "lightning_par.engine.offload.host_storage.pin"
    monkeypatch.setattr(where, lambda memory: locked.append(memory.untyped_storage().nbytes()))
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2")).bfloat16()
        parameters = [
            nn.Parameter(torch.empty(-(-p.shape[0] // ranks), *p.shape[1:], dtype=p.dtype))
            for p in model.parameters()
        ]
    allocate(parameters, OffloadOptions(delayed_update=delayed), torch.device("cuda"))
    needed = sum(p.numel() * p.element_size() for p in parameters)
    assert len(locked) == (1 if delayed is False else 2)
    for size in locked:
        assert needed <= size < 1.01 * needed
        # What torch's allocator of pinned memory would take.
        assert size < 0.99 * 2 ** (needed - 1).bit_length()
