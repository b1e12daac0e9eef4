"""Small modules under strategies of Lightning, with the data and options of their runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn, Tensor
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.support.models.plain_language_model import (
    NormalizedNet,
    PlainModule,
    PlainNet,
    token_pairs,
)
from tests.support.models.toy_gpt import Block, ToyData, ToyModule

__all__ = [
    "MODULES",
    "STRATEGIES",
    "CPUFSDPStrategy",
    "Normalizing",
    "Pairs",
    "Subject",
    "divided",
    "strategy_named",
]


class CPUFSDPStrategy(FSDPStrategy):
    """FSDPStrategy on gloo: the Trainer refuses the class itself on the CPU, and it never tells
    FSDP that the CPU is meant.
    """

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


STRATEGIES: dict[str, Callable[[], Any]] = {
    "DDP": DDPStrategy,
    "FSDP": lambda: CPUFSDPStrategy(
        auto_wrap_policy=ModuleWrapPolicy({Block, type(PlainNet().blocks[0])}),
        sharding_strategy="FULL_SHARD",
    ),
    "ModelParallel, fully_shard": lambda: ModelParallelStrategy(2, 1),
    "ModelParallel, tensor": lambda: ModelParallelStrategy(1, 2),
}
"""Each for two ranks on the CPU."""


def strategy_named(name: str) -> Any:
    """Return a new strategy of `STRATEGIES`."""
    return STRATEGIES[name]()


def divided(module: Any) -> Any:
    """Return a module whose `configure_model` shards its children and divides its MLPs."""

    def configure_model(self: Any) -> None:
        mesh = self.device_mesh
        is_tensor_parallel = mesh["tensor_parallel"].size() > 1
        blocks = getattr(getattr(self, "net", None), "blocks", ())
        for block in blocks if is_tensor_parallel else ():
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block.mlp, mesh["tensor_parallel"], styles)
        if mesh["data_parallel"].size() > 1:
            for child in self.children():
                fully_shard(child, mesh=mesh["data_parallel"])

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"configure_model": configure_model})
    return module


class Dropping(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = F.dropout(self.net(x), 0.2, self.training)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Contrastive(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        one, other = (F.normalize(self.net(t).mean(1), dim=-1) for t in (x, y))
        return F.cross_entropy(one @ other.T, torch.arange(len(one)))


class Summed(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 0.01 * F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), reduction="sum")


class Noisy(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.net(x)
        logits = logits + torch.randn_like(logits)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Decayed(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.net(batch[0]).pow(2).mean()


class MasksLabels(PlainModule):
    """Leaves labels out of its loss by their values."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return super().loss((x, y.masked_fill(y % 3 == 0, -100)))


class ClassWeights(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        weight = torch.linspace(0.1, 2.0, 64)
        return F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), weight=weight)


class Focused(PlainModule):
    """Divides by the largest loss of the batch."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        each = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none").mean(1)
        return (each * each.detach() / each.detach().max()).mean()


class TwoSteps(PlainModule):
    """Steps twice in a batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()


class WithAdam(PlainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Instances(PlainModule):
    """Normalizes each sample alone."""

    def __init__(self) -> None:
        super().__init__()
        self.over_tokens = nn.InstanceNorm1d(64)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.over_tokens(self.net(x).transpose(1, 2)), y)


class Balanced(PlainModule):
    """A product of means over the batch, as of losses that balance experts."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.net(x)
        shares = logits.softmax(-1).mean((0, 1))
        chosen = F.one_hot(logits.argmax(-1), 64).double().mean((0, 1))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        return loss + (shares * chosen.to(shares)).sum() * 64


class Normalizing(PlainModule):
    def __init__(self) -> None:
        super().__init__(NormalizedNet())


class Pairs(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(token_pairs(), 4)


def uneven_pairs() -> list[tuple[Tensor, Tensor]]:
    """Samples of which every other one has labels that do not count."""
    pairs = token_pairs()
    for number, (x, y) in enumerate(pairs):
        ignored = torch.arange(len(y)) < (number % 2) * 7
        pairs[number] = x, torch.where(ignored, -100, y)
    return pairs


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module, its data, and options of its Trainer.

    Attributes:
        make: Returns a new module.
        samples: Returns its samples.
        trainer: Options.
    """

    make: Callable[[], Any] = PlainModule
    samples: Callable[[], Any] = token_pairs
    trainer: Mapping[str, Any] = field(default_factory=dict)


MODULES: dict[str, Subject] = {
    "language model": Subject(),
    "GPT": Subject(make=lambda: ToyModule(), samples=lambda: ToyData(16)),
    "GPT, labels ignored": Subject(make=lambda: ToyModule(), samples=lambda: ToyData(16, True)),
    "dropout": Subject(make=Dropping),
    "InstanceNorm": Subject(make=Instances),
    "BatchNorm": Subject(make=Normalizing),
    "unequal labels": Subject(samples=uneven_pairs),
    "labels masked in the step": Subject(make=MasksLabels),
    "class weights": Subject(make=ClassWeights),
    "contrastive": Subject(make=Contrastive),
    "balance of a batch": Subject(make=Balanced),
    "divided by a maximum": Subject(make=Focused),
    "sum over samples": Subject(make=Summed),
    "noise": Subject(make=Noisy),
    "two losses": Subject(make=Decayed),
    "two steps by hand": Subject(make=TwoSteps),
    "AdamW": Subject(make=WithAdam),
    "accumulation": Subject(trainer={"accumulate_grad_batches": 2}),
    "clipping": Subject(trainer={"gradient_clip_val": 0.05}),
    "clipping by value": Subject(
        trainer={"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    ),
}
"""What the page on other strategies has a table of."""
