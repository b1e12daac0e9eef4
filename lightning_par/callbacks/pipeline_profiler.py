"""`PipelineProfiler`: time breakdown of a pipelined step, its bubble, and a better split."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_par.callbacks.profiler import mesh_strategy, Profiler, Recording, ReportSection
from lightning_par.profiling.html_report import Table
from lightning_par.profiling.pipeline_advice import advise, as_milliseconds, as_percent
from lightning_par.profiling.pipeline_record import RankRecord
from lightning_par.profiling.pipeline_summary import PipelineSummary, RankTimes, summarize_pipeline
from lightning_par.profiling.timeline_plot import draw_timeline

__all__ = ["PipelineProfiler"]

_NOTE = (
    "Makespan: from the first start to the last end of an action, over all stages. A rank is "
    "busy with compute and with exposed communication. Waiting: the part of its idle time in "
    "which a message blocked it. Bubble: idle time divided by the makespan. Predicted: the "
    "bubble of a simulation with the median time of every stage and messages that take no time."
)


class PipelineProfiler(Profiler):
    """Profiler of every action of every rank of a pipeline.

    Logged at the Trainer's ``log_every_n_steps``, for the pipeline of this rank's replica (loggers
    write that of rank 0), the same on every rank of it; r is the coordinate on the ``pp`` axis:

    - ``pipeline/step`` (ms): from the first start to the last end of an action
    - ``pipeline/bubble`` (fraction): idle fraction of that time, mean over the ranks
    - ``pipeline/bubble_predicted`` (fraction): bubble of the simulated schedule, with the median
      times of every stage
    - ``pipeline/bubble_balanced`` (fraction): the same, if all stages took the mean time
    - ``pipeline/imbalance`` (fraction): excess of the slowest stage over the mean stage
    - ``pipeline/rank_r/compute`` (ms): time in actions, less ``exposed``
    - ``pipeline/rank_r/exposed`` (ms): time blocked by collectives inside actions
    - ``pipeline/rank_r/waited`` (ms): time blocked by receives from other stages
    - ``pipeline/rank_r/bubble`` (fraction): idle fraction of the step

    At the end of training rank 0 writes ``report.html`` (one file: a zoomable timeline, measured
    and predicted, and tables), ``trace.json`` (for Perfetto or ``chrome://tracing``) and, where
    matplotlib is installed, ``timeline.png``. Without a pipeline it warns once, and shows the steps
    only.

    Args:
        folder: Folder of the files; None: ``profile`` in the folder of the Trainer's logger.
        keep_steps: Number of steps, counted from the last, that the files show; 1 or more.

    **Communicates**: at every logged step, an all-gather over ``pp`` of the times of the actions;
    at the end, one over all ranks of the kept steps. Between hosts, a few round trips to compare
    their clocks.

    Examples:
        >>> trainer = L.Trainer(strategy="hybrid3d", callbacks=[PipelineProfiler(folder="profile")])
    """

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if mesh_strategy(trainer).sizes.pipeline == 1:
            rank_zero_warn(
                "the callback PipelineProfiler has no pipeline to measure, since "
                "pipeline_parallel_size is 1. Its report shows only the times of steps."
            )

    @override
    def measure(self, recording: Recording) -> Mapping[str, float]:
        if recording.mesh.sizes.pipeline == 1:
            return {}
        records = recording.gather(recording.mesh.group("pp"), last=True)
        found = _summarize(recording, records)
        values = {
            "step": 1e3 * found.makespan,
            "bubble": found.bubble,
            "bubble_predicted": found.predicted,
            "bubble_balanced": found.balanced,
            "imbalance": found.imbalance,
        }
        for rank, times in enumerate(found.ranks):
            values[f"rank_{rank}/compute"] = 1e3 * times.compute
            values[f"rank_{rank}/exposed"] = 1e3 * times.exposed
            values[f"rank_{rank}/waited"] = 1e3 * times.waited
            values[f"rank_{rank}/bubble"] = times.bubble
        return {f"pipeline/{name}": value for name, value in values.items()}

    @override
    def describe(self, recording: Recording, records: Sequence[RankRecord]) -> ReportSection:
        section = ReportSection()
        if recording.mesh.sizes.pipeline == 1:
            return section
        pipelines = _pipelines(recording, records)
        found = _summarize(recording, pipelines[0])
        section.predicted = found.simulation.events
        section.headline = {
            "bubble, measured": as_percent(found.bubble),
            "bubble, predicted": as_percent(found.predicted),
            "bubble if the stages were equal": as_percent(found.balanced),
            "imbalance": as_percent(found.imbalance),
            "pipelined part of a step": as_milliseconds(found.makespan),
        }
        section.remarks = advise(found)
        error = max(record.clock_error for record in records)
        if error:
            section.remarks.append(f"The clocks of the hosts agree to within {1e3 * error:.3f} ms.")
        section.tables = [
            _table(recording, pipeline, number, len(pipelines))
            for number, pipeline in enumerate(pipelines)
        ]
        return section

    @override
    def draw(self, recording: Recording, records: Sequence[RankRecord], folder: Path) -> None:
        if recording.mesh.sizes.pipeline == 1:
            return
        # An optional dependency: its absence must not fail a run that has trained.
        if find_spec("matplotlib") is None:
            rank_zero_warn(
                "the callback PipelineProfiler did not draw timeline.png, since matplotlib is not "
                'installed. Install it with: pip install "lightning-par[plot]"'
            )
            return
        pipeline = _pipelines(recording, records)[0]
        rows = [record.steps[-1].actions for record in pipeline]
        title = f"Step {pipeline[0].steps[-1].step}"
        draw_timeline(rows, folder / "timeline.png", title=title)


def _summarize(recording: Recording, records: Sequence[RankRecord]) -> PipelineSummary:
    """Break down the last step of one pipeline."""
    parallel_model = recording.parallel_model
    steps = [record.steps[-1] for record in records]
    return summarize_pipeline(steps, parallel_model.resolved, parallel_model.bounds)


def _pipelines(recording: Recording, records: Sequence[RankRecord]) -> list[list[RankRecord]]:
    """Group records by pipeline, in the order of the stages; the pipeline of rank 0 comes first."""
    groups = recording.mesh.sizes.groups(("pp",))
    return [[records[rank] for rank in group] for group in groups]


def _table(recording: Recording, records: Sequence[RankRecord], number: int, count: int) -> Table:
    found = _summarize(recording, records)
    return Table(
        key="stages" if number == 0 else f"stages-{number}",
        title="Stages" if count == 1 else f"Stages, pipeline {number + 1} of {count}",
        note=_NOTE,
        columns=(
            "rank",
            "stages",
            "blocks",
            "compute, ms",
            "exposed communication, ms",
            "waiting, ms",
            "idle, ms",
            "bubble, measured",
            "bubble, predicted",
        ),
        rows=[
            _row(record, times, found.makespan)
            for record, times in zip(records, found.ranks, strict=True)
        ],
    )


def _row(record: RankRecord, times: RankTimes, makespan: float) -> tuple[str, ...]:
    return (
        record.name,
        ", ".join(map(str, times.stages)),
        ", ".join(map(str, times.blocks)),
        *(f"{1e3 * t:.3f}" for t in (times.compute, times.exposed, times.waited)),
        f"{1e3 * times.bubble * makespan:.3f}",
        as_percent(times.bubble),
        as_percent(times.predicted),
    )
