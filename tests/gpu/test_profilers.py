"""On a CUDA device: events are the marks, memory is the allocator's, and the peak is looked up."""

import time

import pytest
import torch

from lightning_par.callbacks import CommunicationProfiler, MemoryMonitor, ThroughputMonitor
from lightning_par.engine.clock import clock_for, DeviceClock
from tests.support.cuda_simulation import is_wanted
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.skipif(is_wanted(), reason="a simulated device is never behind the program")
def test_marks_are_when_the_device_gets_there_not_when_the_program_does() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    clock = clock_for(device)
    assert isinstance(clock, DeviceClock)
    x = torch.randn(4096, 4096, device=device)
    x @ x
    torch.cuda.synchronize()
    before = time.monotonic()
    first = clock.mark()
    for _ in range(50):
        x = torch.tanh(x @ x)
    second = clock.mark()
    enqueued = time.monotonic()
    start, end = clock.read([first, second])
    after = time.monotonic()
    assert before - 1e-3 <= start < end <= after
    assert end - start > enqueued - before  # the program was ahead of the device


def test_monitors_and_the_communication_profiler_on_one_device(tmp_path) -> None:
    throughput, memory = ThroughputMonitor(), MemoryMonitor()
    module = ToyModule()
    trainer = quiet_trainer(
        accelerator="cuda",
        devices=1,
        strategy="hybrid3d",
        max_steps=4,
        log_every_n_steps=2,
        callbacks=[throughput, memory, CommunicationProfiler(folder=tmp_path)],
    )
    trainer.fit(module, loader(ToyData(64), 8), loader(ToyData(8), 8))
    values = {k: float(v) for k, v in trainer.callback_metrics.items()}
    parameters = sum(p.numel() for p in module.parameters()) * 4 / 2**20
    assert values["memory/parameters"] == pytest.approx(parameters, rel=0.05)
    assert values["memory/peak"] >= values["memory/current"] >= values["memory/parameters"]
    assert values["memory/activations"] > 0
    if throughput.peak_flops:
        assert 0 < values["throughput/mfu"] < 1
    assert throughput.counted.model > 0
    assert (tmp_path / "report.html").exists()
