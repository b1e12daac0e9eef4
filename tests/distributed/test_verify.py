"""`verify` finds planted faults and names them, and finds none where there is none."""

import copy
import re
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_par import cli, Hybrid3DStrategy, verify
from lightning_par.errors import ConfigurationError
from lightning_par.models import HuggingFaceModule
from lightning_par.observe.modes import WithoutDropout
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.processes import run_rank
from lightning_par.verification.run_trace import Subject
from lightning_par.verification.verify import compare_traces
from tests.support.faults.broken_models import MAKE, SIZES, STEPS, TP
from tests.support.models.huggingface import HFModule, PaddedText
from tests.support.models.toy_gpt import loader, ToyModule
from tests.support.parity import ACCELERATOR
from tests.support.progress import Terminal
from tests.support.ranks.api import run_ranks

ONE = ParallelSizes()


def make_llama() -> Subject:
    batches = list(loader(PaddedText(8, "llama tied"), 4))
    return Subject(
        module=HFModule("llama tied"),
        batches=batches,
        strategy=Hybrid3DStrategy(num_microbatches=2),
    )


def make_shifted() -> Subject:
    """Labels that are shifted already, under the name that the model shifts."""
    sizes = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 16}
    torch.manual_seed(5)
    module = HuggingFaceModule("llama", {**sizes, **heads})
    module.configure_model()
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(1, 37, (2, 4, 13), generator=draw)
    rows[:, 1, 7:] = -100
    batches = [{"input_ids": r[:, :-1].clamp(min=0), "labels": r[:, 1:]} for r in rows]
    return Subject(module=module, batches=batches, strategy=Hybrid3DStrategy())


class Tagger(L.LightningModule):
    """A model that declares no plan, and whose batches are dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(37, 16), nn.Linear(16, 5)
        parts = (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.blocks = nn.ModuleList(nn.Sequential(*map(copy.deepcopy, parts)) for _ in range(2))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.embed(batch["tokens"])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["tags"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class PairTagger(Tagger):
    """Takes what a DataLoader makes of pairs: a list of two tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, tags = batch
        return super().training_step({"tokens": tokens, "tags": tags}, batch_idx)


def make_tagger() -> Subject:
    rows = torch.randint(37, (STEPS, 4, 6), generator=torch.Generator().manual_seed(3))
    batches = [{"tokens": row, "tags": row % 5} for row in rows]
    return Subject(module=Tagger(), batches=batches, strategy=Hybrid3DStrategy())


def trace_rank(rank: int, world: int, make: Any, sizes: ParallelSizes) -> Any:
    return run_rank(make, sizes, rank)


def report_of(make: Any, sizes: ParallelSizes) -> Any:
    """What `verify` would say, on ranks that are there already."""
    subject = make()
    one, _ = run_rank(make, ONE, 0)
    ranks = run_ranks(trace_rank, sizes.world_size, make, sizes, timeout=120)
    return compare_traces(one, ranks, sizes, sizes, subject.strategy.options.plan)


@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (MAKE["none"], TP),
        (MAKE["none"], ParallelSizes(data_shard=2)),
        (MAKE["none"], ParallelSizes(context=2)),
        (make_llama, ParallelSizes(tensor=2, pipeline=2)),
        (make_shifted, ParallelSizes(context=2)),
        (make_shifted, ParallelSizes(data_shard=2)),
        (make_tagger, ParallelSizes(tensor=2, pipeline=2)),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(make: Any, sizes: ParallelSizes) -> None:
    report = report_of(make, sizes)
    assert report.equal, str(report)
    assert len(report.rows) == STEPS
    assert all(row.gradient < 1e-9 and row.weight < 1e-9 for row in report.rows)
    assert "\nequal" in str(report)
    if make is MAKE["none"]:
        assert "dropout was off: " in str(report)


FAULTS = {
    "positions": (
        r"not equal: the run failed",
        r"the run failed: ConfigurationError: .* counts positions from 0",
    ),
    "pattern": (
        r"not equal: the run failed",
        r"a missed plan pattern: no pattern .* matches model\.blocks\.\d\.attention\.query\.norm",
    ),
    "product": (r"not equal: the run failed", r"neither .* nor their sum, nor a mean over labels"),
    "dropout": (
        r"not equal: nothing differs without dropout",
        r"with dropout the run failed: .*training_step computes the loss.* from the rank of",
    ),
    "unsummed": (
        r"the gradient of model\.blocks\.\d\.attention\.query\.norm\.\w+ at step 0 differs",
        r"a gradient that is not summed: model\.blocks\.\d\.attention\.query\.norm\.\w+ \(3 more "
        r"like it\) has the style 'replicated'",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found_and_named(fault: str) -> None:
    report = report_of(MAKE[fault], SIZES.get(fault, TP))
    text = str(report)
    assert not report.equal
    for pattern in FAULTS[fault]:
        assert re.search(pattern, text), text


def test_model_that_fails_on_the_layout_is_reported() -> None:
    """Shards of the queries meet whole keys: the ranks raise, and the report says what."""
    one, _ = run_rank(MAKE["none"], ONE, 0)
    one.error = None
    failed = type(one)(error="RuntimeError: shapes (attention.py:3)")
    report = compare_traces(one, [(failed, None), (failed, None)], TP, TP, None)
    assert not report.equal
    assert "the run failed: RuntimeError: shapes (attention.py:3)" in str(report)
    assert report.rows == ()


def test_a_strategy_may_be_a_name_of_ours_only() -> None:
    batch = next(iter(loader(PaddedText(3, "llama"), 3)))
    with pytest.raises(
        ConfigurationError, match="3 samples, which cannot be divided equally over 2 replicas"
    ):
        verify(ToyModule(), batch, "zero_offload", devices=2)
    for other in ("ddp", "hybrid"):
        with pytest.raises(ConfigurationError, match=r"or its name, such as 'hybrid3d'"):
            verify(ToyModule(), batch, other, devices=2)


def test_batches_have_to_be_divisible() -> None:
    batch = next(iter(loader(PaddedText(3, "llama"), 3)))
    strategy = Hybrid3DStrategy(data_parallel_size=2)
    with pytest.raises(ConfigurationError, match=r"3 samples, .* over 2 replicas\. Use 4 samples"):
        verify(ToyModule(), batch, strategy, devices=2)
    with pytest.raises(ConfigurationError, match="a batch for every step"):
        verify(ToyModule(), [], strategy, devices=2)


def test_dropout_does_nothing_inside() -> None:
    x = torch.ones(50)
    with WithoutDropout() as still:
        assert torch.equal(torch.nn.functional.dropout(x, 0.5), x)
        assert torch.equal(torch.nn.Dropout(0.5)(x), x)
        assert torch.equal(torch.nn.functional.dropout(input=x, p=0.5, training=True), x)
        torch.nn.functional.dropout(x, 0.5, training=False)
    assert still.calls == 3


@pytest.mark.exhaustive  # three processes that import everything
def test_module_in_hand_is_verified_and_left_alone() -> None:
    module, batch = HFModule("llama tied"), next(iter(loader(PaddedText(4, "llama"), 4)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=1)
    report = verify(module, batch, strategy, steps=2)
    assert report.equal, str(report)
    assert report.sizes == report.asked == TP
    assert len(report.rows) == 2
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert not any(value.is_shared() for value in module.state_dict().values())


@pytest.mark.exhaustive
def test_a_list_of_tensors_is_one_batch() -> None:
    rows = torch.randint(37, (4, 6), generator=torch.Generator().manual_seed(3))
    strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=1)
    report = verify(PairTagger(), [rows, rows % 5], strategy, steps=2)
    assert report.equal, str(report)
    assert len(report.rows) == 2


YAML = f"""
trainer:
  accelerator: {ACCELERATOR}
  devices: 4
  logger: false
  strategy:
    class_path: lightning_par.Hybrid3DStrategy
    init_args: {{tensor_parallel_size: 4, pipeline_parallel_size: 1}}
model:
  class_path: file_beside.Own
  init_args: {{family: llama, on_meta: true}}
data:
  class_path: tests.support.models.huggingface.PaddedTextData
"""


OWN = """
from tests.support.models.huggingface import HFModule


class Own(HFModule):
    pass
"""


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_command_prints_the_table(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """In processes of its own, which find a file beside the configuration, with two ranks in place
    of four; steps are shown on a terminal.
    """
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the command adds the folder
    (tmp_path / "my.yaml").write_text(YAML)
    (tmp_path / "file_beside.py").write_text(OWN)
    command = ["lightning-par", "verify", "--config=my.yaml", "--steps=2"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().out
    assert not ended.value.code, said
    assert "tp 2 (in place of tp 4) against one process, float64" in said
    assert "\nequal" in said
    for shown in ("on one process", "on tp 2"):
        assert re.search(f"{shown}: .* 0/2 .*{shown}: .* [12]/2 ", terminal.getvalue(), re.DOTALL)
