"""Step time of `zero_offload` through the Trainer against DeepSpeed's own loop, on the CPU.

Both shard gradients (stage 2), keep float32 masters and moments on the host, and train the same GPT
in bfloat16 on the same batches with AdamW; the losses are printed, so that this can be seen.
DeepSpeed is optional: ``pip install deepspeed``, and a C++ compiler for its CPUAdam, which takes
minutes when it is first used.
"""

import argparse
import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import BenchModule, CONFIG, loader
from _paired import add_arguments, Arguments, compare, fit, launch, read_arguments, Turn
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import ZeROOffloadStrategy
from lightning_par.models.gpt.config import GPTConfig

RANKS, BATCH = 2, 4
DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
}


class Recorded(BenchModule):
    """The same network for every contender, drawn in float32; keeps its losses.

    Args:
        config: Of the network.
        losses: Where to.
    """

    def __init__(self, config: GPTConfig, losses: list[Tensor]) -> None:
        super().__init__(config)
        torch.manual_seed(7)
        self.configure_model()
        self.losses = losses

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss per token."""
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


def batches() -> DataLoader[Any]:
    """Return the batches of this rank."""
    samples = loader(BATCH).dataset
    order = DistributedSampler(samples, RANKS, dist.get_rank(), shuffle=False)
    return DataLoader(samples, batch_size=BATCH, sampler=order)


def train_here(
    turn: Turn, arguments: Arguments, module: pl.LightningModule, options: dict[str, Any]
) -> None:
    """Train with this package.

    Args:
        turn: Of this contender.
        arguments: How long.
        module: What.
        options: Of the strategy.
    """
    fit(
        module,
        batches(),
        ZeROOffloadStrategy(**options),
        turn,
        arguments,
        precision="bf16-true",
        use_distributed_sampler=False,
        limit_val_batches=0,
    )


def train_deepspeed(turn: Turn, arguments: Arguments, module: Recorded) -> None:
    """Train as DeepSpeed's guide does.

    Args:
        turn: Of this contender.
        arguments: How long.
        module: What.
    """
    import deepspeed

    engine, *_ = deepspeed.initialize(
        model=module.model,
        model_parameters=module.model.parameters(),
        config=DEEPSPEED,
        dist_init_required=False,
    )
    for _, batch in zip(range(arguments.total_steps), batches(), strict=False):
        turn.next()
        logits = engine(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        module.losses.append(loss.detach())
        engine.backward(loss)
        engine.step()


def body(dim: int, arguments: Arguments) -> None:
    """Run on one rank.

    Args:
        dim: Of the model.
        arguments: How long.
    """
    config = replace(CONFIG, model_dim=dim)
    losses: dict[str, list[Tensor]] = {}

    def record(name: str) -> Recorded:
        return Recorded(config, losses.setdefault(name, []))

    def here(name: str, **options: Any) -> Any:
        return name, lambda turn: train_here(turn, arguments, record(name), options)

    compare(
        f"ZeRO stage 2, optimizer on the host, {RANKS} ranks, model dim {dim}",
        {
            "DeepSpeed": lambda turn: train_deepspeed(turn, arguments, record("DeepSpeed")),
            **dict(
                [
                    here("zero_offload"),
                    here("streamed", on_nonfinite="ignore"),
                    here("delayed", delayed_update=0),
                ]
            ),
        },
        arguments,
        targets={"zero_offload": 1.0},
    )
    if dist.get_rank() == 0:
        for name, row in losses.items():
            print(f"losses, {name}: first {float(row[0]):.4f}, last {float(row[-2]):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--dim", type=int, default=CONFIG.model_dim, help="of the model")
    options = parser.parse_args()
    if find_spec("deepspeed") is None:
        print("offload_deepspeed.py: DeepSpeed is not installed here; nothing was measured.")
        return
    launch(partial(body, options.dim), read_arguments(options), ranks=RANKS)


if __name__ == "__main__":
    main()
