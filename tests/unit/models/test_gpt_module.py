import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.errors import ConfigurationError
from lightning_par.models import GPTModule, TextDataModule
from lightning_par.models.gpt.lightning_module import group_parameters
from lightning_par.models.metrics import Perplexity

TINY = {"model_dim": 12, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "max_length": 16}


def module(**options: object) -> GPTModule:
    return GPTModule(overrides={**TINY, "vocab_size": 11}, **options)


def batches(count: int, labels: list[list[int]] | None = None) -> DataLoader:
    """Give `count` batches of 3 samples of 5 tokens that count upwards modulo 11."""
    ids = torch.arange(3 * count)[:, None] + torch.arange(6)
    samples = [{"input_ids": row[:-1] % 11, "labels": row[1:] % 11} for row in ids]
    for sample, row in zip(samples, labels or [], strict=False):
        sample["labels"] = torch.tensor(row)
    return DataLoader(samples, batch_size=3)


def trainer(**options: object) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    return L.Trainer(**{**quiet, **plain, **options})


@pytest.fixture(autouse=True)
def _no_advice():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*have no `val_dataloader`.*")
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
        yield


def fit(options: dict, path: Path | None = None, **limits: object) -> tuple[L.Trainer, GPTModule]:
    torch.manual_seed(1)
    run, model = trainer(**limits), module(**options)
    run.fit(model, batches(10), ckpt_path=path)
    return run, model


def test_training_reduces_the_loss_below_a_tenth():
    run, _ = fit({"lr": 1e-2}, max_epochs=10)
    first = 2.4  # ln 11
    assert run.callback_metrics["train_loss"] < first / 10
    assert run.global_step == 100


def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path):
    run, whole = fit({"max_steps": 6}, max_steps=6)
    run, _ = fit({"max_steps": 6}, max_steps=3)
    run.save_checkpoint(tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*dataloader is not resumable.*")
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended.*")
        torch.manual_seed(2)
        resumed = module(max_steps=6)
        trainer(max_steps=6).fit(resumed, batches_from(3), ckpt_path=tmp_path / "a.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def batches_from(first: int) -> DataLoader:
    kept = list(batches(10))[first:]
    samples = [{k: v[i] for k, v in batch.items()} for batch in kept for i in range(3)]
    return DataLoader(samples, batch_size=3)


def test_model_is_built_once_and_can_be_built_on_meta():
    model = module()
    assert not list(model.parameters())
    with torch.device("meta"):
        model.configure_model()
    built = model.model
    assert all(p.is_meta for p in model.parameters())
    model.configure_model()
    assert model.model is built


def test_loss_and_perplexity_of_an_epoch_are_means_over_its_tokens():
    ignored = [-100] * 5
    labels = [[1, 2, 3, 4, 5], ignored, [-100, 3, 4, -100, 7], ignored, ignored, ignored]
    loader = batches(2, labels=[*labels[:3], *labels[3:]])
    model, run = module(), trainer()
    model.configure_model()
    logged = run.validate(model, loader, verbose=False)[0]
    batch = next(iter(loader))
    with torch.no_grad():
        logits = model(batch["input_ids"])
    nll = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
    )
    assert logged["val_loss"] == pytest.approx(nll.item(), rel=1e-6)
    assert logged["val_perplexity"] == pytest.approx(nll.exp().item(), rel=1e-6)
    assert set(run.test(model, loader, verbose=False)[0]) == {"test_loss", "test_perplexity"}
    assert run.predict(model, loader)[0].shape == (3, 5)


def test_perplexity_weights_batches_by_their_tokens_and_passes_over_empty_ones():
    metric = Perplexity()
    metric.update(torch.tensor(1.0), 1)
    metric.update(torch.tensor(2.0), torch.tensor(3))
    metric.update(torch.tensor(torch.nan), 0)
    assert metric.compute() == pytest.approx(torch.tensor(7 / 4).exp().item())


def test_only_matrices_and_tables_are_decayed_and_frozen_weights_left_out():
    model = module()
    model.configure_model()
    model.model.embed.weight.requires_grad_(False)
    decayed, kept = group_parameters(model.named_parameters(), weight_decay=0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in kept["params"]} == {1}
    assert len(decayed["params"]) == 2 * 7  # the head is tied to the frozen table
    assert len(kept["params"]) == 2 * 2 + 1


def rates(limits: dict, **options: object) -> list[float]:
    seen: list[float] = []

    class Watched(GPTModule):
        def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            seen.append(self.optimizers().param_groups[0]["lr"])

    model = Watched(overrides={**TINY, "vocab_size": 11}, lr=1.0, **options)
    trainer(**limits).fit(model, batches(10))
    return seen


def test_rate_warms_up_and_falls_along_a_cosine_to_its_least_value():
    seen = rates({"max_steps": 10}, warmup_steps=4, min_lr_ratio=0.1)
    assert seen[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert seen[7] == pytest.approx(0.55)  # half-way between steps 4 and 10
    assert seen == sorted(seen[:5]) + sorted(seen[5:], reverse=True)
    assert seen[-1] > 0.1
    assert rates({"max_steps": 10}, warmup_steps=4, max_steps=8)[-1] == pytest.approx(0.1)
    by_epochs = rates({"max_epochs": 1}, warmup_steps=4, min_lr_ratio=0.1)
    assert by_epochs == pytest.approx(seen)


def test_hyperparameters_rebuild_the_module(tmp_path: Path):
    run, model = fit({"lr": 1e-2, "betas": (0.8, 0.9)}, max_steps=1)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = GPTModule.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.config == model.config
    assert (again.lr, tuple(again.betas)) == (1e-2, (0.8, 0.9))
    assert torch.equal(again.model.embed.weight, model.model.embed.weight)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be 0 or more"),
        ({"max_steps": 0}, "max_steps=0 must be 1 or more"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5 must be between 0 and 1"),
    ],
)
def test_bad_options_are_refused(options: dict, text: str):
    with pytest.raises(ConfigurationError, match=text):
        module(**options)


def test_data_that_does_not_fit_the_model_is_refused_before_anything_is_built(tmp_path: Path):
    (tmp_path / "a.txt").write_text("words " * 400)
    data = TextDataModule([str(tmp_path / "a.txt")], length=17, batch_size=2)
    model = GPTModule(overrides={**TINY, "vocab_size": 100, "positions": "learned"})
    text = r"2 problems:(.|\n)*vocab_size=256, but .*vocab_size=100(.|\n)*max_length=17.*=16"
    with pytest.raises(ConfigurationError, match=text):
        trainer(max_epochs=1).fit(model, data)


def test_trains_on_the_standard_library_by_default():
    model = GPTModule(overrides=TINY)
    data = TextDataModule(length=16, batch_size=2, max_bytes=20_000)
    run = trainer(max_steps=3, limit_val_batches=1, val_check_interval=3)
    run.fit(model, data)
    assert run.global_step == 3
    assert run.callback_metrics["val_perplexity"] > 1
