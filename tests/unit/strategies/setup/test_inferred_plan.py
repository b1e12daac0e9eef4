"""Plans that are inferred from the step of a run."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn, Tensor
from torch.utils.data import DataLoader

from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.setup.inferred_plan import plan_of_run


class InDouble(pl.LightningModule):
    """Its step takes weights in float64 only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden: Tensor = self.layer(batch) @ torch.eye(4, dtype=torch.float64)
        found: Tensor = self.head(hidden)
        return found.square().mean()

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(4, 4), batch_size=2)  # type: ignore[arg-type]


def test_a_refusal_of_one_precision_is_not_given_again_in_another() -> None:
    module, sizes = InDouble(), ParallelSizes(tensor=2)
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "barebones": True}
    refused = []
    for precision in ("32-true", "64-true"):
        module.trainer = pl.Trainer(precision=precision, **options)
        plan = plan_of_run(module, None, sizes)
        assert plan is not None
        refused.append("tensor" in plan.refusals)
    assert refused == [True, False]
