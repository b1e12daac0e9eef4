import io
import sys
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_par.checkpoint.progress import advance, counted, showing
from lightning_par.strategies.components import progress_bar
from lightning_par.strategies.components.progress_bar import progress_of


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def move(name: str) -> None:
    with counted("write", name, 4_000_000):
        for _ in range(4):
            advance("write", 1_000_000)
            advance("read", 7)  # of another kind: passes by


@pytest.mark.parametrize(
    ("stderr", "delay", "shown"),
    [(Terminal(), 0.0, True), (Terminal(), 1.0, False), (io.StringIO(), 0.0, False)],
    ids=["terminal", "short", "no terminal"],
)
def test_bar_has_bytes_and_rate_on_a_terminal_if_work_takes_long(
    stderr: Any, delay: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress_bar, "_DELAY", delay)
    threads = threading.enumerate()
    with showing(progress_bar.progress_bar):
        move("saving")
        heard = threading.Thread(target=move, args=("in the background",))
        heard.start()
        heard.join()
    move("after the run")
    text = stderr.getvalue()
    assert all(part in text for part in ("saving:", "/4.00M", "B/s")) is shown
    assert "background" not in text
    assert "after" not in text
    assert threading.enumerate() == threads


class Saves(Callback):
    def __init__(self, delay: float) -> None:
        self.delay, self.tasks = delay, list[str]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        bars = trainer.progress_bar_callback
        with showing(progress_of(trainer)), counted("write", "saving", 4_000_000):
            advance("write", 3_000_000)
            assert isinstance(bars, RichProgressBar)
            assert bars.progress is not None
            for task in bars.progress.tasks:
                if "saving" in task.description and task.visible:
                    self.tasks.append(f"{task.description}: {task.completed} of {task.total}")
        assert not any("saving" in task.description for task in bars.progress.tasks)


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_bar_is_one_of_the_rich_bars_while_these_are_drawn(
    delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "_DELAY", delay)
    saves = Saves(delay)
    text = io.StringIO()
    rich = RichProgressBar(console_kwargs={"file": text, "force_terminal": True, "width": 120})
    trainer = pl.Trainer(
        fast_dev_run=1, accelerator="cpu", callbacks=[saves, rich], enable_model_summary=False
    )
    trainer.fit(BoringModel())
    assert saves.tasks == (["saving (MB): 3.0 of 4.0"] if delay == 0 else [])
    assert ("saving (MB)" in text.getvalue()) is (delay == 0)
