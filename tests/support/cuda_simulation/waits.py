"""Where the host waits for the simulated device, and what is copied between the two."""

import contextlib
import sys
import threading
from collections import Counter
from dataclasses import dataclass

from tests.support.cuda_simulation.runtime import device

__all__ = ["Traffic", "record_traffic"]

_OWN = ("lightning_par.", "lightning.")
_BESIDE = "offloaded-updates"
"""Threads that launch nothing, and whose task is to wait: what they wait for holds nobody up."""


@dataclass
class Traffic:
    """What happened between the host and the device.

    Args:
        waits: (cause, operator, line that led there) -> how often the host waited.
        copied: "to the host" or "from the host" -> bytes that were copied without a wait.
        launches: Name -> kernels, copies and messages that were begun.
    """

    waits: Counter
    copied: Counter
    launches: Counter

    def __str__(self):
        counts = f"{self.waits.total()} waits, {self.launches.total()} launches"
        lines = [f"{counts}, copied {dict(self.copied)}"]
        lines += [f"  {n} x {' | '.join(key)}" for key, n in self.waits.most_common()]
        return "\n".join(lines)


@contextlib.contextmanager
def record_traffic():
    """Gives a `Traffic` that is filled until the end of the context; of all threads."""
    native, traffic = device(), Traffic(Counter(), Counter(), Counter())

    def listen(kind, cause, name, size):
        if kind == "launch":
            traffic.launches[name] += 1
        elif kind == "copy":
            traffic.copied[cause] += size
        elif not threading.current_thread().name.startswith(_BESIDE):
            traffic.waits[cause, name, _line()] += 1

    native.listen(listen)
    try:
        yield traffic
    finally:
        native.listen(None)


def _line():
    """The innermost line of the package or of Lightning on the stack, else the innermost at all."""
    frame = first = sys._getframe(2)
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    used = frame or first
    return f"{used.f_globals.get('__name__')}.{used.f_code.co_name}:{used.f_lineno}"
