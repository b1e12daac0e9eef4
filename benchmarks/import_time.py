"""Import time of lightning_par over that of lightning.pytorch, in fresh processes.

    python -m benchmarks.import_time

Measured are whole processes, which alternate so that both meet the same load:

- ``lightning``: ``import lightning.pytorch``.
- ``names``: ``import lightning_par`` first, then ``import lightning.pytorch``, which registers the
  strategies; ``hybrid3d`` is looked up in Lightning's registry.
- ``strategies``: the same, and the class behind the name is imported, as the Trainer does.

Printed are the median of each and the median of the paired ratios to ``lightning``.
"""

import statistics
import subprocess
import sys
import time

__all__ = ["main"]

REPEATS = 9
NAMES = """
import lightning_par, lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
assert "hybrid3d" in StrategyRegistry
"""
CODE = {
    "lightning": "import lightning.pytorch",
    "names": NAMES,
    "strategies": NAMES + "from lightning_par.strategies import Hybrid3DStrategy",
}


def seconds(code: str) -> float:
    """Return how long a fresh process takes that runs `code`."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print a table."""
    for code in CODE.values():  # writes the bytecode, fills the cache of the file system
        seconds(code)
    found = [{name: seconds(code) for name, code in CODE.items()} for _ in range(REPEATS)]
    for name in CODE:
        times = [run[name] for run in found]
        ratios = [run[name] / run["lightning"] for run in found]
        print(
            f"{name:10} {statistics.median(times):7.3f} s"
            f"   ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
