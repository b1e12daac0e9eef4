"""Step time of a Qwen3-MoE whose experts two replicas divide, against transformers' own expert
parallelism (`DistributedConfig(fsdp_size=2, ep_size=2)` in a bare loop), on two ranks.

Both shard the other weights by FSDP2. The first step also gives the bytes that rank 0 sends, and
the largest difference of its logits to those of one device.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from _gpt import loader, make_optimizer
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from torch import nn, Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DistributedConfig, Qwen3MoeConfig
from transformers.utils import logging

from lightning_par.profiling.comm_volume import CommVolume
from lightning_par.strategies import Hybrid3DStrategy

BATCH_SIZE, VOCAB = 4, 1000
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    moe_intermediate_size=128,
    num_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=256,
)


class Counted:
    """Turns of a contender, of which the second step that counts is watched.

    Args:
        turn: Of this contender.
        whole: The model on one device, before the first step.
    """

    def __init__(self, turn: Turn, whole: nn.Module) -> None:
        self._turn, self._whole, self._count = turn, whole, 0
        self._volume = CommVolume({"dp": dist.group.WORLD})
        self.apart = math.nan

    def next(self) -> None:
        """End a step and begin another."""
        if self._count == 2:
            self._volume.__exit__()
        self._turn.next()
        self._count += 1
        if self._count == 2:
            self._volume.__enter__()

    def see(self, ids: Tensor, logits: Tensor) -> None:
        """Compare the logits of the first step."""
        if self._count == 1:
            with torch.no_grad():
                self.apart = float((self._whole(ids).logits - logits).abs().max())

    def told(self, name: str) -> str:
        """Return what was seen."""
        sent = {e.operation: e.sent for e in self._volume.entries()}
        each = ", ".join(f"{operation} {size}" for operation, size in sent.items())
        return f"{name}: logits differ by {self.apart:.1e}; sent {sum(sent.values())}: {each}"


class Module(pl.LightningModule):
    """The model, and a step as in any loop."""

    def __init__(self, net: nn.Module, seen: Counted) -> None:
        super().__init__()
        self.net, self.seen = net, [seen]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of the model itself."""
        ids = batch["input_ids"]
        out = self.net(input_ids=ids, labels=ids, use_cache=False)
        self.seen[0].see(ids, out.logits)
        return out.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return fused AdamW."""
        return make_optimizer(list(self.parameters()))


def body(arguments: Arguments) -> None:
    """Run on every rank."""
    logging.set_verbosity_error()
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(CONFIG)
    told = list[Callable[[], str]]()
    given = islice(loader(BATCH_SIZE, vocab=VOCAB), dist.get_rank(), 2 * arguments.total_steps, 2)
    rows = list(given)  # other ones on each rank

    def theirs(turn: Turn) -> None:
        with TemporaryDirectory() as own:
            folder = [own]
            dist.broadcast_object_list(folder)  # only the first rank saves
            whole.save_pretrained(folder[0])
            dist.barrier()
            model = AutoModelForCausalLM.from_pretrained(
                folder[0], distributed_config=DistributedConfig(fsdp_size=2, ep_size=2)
            )
            dist.barrier()
        seen = Counted(turn, deepcopy(whole))
        told.append(lambda: seen.told("transformers"))
        module, optimizer = Module(model, seen), make_optimizer(list(model.parameters()))
        for index, batch in enumerate(rows):
            seen.next()
            optimizer.zero_grad()
            module.training_step(batch, index).backward()
            optimizer.step()

    def ours(turn: Turn) -> None:
        strategy = Hybrid3DStrategy(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            expert_parallel_size=2,
            zero_stage=3,
        )
        seen = Counted(turn, deepcopy(whole))
        told.append(lambda: seen.told("hybrid3d"))
        rows_of = DataLoader(rows, batch_size=None)  # type: ignore[arg-type,var-annotated]
        options = {"use_distributed_sampler": False}
        fit(Module(deepcopy(whole), seen), rows_of, strategy, seen, arguments, **options)

    compare(
        "divided experts of Qwen3-MoE, 2 ranks",
        {"transformers, ep_size 2": theirs, "hybrid3d, ep 2, ZeRO 3": ours},
        arguments,
        targets={"hybrid3d, ep 2, ZeRO 3": 1.0},
    )
    if dist.get_rank() == 0:
        print("\n".join(each() for each in told), flush=True)


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=2)
