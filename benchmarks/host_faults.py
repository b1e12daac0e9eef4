"""What becomes of a run on two hosts of which one dies or freezes, or whose network is damaged.

    python benchmarks/host_faults.py [--timeout 20]

The hosts are namespaces of this machine, which needs root. Four ranks, tp 2 inside a host, pp 2
across. For every fault: how each rank ended that could, the seconds from the fault to the last end,
what was left on its host, and what the first of the survivors said.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.faults.hosts import FAULTS, run_with_host_fault
from tests.support.hosts import refusal

SAID = re.compile(r"cannot continue: (.*)|MeshError: (.*)|(`Trainer.fit` stopped: .*)")


def main() -> None:
    """Run every fault and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=20, help="of the strategy, in seconds")
    chosen = parser.parse_args()
    if reason := refusal():
        sys.exit(reason)
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = run_with_host_fault(fault, Path(folder), timeout=chosen.timeout)
        said = [found for text in run.said for found in SAID.findall(text)]
        first = next(("".join(found) for found in said), "nothing")
        count = f"{len(run.left)} left"
        print(f"{name}: codes {list(run.codes)}, {run.seconds:.1f} s, {count}: {first}", flush=True)


if __name__ == "__main__":
    main()
