"""The plain answer to "which layout?": the one that divides the model least.

`lightning-par search` prints it beside the fastest layout. The questions and the calculator of
docs/which_layout.md give it by the same rule: the site reads `RULE`.
"""

from dataclasses import replace
from typing import get_args

from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import peak_bytes
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, Recompute

__all__ = ["RULE", "SCHEDULE", "ZERO_STAGES", "plain_layout"]

SCHEDULE = "1f1b"
"""The schedule of a plain pipeline."""

ZERO_STAGES = (1, 3)
"""Stage 2 saves memory only in a pipeline, and there stage 3 saves more."""

RULE = (
    ("divided", "least"),
    ("recompute", "least"),
    ("pipeline", "least"),
    ("context", "least"),
    ("expert", "least"),
    ("zero_stage", "least"),
    ("data_replicate", "most"),
    ("micro_batch", "most"),
)
"""What decides among the layouts that fit, the first that differs: name -> which value is taken.

``divided`` is the number of parts into which the tensor, pipeline and context axes divide the work
on one sample.
"""


def plain_layout(planner: Planner, space: LayoutSpace) -> Layout | None:
    """Return the first layout of `RULE` among those that fit.

    Its schedule is 1F1B and its ZeRO stage 1 or 3. Nothing is timed: only memory decides.

    Args:
        planner: Model, device, precision, and the share of memory that may be taken.
        space: What to choose from.

    Returns:
        The layout; None if no plain layout fits.
    """
    plain = replace(space, schedules=(SCHEDULE,), zero_stages=ZERO_STAGES)
    shape, code = planner.shape, planner.code
    for one in sorted(plain.layouts(shape), key=_order):
        if peak_bytes(shape, one, code) <= planner.limit:
            return one
    return None


def _order(one: Layout) -> tuple[int, ...]:
    sizes = one.sizes
    values = {
        "divided": sizes.tensor * sizes.pipeline * sizes.context,
        "recompute": get_args(Recompute).index(one.recompute),
        "pipeline": sizes.pipeline,
        "context": sizes.context,
        "expert": sizes.expert,
        "zero_stage": one.zero_stage,
        "data_replicate": sizes.data_replicate,
        "micro_batch": one.micro_batch,
    }
    return tuple(values[name] * (1 if end == "least" else -1) for name, end in RULE)
