"""`IslandMonitor`: what islands send each other, how long they wait for it, and how they agree."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_par.callbacks.last_picture import last_picture
from lightning_par.engine.data.islands.client import Exchange
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.picture_file import check_picture_path, picture_file, TEXT_COLOR
from lightning_par.strategies import MeshStrategy

__all__ = ["IslandMonitor"]

_THERE, _LATE = "#4477aa", "#ccbb44"


class IslandMonitor(Callback):
    """Monitor of the exchanges of an island, which logs each of them, and draws them at the end.

    - ``islands/rounds``: exchanges of this island so far, of all fragments
    - ``islands/contributing``: islands whose movements made up the update
    - ``islands/late``: islands that were live, but too late for it
    - ``islands/staleness``: updates by others since this island took its base
    - ``islands/wait``: seconds that training waited for the update
    - ``islands/norm``: mean length of the movements
    - ``islands/agreement``: mean cosine between a movement and the mean of all, -1 to 1
    - ``islands/bytes_sent``: bytes that this rank has sent so far
    - ``islands/bytes_received``: bytes that it has received so far

    Only the first island has loggers. At the end of training it draws ``islands.png``: which island
    contributed to which update, and the agreement.

    Args:
        path: File of the picture (.png, .svg or .pdf); None: ``islands.png`` in the folder of the
            Trainer's logger.

    Attributes:
        exchanges: All exchanges of this rank in the last fit.

    Raises:
        ConfigurationError: At the start of training, if there are no islands.

    Examples:
        >>> trainer = L.Trainer(strategy="islands", callbacks=[IslandMonitor("islands.svg")])
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.exchanges: list[Exchange] = []
        self._logged = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if there are no islands, and begin anew."""
        strategy = trainer.strategy
        if not isinstance(strategy, MeshStrategy) or strategy.islands is None:
            raise ConfigurationError(
                "LP917",
                "the callback IslandMonitor needs a strategy with islands, but "
                f"{type(strategy).__name__} trains no islands. Use strategy='islands', pass outer= "
                "to a strategy of lightning_par, or remove the callback.",
            )
        self.exchanges, self._logged = strategy.islands.exchanges, 0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the exchanges of this step, if there were any."""
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        client = None if strategy.islands is None else strategy.islands.client
        if client is None or self._logged == len(self.exchanges):
            return
        self._logged = len(self.exchanges)
        last = self.exchanges[-1]
        values = {
            "rounds": client.rounds,
            "contributing": len(last.islands),
            "late": len(last.late),
            "staleness": last.staleness,
            "wait": last.waited,
            "norm": fmean([seen.norm for seen in last.movements] or [0.0]),
            "agreement": fmean([seen.agreement for seen in last.movements] or [0.0]),
            "bytes_sent": client.sent,
            "bytes_received": client.received,
        }
        named = {f"islands/{name}": float(value) for name, value in values.items()}
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in named.items()})
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the exchanges, on the first rank of the first island."""
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        leads = trainer.is_global_zero and strategy.processes.island == 0
        draws = leads and any(exchange.islands for exchange in self.exchanges)
        path = last_picture(trainer, self.path, "islands.png", draws=draws)
        if path is not None:
            _draw_rounds(self.exchanges, path)


def _draw_rounds(exchanges: Sequence[Exchange], path: Path) -> None:
    """Draw the islands of every update as rows of dots over the steps, and their agreement below.

    Args:
        exchanges: Those of one island.
        path: File to write; the suffix (.png, .svg or .pdf) says the format.

    Raises:
        ConfigurationError: The suffix is not one of the three.
    """
    path = check_picture_path(path)
    # Exchanges at which no answer came have none.
    known = [exchange for exchange in exchanges if exchange.islands]
    islands = sorted({i for exchange in known for i in [*exchange.islands, *exchange.late]})
    rows = 0.4 + 0.22 * len(islands)
    with picture_file(path, (8.0, 1.4 + rows), font=8) as figure:
        above, below = figure.subplots(2, sharex=True, height_ratios=[rows, 0.9])
        for color, label, of in ((_THERE, "contributed", "islands"), (_LATE, "late", "late")):
            dots = [(e.step, i) for e in known for i in getattr(e, of)]
            places = zip(*dots, strict=True) if dots else ((), ())
            above.scatter(*places, s=9, c=color, label=label)
        above.set_yticks(islands, [f"island {i}" for i in islands])
        above.set_ylim(max(islands) + 0.6, min(islands) - 0.6)
        above.legend(loc="lower right", ncols=2, frameon=False, bbox_to_anchor=(1, 1))
        agreement = [fmean(seen.agreement for seen in e.movements) for e in known]
        below.plot([e.step for e in known], agreement, color=_THERE, linewidth=1)
        below.set_ylabel("agreement", color=TEXT_COLOR)
        below.set_xlabel("optimizer step of this island", color=TEXT_COLOR)
        title = "Which islands an update is made of"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=TEXT_COLOR)
