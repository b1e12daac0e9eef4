"""Numbers of bytes as people read them."""

__all__ = ["in_words"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def in_words(size: float, places: int = 1) -> str:
    """Return bytes as people read them, such as ``1.5 GiB``, with so many decimal places."""
    power = 0
    while abs(size) >= 1024 and power < len(_UNITS) - 1:
        size, power = size / 1024, power + 1
    return f"{size:.{places}f} {_UNITS[power]}" if power else f"{size:.0f} B"
