"""A model that is right, and one fault at a time, as a user might make it."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import Hybrid3DStrategy
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.run_trace import Subject
from tests.support.models.toy_gpt import loader, ToyData, ToyLM, ToyModule

TP = ParallelSizes(tensor=2)
STEPS = 2


class NormedLM(ToyLM):
    """Normalizes the queries of every head, and drops out what it embeds."""

    def __init__(self, seeded: bool = False, **options: Any) -> None:
        super().__init__(blocks=2, **options)
        self.seeded = seeded
        for block in self.blocks:
            block.attention.query = NormedQuery(block.attention.query, block.attention.head_dim)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        x = self.embed(ids) + self.position(positions)
        if self.seeded and dist.is_initialized():
            torch.manual_seed(dist.get_rank())  # so that "every rank draws its own numbers"
        x = F.dropout(x, 0.3, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class NormedQuery(nn.Module):
    def __init__(self, linear: nn.Linear, head_dim: int) -> None:
        super().__init__()
        self.linear, self.norm = linear, nn.LayerNorm(head_dim)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.linear(x).unflatten(-1, (-1, self.norm.normalized_shape[0]))
        return self.norm(heads).flatten(-2)


class SquaredLoss(ToyModule):
    """The square of a mean is no mean of squares."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(batch) ** 2


QUERY, NORM = "model.blocks.*.attention.query", "model.blocks.*.attention.query.norm"


def make(fault: str) -> Subject:
    """Give a subject with one fault, or none."""
    module = (SquaredLoss if fault == "product" else ToyModule)(blocks=2)
    module.model = NormedLM(seeded=fault == "dropout")
    plan = module.model.parallel_plan().under("model")
    style = "replicated" if fault == "unsummed" else "replicated_with_grad_allreduce"
    tensor = {k: v for k, v in plan.tensor.items() if k != QUERY}
    tensor |= {f"{QUERY}.linear": "colwise"}
    if fault != "pattern":
        tensor[NORM] = style
    plan = replace(plan, tensor=tensor)
    if fault == "positions":
        plan = replace(plan, positions={})
    strategy = Hybrid3DStrategy(sequence_parallel=False, plan=plan)
    batches = list(loader(ToyData(4 * STEPS, ignored=True), 4))
    return Subject(module=module, batches=batches, strategy=strategy)


MAKE = {
    name: partial(make, name)
    for name in ("none", "positions", "pattern", "product", "dropout", "unsummed")
}
SIZES = {
    "positions": ParallelSizes(context=2),
    "product": ParallelSizes(data_shard=2),
}
