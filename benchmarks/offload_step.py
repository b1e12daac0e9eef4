"""Step time of an offloaded optimizer on the CPU, where the "device" shares cores with the host.

There the update cannot run beside the computation without taking cores from it, so that this shows
what the detour costs; what overlap gains needs a device of its own.
"""

from _gpt import BenchModule, loader
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn

from lightning_par import Hybrid3DStrategy, ZeROOffloadStrategy
from lightning_par.strategies import MeshStrategy

RANKS, BATCH = 2, 4


def body(arguments: Arguments) -> None:
    """Run on one rank."""

    def train(turn: Turn, strategy: MeshStrategy) -> None:
        fit(BenchModule(), loader(BATCH), strategy, turn, arguments, limit_val_batches=0)

    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    compare(
        f"stage 2 on {RANKS} ranks",
        {
            "on the device": lambda turn: train(turn, Hybrid3DStrategy(zero_stage=2, **sizes)),
            "offloaded": lambda turn: train(turn, ZeROOffloadStrategy()),
            "streamed": lambda turn: train(turn, ZeROOffloadStrategy(on_nonfinite="ignore")),
            "delayed": lambda turn: train(turn, ZeROOffloadStrategy(delayed_update=0)),
        },
        arguments,
        targets={},
    )


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=RANKS)
