"""Learning on real text with the optimizer on the device, on the host, and with delayed updates."""

import argparse
from functools import partial

from _learn import print_curves

from lightning_par import Hybrid3DStrategy, ZeROOffloadStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    contenders = {
        "on the device": Hybrid3DStrategy,
        "offloaded": ZeROOffloadStrategy,
        f"delayed from step {steps // 4}": partial(ZeROOffloadStrategy, delayed_update=steps // 4),
        "delayed from step 0": partial(ZeROOffloadStrategy, delayed_update=0),
    }
    print_curves(contenders, steps, batch_size=8)


if __name__ == "__main__":
    main()
