"""Base of the profiler callbacks: one shared recording of the steps, one report at the end."""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_par.engine.batch import signature
from lightning_par.engine.clock import clock_for, measure_offset
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.chrome_trace import write_trace
from lightning_par.profiling.comm_volume import CommVolume, CommVolumeEntry
from lightning_par.profiling.expected_comm_volume import Forecast, Parts
from lightning_par.profiling.html_report import Report, Table, write_report
from lightning_par.profiling.pipeline_record import RankRecord, StepRecorder
from lightning_par.sizes import AXES
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.upstream.lightning import is_accumulating, is_logging_step

__all__ = ["Profiler", "Recording", "ReportSection", "mesh_strategy"]


class ReportSection:
    """Contribution of one profiler to the report; see `Report`.

    Attributes:
        headline: Key figures at the top: label -> text.
        remarks: Sentences below the key figures.
        tables: Tables in their order on the page.
        predicted: Simulated actions of one pipeline, per rank, in seconds; empty without a
            pipeline.
    """

    def __init__(self) -> None:
        self.headline: dict[str, str] = {}
        self.remarks: list[str] = []
        self.tables: list[Table] = []
        self.predicted: Sequence[Sequence[TimedAction]] = ()


class Recording:
    """Recording of the steps of one fit, shared by all profilers of a Trainer.

    Args:
        trainer: Trainer whose strategy has set up the model.
        keep: Number of steps that are kept.
    """

    def __init__(self, trainer: pl.Trainer, keep: int) -> None:
        strategy = mesh_strategy(trainer)
        self.mesh, self.parallel_model = strategy.mesh, strategy.parallel_model
        self._after_look = strategy.start.after_look
        clock = clock_for(strategy.root_device)
        self.steps = StepRecorder(
            clock=clock,
            comm_volume=CommVolume(self._axes(), clock),
            blocks=self._blocks(),
            keep=keep,
        )
        self._forecast = Forecast(self._parts(trainer, strategy), self.steps.comm_volume)
        # The expected volume follows from the shapes, so it is computed once per batch signature.
        self._expected: dict[Hashable, tuple[CommVolumeEntry, ...]] = {}
        self._signature: Hashable = None
        self._shape_hooks: ExitStack | None = None
        self._hooks = ExitStack()

    def start(self) -> None:
        """Install the hooks and give the pipeline executor the recording's clock."""
        pipeline = self.parallel_model.steps.pipeline
        if pipeline is not None:
            executor = pipeline.executor
            before, executor.clock = executor.clock, self.steps.clock
            self._hooks.callback(setattr, executor, "clock", before)
        self._hooks.enter_context(self.steps.hooked())
        after_look = self._after_look
        after_look[id(self)] = self._restart
        self._hooks.callback(after_look.pop, id(self), None)

    def stop(self) -> None:
        """Remove the hooks; may be called again."""
        self._hooks.close()

    def begin(self, batch: Any, *, synchronizes: bool) -> None:
        """Start to record a step.

        Args:
            batch: Batch of the step, of which only the shapes are used.
            synchronizes: Whether gradients are reduced at the end of the step, rather than
                accumulated.
        """
        self._signature = signature(batch, synchronizes)
        if self._signature not in self._expected:
            self._shape_hooks = self._forecast.watch()
        self.steps.begin()

    def _restart(self) -> None:
        """Forget what the first look at the step has added to the step that is being recorded."""
        if self._shape_hooks is not None:
            self._shape_hooks.close()
            self._shape_hooks = self._forecast.watch()
        self.steps.begin()

    def end(self, step: int) -> None:
        """End the step.

        Args:
            step: Number of the batch.
        """
        run = self.parallel_model.steps.last_run
        if self._shape_hooks is not None:
            self._shape_hooks.close()
            self._shape_hooks = None
            actions = [] if run is None else [action for action, *_ in run.marks]
            synchronizes = bool(self._signature[-1])  # type: ignore[index]
            rows = self._forecast.rows(actions, synchronizes=synchronizes)
            self._expected[self._signature] = rows
        self.steps.end(step, run, self._expected[self._signature])

    def gather(self, group: dist.ProcessGroup, *, last: bool = False) -> list[RankRecord]:
        """Return the records of all ranks of a group, on the clock of its first rank.

        Args:
            group: Process group, all of whose ranks have to call.
            last: Whether only the last step is gathered, instead of all that are kept.

        Returns:
            One record per rank, in the order of the group; the same on every rank of it.

        **Communicates**: what `measure_offset` does, then an all-gather of the pickled records.
        """
        # Hosts have clocks of their own, which drift: the offset is measured at every gather.
        offset = measure_offset(group)
        steps = (self.steps.last(),) if last else self.steps.kept()
        sizes = zip(AXES, self.mesh.sizes.shape, strict=True)
        mine = RankRecord(
            rank=self.mesh.rank,
            place={axis: self.mesh.place[axis] for axis, size in sizes if size > 1},
            steps=tuple(step.shifted(offset.seconds) for step in steps),
            clock_error=offset.error,
        )
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, mine, group=group)
        return found

    def _axes(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups that communication is counted under, by name."""
        axes = dict(self.parallel_model.groups)
        # Stages that share a tied weight reduce its gradient over a group that is no mesh axis.
        known = {group.group_name for group in axes.values()}
        others = [s.group for s in self.parallel_model.shared if s.group.group_name not in known]
        for number, group in enumerate(others, 1):
            axes["pp shared weights" + (f" {number}" if number > 1 else "")] = group
        return axes

    def _parts(self, trainer: pl.Trainer, strategy: MeshStrategy) -> Parts:
        # A loss scaler checks for inf and NaN itself; otherwise the gradient norm shows them, and
        # computing it takes a collective.
        scales_loss = getattr(trainer.precision_plugin, "scaler", None) is not None
        checks_finite = strategy.options.on_nonfinite != "ignore" and not scales_loss
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        shared = self.parallel_model.shared
        return Parts(
            takes_norm=checks_finite or clips,
            compresses=self.parallel_model.compression is not None,
            module=self.parallel_model.module,
            resolved=self.parallel_model.resolved,
            mesh=self.mesh,
            bounds=self.parallel_model.bounds,
            owners=self.parallel_model.rank_of_stage,
            shared=[s for s in shared if isinstance(s, SharedGradients)],
            averaged=[c for c in shared if isinstance(c, ReplicatedGradients) and c.early],
            zero_stage=strategy.options.zero_stage,
            sequence_parallel=strategy.options.sequence_parallel
            and self.parallel_model.resolved.plan.sequence_region != "none",
            compiled=strategy.options.compile_blocks is not False,
            expert_max_rows=strategy.options.expert_max_rows,
        )

    def _blocks(self) -> dict[int, Any]:
        """Return the blocks of this rank's stages by their index in the model."""
        module = self.parallel_model.module
        names = enumerate(self.parallel_model.resolved.block_names)
        blocks = {number: module.get_submodule(name) for number, name in names}
        return {n: block for n, block in blocks.items() if not isinstance(block, StageStub)}


def mesh_strategy(trainer: pl.Trainer) -> MeshStrategy:
    """Return the strategy of a Trainer, which has a mesh.

    Args:
        trainer: Trainer with any strategy.

    Raises:
        ConfigurationError: The strategy is not a `MeshStrategy`.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        raise ConfigurationError(
            "LP903",
            "the profilers need a strategy of lightning_par, but the Trainer's strategy is "
            f"{type(strategy).__name__}. Use strategy='hybrid3d', 'pipeline_1f1b' or "
            "'tensor_parallel', which also run on one device.",
        )
    return strategy


class Profiler(Callback):
    """Base of the callbacks that record steps; those of one Trainer share a recording and a report.

    The first profiler in the Trainer's list records, and writes the files for all of them.

    Args:
        folder: Folder of the files; None: ``profile`` in the folder of the Trainer's logger.
        keep_steps: Number of steps, counted from the last, that the files show; 1 or more.

    Raises:
        ConfigurationError: `keep_steps` is less than 1.
    """

    def __init__(self, *, folder: str | Path | None = None, keep_steps: int = 3) -> None:
        if keep_steps < 1:
            raise ConfigurationError("LP902", f"keep_steps={keep_steps} must be 1 or more.")
        self.keep_steps = keep_steps
        self._given = folder
        self._folder: Path | None = None
        self._recording: Recording | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        mesh_strategy(trainer)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        first = _profilers(trainer)[0]
        if first is self:
            self._recording = Recording(trainer, self.keep_steps)
            self._recording.start()
        self._recording = first._recording
        # log_dir is a collective: Lightning broadcasts it from rank 0.
        folder = trainer.log_dir or trainer.default_root_dir
        self._folder = Path(folder) / "profile" if self._given is None else Path(self._given)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_recorder(trainer):
            synchronizes = not is_accumulating(trainer)
            self.recording.begin(batch, synchronizes=synchronizes)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        recording = self.recording
        # The recorder comes first in the list, so the step is complete when the others measure.
        if self._is_recorder(trainer):
            recording.end(trainer.fit_loop.total_batch_idx)
        if is_logging_step(trainer):
            values = self.measure(recording)
            pl_module.log_dict(dict(values), on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._is_recorder(trainer):
            return
        recording = self.recording
        recording.stop()
        if not recording.steps.kept():
            return
        assert dist.group.WORLD is not None
        records = recording.gather(dist.group.WORLD)
        if trainer.is_global_zero:
            self._write(trainer, recording, records)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._recording is not None:
            self._recording.stop()

    @property
    def recording(self) -> Recording:
        """Recording of this fit, shared with the Trainer's other profilers."""
        assert self._recording is not None
        return self._recording

    @property
    def folder(self) -> Path:
        """Folder of the files; known once training has started."""
        assert self._folder is not None
        return self._folder

    def measure(self, recording: Recording) -> Mapping[str, float]:
        """Return the values to log for the last step.

        May communicate: every rank calls it at every logged step.

        Args:
            recording: Recording of this rank.

        Returns:
            Logged key -> value, the same keys on every rank.
        """
        raise NotImplementedError

    def describe(self, recording: Recording, records: Sequence[RankRecord]) -> ReportSection:
        """Return this profiler's section of the report; called on rank 0 only.

        Args:
            recording: Recording of rank 0.
            records: Records of all ranks, in their order.
        """
        raise NotImplementedError

    def draw(self, recording: Recording, records: Sequence[RankRecord], folder: Path) -> None:
        """Write pictures; called on rank 0 only.

        Args:
            recording: Recording of rank 0.
            records: Records of all ranks, in their order.
            folder: Folder of the files, which exists.
        """

    def _is_recorder(self, trainer: pl.Trainer) -> bool:
        return _profilers(trainer)[0] is self

    def _write(
        self, trainer: pl.Trainer, recording: Recording, records: Sequence[RankRecord]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        sections = [p.describe(recording, records) for p in _profilers(trainer)]
        # The report has room for one predicted timeline; only PipelineProfiler gives one.
        predicted = [s.predicted for s in sections if s.predicted]
        report = Report(
            title=f"{type(recording.parallel_model.module).__name__} on {recording.mesh.sizes}",
            headline={k: v for s in sections for k, v in s.headline.items()},
            remarks=[remark for s in sections for remark in s.remarks],
            records=records,
            predicted=predicted[0] if predicted else (),
            tables=[table for s in sections for table in s.tables],
        )
        write_report(report, self.folder / "report.html")
        write_trace(records, self.folder / "trace.json")
        for profiler in _profilers(trainer):
            profiler.draw(recording, records, self.folder)


def _profilers(trainer: pl.Trainer) -> list[Profiler]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Profiler)]
