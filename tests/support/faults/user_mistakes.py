"""What users get wrong: a case, the script that runs it, and modules and loaders with a mistake."""

from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lightning_par
from tests.support.models.toy_gpt import ToyData, ToyLM, ToyModule


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a user wrote, and what they read.

    Attributes:
        error: Class of the exception.
        says: Regular expression over its text: the value, the numbers, what works.
        options: Of the strategy; tp, pp and dp are short for the sizes.
        devices: Of the Trainer.
        ranks: Whether the error comes after the processes have started.
        strategy: Used instead of one made from `options`.
        module: Makes the LightningModule.
        loader: Makes the data loader.
        trainer: Other options of the Trainer.
        dies: The error comes on one rank only, which takes the others along.
    """

    error: type[BaseException]
    says: str
    options: dict[str, Any] | None = None
    devices: Any = 2
    ranks: bool = False
    strategy: Any = None
    module: Any = ToyModule
    loader: Any = lambda: DataLoader(ToyData(8), batch_size=4)
    trainer: Any = dict
    dies: bool = False


def fit(case: Case) -> None:
    """What a user's script does."""
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
    names["dp"] = "data_parallel_size"
    options = {names.get(k, k): v for k, v in (case.options or {}).items()}
    strategy = case.strategy or lightning_par.Hybrid3DStrategy(**options)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=case.devices,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **case.trainer(),
    )
    trainer.fit(case.module(), case.loader())


def planned(**fields):
    """The toy with these fields of its plan replaced."""

    def make():
        module = ToyModule()
        plan = replace(module.model.parallel_plan(), **fields)
        module.model.parallel_plan = lambda: plan
        return module

    return make


def with_tensor(extra):
    return planned(tensor={**ToyLM(blocks=1).parallel_plan().tensor, **extra})


class Heads(ToyModule):
    """Query and key/value heads of another number in one block."""

    def __init__(self, **counts):
        super().__init__()
        vars(self.model.blocks[2].attention).update(counts)


class Hidden(ToyModule):
    def __init__(self):
        super().__init__()
        self.model.blocks[1].mlp[0] = nn.Linear(24, 7)
        self.model.blocks[1].mlp[2] = nn.Linear(7, 24)


class Bare(ToyModule):
    """Offers no plan."""

    def __init__(self, **options):
        super().__init__(**options)
        self.model.parallel_plan = None


class Penalized(Bare):
    """Offers no plan, and reads its weights in the step."""

    def training_step(self, batch, batch_idx):
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + 0.1 * penalty


class Borrowing(Bare):
    """Offers no plan, and a layer of a block computes with the weight of another one."""

    def __init__(self):
        super().__init__()
        first, second = (block.mlp[0] for block in self.model.blocks[:2])
        inner = first.forward
        first.forward = lambda x: inner(x) * second.weight.mean()


class TwoPlans(ToyModule):
    def __init__(self):
        super().__init__()
        self.critic = ToyLM()


class Manual(ToyModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class NoLoss(ToyModule):
    def training_step(self, batch, batch_idx):
        self.loss(batch)


class LogitsForLoss(ToyModule):
    def training_step(self, batch, batch_idx):
        return {"loss": self.model(batch["ids"])[:, :2]}


class NaN(ToyModule):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) + self.model.embed(batch["ids"]).mean()


class Stream(IterableDataset):
    def __iter__(self):
        yield from ToyData(3)
