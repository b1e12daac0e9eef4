"""Runs without a fault, in which nothing may be told."""

from typing import Any

from benchmarks.mutations import layouts
from benchmarks.mutations.fault import Fault

__all__ = ["HEALTHY"]

_LAYOUTS = {
    "tp 2": layouts.TP,
    "tp 2, whole sequences": layouts.TP_WHOLE,
    "pp 2": layouts.PP,
    "ZeRO 1": layouts.ZERO1,
    "ZeRO 3": layouts.ZERO3,
    "offloaded": layouts.OFFLOAD,
}
_PRECISIONS = ("32-true", "bf16-mixed", "16-true")
_DROPOUT: dict[str, Any] = {"overrides": {"dropout": 0.1}}
_PLAIN: dict[str, Any] = {"overrides": {}}


def _runs() -> list[Fault]:
    found = []
    for precision in _PRECISIONS:
        runs = [
            (f"{name}, {kind}", layout, options)
            for name, layout in _LAYOUTS.items()
            for kind, options in (("dropout", _DROPOUT), ("no dropout", _PLAIN))
        ]
        # Attention with dropout is refused there.
        for name, layout, options in [*runs, ("cp 2, no dropout", layouts.CP, _PLAIN)]:
            trainer = {"precision": precision, "gradient_clip_val": 1.0}
            given: Any = {"layout": layout, "trainer": trainer, **options}
            found.append(Fault(story=f"{name}, {precision}", install=lambda _: None, **given))
    for name in ("tp 2", "pp 2", "ZeRO 1", "ZeRO 3"):
        story, trainer = f"{name}, 32-true, 2 batches a step", {"precision": "32-true"}
        given = {"story": story, "layout": _LAYOUTS[name], "trainer": trainer, **_DROPOUT}
        found.append(Fault(install=lambda _: None, accumulate=2, **given))
    return found


HEALTHY = _runs()
"""43 runs: seven layouts, three precisions, with dropout and without, and four that accumulate."""
