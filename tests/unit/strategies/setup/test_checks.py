"""What a run is told at its start about a plan that fits."""

import warnings

import pytest
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.checks import check_module
from tests.support.models.plain_language_model import token_pairs
from tests.support.models.structures import Convolutions, images, LanguageModel, Planless


def test_tensor_ranks_that_all_compute_the_same_are_told_to_the_user() -> None:
    """Convolutions are not divided, so two tensor ranks would only cost twice as much."""

    def module(net: nn.Module, samples: list[object]) -> Planless:
        made = Planless(net)
        made.train_dataloader = lambda: DataLoader(samples, 8)  # type: ignore[method-assign,arg-type]
        made.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        return made

    convolutions = module(Convolutions(lambda size: nn.GroupNorm(2, size)), images())
    options, two = MeshOptions(), ParallelSizes(tensor=2)
    with pytest.warns(UserWarning, match="tensor_parallel_size=2 divides nothing of Planless"):
        resolved = check_module(convolutions, options, two)
    assert set(resolved.styles.values()) == {"replicated"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*divides nothing")
        check_module(module(LanguageModel(), token_pairs()), options, two)
        check_module(convolutions, options, ParallelSizes(pipeline=2))
