"""What `lightning-par plan` says before anything runs."""

import re
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par import cli
from tests.support.models.huggingface import FAMILIES

pytestmark = [
    pytest.mark.contract,
    # Lightning calls a method that jsonargparse has renamed.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]

YAML = """
trainer:
  accelerator: cpu
  devices: 8
  logger: false
  strategy:
    class_path: lightning_par.Hybrid3DStrategy
    init_args:
      tensor_parallel_size: 2
      pipeline_parallel_size: 2
      data_parallel_size: 2
      zero_stage: 3
model:
  class_path: tests.support.models.huggingface.HFModule
  init_args:
    family: llama tied
    on_meta: ON_META
data: null
"""


class WithoutPlan(L.LightningModule):
    """Declares no plan, and has no forward."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.blocks = nn.ModuleList(nn.Sequential(*map(deepcopy, parts)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        hidden = batch
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.mse_loss(hidden, batch)

    def train_dataloader(self) -> Any:
        """Return batches [4, 6, 16]."""
        return DataLoader(torch.randn(8, 6, 16), 4)


def command(
    tmp_path: Path, monkeypatch: Any, capsys: Any, name: str, *words: str, yaml: str
) -> Any:
    """Run a command on a configuration; give its status and what it said."""
    (tmp_path / "my.yaml").write_text(yaml)
    monkeypatch.setattr(
        sys, "argv", ["lightning-par", name, f"--config={tmp_path / 'my.yaml'}", *words]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def row(out: str, name: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith(name))
    return re.sub(r"  +", " | ", line)


@pytest.mark.parametrize("on_meta", ["true", "false"])
def test_table_names_the_place_of_every_parameter(
    on_meta: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    before, yaml = dist.is_initialized(), YAML.replace("ON_META", on_meta)
    status, out, err = command(tmp_path, monkeypatch, capsys, "plan", yaml=yaml)
    assert status == 0, err
    assert "HFModule on pp 2 x dp_shard 2 x tp 2, zero_stage 3" in out
    # 37 rows: 19 of them on tp rank 0, 10 of those on the first replica; 24 columns, 4 bytes.
    wanted = " | [37, 24] | 0, 1 | dim 0 by tp 2, dim 0 by dp_shard 2 | 960"
    assert row(out, "model.model.embed_tokens.weight = model.lm_head.weight").endswith(wanted)
    query = row(out, "model.model.layers.0-1.self_attn.q_proj.weight")
    assert query.endswith("[24, 24] | 0 | dim 0 by tp 2, dim 0 by dp_shard 2 | 576")
    assert row(out, "model.model.layers.2.mlp.down_proj.weight").split(" | ")[2:] == [
        "1",
        "dim 1 by tp 2, dim 0 by dp_shard 2",
        "480",
    ]
    norm = row(out, "model.model.layers.2.input_layernorm.weight")
    assert "dim 0 by dp_shard 2 | 48 | sequence_parallel: computed on each rank's tokens" in norm
    counted = r"^(?:(\d) ranks as )?rank (\d) \(pp (\d), dp_shard \d, tp \d\): [\d,]+ bytes"
    ranks = [tuple(int(n or 1) for n in found) for found in re.findall(counted, out, re.M)]
    assert sum(count for count, *_ in ranks) == 8
    assert [pp for *_, pp in ranks] == sorted(first // 4 for _, first, _ in ranks)
    _, every, _ = command(tmp_path, monkeypatch, capsys, "plan", "--all", yaml=yaml)
    named = dict(FAMILIES["llama tied"]().named_parameters())
    assert {f"model.{name}" for name in named} <= {
        line.split(" ")[0] for line in every.splitlines()
    }
    assert dist.is_initialized() == before


def test_what_cannot_be_is_one_error(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    yaml = YAML.replace("ON_META", "false").replace("llama tied", "mixtral aux")
    status, _, err = command(tmp_path, monkeypatch, capsys, "plan", yaml=yaml)
    assert status == 1
    assert "MixtralForCausalLM adds an auxiliary loss of its routers" in err
    auto = "--trainer.strategy=auto"
    status, _, err = command(tmp_path, monkeypatch, capsys, "plan", auto, yaml=yaml)
    assert status == 1
    assert "trainer.strategy is a SingleDeviceStrategy" in err or "DDPStrategy" in err


GPUS = YAML.replace("accelerator: cpu", "accelerator: gpu").replace("ON_META", "true")


@pytest.mark.parametrize(("name", "said"), [("plan", "zero_stage 3"), ("memory", "gathered")])
def test_configuration_for_gpus_needs_none(
    name: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    run = command(tmp_path, monkeypatch, capsys, name, yaml=GPUS)
    assert (run[0], "HFModule" in run[1], said in run[1]) == (0, True, True), run[2]


@pytest.mark.parametrize(("name", "said"), [("plan", "inferred:"), ("memory", "gathered")])
def test_a_model_without_a_plan_is_looked_at(
    name: str, said: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    start, _, _ = YAML.partition("model:")
    yaml = f"{start}model: {WithoutPlan.__module__}.WithoutPlan\ndata: null\n"
    status, out, err = command(tmp_path, monkeypatch, capsys, name, yaml=yaml)
    assert (status, "WithoutPlan" in out, said in out) == (0, True, True), err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without GPUs")
def test_devices_that_are_absent_and_not_counted_are_named(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    yaml = GPUS.replace("devices: 8", "devices: -1")
    status, _, err = command(tmp_path, monkeypatch, capsys, "plan", yaml=yaml)
    assert status == 1
    assert "trainer.devices=-1 stands for all devices of this machine" in err
    assert "'gpu'. Pass the number of devices, such as --trainer.devices=8." in err
    status, out, err = command(
        tmp_path, monkeypatch, capsys, "plan", "--trainer.devices=8", yaml=yaml
    )
    assert (status, "HFModule on pp 2 x dp_shard 2 x tp 2" in out) == (0, True), err
