"""The estimate of memory: what does not fit is refused with what would."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_par
from lightning_par.cli import main
from lightning_par.engine.memory.estimate import MemoryEstimate, MemoryRow, misfits
from lightning_par.engine.memory.measured import available_memory
from lightning_par.models import Mixtral, MixtralConfig
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.strategies.memory_estimate import memory_check

GIB = 2**30
ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def strategy(devices: int, kind: str = "zero_offload", **options: Any) -> Any:
    names = {"zero_offload": lightning_par.ZeROOffloadStrategy}
    made = names.get(kind, lightning_par.Hybrid3DStrategy)(**options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=made,
        precision="bf16-true",
        logger=False,
        enable_checkpointing=False,
    )
    return trainer.strategy


class Large(torch.nn.Module):
    """2^33 parameters in 8 blocks; on meta they take nothing."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = torch.nn.ModuleList(
                torch.nn.Linear(2**15, 2**15, bias=False) for _ in range(8)
            )

    def parallel_plan(self) -> lightning_par.ParallelPlan:
        return lightning_par.ParallelPlan(blocks="blocks")


def explain(made: Any, device: float | None, host: float | None) -> str | None:
    model = Large()
    layout = check_plan(model, model.parallel_plan(), made.sizes)
    sizes = [None if size is None else int(size * GIB) for size in (device, host)]
    check = replace(memory_check(model, made), resolved=layout)
    return check.explain_misfit(device=sizes[0], host=sizes[1])


def test_bytes_of_the_formulas() -> None:
    """P = 2^33 parameters in bfloat16 over N = 4 ranks; a block has 2^30."""
    whole = lightning_par.memory_estimate(Large(), strategy(4, stage=3))
    rows = {row.kind: (row.device / GIB, row.host / GIB) for row in whole.rows}
    assert rows == {
        "parameters": (4, 0),
        "gathered": (4, 0),
        "gradients": (4, 4),  # all of them, as 3.5 blocks of 2 and a bucket would be more
        "optimizer": (0, 24),
    }
    on_device = lightning_par.memory_estimate(Large(), strategy(4, "hybrid3d", **ONES))
    assert on_device.host == 0
    pipeline = {"pipeline_parallel_size": 4, "tensor_parallel_size": 1, "offload_options": {}}
    stages = lightning_par.memory_estimate(Large(), strategy(4, "hybrid3d", **pipeline))
    assert [row.device / GIB for row in stages.rows] == [4, 0, 4, 0]


def test_whole_replicas_are_told_to_share() -> None:
    made = strategy(4, "hybrid3d", **ONES, zero_stage=0, gradient_compression="int8")
    rows = {row.kind: row.device / GIB for row in lightning_par.memory_estimate(Large(), made).rows}
    assert rows == {
        "parameters": 16,
        "gathered": 0,
        "gradients": 16,
        "compression": 8 * 4 * 1.25,
        "optimizer": 32,
    }
    offload = {"zero_stage": 0, "gradient_compression": "bf16", "offload_options": {}}
    away = lightning_par.memory_estimate(Large(), strategy(4, "hybrid3d", **ONES, **offload))
    # All gradients are there until they are compressed, after the backward.
    assert {row.kind: row.device / GIB for row in away.rows}["gradients"] == 16
    says = "needs 104.00 GiB .* Use zero_stage=3, gradient_compression=None."
    assert re.search(says, explain(made, 32, None) or "")


@pytest.mark.parametrize("offloads", [False, True])
def test_whole_replicas_gather_nothing_unless_they_offload(offloads: bool) -> None:
    options: dict[str, Any] = {"offload_options": {}} if offloads else {}
    made = strategy(4, "hybrid3d", **ONES, zero_stage=0, **options)
    rows = {row.kind: row.device for row in lightning_par.memory_estimate(Large(), made).rows}
    assert rows["gathered"] == (16 * GIB if offloads else 0)


def test_table_is_printed() -> None:
    text = str(lightning_par.memory_estimate(Large(), strategy(1)))
    assert text.splitlines()[1].split() == ["parameters", "16.000", "GiB", "0", "B"]
    assert text.splitlines()[-1].split()[-4:] == ["16.031", "GiB", "112.000", "GiB"]


FITS = [
    # 16 GiB of parameters alone.
    ((1, {}), 10, 500, r"needs 16.03 GiB without activations, but has 10.00 GiB.*Use more devices"),
    ((1, {"delayed_update": 3}), 80, 120, r"needs 128.00 GiB.*120.00 GiB are .*delayed_update=F"),
    (
        (1, {}),
        80,
        100,
        r'the host needs 112.00 GiB of CPU memory for its 1 ranks.*Use state_dtype="bfloat16"\.',
    ),
    ((4, {"stage": 1}), 20, 500, r"every device needs 24.00 GiB.*Use zero_stage=3\."),
    ((1, {}), None, 120, r"the host needs 128.03 GiB.*120.00 GiB are available"),
    ((1, {}), 80, 113, None),
    ((1, {}), 80, None, None),
]


@pytest.mark.parametrize(("made", "device", "host", "says"), FITS)
def test_run_that_cannot_fit_is_refused_with_what_would(
    made: Any, device: Any, host: Any, says: str | None
) -> None:
    devices, options = made
    said = explain(strategy(devices, **options), device, host)
    if says is None:
        assert said is None
    else:
        assert said is not None
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(said)


def test_offloading_is_proposed_where_the_optimizer_does_not_fit() -> None:
    said = explain(strategy(1, "hybrid3d", **ONES), 40, 500)
    assert said is not None
    assert "64.00 GiB without activations, but has 40.00 GiB" in said
    assert said.endswith("Use offload_options={} (the optimizer in CPU memory).")


def test_sharding_of_a_model_without_blocks_is_warned_of() -> None:
    """On the CPU, too, where nothing is refused."""
    model, made = Large(), strategy(2, "hybrid3d", **ONES, zero_stage=3)
    bare = check_plan(model, lightning_par.ParallelPlan(), made.sizes)
    with pytest.warns(UserWarning, match="zero_stage=3: the plan of Large does not say which"):
        replace(memory_check(model, made), resolved=bare).check(made.root_device)
    memory_check(model, made).check(made.root_device)


def test_misfit_of_the_host_counts_every_rank() -> None:
    estimate = MemoryEstimate((MemoryRow(kind="all", device=GIB, host=2 * GIB),))
    sizes = {"device": GIB, "host": 7 * GIB}
    assert misfits(estimate, **sizes, ranks_per_host=3) == []
    (problem,) = misfits(estimate, **sizes, ranks_per_host=4)
    assert (
        problem
        == "the host needs 8.00 GiB of CPU memory for its 4 ranks, but 7.00 GiB are available"
    )
    assert misfits(estimate, **sizes, ranks_per_host=3, shared=True) == [
        "the host needs 9.00 GiB of CPU memory for its 3 ranks, but 7.00 GiB are available"
    ]


def test_memory_of_this_machine_is_known() -> None:
    free = available_memory()
    assert free is None or 2**20 < free < 2**50


CONFIG = Path(__file__).resolve().parents[4] / "configs" / "gpt_data_parallel_2.yaml"


@pytest.mark.filterwarnings("ignore")  # of jsonargparse, about Lightning
@pytest.mark.parametrize(("host", "status"), [(64, 0), (0.01, 1)])
def test_command_prints_the_table_and_judges(
    host: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"--config={CONFIG}", "--devices=8", f"--host-gib={host}", "--device-gib=16"]
    arguments += ["--trainer.strategy=zero_offload", "--model.preset=gpt2"]
    monkeypatch.setattr(sys, "argv", ["lightning-par", "memory", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr().out
    assert (stop.value.code or 0) == status, said
    assert "124,439,808 parameters on dp_shard 8" in said
    assert "optimizer" in said
    assert ("cannot hold the model" in said) == bool(status)


def test_divided_experts_are_counted_where_they_are() -> None:
    """With ZeRO stage 1 a rank gathers everything but the experts of others."""
    with torch.device("meta"):
        model = Mixtral(MixtralConfig.preset("tiny"))

    def gathered(**sizes: int) -> int:
        sizes |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 4}
        made = strategy(4, "hybrid3d", zero_stage=1, **sizes)
        rows = {row.kind: row.device for row in lightning_par.memory_estimate(model, made).rows}
        return rows["gathered"]

    experts = 2 * sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert experts
    assert gathered() - gathered(expert_parallel_size=2) == experts // 2
    assert gathered() - gathered(expert_parallel_size=4) == experts * 3 // 4
