"""One class, unchanged, under every strategy; randomness in steps and in loaders; accumulation."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lightning_par.profiling.comm_volume import CommVolume
from tests.contract.subject import data
from tests.support.models.toy_gpt import loader, TOKENS, ToyModule, VOCAB
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.contract

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "one device": ("auto", {}),
    "ddp": ("ddp", {}),
    "tensor_parallel": ("tensor_parallel", {}),
    "pipeline_1f1b": ("pipeline_1f1b", {}),
    "hybrid3d": ("hybrid3d", {}),
    "hybrid3d dp2": ("Hybrid3DStrategy", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
}


def chosen(name: str) -> Any:
    """The strategy as a user gives it: a registered name, or an object."""
    import lightning_par

    kind, options = STRATEGIES[name]
    return getattr(lightning_par, kind)(**options) if options else kind


def fit_plain_class(rank: int, world: int, name: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_default_dtype(torch.float64)
    module = ToyModule("sgd")
    made = quiet_trainer(strategy=chosen(name), devices=world, max_epochs=1, precision="64-true")
    replicas = 2 if name.endswith(("ddp", "dp2")) else 1
    training = data(12, 4, replicas)
    if name == "ddp":  # or Lightning shuffles it
        order = DistributedSampler(training.dataset, replicas, rank, shuffle=False)
        training = loader(training.dataset, 4 // replicas, sampler=order)
    made.fit(module, training, data(8, 4, replicas))
    own = made.strategy.lightning_module_state_dict
    state = getattr(made.strategy, "gather_state_dict", own)()
    metrics = [float(made.callback_metrics[k]) for k in ("train_loss", "val_loss")]
    return metrics, {k: v.detach().clone() for k, v in state.items()}


@pytest.mark.parametrize("name", [n for n in STRATEGIES if n != "one device"])
def test_one_class_trains_under_every_strategy(name: str) -> None:
    ((metrics, weights),) = run_ranks(fit_plain_class, 1, "one device")
    for got, state in run_ranks(fit_plain_class, 2, name):
        assert got == pytest.approx(metrics, abs=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(value, weights[key], rtol=0, atol=1e-10)


# ---------------------------------------------------------------- randomness


class MaskingModule(ToyModule):
    """Masks labels and ids at random inside the step, with all three generators."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.seen: list[str] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, labels = batch["ids"].clone(), batch["labels"].clone()
        ids[torch.rand(ids.shape) < 0.3] = 0
        labels[:, torch.from_numpy(np.random.rand(labels.shape[1])) < 0.3] = 1
        ids[:, random.randrange(ids.shape[1])] = 2
        self.seen.append(str(ids.tolist()) + str(labels.tolist()))
        return self.loss({"ids": ids, "labels": labels})

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(str(torch.rand(len(batch["ids"]), 2).tolist()))
        self.loss(batch)


class AugmentedData(Dataset[dict[str, Tensor]]):
    """Draws every sample anew, with the generators of the worker."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (TOKENS,))
        labels = torch.as_tensor(np.random.randint(0, VOCAB, TOKENS))
        labels[0] = random.randrange(VOCAB)
        return {"ids": ids, "labels": labels}


def see(rank: int, world: int, options: dict[str, Any], workers: int) -> list[str]:
    """What the steps of this rank saw; the seeds of ranks differ on purpose."""
    from lightning_par import Hybrid3DStrategy

    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    module = MaskingModule()
    torch.manual_seed(rank)
    made = quiet_trainer(
        # Ranks are seeded apart, so the step is none that one process would do.
        strategy=Hybrid3DStrategy(**options, verify=False),
        devices=world,
        max_epochs=2,
        num_sanity_val_steps=0,
    )
    options = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    source = loader(AugmentedData(), 4, shuffle=True, **options)
    made.fit(module, source, loader(AugmentedData(), 4))
    return module.seen


REPLICAS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "tp2": ({"tensor_parallel_size": 2}, [[0, 1]]),
    "pp2": ({"tensor_parallel_size": 1, "pipeline_parallel_size": 2}, [[0, 1]]),
    "tp2 dp2": (
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 2},
        [[0, 1], [2, 3]],
    ),
    "pp2 dp2": (
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 2},
        [[0, 2], [1, 3]],
    ),
}
ONCE = {("tp2 dp2", 0), ("pp2 dp2", 2)}
"""Two replicas are two of what stands alone."""


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(n, w, marks=[] if (n, w) in ONCE else [pytest.mark.exhaustive])
        for n in REPLICAS
        for w in (0, 2)
    ],
)
def test_ranks_of_a_replica_see_the_same_random_batch(name: str, workers: int) -> None:
    """And different replicas, steps and micro-batches see different ones."""
    options, replicas = REPLICAS[name]
    seen = run_ranks(see, sum(map(len, replicas)), options, workers)
    for members in replicas:
        first, *others = (seen[rank] for rank in members)
        assert all(other == first for other in others)
        assert len(set(first)) == len(first)
    firsts = [seen[members[0]] for members in replicas]
    assert len({text for first in firsts for text in first}) == sum(map(len, firsts))


# ---------------------------------------------------------------- accumulation


class BatchLedger(Callback):
    """Counts what every training batch communicates."""

    def __init__(self) -> None:
        self.batches: list[dict[tuple[str, str], int]] = []
        self._ledger = CommVolume()

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._ledger = CommVolume(trainer.strategy.parallel_model.groups)
        self._ledger.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self._ledger.__exit__(None, None, None)
        entries = self._ledger.entries()
        self.batches.append({(e.axis, e.operation): e.payload for e in entries})


def count_batches(rank: int, world: int, options: dict[str, Any]) -> list[dict[Any, int]]:
    from lightning_par import Hybrid3DStrategy

    counter = BatchLedger()
    made = quiet_trainer(
        strategy=Hybrid3DStrategy(**options, verify=False),
        devices=world,
        max_epochs=1,
        accumulate_grad_batches=3,
        limit_val_batches=0,
        callbacks=[counter],
    )
    made.fit(ToyModule("sgd"), data(24, 4, 2 if "zero_stage" in options else 1))
    return counter.batches


FEW_BYTES = 1000
"""More than counts of labels and logged values take, less than any gradient of a block."""


@pytest.mark.parametrize(
    ("zero_stage", "pipeline"),
    [
        pytest.param(z, p, marks=[pytest.mark.exhaustive] if p == 2 and z < 3 else [])
        for z in range(4)
        for p in (1, 2)
    ],
)
def test_accumulating_batches_exchange_no_gradients(zero_stage: int, pipeline: int) -> None:
    """Only the third batch and the last one do; the others exchange a few numbers."""
    options = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": pipeline,
        "data_parallel_size": 2,
        "zero_stage": zero_stage,
    }
    for batches in run_ranks(count_batches, 2 * pipeline, options):
        axis = ("dp_shard", "reduce_scatter")
        if zero_stage == 0:  # where the axis is the world, its gradients have a group of their own
            axis = ("dp gradients" if pipeline == 1 else "dp_replicate", "all_reduce")
        exchanged = [batch.get(axis, 0) > FEW_BYTES for batch in batches]
        assert exchanged == [False, False, True, False, False, True]


@pytest.mark.parametrize("name", ["tp2", "pp2"])
def test_accumulating_batches_sum_no_shared_gradients(name: str) -> None:
    """Gradients of which several ranks hold a part: norms under tp, the tied embedding under pp."""
    options, _ = REPLICAS[name]
    for batches in run_ranks(count_batches, 2, options):
        sums = [sum(v for (_, op), v in b.items() if op == "all_reduce") for b in batches]
        # The first batch is looked at before it is trained on, which sums a few numbers more.
        assert sums[1] == sums[3] == sums[4] < min(sums[2], sums[5])
