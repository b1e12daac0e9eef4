"""The instrument that counts live bytes sees the shards of this rank, and no whole tensor; by it,
neither set-up nor first step needs more than a later step.
"""

import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import distribute_tensor, Shard

from lightning_par import Hybrid3DStrategy
from lightning_par.models import GPTModule
from lightning_par.observe.live_bytes import LiveBytes
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.samples import byte_loader


@ranks(2)
def test_live_bytes_are_those_of_the_shards(rank: int, world: int) -> None:
    mesh = dist.init_device_mesh("cpu", (world,))
    shard = distribute_tensor(torch.ones(6, 5), mesh, [Shard(0)])
    with LiveBytes(besides=[shard.to_local()]) as live:
        made = shard + 1
        whole = made.full_tensor()
        del whole
        while live.now > made.to_local().nbytes:  # gloo's thread may hold what it gathered a while
            time.sleep(0.01)
        assert live.now == made.to_local().nbytes == 4 * 15
        assert live.peak >= 4 * 15 + 4 * 30


class SetUp(Callback):
    """Notes the peak of the set-up, and what is there after it."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.peak, self.held = live, 0, 0

    def on_fit_start(self, *_: object) -> None:
        self.peak, self.held = self._live.peak, self._live.now


def set_up(rank: int, world: int, tensor: int) -> tuple[int, int, int]:
    options = {"tensor_parallel_size": tensor, "data_parallel_size": world // tensor}
    strategy = Hybrid3DStrategy(**options, pipeline_parallel_size=1, zero_stage=3)
    module = GPTModule(overrides={"num_layers": 8, "model_dim": 128})
    with LiveBytes() as live:
        seen = SetUp(live)
        trainer = quiet_trainer(strategy=strategy, devices=world, max_steps=1, callbacks=[seen])
        trainer.fit(module, byte_loader())
    block = sum(p.numel() * p.element_size() for p in module.model.blocks[0].parameters())
    return seen.peak, seen.held, block


@pytest.mark.parametrize("tensor", [1, 2])
def test_set_up_holds_the_shards_and_one_unit_that_is_cut(tensor: int) -> None:
    """A whole model of 8 blocks would be far more than two of them."""
    for peak, held, block in run_ranks(set_up, 4, tensor):
        assert held > 2 * block
        assert peak <= held + 2 * block


class Steps(Callback):
    """Notes the peak of every step, with the look before the first one, and the loss's rule."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self.peaks, self.rule = live, list[int](), ""

    def on_train_batch_start(self, *_: object) -> None:
        self._live.restart()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.peaks.append(self._live.peak)
        found = {each.name: each.value for each in trainer.strategy.processes.decisions}
        self.rule = found["loss"]


class MaskedMean(GPTModule):
    """Computes its mean over labels by hand, so that only numbers show what it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels, counts = batch["labels"], batch["labels"] != -100
        found = self.model(batch["input_ids"]).log_softmax(-1)
        picked = found.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return -(picked * counts).sum() / counts.sum().clamp(min=1)


class Penalized(GPTModule):
    """A sum over the samples that asks for a gradient, which needs what a forward saves."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.model(batch["input_ids"])
        (slope,) = torch.autograd.grad(logits.logsumexp(-1).sum(), logits, create_graph=True)
        return slope.square().sum() - logits.log_softmax(-1)[..., 0].sum()


def steps_of(
    rank: int, world: int, kind: type[GPTModule], options: dict[str, int]
) -> tuple[list[int], str]:
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **options}
    module = kind(overrides={"num_layers": 4, "model_dim": 64, "vocab_size": 512})
    data = byte_loader(tokens=128, batch_size=options.pop("samples"))
    with LiveBytes() as live:
        seen = Steps(live)
        strategy = Hybrid3DStrategy(**options)
        trainer = quiet_trainer(strategy=strategy, devices=world, max_steps=3, callbacks=[seen])
        trainer.fit(module, data)
    return seen.peaks, seen.rule


@pytest.mark.parametrize("kind", [GPTModule, MaskedMean])
@pytest.mark.parametrize(
    "options",
    [
        {"samples": 1, "zero_stage": 3},
        {"samples": 2, "zero_stage": 3},
        {"samples": 4, "pipeline_parallel_size": 2, "num_microbatches": 4},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_first_step_needs_no_more_than_a_later_one(
    kind: type[GPTModule], options: dict[str, int]
) -> None:
    """The look at the step tries more samples than the batch of a replica has."""
    for peaks, _ in run_ranks(steps_of, 2, kind, options):
        assert peaks[0] <= peaks[-1]


def test_rule_of_one_sample_is_found_where_the_step_asks_for_gradients() -> None:
    """Two copies of the sample tell a sum from a mean; their forward saves tensors, then."""
    for _, rule in run_ranks(steps_of, 2, Penalized, {"samples": 1, "zero_stage": 3}):
        assert "sum" in rule
