"""Kills a random rank at a random moment of a random step, again and again; see RESULTS.md.

    python benchmarks/faults.py [--trials 50] [--first-seed 0]

Four ranks, tp 2 x pp 2, each a process of its own under a Trainer. A trial is good if every process
has ended 5 s after the kill and a surviving rank names the killed one, its place, action and step.
"""

import argparse
import random
import re
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.faults.runs import Fault, run_with_fault

WORLD, LIMIT = 4, 5.0
PLACES = ("pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1")


def trial(seed: int) -> tuple[float | None, str | None]:
    """Run one trial; give the seconds to the last end, and what was said about the killed rank."""
    seeded = random.Random(seed)
    fault = Fault(
        kind="kill",
        rank=seeded.randrange(WORLD),
        step=seeded.randrange(1, 12),
        delay=seeded.uniform(0, 0.1),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = run_with_fault(WORLD, fault, Path(folder))
    place = re.escape(f"rank {fault.rank} ({PLACES[fault.rank]})")
    said = [re.search(rf"{place} has died, in (.*, step \d+)\.", log) for log in run.logs]
    named = next((found[1] for found in said if found), None)
    times = [s for s in run.seconds if s is not None]
    return (max(times) if len(times) == WORLD else None), named


def main() -> None:
    """Run the trials and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    chosen = parser.parse_args()
    found = []
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.trials):
        seconds, named = trial(seed)
        found.append((seconds, named))
        print(f"seed {seed}: {seconds} s, {named}", flush=True)
    times = [s for s, _ in found if s is not None]
    in_time, told = sum(s <= LIMIT for s in times), sum(n is not None for _, n in found)
    print(f"ended within {LIMIT:g} s: {in_time} of {len(found)}; named: {told} of {len(found)}")
    print(f"seconds: median {statistics.median(times):.2f}, max {max(times):.2f}")


if __name__ == "__main__":
    main()
