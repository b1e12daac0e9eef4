"""The path of a gradient: its actions are printed in order, and run in that order."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import MixedPrecision
from lightning_par.strategies.step.gradient_path import GradientAction, GradientPath
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

TP_PP = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
PP_DP = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 2}
BACKWARD = "(after the last backward of a step)"
STEP = "(before the optimizer step)"
UNSCALE = "(before the optimizer step, by the precision plugin)"
CLIP = "(before the optimizer step, in configure_gradient_clipping)"
PATHS: dict[str, tuple[dict[str, Any], bool, list[str]]] = {
    "tp2 pp2": (
        TP_PP,
        False,
        [
            f"1. sum copies over tp {BACKWARD}",
            f"2. sum copies over pp {BACKWARD}",
            f"3. norm over all ranks {STEP}",
            f"4. raise if the norm or a loss is not finite {STEP}",
            f"5. clip {CLIP}",
        ],
    ),
    "pp2 dp2, compressed and offloaded": (
        {
            **PP_DP,
            "zero_stage": 0,
            "gradient_compression": "int8",
            "offload_options": {},
            "on_nonfinite": "skip",
        },
        False,
        [
            f"1. average over the replicas, compressed {BACKWARD}",
            f"2. sum copies over pp {BACKWARD}",
            f"3. send to the host {BACKWARD}",
            f"4. norm over all ranks {STEP}",
            f"5. leave the step out if the norm or a loss is not finite {STEP}",
            f"6. clip {CLIP}",
        ],
    ),
    "dp4, whole replicas": (
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0},
        False,
        [
            f"1. average copies over dp_replicate {BACKWARD}",
            f"2. norm over all ranks {STEP}",
            f"3. raise if the norm or a loss is not finite {STEP}",
            f"4. clip {CLIP}",
        ],
    ),
    "cp2 dp2, float16": (
        {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "context_parallel_size": 2,
            "data_parallel_size": 2,
        },
        True,
        [
            f"1. None where no replica has a gradient {BACKWARD}",
            f"2. average copies over cp {BACKWARD}",
            f"3. divide by the loss scale; on overflow leave the step out {UNSCALE}",
            f"4. norm over all ranks {CLIP}",
            f"5. clip {CLIP}",
        ],
    ),
}


class Observer(Callback):
    """Writes down the path, and its actions as they run."""

    def __init__(self) -> None:
        self.printed: list[str] = []
        self.names: list[str] = []
        self.ran: list[list[str]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        path: GradientPath = trainer.strategy.parallel_model.gradients
        self.printed = str(path).splitlines()
        self.names = [action.name for action in path.actions]
        path.actions = tuple(
            action if action.run is None else replace(action, run=self._noted(action))
            for action in path.actions
        )
        if path.scaler is not None:
            unscale, name = path.scaler.unscale_, self.names[2]
            path.scaler.unscale_ = self._after_note(name, unscale)  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any) -> None:
        self.ran.append([])

    def _noted(self, action: GradientAction) -> Callable[..., Any]:
        assert action.run is not None
        return self._after_note(action.name, action.run)

    def _after_note(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.ran[-1].append(name)
            return run(*args)

        return noted


def train(rank: int, world: int, options: dict[str, Any], scales: bool) -> Any:
    observer = Observer()
    callbacks = [observer, *([MixedPrecision("16-mixed", init_scale=8.0)] if scales else [])]
    made = quiet_trainer(
        strategy=Hybrid3DStrategy(**options),
        devices=world,
        max_steps=2,
        gradient_clip_val=0.5,
        callbacks=callbacks,
    )
    made.fit(ToyModule("adamw"), loader(ToyData(16), 4), loader(ToyData(4), 4))
    return observer.printed, observer.names, observer.ran


@pytest.mark.parametrize("name", PATHS)
def test_stages_are_printed_in_order_and_run_in_that_order(name: str) -> None:
    options, scales, lines = PATHS[name]
    for printed, names, ran in run_ranks(train, 4, options, scales, timeout=120):
        assert printed == lines
        assert ran == [names] * 2
