"""Drawing which islands contributed to which updates, and how much they agreed."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from lightning_par.engine.data.islands.client import Exchange
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.picture_file import check_picture_path, picture_file, TEXT_COLOR

__all__ = ["draw_rounds"]

_THERE, _LATE = "#4477aa", "#ccbb44"


def draw_rounds(exchanges: Sequence[Exchange], path: str | Path, *, width: float = 8.0) -> Path:
    """Draw the islands of every update as rows of dots over the steps, and their agreement below.

    Args:
        exchanges: Those of one island.
        path: File to write; the suffix (.png, .svg or .pdf) says the format.
        width: Width of the picture in inches.

    Returns:
        `path`.

    Raises:
        ConfigurationError: matplotlib is not installed, the suffix is not one of the three, or
            there is nothing to draw.
    """
    path = check_picture_path(path)
    # Exchanges at which no answer came have none.
    known = [exchange for exchange in exchanges if exchange.islands]
    if not known:
        raise ConfigurationError("LP906", "There is no exchange of islands to draw.")
    islands = sorted({i for exchange in known for i in [*exchange.islands, *exchange.late]})
    rows = 0.4 + 0.22 * len(islands)
    with picture_file(path, (width, 1.4 + rows), font=8) as figure:
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
    return path
