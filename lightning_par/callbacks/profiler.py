"""What the profilers share: one recording of the steps, and one report at the end."""

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
from lightning_par.engine.data.gradient_reduction import SharedGradients
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

__all__ = ["Chapter", "Profiler", "Recording", "mesh_strategy"]


class Chapter:
    """What one profiler adds to the report.

    Attributes:
        headline: Figures at the top: label -> text.
        remarks: Sentences below them.
        tables: In order.
        predicted: Simulated actions of one pipeline, in seconds; empty without one.
    """

    def __init__(self) -> None:
        self.headline: dict[str, str] = {}
        self.remarks: list[str] = []
        self.tables: list[Table] = []
        self.predicted: Sequence[Sequence[TimedAction]] = ()


class Recording:
    """The recording of one fit, which all profilers of a Trainer share.

    Args:
        trainer: Its strategy has set up the model.
        keep: How many steps are remembered.
    """

    def __init__(self, trainer: pl.Trainer, keep: int) -> None:
        strategy = mesh_strategy(trainer)
        self.mesh, self.parallel_model = strategy.mesh, strategy.parallel_model
        clock = clock_for(strategy.root_device)
        self.steps = StepRecorder(
            clock=clock,
            ledger=CommVolume(self._axes(), clock),
            blocks=self._blocks(),
            keep=keep,
        )
        self._forecast = Forecast(self._parts(trainer, strategy), self.steps.ledger)
        self._foreseen: dict[Hashable, tuple[CommVolumeEntry, ...]] = {}
        self._kind: Hashable = None
        self._watch: ExitStack | None = None
        self._open = ExitStack()

    def start(self) -> None:
        """Begin to listen."""
        pipeline = self.parallel_model.steps.pipeline
        if pipeline is not None:
            executor = pipeline.executor
            before, executor.clock = executor.clock, self.steps.clock
            self._open.callback(setattr, executor, "clock", before)
        self._open.enter_context(self.steps.listening())

    def stop(self) -> None:
        """Stop listening; may be called again."""
        self._open.close()

    def begin(self, batch: Any, *, synchronizes: bool) -> None:
        """Begin a step.

        Args:
            batch: Its shapes tell whether steps of the same kind have been seen.
            synchronizes: Whether gradients are reduced at its end.
        """
        self._kind = signature(batch, synchronizes)
        if self._kind not in self._foreseen:
            self._watch = self._forecast.watch()
        self.steps.begin()

    def end(self, step: int) -> None:
        """End the step.

        Args:
            step: Number of the batch.
        """
        run = self.parallel_model.steps.last_run
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            actions = [] if run is None else [action for action, *_ in run.marks]
            synchronizes = bool(self._kind[-1])  # type: ignore[index]
            rows = self._forecast.rows(actions, synchronizes=synchronizes)
            self._foreseen[self._kind] = rows
        self.steps.end(step, run, self._foreseen[self._kind])

    def gather(self, group: dist.ProcessGroup, *, last: bool = False) -> list[RankRecord]:
        """Return the records of all ranks of a group, on the clock of its first rank.

        Args:
            group: Every rank of it has to call.
            last: Only the last step, instead of all that are remembered.

        **Communicates**: what `measure_offset` does, then the records of every rank to all.
        """
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
        axes = dict(self.parallel_model.groups)
        known = {group.group_name for group in axes.values()}
        others = [s.group for s in self.parallel_model.shared if s.group.group_name not in known]
        for number, group in enumerate(others, 1):
            axes["pp shared weights" + (f" {number}" if number > 1 else "")] = group
        return axes

    def _parts(self, trainer: pl.Trainer, strategy: MeshStrategy) -> Parts:
        scales_loss = getattr(trainer.precision_plugin, "scaler", None) is not None
        judges = strategy.options.on_nonfinite != "ignore" and not scales_loss
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        return Parts(
            takes_norm=judges or clips,
            compresses=self.parallel_model.compression is not None,
            module=self.parallel_model.module,
            resolved=self.parallel_model.resolved,
            mesh=self.mesh,
            bounds=self.parallel_model.bounds,
            owners=self.parallel_model.rank_of_stage,
            shared=[s for s in self.parallel_model.shared if isinstance(s, SharedGradients)],
            zero_stage=strategy.options.zero_stage,
            sequence_parallel=strategy.options.sequence_parallel,
            compiled=strategy.options.compile_blocks is not False,
        )

    def _blocks(self) -> dict[int, Any]:
        module = self.parallel_model.module
        names = enumerate(self.parallel_model.resolved.block_names)
        blocks = {number: module.get_submodule(name) for number, name in names}
        return {n: block for n, block in blocks.items() if not isinstance(block, StageStub)}


def mesh_strategy(trainer: pl.Trainer) -> MeshStrategy:
    """Return the strategy of a Trainer.

    Raises:
        ConfigurationError: It is not one of ours.
    """
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy):
        raise ConfigurationError(
            f"the profilers read the mesh of lightning_par, but the Trainer's strategy is "
            f"{type(strategy).__name__}. Use strategy='hybrid3d', 'pipeline_1f1b' or "
            "'tensor_parallel', which also run on one device."
        )
    return strategy


class Profiler(Callback):
    """Base of the callbacks that record steps; those of one Trainer share a recording and a report.

    The first of them in the Trainer's list records, and writes the files of all.

    Args:
        folder: Where the files go; None: ``profile`` in the folder of the Trainer's logger.
        keep_steps: How many steps, the last ones, are shown in the files.
    """

    def __init__(self, *, folder: str | Path | None = None, keep_steps: int = 3) -> None:
        if keep_steps < 1:
            raise ConfigurationError(f"keep_steps={keep_steps}: use 1 or more.")
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
        folder = trainer.log_dir or trainer.default_root_dir  # every rank has to ask
        self._folder = Path(folder) / "profile" if self._given is None else Path(self._given)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._records(trainer):
            synchronizes = not trainer.fit_loop._should_accumulate()
            self.recording.begin(batch, synchronizes=synchronizes)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        recording = self.recording
        if self._records(trainer):
            recording.end(trainer.fit_loop.total_batch_idx)
        if trainer._logger_connector.should_update_logs:
            values = self.measure(recording)
            pl_module.log_dict(dict(values), on_step=True, on_epoch=False, batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._records(trainer):
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
        """The recording of this fit."""
        assert self._recording is not None
        return self._recording

    @property
    def folder(self) -> Path:
        """Where the files go; known once training has started."""
        assert self._folder is not None
        return self._folder

    def measure(self, recording: Recording) -> Mapping[str, float]:
        """Return what is logged of the last step, the same on every rank; every rank calls."""
        raise NotImplementedError

    def describe(self, recording: Recording, records: Sequence[RankRecord]) -> Chapter:
        """Return this profiler's part of the report; called on the first rank only.

        Args:
            recording: Of the first rank.
            records: Of all ranks.
        """
        raise NotImplementedError

    def draw(self, recording: Recording, records: Sequence[RankRecord], folder: Path) -> None:
        """Write pictures; called on the first rank only."""

    def _records(self, trainer: pl.Trainer) -> bool:
        return _profilers(trainer)[0] is self

    def _write(
        self, trainer: pl.Trainer, recording: Recording, records: Sequence[RankRecord]
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        chapters = [p.describe(recording, records) for p in _profilers(trainer)]
        predicted = [c.predicted for c in chapters if c.predicted]
        report = Report(
            title=f"{type(recording.parallel_model.module).__name__} on {recording.mesh.sizes}",
            headline={k: v for c in chapters for k, v in c.headline.items()},
            remarks=[remark for c in chapters for remark in c.remarks],
            records=records,
            predicted=predicted[0] if predicted else (),
            tables=[table for c in chapters for table in c.tables],
        )
        write_report(report, self.folder / "report.html")
        write_trace(records, self.folder / "trace.json")
        for profiler in _profilers(trainer):
            profiler.draw(recording, records, self.folder)


def _profilers(trainer: pl.Trainer) -> list[Profiler]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, Profiler)]
