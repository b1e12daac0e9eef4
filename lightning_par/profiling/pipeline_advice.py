"""What the report of a pipelined step advises: less communication, or another split."""

from lightning_par.profiling.pipeline_summary import PipelineSummary

__all__ = ["advise", "as_milliseconds", "as_percent"]

_MUCH = 0.2
"""Fraction of a stage's time from which on its communication is named."""
_CURES = {
    "tp": "a smaller tensor_parallel_size, on faster links if you can",
    "cp": "a smaller context_parallel_size",
    "ep": "a smaller expert_parallel_size",
    "dp_shard": "zero_stage=1 if that fits, or fewer and larger micro-batches",
}
"""Mesh axis -> what makes its communication inside of the stages shorter."""


def advise(found: PipelineSummary) -> list[str]:
    """Return the sentences of the report that name what would make the step shorter.

    Args:
        found: Breakdown of the step.
    """
    return [*_on_communication(found), _on_split(found)]


def as_percent(fraction: float) -> str:
    """Return a fraction as the report writes it."""
    return f"{100 * fraction:.1f} %"


def as_milliseconds(seconds: float) -> str:
    """Return a time as the report writes it."""
    return f"{1e3 * seconds:.2f} ms"


def _on_communication(found: PipelineSummary) -> list[str]:
    shares = [t.exposed / (t.compute + t.exposed) for t in found.ranks if t.compute + t.exposed]
    # In every stage: where one alone stands still, its peers come late, or the split is at fault.
    if len(shares) < len(found.ranks) or min(shares) < _MUCH:
        return []
    axes = {axis for times in found.ranks for axis in times.exposed_on}
    most = max(axes, key=lambda a: sum(times.exposed_on.get(a, 0.0) for times in found.ranks))
    cure = _CURES.get(most, f"less of what the group {most} sends inside of the blocks")
    return [
        f"Communication takes at least {as_percent(min(shares))} of the time of every stage, most "
        f"of it on {most}: no split of the blocks and no schedule makes that shorter. Try {cure}."
    ]


def _on_split(found: PipelineSummary) -> str:
    # With virtual stages a rank holds e.g. stages 0 and 2: bring the counts into stage order.
    now = [count for times in found.ranks for count in times.blocks]
    stages = [stage for times in found.ranks for stage in times.stages]
    now = [count for _, count in sorted(zip(stages, now, strict=True))]
    if found.split is None:
        return "The blocks could not be timed one by one, so no other split is suggested."
    best = list(found.split.stage_blocks)
    if best == now:
        return f"No other split of the blocks is predicted to be 5 % faster than this one, {now}."
    return (
        f"The slowest stage takes {as_percent(found.imbalance)} more than the mean. With "
        f"stage_blocks={best} instead of {now} the pipelined part of a step would take "
        f"{as_milliseconds(found.split.makespan)} instead of "
        f"{as_milliseconds(found.predicted_makespan)}, and the bubble would be "
        f"{as_percent(found.split.bubble)}, by the prediction."
    )
