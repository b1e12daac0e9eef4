"""The choice of a layout keeps what is given, meets no refusal, and is the same each time."""

import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_par import AutoParallelStrategy, TensorParallelStrategy
from lightning_par.callbacks import ActivationCheckpointing
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError, MeshError
from lightning_par.models import GPTModule, MixtralModule
from lightning_par.strategies.auto import choice as choices
from lightning_par.strategies.auto import machine
from lightning_par.strategies.auto.choice import Choice, LayoutChooser
from lightning_par.strategies.auto.machine import find_profile
from tests.support.parity import quiet_trainer

CPU = torch.device("cpu")
SIZES = {"num_layers": 6, "model_dim": 24, "num_heads": 6, "vocab_size": 64, "max_length": 32}


class Texts(Dataset[dict[str, Tensor]]):
    """Of 12 tokens each, or of other numbers."""

    def __init__(self, count: int, uneven: bool) -> None:
        self.count, self.uneven = count, uneven

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.zeros(12 - index % 5 * self.uneven, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}


def gpt(count: int = 64, uneven: bool = False, kind: Any = GPTModule, **sizes: Any) -> Any:
    """A module on meta, with data of its own in batches of four."""
    module = kind(overrides={**SIZES, **sizes})
    with record_construction():
        module.configure_model()
    module.train_dataloader = lambda: DataLoader(Texts(count, uneven), batch_size=4)
    return module


def chooser(
    module: pl.LightningModule,
    devices: int = 4,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> LayoutChooser:
    strategy = AutoParallelStrategy(**options)
    made = quiet_trainer(**(trainer or {}))
    module.trainer = made
    return LayoutChooser(
        trainer=made,
        module=module,
        options=strategy.options,
        wish=strategy._wish,
        device=CPU,
        devices=devices,
        node=devices,
    )


def choose(module: pl.LightningModule, devices: int = 4, **options: Any) -> Choice:
    return chooser(module, devices, **options).choose()


def test_every_replica_keeps_its_batch_and_the_choice_is_the_same_each_time() -> None:
    """Other ranks come to it from the same things."""
    first, again = (choose(gpt(), devices=8) for _ in range(2))
    assert first.layout == again.layout
    assert str(first).partition(" MiB")[0] == str(again).partition(" MiB")[0]
    assert first.layout.samples == 4 * first.layout.sizes.data
    assert first.predicted is not None
    assert first.runner_up is not None
    assert first.runner_up.layout.sizes != first.layout.sizes
    speed, next_best = (
        one.layout.samples / one.time.seconds for one in (first.predicted, first.runner_up)
    )
    assert speed >= next_best
    said = str(first)
    assert f"{first.predicted.time.seconds:.3g} s a step, {speed:.4g} samples/s" in said
    assert "predicted with the device profile cpu; the next best layout is " in said


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "gpipe"},
        {"pipeline_parallel_size": 2, "stage_blocks": [2, 4], "schedule": "1f1b"},
        {"data_parallel_size": 2, "zero_stage": 3, "sequence_parallel": False},
        {"data_parallel_size": 4, "data_parallel_replicate_size": 2, "zero_stage": 2},
        {"context_parallel_size": 2},
        {"data_parallel_size": 4, "zero_stage": 0},
    ],
    ids=lambda given: " ".join(given),
)
def test_what_is_given_is_kept(given: dict[str, Any]) -> None:
    made = chooser(gpt(), **given)
    found = made.choose()
    assert found.predicted is not None
    settings = made.settings(found.layout)
    assert {name: getattr(settings, name) for name in given} == given
    sizes = settings.fit_sizes(4, 4)
    assert sizes == found.layout.sizes
    assert sizes.world_size == 4


class Stepping(GPTModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False


def test_nothing_is_chosen_into_a_refusal() -> None:
    one = {"data_parallel_size": 1}
    # Two heads of keys: no tensor degree 4. Manual optimization: no pipeline.
    assert choose(gpt(kind=Stepping), 2, **one).layout.sizes.tensor == 2
    with pytest.raises(ConfigurationError, match=r"(?s)no layout of 4 .*manual optimization"):
        choose(gpt(kind=Stepping), **one)
    assert choose(gpt(), **one).layout.sizes.pipeline > 1
    # 8 replicas with batches of four would draw more than 20 samples.
    few = choose(gpt(count=20), 8).layout
    assert few.sizes.data == 4
    uneven = chooser(gpt(uneven=True), 2, tensor_parallel_size=2)
    assert not uneven.settings(uneven.choose().layout).sequence_parallel
    even = chooser(gpt(), 2, tensor_parallel_size=2)
    assert even.settings(even.choose().layout).sequence_parallel
    piped = choose(gpt(kind=MixtralModule, ff_dim=20), pipeline_parallel_size=2, **one)
    assert piped.layout.microbatches == 1  # the balance of experts is none of parts of a batch


def test_batches_that_accumulate_are_cut_by_a_pipeline_only() -> None:
    trainer = {"accumulate_grad_batches": 3}
    whole = choose(gpt(), 2, trainer=trainer, data_parallel_size=2).layout
    assert (whole.micro_batch, whole.microbatches) == (4, 3)
    made = chooser(
        gpt(), 2, trainer=trainer, pipeline_parallel_size=2, num_microbatches=2, schedule="1f1b"
    )
    cut = made.choose().layout
    assert (cut.micro_batch, cut.microbatches) == (2, 6)
    assert made.settings(cut).num_microbatches == 2


def profile(folder: Path, **numbers: Any) -> str:
    """A file of the user's own, as ``lightning-par calibrate`` names its device."""
    entry = {"flops": 1e11, "processors": 1, "bandwidth": 1e10, "memory": 1e9, **numbers}
    entry |= {f"{key}_source": "measured" for key in entry}
    links = {"link": "shared-memory", "network": "ethernet-10"}
    path = folder / "mine.json"
    path.write_text(json.dumps({"devices": {"here": entry | links}}))
    return str(path)


def test_little_memory_shards_more_or_computes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, module = profile(tmp_path), gpt(model_dim=96, vocab_size=512)
    roomy = choose(module, profile=path)
    assert (roomy.profile, roomy.layout.recompute) == ("here", "none")
    assert roomy.predicted is not None
    monkeypatch.setattr(machine, "available_memory", lambda: 4 * 0.6 * roomy.predicted.memory.peak)
    tight = chooser(module, profile=path)
    found = tight.choose()
    assert found.layout != roomy.layout
    assert found.predicted is not None
    assert found.predicted.memory.peak <= 0.9 * 0.6 * roomy.predicted.memory.peak
    kept = ActivationCheckpointing("full").recomputation
    object.__setattr__(tight.options, "recomputation", kept)  # as the callback gives it
    assert tight.settings(tight.choose().layout).recomputation is kept
    monkeypatch.setattr(machine, "available_memory", lambda: 4 * 1000)
    with pytest.raises(
        MeshError, match=r"none of \d+ layouts fits into 0\.0 GiB, .* Hybrid3DStrategy"
    ):
        choose(module, profile=path)


class Images(pl.LightningModule):
    """No transformer."""

    def __init__(self, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), norm(8), nn.Linear(8, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).sum()


class Traceable(Images):
    """Can be divided by its structure."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(32, 8), batch_size=4)  # type: ignore[arg-type]


class Wrong(Images):
    config = gpt().config
    """Of another model."""


def test_a_model_that_cannot_be_read_gets_replicas_and_the_reason() -> None:
    found = choose(Images())
    assert (found.predicted, found.layout.sizes.data, found.layout.zero_stage) == (None, 4, 1)
    assert re.search(
        r"chose dp_shard 4.* without a prediction of its time, since no module of Images has",
        str(found),
    )
    assert "but Wrong has 108" in choose(Wrong()).reason
    assert choose(Images(), tensor_parallel_size=1, data_parallel_size=4).layout.sizes.data == 4
    trainer = {"sync_batchnorm": True, "strategy": TensorParallelStrategy()}
    assert choose(Images(nn.BatchNorm1d), trainer=trainer).layout.sizes.data == 4
    divided = choose(Traceable(nn.BatchNorm1d), 2)
    assert divided.layout.sizes.tensor == 2
    assert "A layout that auto_parallel prefers is not possible: BatchNorm 'layers.1'" in str(
        divided
    )
    with pytest.raises(ConfigurationError, match=r"(?s)no layout of 4 .*pass sync_batchnorm=True"):
        choose(Images(nn.BatchNorm1d), tensor_parallel_size=1, pipeline_parallel_size=1)


def test_profiles_are_found_by_the_name_of_a_gpu_or_in_a_file(tmp_path: Path) -> None:
    names = {
        ("NVIDIA A100-SXM4-80GB", 85e9): "a100-80",
        ("NVIDIA A100-PCIE-40GB", 42e9): "a100-40",
        ("NVIDIA H100 80GB HBM3", 85e9): "h100",
        ("NVIDIA GH200 480GB", 100e9): "gh200",
    }
    assert {given: machine._of_gpu(*given) for given in names} == names
    with pytest.raises(ConfigurationError, match=r"no profile of 'Tesla T4'.*calibrate --out"):
        machine._of_gpu("Tesla T4", 16e9)
    mine = find_profile(profile(tmp_path), CPU, 2)
    assert (mine.name, mine.flops, mine.node) == ("here", 1e11, 2)
    with pytest.raises(ConfigurationError, match="no profile of the device 'abacus'"):
        choose(gpt(), profile="abacus")
    other = tmp_path / "empty.json"
    other.write_text('{"devices": {}}')
    with pytest.raises(ConfigurationError, match="only those that lightning_par also has"):
        find_profile(str(other), CPU, 2)


def test_sizes_that_fit_no_mesh_are_refused_by_the_trainer() -> None:
    strategy = AutoParallelStrategy(tensor_parallel_size=3)
    with pytest.raises(MeshError, match="tensor_parallel_size=3 needs 3 devices or a multiple"):
        quiet_trainer(devices=4, strategy=strategy)
    waiting = quiet_trainer(devices=4, strategy=AutoParallelStrategy(data_parallel_size=2))
    with pytest.raises(MeshError, match="chooses the parallel sizes when"):
        _ = waiting.strategy.sizes


def test_every_option_that_a_choice_sets_is_one_of_the_strategy() -> None:
    options = AutoParallelStrategy().options
    assert all(hasattr(options, name) for name in choices.CHOSEN)
