"""What a steady step of a toy GPT asks of the simulated device: under the Trainer, and without."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import nn, Tensor
from torch.utils.data import ConcatDataset, Dataset

import lightning_par
from tests.support.cuda_simulation.waits import record_traffic, Traffic
from tests.support.models import mixture
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

__all__ = ["bare_step", "experts", "steady_step"]

_STEADY = 4
"""Number of the step that is looked at; earlier ones make groups, states and plans."""
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


class _Steady(Callback):
    """Records from the end of the step before to the end of the steady one."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == _STEADY - 1:
            self.recording = record_traffic()
            self.traffic = self.recording.__enter__()
        elif trainer.global_step == _STEADY:
            self.recording.__exit__(None, None, None)


def steady_step(
    rank: int,
    world: int,
    options: dict[str, Any],
    kind: Callable[[], Any] = ToyModule,
    *,
    batch_size: int = 4,
    ignored: bool = True,
    precision: str = "32-true",
    **loading: Any,
) -> Traffic:
    """What a rank waits for, copies and launches in a steady step of `Hybrid3DStrategy`.

    Args:
        rank: Of the world.
        world: Number of ranks.
        options: Of the strategy.
        kind: Makes the module, or the module and its data.
        batch_size: Of all replicas together.
        ignored: Whether some labels do not count.
        precision: Of the Trainer.
        loading: Options of the loader besides pinned memory.
    """
    torch.set_default_dtype(torch.float32)
    steady = _Steady()
    replicas = options.get("data_parallel_size", 1)
    trainer = quiet_trainer(
        strategy=lightning_par.Hybrid3DStrategy(
            **dict.fromkeys(_SIZES, 1) | {"data_parallel_size": replicas, **options}
        ),
        devices=world,
        max_steps=_STEADY + 1,
        precision=precision,
        gradient_clip_val=1.0,
        callbacks=[steady],
    )
    made = kind()
    module, data = made if isinstance(made, tuple) else (made, ToyData(64, ignored=ignored))
    trainer.fit(module, loader(data, batch_size // replicas, **{"pin_memory": True, **loading}))
    return steady.traffic


def experts(**config: Any) -> tuple[Any, Dataset[Any]]:
    """A small Mixtral, of sizes that `F.grouped_mm` takes, and data for all steps in one epoch."""
    module, data = mixture.make(adam=True, model_dim=48, ff_dim=16, **config)
    return module, ConcatDataset([data] * 6)


def bare_step(
    parameters: Sequence[nn.Parameter],
    batch_size: int,
    loss_and_backward: Callable[[dict[str, Tensor]], object],
) -> Traffic:
    """What a rank asks for in a step of a plain loop with AdamW and clipping.

    Args:
        parameters: Of this rank.
        batch_size: Of this rank.
        loss_and_backward: What a step does with its batch, before clipping.
    """
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-6)
    batches = loader(ToyData(64), batch_size, pin_memory=True)
    for step, given in enumerate(itertools.islice(batches, _STEADY + 1)):
        batch = {name: x.cuda(non_blocking=True) for name, x in given.items()}
        with record_traffic() if step == _STEADY else nullcontext() as traffic:
            optimizer.zero_grad()
            loss_and_backward(batch)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
    return traffic
