"""Predictions as text for people and as plain values for JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_par.planner.search import Candidate, SearchResult

__all__ = ["as_values", "describe", "format_rejections", "format_table"]

_GIB, _GB = 2**30, 1e9
_NAMES = {"moment": "block, logits"}
"""What only the block at work needs, or the loss after the blocks."""
_HEAD = ("step, s", "tokens/s", "MFU", "GiB", "bubble", "layout")
_BAR = 40
"""Characters of the longest bar."""


def format_table(candidates: Sequence[Candidate]) -> str:
    """Return a table with a line for each layout: time, speed, memory of the fullest rank, bubble.

    Args:
        candidates: At least one.
    """
    rows = [_HEAD, *map(_row, candidates)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD) - 1)]
    lines = (
        "  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[-1]])
        for row in rows
    )
    return "\n".join(lines)


def _row(one: Candidate) -> tuple[str, ...]:
    return (
        f"{one.time.seconds:.4g}",
        f"{one.tokens_per_second:,.0f}",
        f"{one.mfu:.1%}",
        f"{one.memory.peak / _GIB:.1f}",
        f"{one.time.bubble:.1%}",
        str(one.layout),
    )


def describe(one: Candidate) -> str:
    """Return where time and memory go, and the bytes that a rank sends by axis."""
    rank = one.memory.peak_rank
    held = one.memory.ranks[rank].items()
    memory = {_NAMES.get(name, name): size / _GIB for name, size in held}
    traffic = {axis: size / _GB for axis, size in one.traffic.items()}
    lines = [
        "time of a step, s:",
        *_bars(one.time.parts),
        f"memory of the fullest rank, pipeline rank {rank}, GiB:",
        *_bars(memory),
        "sent by a rank in a step, GB:",
        *_bars(traffic),
    ]
    if one.memory.host:
        lines.append(
            f"memory of the host, for each of its devices: {one.memory.host / _GIB:.1f} GiB"
        )
    layout = one.layout
    if layout.sizes.pipeline > 1:
        # Unequal stages only: an even split is what the strategy makes by itself.
        if len(set(layout.split(sum(layout.blocks)))) > 1:
            lines.append(f"blocks of each stage: {' '.join(map(str, layout.blocks))}")
        lines.append("draw it, with these times: --picture pipeline.svg")
    return "\n".join(lines)


def _bars(values: Mapping[str, float]) -> Iterator[str]:
    shown = {name: value for name, value in values.items() if value > 0}
    width = max(map(len, shown), default=0)
    whole = sum(shown.values())
    for name, value in shown.items():
        share = value / whole
        bar = "#" * round(_BAR * share)
        yield f"  {name:<{width}}  {value:10.4g}  {share:6.1%}  {bar}".rstrip()


def format_rejections(result: SearchResult) -> str:
    """Return a line for every neighbor of the chosen layout: what it changes, and why it lost."""
    width = max((len(one.change) for one in result.rejections), default=0)
    return "\n".join(f"  {one.change:<{width}}  {one.reason}" for one in result.rejections)


def as_values(one: Candidate) -> dict[str, Any]:
    """Return a candidate as what JSON can hold; seconds, bytes and fractions."""
    return {
        "layout": asdict(one.layout),
        "seconds": one.time.seconds,
        "tokens_per_second": one.tokens_per_second,
        "mfu": one.mfu,
        "bubble": one.time.bubble,
        "time": dict(one.time.parts),
        "peak_rank": one.memory.peak_rank,
        "peak_bytes": one.memory.peak,
        "memory": dict(one.memory.ranks[one.memory.peak_rank]),
        "host_bytes": one.memory.host,
        "traffic": dict(one.traffic),
    }
