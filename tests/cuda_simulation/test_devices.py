"""What a module holds besides parameters is where these are."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import ConfigurationError
from lightning_par.verification.rehearse import rehearse_apart
from tests.distributed.user_code.test_parameters import CASES as PENALTIES
from tests.support.cuda_simulation import is_wanted
from tests.support.models.rehearsed import build
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")


class Total(Metric):
    """Adds numbers up; moves none of them, as torchmetrics leave to who owns the metric."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, value: Tensor) -> None:
        self.total += value.new_ones(())

    def compute(self) -> Tensor:
        return self.total


class Counting(ToyModule):
    """Counts its batches in a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Total()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total.update(loss.detach())
        self.log("total", self.total, on_epoch=True, on_step=False)
        return loss


def test_metrics_of_a_module_are_on_its_device() -> None:
    module = Counting()
    trainer = quiet_trainer(strategy=Hybrid3DStrategy(), devices=1, max_epochs=1)
    trainer.fit(module, loader(ToyData(12), 4), loader(ToyData(4), 4))
    assert trainer.callback_metrics["total"] == 3


def test_a_rehearsal_after_gradients_on_the_device_is_refused() -> None:
    torch.ones(2, device="cuda", requires_grad=True).sum().backward()

    def make(observer: Any, environment: Any) -> Any:
        return build({}, [environment], [observer], devices=2)

    with pytest.raises(ConfigurationError, match="has computed gradients on a GPU"):
        rehearse_apart(make, num_nodes=1, devices=2, rank=0)


@pytest.mark.parametrize(
    "case", ["penalty_before_the_model_runs", "penalty_of_parameters_on_the_host"]
)
def test_gradients_of_reads_wait_for_those_of_the_forward(case: str) -> None:
    """FSDP2 reduces these on a stream of its own, or is still copying them to the host."""
    PENALTIES.check(case, "zero3", None)


def test_the_thread_of_offloaded_updates_has_the_device_of_its_rank() -> None:
    """On another one it would make a context, and take memory for it."""
    device = torch.device("cuda", 1)
    with torch.cuda.device(device):
        ready = torch.cuda.Event()
        ready.record()
    found: list[int] = []
    kernel = choose_kernel("torch", Path())
    with closing(UpdateWorker(kernel, 1, device)) as worker:
        worker.run(ready, lambda: found.append(torch.cuda.current_device())).result()
    assert found == [1]
