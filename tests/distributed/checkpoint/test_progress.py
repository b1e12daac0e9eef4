"""Set-up, saving and resharding count exactly the bytes that they move, on rank 0 alone."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_par.checkpoint.reader import CheckpointReader
from lightning_par.models import GPTModule
from lightning_par.observe import terminal_bar
from tests.support.progress import Terminal
from tests.support.ranks.api import run_ranks
from tests.support.resharding import make_data, make_trainer, SIZES, Witness

WORLD = 2
LAYOUTS = {"file": ("tp2", "dp2 zero 3"), "folder": ("pp2", "tp2")}
"""Form of the checkpoint -> the layout that saves it, and the one that goes on."""
BARS = ["building the model", "saving a.ckpt", "verifying a.ckpt", "loading weights"]
BARS += ["loading the optimizer"]


def watch(rank: int, world: int, folder: Path, form: str, shown: bool) -> tuple[list[Any], str]:
    """Save from one layout, go on in another; give name, bytes and total of every bar, and the
    text on the terminal.
    """
    made: dict[int, Any] = {}  # by identity: tqdm compares bars by their line

    class Kept(terminal_bar._Bar):  # type: ignore[misc]
        def close(self) -> None:
            if not self.disable:
                made[id(self)] = self
            super().close()

    path, terminal = folder / "a.ckpt", Terminal()
    with (
        mock.patch.object(terminal_bar, "_Bar", Kept),
        mock.patch.object(terminal_bar, "DELAY", 0.0),
        mock.patch.object(sys, "stderr", terminal),
    ):
        for layout, steps, source in zip(LAYOUTS[form], (1, 2), (None, path), strict=True):
            limits = {"max_steps": steps, "limit_val_batches": 0, "enable_progress_bar": shown}
            options = {"trainer": limits, "checkpoint_format": form}
            callbacks = [Witness(1, path), *([TQDMProgressBar()] if shown else [])]
            trainer = make_trainer(layout, world, callbacks, **options)
            data = make_data(folder, 2 if layout.startswith("dp2") else 1)
            trainer.fit(GPTModule(overrides=SIZES), datamodule=data, ckpt_path=source)
    return [(bar.desc, bar.n, bar.total) for bar in made.values()], terminal.getvalue()


def assert_silent(found: tuple[list[Any], str]) -> None:
    bars, text = found
    assert bars == []
    assert not any(name in text for name in BARS)


def test_bars_move_to_exactly_their_bytes_and_are_off_with_those_of_lightning(
    tmp_path: Path,
) -> None:
    for form in ("file", "folder"):
        folder = tmp_path / form
        folder.mkdir()
        (bars, text), second = run_ranks(watch, WORLD, folder, form, True, timeout=120)
        assert_silent(second)
        assert list(dict.fromkeys(name for name, *_ in bars)) == BARS
        for name, moved, total in bars:
            assert moved == total > 0, (form, name)
            assert name in text
        index = CheckpointReader(folder / "a.ckpt").index
        found = {name: moved for name, moved, _ in bars}
        states = sum(entry.numel * entry.dtype.itemsize for entry in index.optimizer.values())
        weights = sum(entry.numel * entry.dtype.itemsize for entry in index.weights.values())
        # Two ranks share the work, and neither has much more of it.
        assert 0.4 < found["saving a.ckpt"] / (weights + states) < 0.6
        assert 0.4 < found["loading the optimizer"] / states < 0.6
    silent = run_ranks(watch, WORLD, tmp_path, "file", False, timeout=120)
    for found in silent:
        assert_silent(found)
