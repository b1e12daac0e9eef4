"""What hosts send to each other in a step, beside what the ledger counts and the plan foresees.

    python benchmarks/host_bytes.py

Two and four hosts of two ranks each, which are namespaces of this machine; that needs root. A GPT
of 4 layers, D 128, batches of 8 x 256 tokens in all, float32, gloo. The counters of the interfaces
between the hosts are read before the fourth and the eighth step; the ledger is that of a step.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.host_bytes import count_host_bytes, FOUR_HOSTS, TWO_HOSTS
from tests.support.hosts import refusal


def main() -> None:
    """Run every layout and print a row of bytes a step."""
    if reason := refusal():
        sys.exit(reason)
    print("| hosts | layout | ledger | reduce-scatters again | on the wire | above |")
    for nodes, layouts in ((2, TWO_HOSTS), (4, FOUR_HOSTS)):
        with tempfile.TemporaryDirectory() as folder:
            found = count_host_bytes(Path(folder), layouts, nodes=nodes, devices=2)
        for name, sent in found.items():
            again = sum(n for (_, what), n in sent.counted.items() if what == "reduce_scatter")
            numbers = f"{sum(sent.counted.values()):,} | {again:,} | {sent.wire:,.0f}"
            print(f"| {nodes} | {name} | {numbers} | {100 * sent.overhead:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
