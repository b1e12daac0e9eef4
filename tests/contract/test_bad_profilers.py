"""What a user may get wrong with the profilers, and what they read."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import CommunicationProfiler, PipelineProfiler
from lightning_par.errors import ConfigurationError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("profiler", [PipelineProfiler, CommunicationProfiler])
@pytest.mark.parametrize("keep_steps", [0, -2])
def test_no_step_cannot_be_kept(profiler: Any, keep_steps: int) -> None:
    with pytest.raises(ConfigurationError, match=rf"keep_steps={keep_steps}.*1 or more"):
        profiler(keep_steps=keep_steps)


@pytest.mark.parametrize("profiler", [PipelineProfiler, CommunicationProfiler])
def test_a_strategy_that_has_no_mesh_is_named(profiler: Any, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=1, callbacks=[profiler(folder=tmp_path)])
    with pytest.raises(ConfigurationError, match=r"SingleDeviceStrategy.*strategy='hybrid3d'"):
        trainer.fit(ToyModule(), loader(ToyData(8), 4), loader(ToyData(4), 4))


def without_pipeline(rank: int, world: int, folder: Path) -> list[str]:
    trainer = quiet_trainer(
        strategy=Hybrid3DStrategy(),
        devices=1,
        max_steps=2,
        limit_val_batches=0,
        callbacks=[PipelineProfiler(folder=folder)],
    )
    with pytest.warns(UserWarning, match="pipeline_parallel_size is 1"):
        trainer.fit(ToyModule(), loader(ToyData(8), 4))
    return sorted(path.name for path in folder.iterdir())


def test_without_a_pipeline_it_says_so_and_the_report_shows_steps(tmp_path: Path) -> None:
    assert run_ranks(without_pipeline, 1, tmp_path) == [["report.html", "trace.json"]]


class Broken(ToyModule):
    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            raise RuntimeError("the second step breaks")
        return super().training_step(batch, batch_idx)


def breaking(rank: int, world: int, folder: Path) -> list[str]:
    before = dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))
    profilers: list[pl.Callback] = [PipelineProfiler(folder=folder)]
    trainer = quiet_trainer(
        strategy=Hybrid3DStrategy(),
        devices=1,
        max_steps=3,
        limit_val_batches=0,
        callbacks=[*profilers, CommunicationProfiler(folder=folder)],
    )
    broken = pytest.raises(RuntimeError, match="the second step breaks")
    with pytest.warns(UserWarning, match="pipeline_parallel_size is 1"), broken:
        trainer.fit(Broken(), loader(ToyData(64), 4))
    assert (dict(vars(dist.ProcessGroup)), dict(vars(dist.Work))) == before
    return [path.name for path in folder.iterdir()]


def test_a_failing_step_leaves_torch_as_it_was_and_writes_nothing(tmp_path: Path) -> None:
    assert run_ranks(breaking, 1, tmp_path) == [[]]
