import io
import re
import sys
import threading
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_par import Hybrid3DStrategy
from lightning_par.checkpoint.progress import advance, counted, showing
from lightning_par.observe import terminal_bar
from lightning_par.strategies.components import progress_bar
from lightning_par.strategies.components.progress_bar import progress_of
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.progress import Terminal


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
    monkeypatch.setattr(terminal_bar, "DELAY", delay)
    threads = threading.enumerate()
    with showing(terminal_bar.progress_bar):
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


def test_pieces_are_shown_before_the_first_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with showing(terminal_bar.progress_bar):
        with counted("steps", "verifying", 3):
            assert "verifying:   0%" in stderr.getvalue()
            assert "0/3" in stderr.getvalue()
        with counted("operations", "rehearsing", None):
            advance("operations")
    assert "rehearsing: 0 operations" in stderr.getvalue()


@pytest.mark.parametrize("period", [0.0, 60.0])
def test_command_writes_lines_where_there_is_no_terminal(
    period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(terminal_bar, "_LINES", period)
    monkeypatch.setattr(terminal_bar, "DELAY", period)
    with showing(terminal_bar.progress_of_command):
        with counted("steps", "training", 3):
            assert stderr.getvalue() == "training: 0 of 3 steps\n"
            advance("steps")
        with counted("operations", "rehearsing", None):
            advance("operations", 7)
        with counted("write", "saving", 4_000_000):
            advance("write", 1_000_000)
    often = ["training: 0 of 3 steps", "training: 1 of 3 steps"]
    often += ["rehearsing: 0 operations", "rehearsing: 7 operations"]
    often += ["saving: 0.00B of 4.00MB", "saving: 1.00MB of 4.00MB"]
    assert stderr.getvalue().splitlines() == (often[:4:2] if period else often)


def test_command_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with showing(terminal_bar.progress_of_command), counted("steps", "training", 3):
        assert "training:   0%" in stderr.getvalue()


class Saves(Callback):
    def __init__(self, delay: float) -> None:
        self.delay, self.tasks = delay, list[str]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        bars = trainer.progress_bar_callback
        assert isinstance(bars, RichProgressBar)
        assert bars.progress is not None
        own = bars.progress.tasks
        with showing(progress_of(trainer)):
            with counted("write", "saving", 4_000_000):
                advance("write", 3_000_000)
                self.note(bars.progress.tasks[len(own) :])
            with counted("blocks", "compiling block 1 of 2", 1):
                self.note(bars.progress.tasks[len(own) :])
        assert bars.progress.tasks == own

    def note(self, tasks: list[Any]) -> None:
        shown = [f"{t.description}: {t.completed:g} of {t.total:g}" for t in tasks]
        self.tasks.extend(shown)


@pytest.mark.parametrize("delay", [0.0, 60.0])
def test_bar_is_one_of_the_rich_bars_while_these_are_drawn(
    delay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress_bar, "DELAY", delay)
    saves = Saves(delay)
    text = io.StringIO()
    rich = RichProgressBar(console_kwargs={"file": text, "force_terminal": True, "width": 120})
    trainer = pl.Trainer(
        fast_dev_run=1, accelerator="cpu", callbacks=[saves, rich], enable_model_summary=False
    )
    trainer.fit(BoringModel())
    bytes_shown = ["saving (MB): 3 of 4"] if delay == 0 else []
    assert saves.tasks == [*bytes_shown, "compiling block 1 of 2 (blocks): 0 of 1"]
    assert ("saving (MB)" in text.getvalue()) is (delay == 0)


# torch's compiler asks for it, and hides the warning where it is none of the errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_first_compile_of_every_block_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    trainer = quiet_trainer(
        max_steps=2,
        enable_progress_bar=True,
        strategy=Hybrid3DStrategy(compile_blocks={"backend": "eager"}),
        callbacks=[TQDMProgressBar()],
    )
    data = loader(ToyData(4), 2)
    trainer.fit(ToyModule(blocks=2), data, data)
    shown = re.findall(r"compiling block \d of \d", stderr.getvalue())
    assert list(dict.fromkeys(shown)) == ["compiling block 1 of 2", "compiling block 2 of 2"]
