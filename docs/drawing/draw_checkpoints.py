"""Draws which rank writes and reads which part of a checkpoint; the options are those of draw.py.

The parts are those that the package's own functions give: how shards are cut, who writes what
several ranks hold, and which stored parts a rank of another layout needs.
"""

from canvas import arrow, BLUE, box, canvas, GREEN, GREY, ORANGE, PALE, save, SOFT, write
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_par.checkpoint.index import Chunk, file_name
from lightning_par.checkpoint.pieces import assign_writers
from lightning_par.checkpoint.tensor_files import overlap
from lightning_par.dtensor import Box, cut_box
from lightning_par.mesh import ParallelSizes

WRITERS = ParallelSizes(data_shard=2, tensor=2)
READERS = 3
SHAPES = {"query.weight": (12, 12), "norm.weight": (12,), "loss_scale": ()}
COLORS = (BLUE, ORANGE, GREEN, GREY)
UNIT, TOP = 0.2, 1.5


def box_of(name: str, rank: int) -> Box:
    """What a rank of tp 2 x dp 2 holds: matrices are cut twice, vectors by the replicas only."""
    shape, place = SHAPES[name], WRITERS.coordinates(rank)
    cuts = [(0, WRITERS.data_shard, place["dp_shard"])] if shape else []
    if len(shape) == 2:
        cuts.insert(0, (0, WRITERS.tensor, place["tp"]))
    return cut_box(name, shape, cuts)


def stored_chunks() -> dict[str, list[Chunk]]:
    """Every part in the checkpoint, in the file of the rank that writes it."""
    held = [[box_of(name, rank) for name in SHAPES] for rank in range(WRITERS.world_size)]
    sizes = [[(b, 4 * b.shape[0] if b.shape else 4) for b in boxes] for boxes in held]
    found: dict[str, list[Chunk]] = {name: [] for name in SHAPES}
    for rank, boxes in enumerate(assign_writers(sizes)):
        for b in sorted(boxes, key=lambda b: b.name):
            file = file_name("weights", rank, WRITERS.world_size)
            found[b.name].append(Chunk(file, b.name, b.offset, b.shape))
    return found


def writer_of(chunk: Chunk) -> int:
    return int(chunk.file.split("-")[1])


def draw_part(axes: Axes, x: float, chunk: Chunk, low: int, high: int, text: str) -> None:
    """Rows `low` to `high` of a tensor that is drawn with its first row at the top."""
    wide = 1.6 if len(chunk.shape) == 2 else 0.5
    y, height = TOP + low * UNIT, (high - low) * UNIT
    color = COLORS[writer_of(chunk)]
    box(axes, x, y, wide, height, fill=PALE[color])
    box(axes, x, y, 0.12, height, fill=color)
    write(axes, x + 0.19, y + height / 2, text, size=7.5)


def checkpoints() -> Figure:  # house: a picture is drawn from the top to the bottom
    figure, axes = canvas(10, 4.9, title="One checkpoint: written by tp 2 x dp 2, read by dp 3")
    chunks = stored_chunks()
    write(axes, 0.2, 0.75, "Written: every part by one rank", weight="bold")
    write(
        axes,
        0.2,
        1.0,
        "rows are cut over tp, then over the replicas; each part is written once",
        size=8,
        color=SOFT,
    )
    columns = {"query.weight": 0.2, "norm.weight": 2.1}
    for name, x in columns.items():
        write(axes, x, 1.3, f"{name} {list(SHAPES[name])}", size=8)
        for chunk in chunks[name]:
            low = chunk.offset[0]
            label = f"rank {writer_of(chunk)}" if name == "query.weight" else str(writer_of(chunk))
            draw_part(axes, x, chunk, low, low + chunk.shape[0], label)
    write(axes, 3.75, 0.75, "Stored", weight="bold")
    for rank in range(WRITERS.world_size):
        y = TOP + 0.6 * rank
        box(axes, 3.75, y, 2.75, 0.44, fill=PALE[COLORS[rank]])
        box(axes, 3.75, y, 0.12, 0.44, fill=COLORS[rank])
        write(axes, 3.95, y + 0.14, file_name("weights", rank, WRITERS.world_size), size=7.5)
        inside = [c.key for entry in chunks.values() for c in entry if writer_of(c) == rank]
        write(axes, 3.95, y + 0.32, ", ".join(inside), size=6.6, color=SOFT)
    for row, name in enumerate(("index.json", "manifest.json")):
        y = TOP + 2.45 + 0.3 * row
        box(axes, 3.75, y, 2.75, 0.24, fill=PALE[GREY], edge=GREY)
        what = ("names, shapes, parts", "length and checksum of every file")[row]
        write(axes, 3.82, y + 0.12, f"{name}: {what}", size=6.8)
    arrow(axes, (2.8, TOP + 1.2), (3.65, TOP + 1.2), GREY)
    arrow(axes, (6.6, TOP + 1.2), (7.35, TOP + 1.2), GREY)
    write(axes, 7.4, 0.75, "Read: what a rank needs", weight="bold")
    write(axes, 7.4, 1.0, "query.weight, zero 3 over 3 replicas", size=8, color=SOFT)
    for reader in range(READERS):
        wanted = cut_box("query.weight", SHAPES["query.weight"], [(0, READERS, reader)])
        for chunk in chunks["query.weight"]:
            common = overlap(chunk, wanted.offset, wanted.shape)
            if common is not None:
                low, high = common[0]
                shift = 0.12 * reader
                y = TOP + low * UNIT + shift
                color = COLORS[writer_of(chunk)]
                box(axes, 8.0, y, 1.6, (high - low) * UNIT, fill=PALE[color])
                box(axes, 8.0, y, 0.12, (high - low) * UNIT, fill=color)
                rows = f"row {low}" if high == low + 1 else f"rows {low} to {high - 1}"
                text = f"{rows}, file {writer_of(chunk)}"
                write(axes, 8.19, y + (high - low) * UNIT / 2, text, size=7)
        middle = wanted.offset[0] + wanted.shape[0] / 2
        write(axes, 7.4, TOP + middle * UNIT + 0.12 * reader, f"rank {reader}", size=8.5)
    note = (
        "Names and shapes are as in a run on one process: a reader need not know the layout of "
        "the writers. "
        "Optimizer states are stored in the same way."
    )
    write(axes, 0.2, 4.7, note, size=7.5, color=SOFT)
    return figure


if __name__ == "__main__":
    save({"checkpoints": checkpoints}, __doc__)
