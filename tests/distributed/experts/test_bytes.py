"""Rows travel to the experts of other ranks and back, twice, and nothing else does."""

import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import lightning_par
from lightning_par.errors import ConfigurationError
from tests.distributed.profiling.test_bytes import _Counter
from tests.support.models.mixture import DIM, EXPERTS, layout, make, VOCAB
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

FLOAT, NUMBER, LAYERS, RANKS = 4, 8, 3, 2


class _Watch(_Counter):
    """Keeps how many rows every expert got in the step that is counted."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []
        for block in module.model.blocks:
            block.moe.router.register_forward_hook(self._keep)

    def _keep(self, module: Any, inputs: Any, routed: Any) -> None:
        if self.comm_volume is not None:
            self.counts.append(routed.counts)


def count(rank: int, world: int, zero_stage: int, max_rows: int | None = None) -> Any:
    torch.manual_seed(5)
    module, samples = make()
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    watch = _Watch(module)
    options = layout(dp=world, ep=RANKS, zero=zero_stage, expert_max_rows=max_rows)
    strategy = lightning_par.Hybrid3DStrategy(**options)
    trainer = quiet_trainer(
        devices=world, strategy=strategy, max_epochs=1, callbacks=[watch], limit_val_batches=0
    )
    order = DistributedSampler(samples, num_replicas=world, rank=rank)
    trainer.fit(module, DataLoader(samples, batch_size=4 // world, sampler=order))
    return watch.found, torch.stack(watch.counts), sizes


def test_rows_that_leave_a_rank_travel_out_and_back_forward_and_backward() -> None:
    results = run_ranks(count, 2, 1, timeout=120)
    own = EXPERTS // RANKS
    leaving = []
    for rank, (_, counts, _) in enumerate(results):
        there = slice(own, None) if rank == 0 else slice(0, own)
        assert counts.shape == (LAYERS, EXPERTS)
        assert counts.sum() == LAYERS * 2 * 10 * 2  # samples, tokens, experts of a token
        leaving.append(int(counts[:, there].sum()))
    assert leaving[0] != leaving[1]
    for rank, (found, counts, sizes) in enumerate(results):
        ((calls, payload, sent),) = [v for (_, what), v in found.items() if what == "all_to_all"]
        assert calls == 5 * LAYERS  # how many rows; rows and answers, and their gradients
        rows = 2 * (leaving[0] + leaving[1])  # ours out, theirs answered, and both gradients
        numbers = LAYERS * EXPERTS * NUMBER
        assert sent == rows * DIM * FLOAT + numbers // RANKS
        stays = 4 * (int(counts.sum()) - leaving[rank])
        arrives = int(counts.sum()) - leaving[rank] + leaving[1 - rank]
        assert payload == 2 * (int(counts.sum()) + arrives) * DIM * FLOAT + numbers
        assert payload - sent == stays * DIM * FLOAT + numbers // RANKS
        others = sum(n for name, n in sizes.items() if ".experts." not in name) * FLOAT
        assert found["dp_shard", "reduce_scatter"][1] == others
        assert found["dp_shard", "all_gather"][1] == others
        assert not {axis for axis, _ in found} & {"expert_shard", "expert_replicate"}


def test_padded_parts_have_one_size_whatever_tokens_choose() -> None:
    rows, results = 40, run_ranks(count, 2, 1, 40, timeout=120)
    assert not torch.equal(results[0][1], results[1][1])
    for found, _, _ in results:
        ((calls, payload, sent),) = [v for (_, what), v in found.items() if what == "all_to_all"]
        assert calls == 5 * LAYERS
        assert payload == LAYERS * (4 * RANKS * rows * DIM * FLOAT + EXPERTS * NUMBER)
        assert sent == payload // RANKS


def refused(rank: int, world: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        count(rank, world, 1, 39)
    return str(caught.value)


def test_more_rows_than_a_part_holds_are_refused_with_their_number() -> None:
    # 2 samples of 10 tokens, which may all choose the 2 experts of one rank.
    said = r"expert_max_rows=39: .* 40 rows .* Use expert_max_rows=40 or more"
    for text in run_ranks(refused, 2, timeout=120):
        assert re.search(said, text), text


def test_experts_are_reduced_over_the_ranks_that_hold_the_same_ones() -> None:
    for found, _, sizes in run_ranks(count, 4, 3, timeout=120):
        experts = sum(n for name, n in sizes.items() if ".experts." in name) * FLOAT
        others = sum(n for name, n in sizes.items() if ".experts." not in name) * FLOAT
        assert found["expert_shard", "reduce_scatter"][1] == experts // RANKS
        assert found["expert_shard", "all_gather"][1] == 2 * experts // RANKS
        padding = -VOCAB % 4 * DIM * FLOAT  # the embedding's rows do not divide by 4
        assert found["dp_shard", "reduce_scatter"][1] == others + padding
        assert ("ep", "all_to_all") in found
        assert not {axis for axis, _ in found} & {"expert_replicate"}
