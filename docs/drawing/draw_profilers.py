"""Draws what PipelineProfiler says of a step; the options are those of draw.py."""

from canvas import BLUE, canvas, GREY, ORANGE, PALE, save, SOFT, write
from draw_schedules import draw_grid, draw_keys, percent, WIDE
from matplotlib.figure import Figure

from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate, Simulation
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import balance_blocks, ResolvedPlan
from lightning_par.profiling.pipeline_record import StepRecord
from lightning_par.profiling.pipeline_summary import PipelineSummary, summarize_pipeline

BLOCKS, STAGES, MICRO_BATCHES, MESSAGE, HEAD = 12, 3, 6, 0.5, 2.0
SCHEDULE = build_schedule("1f1b", STAGES, MICRO_BATCHES)
LAYOUT = ResolvedPlan(
    plan=ParallelPlan(),
    block_names=tuple(f"blocks.{number}" for number in range(BLOCKS)),
    block_weights=(1,) * BLOCKS,
    edge_weights=(0, 0),
    units={},
    canonical={},
    styles={},
    divided={},
)


def run(counts: tuple[int, ...], p2p: float) -> Simulation:
    """Simulate stages of so many blocks of 1 slot; what follows the blocks takes `HEAD`."""
    forward = [float(count) for count in counts]
    forward[-1] += HEAD
    return simulate(SCHEDULE, forward=forward, backward=[2 * f for f in forward], p2p=p2p)


def summarize(step: Simulation) -> PipelineSummary:
    """Give a simulated step to the profiler as if it had been measured."""
    bounds = balance_blocks(LAYOUT, STAGES)
    records = [
        StepRecord(
            step=0,
            start=0.0,
            end=step.makespan,
            actions=row,
            waits=(0.0,) * len(row),
            transfers=(),
            entries=(),
            expected=(),
            blocks=dict.fromkeys(range(*bounds[rank]), 1.0),
        )
        for rank, row in enumerate(step.events)
    ]
    return summarize_pipeline(records, LAYOUT, bounds)


def profilers() -> Figure:
    counts = tuple(hi - lo for lo, hi in balance_blocks(LAYOUT, STAGES))
    measured = run(counts, MESSAGE)
    found = summarize(measured)
    assert found.split is not None
    better = run(found.split.stage_blocks, 0.0)
    figure, axes = canvas(10, 5.35, title="What the profiler says about a step")
    rows = (
        (f"measured, blocks {list(counts)}: bubble", measured, found.bubble),
        ("predicted, with the same times and without messages: bubble", found.simulation, None),
        (f"suggested, stage_blocks={list(found.split.stage_blocks)}: bubble", better, None),
    )
    unit, top = WIDE / measured.makespan, 0.85
    for text, simulation, bubble in rows:
        share = simulation.bubble if bubble is None else bubble
        write(axes, 0.2, top - 0.15, f"{text} {percent(share)}", weight="bold")
        draw_grid(axes, simulation.events, top, unit, "stage")
        end = 0.85 + simulation.makespan * unit
        write(axes, end + 0.08, top + 0.5, f"{simulation.makespan:g} slots", size=8, color=SOFT)
        top += 1.45
    keys = ((0.85, BLUE, "forward"), (1.95, ORANGE, "backward"), (3.15, PALE[GREY], "idle"))
    draw_keys(axes, top - 0.12, keys)
    note = (
        f"A block takes 1 slot, the head {HEAD:g}, a message {MESSAGE:g}; a backward takes twice "
        "as long as a forward.\nThe suggestion gives the last stage fewer blocks, because it has "
        f"the head (imbalance: {percent(found.imbalance)})."
    )
    write(axes, 4.0, top - 0.1, note, size=7.6, color=SOFT, linespacing=1.4)
    return figure


if __name__ == "__main__":
    save({"profilers": profilers}, __doc__)
