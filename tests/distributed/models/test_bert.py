"""BERT with padding and random masking computes on every layout what one process computes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_par.models import BertModule
from lightning_par.models.data.sentence_pairs import pack_pairs, SentencePairs
from tests.support.exhaustive import some
from tests.support.module_parity import assert_model_parity, Made

LENGTH, VOCAB = 24, 34


class TwelvePairs(Dataset[dict[str, Tensor]]):
    """Pairs of random sentences: every sample has another number of padded tokens, and the last
    one does not count.
    """

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(3)
        sizes = torch.randint(2, 9, (60,), generator=draw).tolist()
        sentences = [torch.randint(0, 30, (n,), generator=draw).tolist() for n in sizes]
        pairs = [p for i in range(12) for p in pack_pairs(sentences[i * 4 : i * 4 + 3], LENGTH, i)]
        self.inner = SentencePairs(pairs[:11], LENGTH, first_special=30, seed=0)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.inner[index if index < 11 else -1]


class SgdBert(BertModule):
    """Shows errors of scale, which AdamW hides, and logs the loss of all replicas."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("global_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def make(order_head: bool = True) -> Made:
    sizes: dict[str, Any] = {"num_layers": 3, "model_dim": 12, "num_heads": 6, "ff_dim": 20}
    sizes |= {"vocab_size": VOCAB, "max_length": 32, "order_head": order_head}
    module = SgdBert(overrides=sizes)
    module.configure_model()
    return module, TwelvePairs()


def layout(tp: int = 1, pp: int = 1, dp: int = 1, **other: Any) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return {**sizes, **other}


LAYOUTS = {
    "tp2": layout(tp=2),
    "tp2 whole sequences": layout(tp=2, sequence_parallel=False),
    "pp2": layout(pp=2, num_microbatches=3),
    "dp2": layout(dp=2),
    "dp2 zero3": layout(dp=2, zero_stage=3),
    "tp2 pp2": layout(tp=2, pp=2),
}


WITHOUT_ORDER = {
    "cp2": layout(context_parallel_size=2),
    "cp2 pp2": layout(pp=2, context_parallel_size=2),
    "cp2 tp2": layout(tp=2, context_parallel_size=2),
    "cp2 dp2": layout(dp=2, context_parallel_size=2),
    "cp4 zigzag hybrid": layout(
        context_parallel_size=4,
        context_options={"method": "hybrid", "ulysses_size": 2, "layout": "zigzag"},
    ),
    "tp2 pp2": layout(tp=2, pp=2),
}


# `make test` leaves out what others here have with more axes, and axes that test_huggingface.py and
# test_parity.py have together.
@pytest.mark.parametrize("name", some(WITHOUT_ORDER, {"cp2", "cp2 tp2", "tp2 pp2", "cp2 dp2"}))
def test_bert_that_only_fills_in_equals_one_process(name: str) -> None:
    options = WITHOUT_ORDER[name]
    trainer = {"gradient_clip_val": 0.5}
    results = assert_model_parity(
        make, {"order_head": False}, options, batch_size=4, trainer=trainer
    )
    shards = options["tensor_parallel_size"] * options["data_parallel_size"]
    for result in results:
        first = next(n for n in result["shapes"] if n.endswith("attention.query.weight"))
        assert result["shapes"][first] == (12 // shards, 12)


@pytest.mark.parametrize("name", some(LAYOUTS, {"dp2", "tp2 pp2"}))
def test_bert_equals_one_process(name: str) -> None:
    options = LAYOUTS[name]
    results = assert_model_parity(
        make, {}, options, batch_size=4, trainer={"gradient_clip_val": 0.5}
    )
    blocks = [{n.split(".")[2] for n in r["shapes"] if ".blocks." in n} for r in results]
    assert len({frozenset(held) for held in blocks}) == options["pipeline_parallel_size"]
    shards = options["tensor_parallel_size"] * options["data_parallel_size"]
    for result in results:
        first = next(n for n in result["shapes"] if n.endswith("attention.query.weight"))
        assert result["shapes"][first] == (12 // shards, 12)
