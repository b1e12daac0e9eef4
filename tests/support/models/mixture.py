"""A tiny Mixtral in float64, its data, and the layouts on which it is trained."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_par.models import MixtralModule
from tests.support.module_parity import Made

LENGTH, VOCAB, DIM, FF, EXPERTS = 10, 34, 12, 20, 4


class TwelveTexts(Dataset[dict[str, Tensor]]):
    """Random tokens, none twice in a sample: equal first tokens would be equally good choices. In
    every sample some labels do not count: as many, or another number each, and in one sample none.
    """

    def __init__(self, ragged: bool) -> None:
        draw = torch.Generator().manual_seed(3)
        orders = [torch.randperm(VOCAB, generator=draw) for _ in range(12)]
        self.tokens = torch.stack(orders)[:, : LENGTH + 1]
        self.ragged = ragged

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index, 1:].clone()
        ignored = LENGTH if index == 7 else index % 5 + 1
        labels[: ignored if self.ragged else 2] = -100
        return {"input_ids": self.tokens[index, :-1], "labels": labels}


class SgdMixtral(MixtralModule):
    """Shows errors of scale, which AdamW hides, and logs the loss of all replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("global_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, foreach=True)


class AdamMixtral(SgdMixtral):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, foreach=True)


def make(*, ragged: bool = False, skewed: bool = False, adam: bool = False, **config: Any) -> Made:
    sizes = {"num_layers": 3, "model_dim": DIM, "num_heads": 6, "num_kv_heads": 2, "ff_dim": FF}
    weights = {"auxiliary_weight": 0.5, "z_weight": 0.1, "bias_rate": 0.05, "init_std": 0.3}
    more = {"vocab_size": VOCAB, "max_length": 32, "num_experts": EXPERTS}
    kind = AdamMixtral if adam else SgdMixtral
    module = kind(overrides={**sizes, **weights, **more, **config})
    module.configure_model()
    if skewed:
        for block in module.model.blocks:
            block.moe.router.bias_steps[0] = 10**6
    return module, TwelveTexts(ragged)


def layout(
    tp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, zero: int = 1, **other: Any
) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    if pp > 1:
        other = {"num_microbatches": 2, **other}
    return {**sizes, "expert_parallel_size": ep, "zero_stage": zero, **other}
