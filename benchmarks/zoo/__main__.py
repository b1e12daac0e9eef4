"""Plants every fault of the zoo, and says which checker finds it, when, and what it blames.

python -m benchmarks.zoo [--only TEXT] [--report FILE] [--typed]

Prints a row for each fault, then the score of each checker with its false alarms on 40 healthy
runs, its time and its memory. `--report` also writes the counts of each phase, of which
docs/drawing/draw_zoo.py draws.
"""

import argparse
import json
import time
from pathlib import Path

from benchmarks.zoo.fault import FAULTS
from benchmarks.zoo.score import counts_by_phase, score_table
from benchmarks.zoo.trials import try_all
from tests.support.ranks.api import close_ranks


def main() -> None:
    """Run all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--report", type=Path, help="file for the counts of each phase")
    parser.add_argument("--typed", action="store_true", help="try spmd_types on some faults")
    given = parser.parse_args()
    if given.typed:
        from benchmarks.zoo.typed import print_found  # spmd_types need not be installed

        print_found()
        close_ranks()
        return
    began = time.monotonic()
    numbers = [n for n, fault in enumerate(FAULTS) if given.only in fault.name]
    rows, healthy = try_all(numbers, healthy=not given.only)
    print(f"\n{score_table(rows, healthy)}")
    missed = [row.fault.name for row in rows if row.found["proof"] is None]
    print(f"\nnot found by the proof: {', '.join(missed) or 'none'}")
    wrong = [row.fault.name for row in rows if row.found["proof"] and not row.is_blamed("proof")]
    print(f"blamed wrongly by the proof: {', '.join(wrong) or 'none'}")
    print(f"\n{time.monotonic() - began:.0f} s")
    if given.report:
        given.report.write_text(json.dumps(counts_by_phase(rows), indent=1) + "\n")
    close_ranks()


if __name__ == "__main__":
    main()
