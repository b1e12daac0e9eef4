"""Where the main thread of a rank waits for other ranks, seen from a thread beside it.

Note [Ranks apart]: what one rank does alone (a checkpoint saved, a text sampled, a stop decided
under ``if trainer.is_global_zero``) communicates, and waits for ranks that are elsewhere and wait
for it. If all ranks have waited for seconds, in different places, none of them will go on.
"""

import itertools
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lightning_par.strategies.processes.rank_status import RankState, RankStatus
from lightning_par.strategies.step.absent_parameter import is_of_a_framework

__all__ = ["RanksApart", "WaitingPlace", "hook_of"]

_INNERMOST = 8
"""Frames in which what communicates is looked for."""
_LOOKS = 4
"""In how many looks ranks have to be apart."""
_COMMUNICATES = ("/torch/distributed/", "/lightning_par/engine/collectives.py")
_LOOPS = "/lightning/pytorch/loops/"


class WaitingPlace:
    """Tells where the main thread waits, by two looks some seconds apart."""

    def __init__(self) -> None:
        self._before: tuple[str, str] | None = None

    def look(self) -> str:
        """Return where the main thread has waited since the last look; empty if it has not."""
        place = _place(sys._current_frames().get(threading.main_thread().ident or 0))
        # The same line twice may be two visits: a thread that has slept in between has one more
        # voluntary switch.
        now = (place, _switches()) if place else None
        waits = now is not None and now[1] != "" and now == self._before
        self._before = now
        return place if waits else ""


def hook_of(error: BaseException) -> str:
    """Return the line of the user's hook, other than a step, in which an exception was raised;
    empty if it was in none.
    """
    found = ""
    # From the outside in: the first frame of the user's below Lightning's loop.
    for frame, line in traceback.walk_tb(error.__traceback__):
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if _LOOPS in file:
            found = ""  # what called the loop is no hook
        elif not found and not is_of_a_framework(file):
            found = f"{name} ({Path(file).name}:{line})" if not name.endswith("_step") else "step"
    return "" if found == "step" else found


def _switches() -> str:
    """Return how often the main thread has been woken or interrupted; empty where no one counts."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return ""
    # Voluntary switches alone: a thread that waits is also interrupted.
    return "".join(line for line in status.splitlines() if line.startswith("voluntary"))


def _place(frame: FrameType | None) -> str:
    """Return the line of the user's hook, or else of Lightning's loop, that waits in a collective,
    and where in it; empty if none does.
    """
    waits, places = False, list[str]()
    for depth in itertools.count():
        if frame is None:
            break
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        # Near the innermost frame only: further out, files of torch may call the user's code.
        waits |= depth < _INNERMOST and any(part in file for part in _COMMUNICATES)
        place = f"{name} ({Path(file).name}:{frame.f_lineno})"
        if _LOOPS in file:
            places = places or [f"the Trainer's {place}"]
            break
        if not is_of_a_framework(file):
            places.append(place)
        frame = frame.f_back
    # The innermost line of the user's and the outermost one, the hook.
    return ", from ".join(dict.fromkeys([*places[:1], *places[-1:]])) if waits else ""


class RanksApart:
    """Tells whether all ranks wait for each other in different places, and will not go on.

    One look is not enough: a rank that has just gone on says so at its next look only, which a
    loaded machine may delay. So every rank has to say its place anew between any two of several
    looks.
    """

    def __init__(self) -> None:
        self._places: dict[int, str] = {}
        self._said: dict[int, float] = {}
        self._seen = 0

    def look(self, states: Sequence[RankState]) -> dict[int, str]:
        """Return where each rank waits, once that is sure; else nothing.

        Args:
            states: Of all ranks of the run; the fault of a running one is where it waits.
        """
        places = {state.rank: state.fault for state in states}
        said = {state.rank: state.when for state in states}
        waits = all(s.status is RankStatus.RUNNING and not s.is_stopped and s.fault for s in states)
        # All in one place is a slow collective, no deadlock.
        if not waits or len({*places.values()}) < 2:
            places, self._seen = {}, 0
        # Some rank has moved: counting begins anew.
        elif places != self._places:
            self._seen = 1
        elif all(said[rank] > self._said[rank] for rank in said):
            self._seen += 1
        else:  # a rank has said nothing since
            return {}
        self._places, self._said = places, said
        return places if self._seen >= _LOOKS else {}
