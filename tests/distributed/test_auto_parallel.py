"""`auto_parallel` trains what one process trains, on any number of ranks, without a size given."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_par import AutoParallelStrategy
from lightning_par.models import GPTModule
from lightning_par.observe.modes import DoublePrecision
from tests.distributed.models import test_bert
from tests.support.exhaustive import some
from tests.support.models import mixture
from tests.support.models.huggingface import HFModule, PaddedText
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.models.user_encoders import labeled_rows, LoggedEncoder, TorchEncoder
from tests.support.parity import quiet_trainer, Recorder, Result, TOLERANCE
from tests.support.ranks.api import run_ranks

SAMPLES, EACH, STEPS = 48, 2, 3  # three steps of two samples on each of eight replicas
VOCAB, LENGTH = 19, 12


class RandomTexts(Dataset[dict[str, Tensor]]):
    """Random tokens with labels of which, in each sample, another number does not count."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1), generator=draw)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


class SgdGPT(GPTModule):
    """Shows errors of scale, which AdamW hides, and logs the loss of all replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("global_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def gpt() -> tuple[pl.LightningModule, Dataset[Any]]:
    sizes = {"num_layers": 5, "model_dim": 24, "num_heads": 6, "vocab_size": VOCAB}
    module = SgdGPT(overrides={**sizes, "max_length": 16})
    module.configure_model()
    return module, RandomTexts()


def llama() -> tuple[pl.LightningModule, Dataset[Any]]:
    return HFModule("llama"), PaddedText(SAMPLES, "llama")


def repeated(made: tuple[pl.LightningModule, Dataset[Any]]) -> Any:
    """Return a module with its samples, again and again."""
    module, samples = made
    return module, Subset(samples, [i % len(samples) for i in range(SAMPLES)])  # type: ignore[arg-type]


MODELS: Mapping[str, Callable[[], Any]] = {
    "gpt": gpt,
    "bert": lambda: repeated(test_bert.make()),
    "mixtral": lambda: repeated(mixture.make(ragged=True)),
    "llama": llama,
    "encoder": lambda: (LoggedEncoder(), Subset(labeled_rows(SAMPLES), range(SAMPLES))),  # type: ignore[arg-type]
    "torch encoder": lambda: (TorchEncoder(), Subset(labeled_rows(SAMPLES), range(SAMPLES))),  # type: ignore[arg-type]
}
TRACED = ("encoder", "torch encoder")
"""Models without a configuration."""


class _Losses(Recorder):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        logged = trainer.callback_metrics
        name = "global_loss" if "global_loss" in logged else "train_loss"
        self.losses.append(float(logged[name]))


def train(strategy: Any, *, devices: int, model: str, batch_size: int) -> Result:
    """Run three steps in float64 and say what came out."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    module, samples = MODELS[model]()
    recorder = _Losses()
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        precision="64-true",
        max_steps=STEPS,
        gradient_clip_val=0.5,
        limit_val_batches=0,
    )
    with DoublePrecision() if model == "llama" else nullcontext():
        training = DataLoader(samples, batch_size=batch_size)
        trainer.fit(module, training, None if model in TRACED else DataLoader(samples))
    state = getattr(trainer.strategy, "gather_state_dict", module.state_dict)()
    sizes = getattr(trainer.strategy, "sizes", None)
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {name: value.detach().clone() for name, value in state.items()},
        "sizes": sizes,
        "is_predicted": getattr(getattr(trainer.strategy, "choice", None), "predicted", None)
        is not None,
        "layout": getattr(getattr(trainer.strategy, "choice", None), "layout", None),
    }


def train_rank(rank: int, world: int, model: str, options: Mapping[str, Any]) -> Result:
    strategy = AutoParallelStrategy(**options)
    return train(strategy, devices=world, model=model, batch_size=EACH)


def assert_equal(model: str, world: int, **options: Any) -> list[Result]:
    """Assert that every rank computes what one process does with the batches of all replicas."""
    results: list[Result] = run_ranks(train_rank, world, model, options, timeout=120)
    sizes = results[0]["sizes"]
    try:
        wanted = train("auto", devices=1, model=model, batch_size=EACH * sizes.data)
    finally:
        torch.set_default_dtype(torch.float32)
    close = {"rtol": 0, "atol": TOLERANCE}
    assert len(wanted["gradients"]) == STEPS
    seen = set()
    for result in results:
        assert result["layout"] == results[0]["layout"]
        assert result["sizes"] == sizes
        assert sizes.world_size == world
        torch.testing.assert_close(result["losses"], wanted["losses"], **close)
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for name, grad in got.items():
                known = name if name in want else "model.embed.weight"
                torch.testing.assert_close(grad, want[known], **close, msg=f"gradient of {name}")
            seen |= {*got}
    assert {*wanted["gradients"][0]} <= seen
    assert [*results[0]["weights"]] == [*wanted["weights"]]
    torch.testing.assert_close(results[0]["weights"], wanted["weights"], **close)
    return results


CELLS = [(model, world) for model in MODELS for world in (1, 2, 3, 4, 6, 8)]
CELLS = [(m, w) for m, w in CELLS if m not in TRACED or w in (2, 4)]
QUICK = {("gpt", 1), ("gpt", 4), ("bert", 2), ("mixtral", 3), ("llama", 6)}
QUICK |= {("torch encoder", 4)}


@pytest.mark.parametrize("cell", some(CELLS, {*CELLS} - QUICK), ids=lambda c: f"{c[0]}-{c[1]}")
def test_without_a_size_given_equals_one_process(cell: tuple[str, int]) -> None:
    assert_equal(*cell)


KEPT = [("gpt", 4), ("bert", 6), ("mixtral", 4), ("llama", 4), ("encoder", 4)]
KEPT += [("torch encoder", 2)]


@pytest.mark.parametrize("cell", some(KEPT, {*KEPT[1:3]}), ids=lambda c: f"{c[0]}-{c[1]}")
def test_one_replica_is_kept_and_the_rest_of_the_mesh_equals_one_process(
    cell: tuple[str, int],
) -> None:
    result = assert_equal(*cell, data_parallel_size=1)[0]
    sizes = result["sizes"]
    assert sizes.data == 1
    assert sizes.tensor * sizes.pipeline * sizes.context == cell[1]
    assert result["is_predicted"]


def train_twice(rank: int, world: int) -> list[Any]:
    """Train a module, evaluate it, and train another one, which has no configuration."""
    torch.manual_seed(5)
    trainer = quiet_trainer(
        devices=world,
        strategy=AutoParallelStrategy(data_parallel_size=1),
        max_steps=10,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    found, (module, samples) = [], gpt()
    held_out = DataLoader(Subset(samples, range(4)), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, DataLoader(samples, batch_size=4), held_out)
    found += [trainer.strategy.choice, trainer.strategy.sizes]
    trainer.validate(module, held_out, verbose=False)
    found.append(trainer.strategy.choice)
    trainer.fit_loop.epoch_loop.max_steps += 2
    trainer.fit(PlainModule(), DataLoader(token_pairs(8), batch_size=4))
    return [*found, trainer.strategy.choice, trainer.strategy.sizes, trainer.global_step]


def test_a_module_keeps_its_choice_and_another_one_gets_its_own() -> None:
    """Ten steps are enough to hold the prediction against them."""
    for first, sizes, again, second, others, steps in run_ranks(train_twice, 2, timeout=120):
        assert first.predicted is not None
        assert again == first
        assert second.predicted is not None
        assert sizes.world_size == others.world_size == 2
        assert sizes.data == others.data == 1
        assert steps == 12
