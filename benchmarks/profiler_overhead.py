"""Step time of a pipeline with the profilers against the same pipeline without them.

Everything is recorded in every step. The profilers listen only while it is their turn; what it
takes to begin and to stop listening counts for them.
"""

from tempfile import TemporaryDirectory
from typing import Any

from _gpt import BenchModule, loader
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from lightning.pytorch.callbacks import Callback

from lightning_par.callbacks import CommunicationProfiler, PipelineProfiler
from lightning_par.callbacks.profiler import Profiler
from lightning_par.strategies import Pipeline1F1BStrategy

RANKS, MICROBATCHES = 2, 8


class _Listening(Callback):
    """Takes turns, and lets the profilers listen during its own."""

    def __init__(self, turn: Turn, profiler: Profiler) -> None:
        self._turn, self._profiler = turn, profiler

    def on_train_batch_start(self, *_: Any) -> None:
        self._profiler.recording.stop()
        self._turn.next()
        self._profiler.recording.start()


def body(arguments: Arguments) -> None:
    """Run on one rank."""

    def plain(turn: Turn) -> None:
        train(turn, {})

    def timed(turn: Turn) -> None:
        with TemporaryDirectory() as folder:
            profiler = PipelineProfiler(folder=folder)
            train(turn, {"callbacks": [_Listening(turn, profiler), profiler]})

    def counted(turn: Turn) -> None:
        with TemporaryDirectory() as folder:
            profiler = PipelineProfiler(folder=folder)
            both = [profiler, CommunicationProfiler()]
            train(turn, {"callbacks": [_Listening(turn, profiler), *both]})

    def train(turn: Turn, options: dict[str, Any]) -> None:
        strategy = Pipeline1F1BStrategy(num_microbatches=MICROBATCHES)
        data = loader(MICROBATCHES)
        fit(BenchModule(), data, strategy, turn, arguments, limit_val_batches=0, **options)

    compare(
        f"pp {RANKS}, {MICROBATCHES} micro-batches",
        {"no profiler": plain, "PipelineProfiler": timed, "both profilers": counted},
        arguments,
        targets={"PipelineProfiler": 1.01, "both profilers": 1.01},
    )


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=RANKS)
