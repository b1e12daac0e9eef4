"""Schedules that cannot be are refused in one error, before a process is started."""

import pytest

from lightning_par import Pipeline1F1BStrategy
from lightning_par.errors import ConfigurationError, PlanError, ScheduleError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

pytestmark = pytest.mark.contract

CROSSED = "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n"
DEADLOCK = "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"virtual_pipeline_size": 1}, ConfigurationError, "virtual_pipeline_size=1 must be"),
        ({"virtual_pipeline_size": "2"}, ConfigurationError, "must be a whole number of 2 or more"),
        (
            {"schedule": "zbv", "virtual_pipeline_size": 2},
            ConfigurationError,
            "virtual_pipeline_size=2 needs schedule='interleaved'",
        ),
        (
            {"schedule": "interleaved", "virtual_pipeline_size": 4},
            PlanError,
            "4 stages per rank: model.blocks has 4 blocks, .*Use pipeline_parallel_size=1 or less",
        ),
        (
            {"schedule": "interleaved", "stage_blocks": [2, 2]},
            PlanError,
            "4 entries of 1 or more whose sum is 4",
        ),
        ({"schedule": CROSSED}, ScheduleError, "Use the same order of stages and micro-batches"),
        ({"schedule": DEADLOCK}, ScheduleError, "deadlock"),
        ({"schedule": "0F0 0B0\n"}, ScheduleError, "1 lines with actions.*2 pipeline ranks"),
        ({"schedule": "0F0 0B0\n1F0 1B0\n"}, ScheduleError, "Use num_microbatches=1 or less"),
    ],
    ids=lambda value: None,
)
def test_it_is_said_before_any_process_starts(options, error, says, monkeypatch, tmp_path):
    if "\n" in options.get("schedule", ""):
        path = tmp_path / "mine.txt"
        path.write_text(options["schedule"])
        options = {**options, "schedule": str(path)}
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(error, match=says):
        quiet_trainer(
            strategy=Pipeline1F1BStrategy(num_microbatches=2, **options),
            devices=2,
            max_steps=1,
        ).fit(ToyModule(blocks=4), loader(ToyData(4), 4))
