"""Plants every fault of the zoo, and says which checker finds it, when, and what it blames.

python -m benchmarks.zoo [--only TEXT] [--picture] [--typed]

Prints a row for each fault, then the score of each checker with its false alarms on 40 healthy
runs. Without `--only` it is also written to docs/pictures/zoo.svg if `--picture` is given.
"""

import argparse
import time

from benchmarks.zoo.fault import FAULTS
from benchmarks.zoo.picture import draw
from benchmarks.zoo.score import Row, score_table
from benchmarks.zoo.trials import Trials
from tests.support.ranks.api import close_ranks


def main() -> None:
    """Run all, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose names contain this")
    parser.add_argument("--picture", action="store_true", help="draw docs/pictures/zoo.svg")
    parser.add_argument("--typed", action="store_true", help="try spmd_types on some faults")
    given = parser.parse_args()
    if given.typed:
        from benchmarks.zoo.typed import print_found  # spmd_types need not be installed

        print_found()
        close_ranks()
        return
    began, trials, rows = time.monotonic(), Trials(), list[Row]()
    for number, fault in enumerate(FAULTS):
        if given.only in fault.name:
            rows.append(trials.try_fault(number))
            print(rows[-1], flush=True)
    alarms = {} if given.only else trials.try_healthy()
    print(f"\n{score_table(rows, alarms)}")
    missed = [row.fault.name for row in rows if row.found["proof"] is None]
    print(f"\nnot found by the proof: {', '.join(missed) or 'none'}")
    wrong = [row.fault.name for row in rows if row.found["proof"] and not row.is_blamed("proof")]
    print(f"blamed wrongly by the proof: {', '.join(wrong) or 'none'}")
    print(f"\n{time.monotonic() - began:.0f} s")
    if given.picture and not given.only:
        draw(rows)
    close_ranks()


if __name__ == "__main__":
    main()
