"""A file of a picture, drawn with matplotlib, which is optional."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_par.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["TEXT_COLOR", "check_picture_path", "picture_file"]

TEXT_COLOR = "#2b2f36"
_SUFFIXES = (".pdf", ".png", ".svg")


def check_picture_path(path: str | Path) -> Path:
    """Return the path of a picture.

    Raises:
        ConfigurationError: Its suffix says no format that is drawn.
    """
    path = Path(path)
    if path.suffix not in _SUFFIXES:
        valid = ", ".join(_SUFFIXES)
        raise ConfigurationError(
            "LP906", f"path={str(path)!r} must have one of the suffixes {valid}."
        )
    return path


@contextmanager
def picture_file(path: Path, size: tuple[float, float], *, font: float) -> Iterator["Figure"]:
    """Surrounds the drawing of a figure, which is saved at the end.

    The same drawing gives the same file: an SVG has fixed ids, and no date.

    Args:
        path: File to write; see `check_picture_path`.
        size: Width and height in inches.
        font: Size of the text in points.

    Yields:
        The empty figure.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            "LP909",
            "Drawing a picture needs matplotlib. Install it with: pip install "
            '"lightning-par[plot]"',
        ) from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lightning-par", "font.size": font}):
        figure = Figure(figsize=size, dpi=150)
        figure.set_layout_engine("constrained")
        yield figure
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
