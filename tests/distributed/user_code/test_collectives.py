"""Collectives in the user's steps and hooks: over the replicas, or refused with what to write."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import BatchLayout, Hybrid3DStrategy
from lightning_par.errors import LightningParError
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


class Gathering(PlainModule):
    """Gathers the numbers of its validation samples, and sums of them over the replicas."""

    ask: str = "gather"

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.scores: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.kept.append((logits.argmax(-1) == batch[1]).double().sum(-1))

    def on_validation_epoch_end(self) -> None:
        kept = torch.cat(self.kept)
        self.kept.clear()
        count = torch.tensor(float(len(kept)))
        if self.ask == "all_reduce" and dist.is_initialized():
            dist.all_reduce(count)
        if self.ask == "agree" and dist.is_initialized():
            dist.all_reduce(least := count.clone(), op=dist.ReduceOp.MIN)
            assert least == count
            dist.barrier()
        if self.ask == "group" and dist.is_initialized():
            dist.all_reduce(count, group=self.trainer.strategy.mesh.data_group)
        if self.ask in ("agree", "reduce"):
            count = self.trainer.strategy.reduce(count, reduce_op="sum")
        gathered = self.all_gather(kept)
        if self.trainer.world_size > 1:
            assert gathered.ndim == 2
            gathered = gathered.flatten()
        self.scores.append((len(gathered), float(gathered.sum()), float(count)))


class Negatives(PlainModule):
    """Compares every sample with those of all replicas; the gradient goes through the gather."""

    batch = BatchLayout(sequence_dims={"0": 1, "1": 1}, loss_weight="samples")

    def loss(self, batch: Any) -> Tensor:
        own = self.net(batch[0]).mean(1)
        every = self.all_gather(own, sync_grads=True).reshape(-1, own.shape[-1])
        return ((own @ every.T).logsumexp(1) - own.square().sum(1)).mean()


class Summing(PlainModule):
    """Sums over all ranks behind the blocks."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if dist.is_initialized():
            dist.broadcast(loss.detach().clone(), 0)
        return loss


def _train(rank: int, world: int, layout: str | None, kind: str, *options: Any) -> Any:
    seed_everything(0, verbose=False)
    module = {"Negatives": Negatives, "Summing": Summing}.get(kind, Gathering)()
    module.ask = kind
    samples, held = token_pairs(), token_pairs()[:16]
    replicas = 2 if "zero" in (layout or "") else 1
    sampler = partial(
        DistributedSampler, num_replicas=replicas, rank=rank * replicas // world, shuffle=False
    )
    strategy: Any = "auto"
    if layout is not None:
        strategy = Hybrid3DStrategy(**{**LAYOUTS[layout], **dict(options)})
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=1, num_sanity_val_steps=0
    )
    given = [DataLoader(x, 8 // replicas, sampler=sampler(x)) for x in (samples, held)]
    if kind in ("Negatives", "Summing"):
        given.pop()
    try:
        trainer.fit(module.double(), *given)
    except LightningParError as error:
        return {"refused": str(error)}
    finally:
        torch.set_default_dtype(torch.float32)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return {"scores": getattr(module, "scores", None), "weights": weights}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("pp2", "gather"),
        ("zero1tp2", "reduce"),
        pytest.param("tp2", "agree", marks=pytest.mark.exhaustive),
        pytest.param("zero1tp2", "group", marks=pytest.mark.exhaustive),
    ],
)
def test_samples_of_all_replicas_are_gathered_and_counted_once(layout: str, kind: str) -> None:
    wanted = _train(0, 1, None, kind)["scores"]
    assert wanted
    world = 4 if layout == "zero1tp2" else 2
    for found in run_ranks(_train, world, layout, kind, timeout=180):
        assert found["scores"] == wanted


@pytest.mark.parametrize(
    ("layout", "kind", "pattern"),
    [
        (
            "zero1tp2",
            "all_reduce",
            "2 ranks hold the same samples, so each sample would be counted 2 times",
        ),
        ("pp2", "Summing", "loss .*but only the ranks of the last pipeline stage"),
    ],
)
def test_a_collective_that_counts_samples_twice_is_refused(
    layout: str, kind: str, pattern: str
) -> None:
    world = 4 if layout == "zero1tp2" else 2
    refusals = [
        found.get("refused") for found in run_ranks(_train, world, layout, kind, timeout=180)
    ]
    told = [text for text in refusals if text]
    assert told
    assert all(re.search(pattern, text) for text in told), told


@pytest.mark.parametrize(
    ("layout", "options"), [("zero1tp2", []), ("pp2", [("num_microbatches", 1)])]
)
def test_negatives_of_all_replicas_have_the_gradient_of_one_process(
    layout: str, options: list[Any]
) -> None:
    wanted = _train(0, 1, None, "Negatives")["weights"]
    world = 4 if layout == "zero1tp2" else 2
    for found in run_ranks(_train, world, layout, "Negatives", *options, timeout=180):
        assert "refused" not in found, found["refused"]
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-9)
