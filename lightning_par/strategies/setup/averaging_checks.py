"""Checks of callbacks that average weights."""

from collections.abc import Callable, Sequence
from copy import deepcopy

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor

from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.step.batch_statistics import training_batchnorms

__all__ = ["averaging_callbacks", "averaging_problems"]


def averaging_callbacks(
    trainer: pl.Trainer,
) -> list[WeightAveraging | StochasticWeightAveraging]:
    """Return the Trainer's callbacks that average weights."""
    every = getattr(trainer, "callbacks", ())
    return [c for c in every if isinstance(c, WeightAveraging | StochasticWeightAveraging)]


def averaging_problems(
    trainer: pl.Trainer, module: pl.LightningModule, sizes: ParallelSizes
) -> list[str]:
    """Return why what these callbacks do on each rank would not be what they do on one process.

    Args:
        trainer: The user's Trainer.
        module: The user's LightningModule.
        sizes: Sizes of the mesh.
    """
    problems = []
    layers = training_batchnorms(module)
    for callback in averaging_callbacks(trainer):
        name = type(callback).__name__
        if isinstance(callback, WeightAveraging):
            # The options of torch's AveragedModel are kept as they were given.
            # By the kind of its attributes, as their names are private and change with Lightning.
            given = [held for held in vars(callback).values() if isinstance(held, dict)]
            function = next((d["multi_avg_fn"] for d in given if "multi_avg_fn" in d), None)
            if function is not None and not _is_entrywise(function):
                problems.append(
                    f"{name}(multi_avg_fn=...) is not supported: its average of an entry depends "
                    f"on other entries or on random numbers, but on {sizes} a rank has only its "
                    "shards of the weights. Use a function that averages each entry separately, "
                    "or avg_fn=, which gets one whole weight at a time."
                )
        elif layers and sizes.pipeline > 1:
            problems.append(
                f"{name} ends with a pass over the data that only updates the statistics of "
                f"BatchNorm ({layers[0]!r}), which is not supported with "
                f"pipeline_parallel_size={sizes.pipeline}. Use WeightAveraging or "
                "EMAWeightAveraging, which average the statistics, too; or "
                "pipeline_parallel_size=1."
            )
    return problems


def _is_entrywise(function: Callable[..., None]) -> bool:
    """Try a function that averages lists of tensors on five numbers, together and one by one."""
    generator = torch.Generator().manual_seed(0)
    # Two random values: entries of a constant average would agree for any function.
    average, model = torch.randn(2, 5, generator=generator, dtype=torch.float64)

    def result(average: Tensor, model: Tensor, sizes: Sequence[int]) -> Tensor:
        averages = list(average.clone().split(sizes))
        # A copy, as a function that keeps a state would have seen one update more.
        deepcopy(function)(averages, list(model.split(sizes)), torch.tensor(3))
        return torch.cat(averages)

    together = result(average, model, [2, 3])
    alone = [result(a, m, [1]) for a, m in zip(average.split(1), model.split(1), strict=True)]
    return bool(torch.allclose(together, torch.cat(alone), rtol=1e-12, atol=0))
