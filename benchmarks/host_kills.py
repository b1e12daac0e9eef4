"""Kills a random host at a random step, again and again; does the run go on as if nobody had?

    python benchmarks/host_kills.py [--kills 20] [--seed 0]

Two hosts, namespaces of this machine (which needs root), under torchrun with ``--max-restarts``; dp
2 with ZeRO 3 across them, a checkpoint every third step, float64. The ranks of a host are killed,
and at every fifth time all its processes, the agent with them, which is then started again as an
init system would. Every loss, also of steps that are computed again, is compared with one process
that trained without a break.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.faults.restarts import run_and_kill, SAVE_EVERY, undisturbed_losses
from tests.support.hosts import refusal


def main() -> None:
    """Kill, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if reason := refusal():
        sys.exit(reason)
    steps, began = 2 * SAVE_EVERY * (chosen.kills + 1), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        one, hosts = Path(folder) / "one", Path(folder) / "hosts"
        one.mkdir()
        wanted = undisturbed_losses(one, steps)
        run = run_and_kill(hosts, kills=chosen.kills, steps=steps, seed=chosen.seed)
    print("killed:", ", ".join(run.killed))
    for start, done, lost in dict.fromkeys(run.lost):
        print(f"goes on after step {start}, had done {done}, lost {lost}")
    worst = max(abs(loss - wanted[step]) for step, loss in run.losses)
    missing = set(wanted) - {step for step, _ in run.losses}
    print(f"{len(run.killed)} kills, {steps} steps, {len(run.losses)} computed, missing: {missing}")
    print(f"largest difference of a loss: {worst:.1e}; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
