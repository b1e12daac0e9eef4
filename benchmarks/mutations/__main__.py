"""Plants each fault in a run and prints who told it, when, and whom it blamed.

python -m benchmarks.mutations [--only TEXT] [--healthy STEPS]
"""

import argparse
import time
from collections import Counter

from benchmarks.mutations.fault import FAULTS, PROVED, STEP
from benchmarks.mutations.healthy import HEALTHY
from benchmarks.mutations.trial import Found, run, run_healthy
from tests.support.ranks.api import close_ranks

_ROUNDING = 1e-4
"""Relative difference of weights after the run that sums in another order give."""


def _when(number: int, found: Found) -> str:
    """Say after how many steps a fault was told."""
    begins = {"later": STEP, "between": STEP, "once": PROVED}.get(FAULTS[number].when, 0)
    after = found.step - begins
    return "before the second step" if begins == 0 and found.step <= 1 else f"after {after} steps"


def main() -> None:
    """Run the faults and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--healthy", type=int, help="run the healthy ones for so many steps")
    given = parser.parse_args()
    chosen = given.only
    if given.healthy:
        _run_healthy(chosen, given.healthy)
    else:
        _run_faults(chosen)
    close_ranks()


def _run_healthy(chosen: str, steps: int) -> None:
    for number, planted in enumerate(HEALTHY):
        if chosen in planted.story:
            print(f"{planted.story}: {run_healthy(number, steps=steps, every=25)}", flush=True)


def _run_faults(chosen: str) -> None:
    results: Counter[str] = Counter()
    right = blamed = 0
    for number, planted in enumerate(FAULTS):
        if chosen not in planted.name:
            continue
        began = time.monotonic()
        found = run(number)
        took = time.monotonic() - began
        if found.verdict == "missed" and (found.changed or 0) < _ROUNDING:
            outcome = f"no effect ({found.changed:.1e})"
        elif found.verdict == "missed":
            outcome = f"missed (weights differ by {found.changed:.1e})"
        elif found.verdict == "crash":
            outcome = f"crash: {found.text[:200]}"
        else:
            outcome = f"{found.text[:5]} {_when(number, found)}"
            blamed += 1
            is_right = found.verdict == planted.kind
            if planted.kind == "machine" and is_right:
                is_right = planted.rank in found.ranks
            right += is_right
            outcome += f", blames {found.verdict}" + ("" if is_right else ": WRONG")
            if found.ranks:
                outcome += f" (ranks {sorted(found.ranks)})"
        results[outcome.split(" (")[0].split(",")[0].split(":")[0]] += 1
        print(f"{number:3} {planted.name}: {outcome} [{took:.0f} s]", flush=True)
    print(dict(results))
    print(f"right blame: {right} of {blamed}")


if __name__ == "__main__":
    main()
