"""The optimizer on the host of a CUDA device."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

import lightning_par
from lightning_par.callbacks import MixedPrecision
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer, Recorder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Seen(Callback):
    """What the device and the host hold at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        host = trainer.strategy.parallel_model.host
        held = list(host._held.values())
        self.pinned = all(slot.is_pinned() for h in held for slot in h.slots)
        self.places = {t.device.type for h in held for t in (h.master, h.mean, h.square)}
        self.early = host.early_updates


def train(strategy: Any, callbacks: list[Callback]) -> list[float]:
    recorder = Recorder()
    torch.manual_seed(1)
    trainer = quiet_trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        max_epochs=1,
        callbacks=[recorder, MixedPrecision("bf16-true"), *callbacks],
    )
    trainer.fit(ToyModule(), loader(ToyData(20), 4), loader(ToyData(4), 4))
    return recorder.losses


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "ignore", "bucket_size_mb": 1e-3}])
def test_offloaded_run_is_that_with_masters_on_the_device(options: dict[str, Any]) -> None:
    """Losses of bfloat16: 8 digits in base 2, and Adam enlarges what rounding leaves."""
    seen = Seen()
    losses = train(lightning_par.ZeROOffloadStrategy(**options), [seen])
    wanted = train(lightning_par.Hybrid3DStrategy(), [])
    torch.testing.assert_close(losses, wanted, rtol=2e-2, atol=0)
    assert seen.pinned
    assert seen.places == {"cpu"}
    assert bool(seen.early) == bool(options)
