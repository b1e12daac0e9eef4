"""Draws pictures of the documentation from the engine's own data; draw_*.py draw the others.

python docs/drawing/draw.py            writes docs/pictures/*.svg
python docs/drawing/draw.py --out DIR --suffix .png
"""

from collections.abc import Callable
from pathlib import Path

import facts
from canvas import (
    arrow,
    BLUE,
    box,
    canvas,
    GREEN,
    GREY,
    heat,
    INK,
    ORANGE,
    PALE,
    save,
    SOFT,
    write,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_par.engine.collectives import split_sizes
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.plan.resolved_plan import balance_blocks
from lightning_par.profiling.timeline_plot import draw_timeline
from lightning_par.sizes import ParallelSizes

COLUMNS = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
SHORT = {name: name.replace("blocks.", "block ") for name in COLUMNS}


def who_holds_what() -> Figure:
    sizes = ParallelSizes(pipeline=2, data_shard=2, tensor=2)
    model, layout, _ = facts.tiny_gpt()
    bounds = balance_blocks(layout, sizes.pipeline)
    counts = facts.parameters_per_rank(sizes)
    figure, axes = canvas(10, 5.6, title="Who holds what: 8 ranks, tp 2 x pp 2 x dp 2")
    left, cell, height, row = 2.5, 0.72, 0.36, 0.47
    for column, name in enumerate(COLUMNS):
        x = left + (column + 0.5) * cell
        write(axes, x, 0.78, SHORT[name], ha="center", size=8.5)
    ranks = sorted(range(sizes.world_size), key=lambda r: (sizes.data_rank(r), r))
    for line, rank in enumerate(ranks):
        place, replica = sizes.coordinates(rank), sizes.data_rank(rank)
        y = 1.0 + line * row + 0.14 * replica
        color = (BLUE, ORANGE)[place["pp"]]
        write(axes, 1.35, y + height / 2, f"rank {rank}", weight="bold")
        write(axes, 1.93, y + height / 2, f"pp {place['pp']}", size=8, color=color)
        if line % 4 == 0:
            axes.plot([1.2, 1.2], [y, y + 3 * row + height], color=GREY, lw=1.5)
            write(axes, 0.2, y + 1.5 * row, f"replica {replica}", weight="bold")
            write(axes, 0.2, y + 1.5 * row + 0.2, "its own samples", size=7.5, color=SOFT)
        for column, name in enumerate(COLUMNS):
            x, wide = left + column * cell + 0.03, cell - 0.06
            if place["pp"] not in layout.stages_of(name, bounds):
                box(axes, x, y, wide, height, edge=PALE[GREY])
                continue
            whole = layout.styles.get(name) == "sequence_parallel"
            box(axes, x, y, wide, height, fill=color if whole else PALE[color])
            if not whole:
                box(axes, x, y + place["tp"] * height / 2, wide, height / 2, fill=color)
        x = left + len(COLUMNS) * cell + 0.15
        write(axes, x, y + height / 2 - 0.08, f"{counts[rank]:,} parameters", size=8)
        share = f"optimizer states of half of them (dp_shard {place['dp_shard']})"
        write(axes, x, y + height / 2 + 0.09, share, size=6.6, color=SOFT)
    notes = (
        "Filled: held by this rank; upper half for tp 0, lower half for tp 1. Norms are whole. "
        "Empty: on the other stage.\n"
        "embed and head are one tied weight: both stages hold their half of it and sum its "
        "gradient. ZeRO stage 1 (the default)\n"
        f"shards the optimizer states over the replicas. The model has {model.num_parameters:,} "
        "parameters (preset tiny)."
    )
    write(axes, 0.2, 5.22, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


CELLS = {
    "here": ("runs here", BLUE, "white"),
    "EarlierBlock": ("stub", PALE[ORANGE], INK),
    "LaterBlock": ("stub: ends\nthe step", PALE[ORANGE], INK),
    "Absent": ("not reached", PALE[GREY], SOFT),
    "Ghost": ("shape only,\nNaN", PALE[GREY], SOFT),
}


def stage_cell(kinds: list[str], column: int) -> tuple[str, str, str]:
    """Label, fill and ink of what a stage does at a module."""
    kind = kinds[column]
    if kind == "EarlierBlock" and kinds[column + 1] != kind:
        return ("stub: gives\nactivations", *CELLS[kind][1:])
    if kind == "LaterBlock" and kinds[column - 1] == kind:
        return CELLS["Absent"]
    return CELLS[kind]


def stages() -> Figure:
    count = 2
    figure, axes = canvas(
        10, 3.15, title="One micro-batch, two stages: both run the same training_step"
    )
    left, cell = 1.1, 0.98
    headings = [*(SHORT[n] for n in COLUMNS), "loss, self.log"]
    for column, name in enumerate(headings):
        write(axes, left + (column + 0.47) * cell, 0.75, name, ha="center", size=8.5)
    ends = []
    for stage in range(count):
        y = 1.0 + 0.95 * stage
        kinds = list(facts.stage_modules(stage, count, COLUMNS).values())
        write(axes, 0.2, y + 0.25, f"stage {stage}", weight="bold")
        last = CELLS["here"] if stage == count - 1 else CELLS["Absent"]
        for column in range(len(headings)):
            inside = column < len(COLUMNS)
            text, fill, ink = stage_cell(kinds, column) if inside else last
            x = left + column * cell
            box(axes, x, y, cell - 0.06, 0.5, fill=fill)
            write(axes, x + cell / 2 - 0.03, y + 0.25, text, ha="center", size=7.5, color=ink)
        here = [c for c, k in enumerate(kinds) if k == "here" and "block" in COLUMNS[c]]
        ends.append(here[-1])
    x = left + (ends[0] + 0.47) * cell
    arrow(axes, (x - 0.12, 1.5), (x - 0.12, 1.95), BLUE)
    arrow(axes, (x + 0.12, 1.95), (x + 0.12, 1.5), ORANGE)
    write(axes, x - 0.24, 1.72, "activations", size=8, ha="right", color=BLUE)
    write(axes, x + 0.24, 1.72, "gradients", size=8, color=ORANGE)
    notes = (
        "The stub before the first local block returns the received activations. The stub after "
        "the last local block ends the step\n"
        "on this stage. If a step uses a value of another stage by mistake, this value is NaN, and "
        "so is the loss."
    )
    write(axes, 0.2, 2.8, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


def draw_collectives(axes: Axes, pitch: float) -> None:
    """The bars between the steps at which the ranks of a block talk."""
    for after, text, color in (
        (0, "all-gather", ORANGE),
        (2, "reduce-scatter", BLUE),
        (4, "all-gather", ORANGE),
        (6, "reduce-scatter", BLUE),
    ):
        x = 0.95 + (after + 0.5) * pitch
        box(axes, x - 0.09, 1.1, 0.18, 2.4, fill=PALE[color])
        write(axes, x, 2.3, text, ha="center", size=7.6, rotation=90)


def tensor_parallel() -> Figure:
    shapes, volume = facts.activation_shapes()
    figure, axes = canvas(
        10, 4.1, title="Tensor parallelism of one block: activations on each of two ranks"
    )
    steps = [
        ("norm", "attention_norm.out", BLUE, "D"),
        ("into query, key,\nvalue (colwise)", "attention.query.in", ORANGE, "D"),
        ("attention on\nN/tp heads", "attention.out.in", GREEN, "D/tp"),
        ("out (rowwise)", "attention.out.out", BLUE, "D"),
        ("norm", "mlp_norm.out", BLUE, "D"),
        ("into up, gate\n(colwise)", "mlp.up.in", ORANGE, "D"),
        ("silu(gate) * up", "mlp.down.in", GREEN, "F/tp"),
        ("down (rowwise)", "mlp.down.out", BLUE, "D"),
    ]
    pitch, tall, wide, tokens = 1.2, 1.05, 0.62 / 64, facts.TOKENS
    for number, (name, key, color, features) in enumerate(steps):
        x = 0.95 + number * pitch
        write(axes, x, 0.82, name, ha="center", size=7.6)
        shape = shapes[key]
        length, dim = shape[1], shape[2]
        for rank in range(2):
            y = 1.15 + rank * 1.25
            offset = rank * tall / 2 if length < tokens else 0.0
            w, h = dim * wide, tall * length / tokens
            box(axes, x - w / 2, y + offset, w, h, fill=color)
            label = f"{'T' if length == tokens else 'T/tp'} x {features}"
            turn = 90 if w < 0.5 else 0
            at = (x, y + offset + h / 2)
            write(axes, *at, label, ha="center", size=7.4, color="white", rotation=turn)
    for rank in range(2):
        write(axes, 0.12, 1.15 + rank * 1.25 + tall / 2, f"rank {rank}", size=8, rotation=90)
    draw_collectives(axes, pitch)
    size = facts.BATCH * tokens * shapes["mlp_norm.out"][2] * 4
    gathers, scatters = (volume.total(operation=o) for o in ("all_gather", "reduce_scatter"))
    notes = (
        f"Counted in the block's forward: {gathers.calls} all-gathers and {scatters.calls} "
        f"reduce-scatters of B x T x D = {size:,} bytes each (B {facts.BATCH}, T {tokens}, D "
        f"{shapes['mlp_norm.out'][2]}, float32);\na rank sends {gathers.sent + scatters.sent:,} "
        "bytes, (tp-1)/tp of them. The backward swaps the two operations and sends as much."
    )
    write(axes, 0.2, 3.8, notes, size=8, color=SOFT, linespacing=1.4)
    return figure


# What the docstring of engine/data/fsdp.py says: parameters, gradients, optimizer states.
DURING = {
    0: ("whole", "whole", "whole"),
    1: ("step", "step", "share"),
    2: ("step", "block", "share"),
    3: ("block", "block", "share"),
}
SAYS = {
    "whole": "always whole",
    "step": "whole during a step",
    "block": "one block at a time is whole",
    "share": "never whole",
}


def draw_shares(axes: Axes, y: float, stage: int, found: facts.ZeroFacts) -> None:
    """What both ranks hold of parameters, gradients and optimizer states."""
    for column, state in enumerate(DURING[stage]):
        x = 1.15 + 1.85 * column
        held = found.held if state != "whole" else 1.0
        color = (BLUE, ORANGE, GREEN)[column]
        for rank in range(2):
            wide, top = 1.5, y + 0.18 * rank
            pale = PALE[color] if state == "step" else PALE[GREY]
            box(axes, x, top, wide, 0.14, fill=pale)
            start = rank * held if held < 1 else 0.0
            box(axes, x + start * wide, top, wide * held, 0.14, fill=color)
        write(axes, x, y + 0.43, SAYS[state], size=7.2, color=SOFT)


def draw_traffic(axes: Axes, y: float, found: facts.ZeroFacts) -> None:
    """What a rank sends in a step."""
    x = 6.85
    for operation, color in (
        ("all_gather", BLUE),
        ("reduce_scatter", ORANGE),
        ("all_reduce", GREY),
    ):
        if operation in found.sent:
            wide = 0.62 * found.sent[operation]
            box(axes, x, y + 0.02, wide, 0.26, fill=color)
            text = f"{found.sent[operation]:.2f}"
            write(axes, x + wide / 2, y + 0.15, text, ha="center", size=7.5, color="white")
            x += wide + 0.02
    write(axes, x + 0.06, y + 0.15, f"{sum(found.sent.values()):.2f} P", size=8)


def data_parallel() -> Figure:
    figure, axes = canvas(10, 4.05, title="What two replicas keep, and send, at each ZeRO stage")
    heads = ("parameters", "gradients", "optimizer states")
    for column, head in enumerate(heads):
        write(axes, 1.15 + 1.85 * column, 0.72, head, weight="bold", size=8.5)
    write(axes, 6.85, 0.72, "sent by a rank in a step of 2 micro-batches", weight="bold", size=8.5)
    for stage in range(4):
        y, found = 0.95 + 0.66 * stage, facts.zero_facts(stage)
        write(axes, 0.2, y + 0.16, f"stage {stage}", weight="bold")
        draw_shares(axes, y, stage, found)
        draw_traffic(axes, y, found)
    x = 6.85
    for text, color, wide in (
        ("all-gather", BLUE, 0.95),
        ("reduce-scatter", ORANGE, 1.2),
        ("all-reduce", GREY, 0.9),
    ):
        box(axes, x, 3.6, 0.14, 0.14, fill=color)
        write(axes, x + 0.19, 3.67, text, size=7.5)
        x += wide
    notes = (
        "Each pair of bars: rank 0 and rank 1. Filled: what a rank keeps. Pale color: kept only "
        "until\nthe last backward. P: the bytes of all parameters. The bytes sent were counted on "
        "the\nsmallest reference model."
    )
    write(axes, 0.2, 3.72, notes, size=7.8, color=SOFT, linespacing=1.4)
    return figure


def initialization() -> Figure:
    name = "blocks.0.attention.query.weight"
    values = facts.initial_values(name, 1, model_dim=12, num_heads=2, num_kv_heads=2)
    figure, axes = canvas(10, 3.95, title="Initialization: one seed, the same weights on any mesh")
    steps = (
        ("1  build", "The constructor runs with\nparameters on meta, without\nmemory. A tape "
         "records what it\ndoes to each parameter."),
        ("2  seed", f"A rank takes one of the\nparameters that it holds:\n{name}\n"
         "seed = hash(run seed, name)"),
        ("3  replay", "The rank replays the tape\nwith this seed on its device;\nthis gives the "
         "whole value of\nthis one parameter."),
        ("4  cut", "The rank keeps its tp shard.\nA complete block is then\ncut over dp_shard."),
    )  # fmt: skip
    for number, (head, text) in enumerate(steps):
        y = 0.82 + 0.72 * number
        write(axes, 0.2, y, head, weight="bold", size=8.5)
        write(axes, 1.05, y - 0.06, text, size=7, va="top", linespacing=1.25)
    size = 0.165
    x, y = 3.1, 1.0
    write(axes, x, 0.82, "1 device", weight="bold", size=8.5)
    heat(axes, values, x, y, size)
    x += 12 * size + 0.3
    write(axes, x, 0.82, "tp 2", weight="bold", size=8.5)
    parts = values.split(split_sizes(values.shape[0], 2))
    for rank, part in enumerate(parts):
        top = y + rank * (6 * size + 0.16)
        heat(axes, part, x, top, size)
        write(axes, x, top + 6 * size + 0.08, f"rank {rank}", size=6.5, color=SOFT)
    x += 12 * size + 0.3
    write(axes, x, 0.82, "dp_shard 3", weight="bold", size=8.5)
    for rank, part in enumerate(values.split(split_sizes(values.shape[0], 3))):
        top = y + rank * (4 * size + 0.16)
        heat(axes, part, x, top, size)
        write(axes, x, top + 4 * size + 0.08, f"rank {rank}", size=6.5, color=SOFT)
    note = "The engine's values for seed 1 and a weight of 12 x 12. Blue: below 0, orange: above."
    write(axes, 3.1, 3.75, note, size=8, color=SOFT)
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "data_parallel": data_parallel,
    "initialization": initialization,
    "stages": stages,
    "tensor_parallel": tensor_parallel,
    "who_holds_what": who_holds_what,
}


def draw_simulated_step(path: Path) -> None:
    """The picture of `draw_timeline`, of a step in which the stages have 4, 3 and 5 blocks."""
    blocks = [4, 3, 5]
    simulation = simulate(
        build_schedule("1f1b", 3, 6), forward=blocks, backward=[2 * n for n in blocks], p2p=0.5
    )
    labels = [f"stage {stage}, {n} blocks" for stage, n in enumerate(blocks)]
    draw_timeline(simulation.events, path, title="Simulated step", unit="slots", labels=labels)


if __name__ == "__main__":
    options = save(PICTURES, __doc__)
    draw_simulated_step(options.out / f"timeline{options.suffix}")
