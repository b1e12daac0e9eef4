"""Rows travel to the experts of other ranks and back, twice, and nothing else does; profilers and
planner foresee it.
"""

import re
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import lightning_par
from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError
from lightning_par.planner.memory import block_activations, predict_memory
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import load_profile, reached
from lightning_par.planner.shapes import Implementation, Layout
from lightning_par.planner.step_time import StepCost
from lightning_par.sizes import ParallelSizes
from tests.distributed.profiling.test_bytes import _Counter
from tests.distributed.profiling.test_expected_comm_volume import Keeper
from tests.support.models.mixture import DIM, EXPERTS, FF, layout, LENGTH, make, VOCAB
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

FLOAT, NUMBER, LAYERS, RANKS = 4, 8, 3, 2


class _Watch(_Counter):
    """Keeps how many rows every expert got in the step that is counted, and the bytes of floats
    that experts keep for the backward.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []
        self.saved: dict[int, int] = {}
        for block in module.model.blocks:
            block.moe.router.register_forward_hook(self._keep)
            block.moe.experts.forward = self._watched(block.moe.experts)

    def _keep(self, module: Any, inputs: Any, routed: Any) -> None:
        if self.comm_volume is not None:
            self.counts.append(routed.counts)

    def _watched(self, experts: Any) -> Any:
        inner, held = experts.forward, []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            parameters = [local_part(p) for p in experts.parameters()]
            own = {p.untyped_storage().data_ptr() for p in parameters}
            if self.comm_volume is not None and tensor.is_floating_point():
                held.append(tensor)  # nobody else gets its memory
                self.saved[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in own)
            return tensor

        def forward(*args: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return inner(*args)

        return forward


def count(
    rank: int, world: int, zero_stage: int, max_rows: int | None = None, tensor: int = 1
) -> Any:
    torch.manual_seed(5)
    module, samples = make()
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    watch, keeper = _Watch(module), Keeper(folder=".")
    replicas = world // tensor
    options = layout(tensor, 1, replicas, RANKS, zero_stage, expert_max_rows=max_rows)
    strategy = lightning_par.Hybrid3DStrategy(**options)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_epochs=1,
        callbacks=[watch, keeper],
        limit_val_batches=0,
    )
    order = DistributedSampler(samples, num_replicas=replicas, rank=rank // tensor)
    trainer.fit(module, DataLoader(samples, batch_size=4 // replicas, sampler=order))
    expected = {(e.axis, e.operation): (e.calls, e.payload, e.sent) for e in keeper.expected}
    kept = sum(watch.saved.values())
    return watch.found, torch.stack(watch.counts), sizes, expected, kept


def all_to_alls(entries: Any) -> tuple[int, int, int]:
    """Calls, payload and sent bytes; of two ranks, the axes of data and experts have one group."""
    (found,) = [value for (_, operation), value in entries.items() if operation == "all_to_all"]
    return found


def forecast(
    max_rows: int | None = None, tensor: int = 1, experts: int = 2
) -> tuple[float, float, float]:
    """The bytes that the planner says a rank sends, blocks keep, and all that a rank holds."""
    module, _ = make(experts_per_token=experts)
    shape = read_shape(module.config, LENGTH)
    code = Implementation(activation_bytes=FLOAT)
    sizes = ParallelSizes(data_shard=2, tensor=tensor, expert=RANKS)
    made = Layout(sizes=sizes, micro_batch=2, expert_max_rows=max_rows)
    device = load_profile("h100")
    cost = StepCost(shape, made, device, code, reached(device))
    kept = LAYERS * block_activations(shape, made, code)
    return cost.traffic()["ep"], kept, predict_memory(shape, made, code).peak


def test_rows_that_leave_a_rank_travel_out_and_back_forward_and_backward() -> None:
    results = run_ranks(count, 2, 1, timeout=120)
    own = EXPERTS // RANKS
    leaving = []
    for rank, (_, counts, *_) in enumerate(results):
        there = slice(own, None) if rank == 0 else slice(0, own)
        assert counts.shape == (LAYERS, EXPERTS)
        assert counts.sum() == LAYERS * 2 * 10 * 2  # samples, tokens, experts of a token
        leaving.append(int(counts[:, there].sum()))
    assert leaving[0] != leaving[1]
    unforeseen, numbers = 0, LAYERS * EXPERTS * NUMBER
    for rank, (found, counts, sizes, expected, _) in enumerate(results):
        (calls, payload, sent), foreseen = all_to_alls(found), all_to_alls(expected)
        assert calls == 5 * LAYERS  # how many rows; rows and answers, and their gradients
        rows = 2 * (leaving[0] + leaving[1])  # ours out, theirs answered, and both gradients
        assert sent == rows * DIM * FLOAT + numbers // RANKS
        stays = 4 * (int(counts.sum()) - leaving[rank])
        arrives = int(counts.sum()) - leaving[rank] + leaving[1 - rank]
        assert payload == 2 * (int(counts.sum()) + arrives) * DIM * FLOAT + numbers
        assert payload - sent == stays * DIM * FLOAT + numbers // RANKS
        others = sum(n for name, n in sizes.items() if ".experts." not in name) * FLOAT
        assert found["dp_shard", "reduce_scatter"][1] == others
        assert found["dp_shard", "all_gather"][1] == others
        assert not {axis for axis, _ in found} & {"expert_shard", "expert_replicate"}
        # Foreseen is even routing, which is that of a rank only if as many rows arrive as leave.
        assert foreseen[0] == calls
        assert foreseen[1] == RANKS * foreseen[2]
        assert foreseen[2] == forecast()[0] + numbers // RANKS
        unforeseen += payload - foreseen[1]
    assert unforeseen == 0
    # A row of an expert, and the four tensors of its MLP; its answer, weighted or not.
    chosen = 2 * LENGTH * 2
    values = (DIM + 4 * FF) + 2 * DIM
    assert sum(kept for *_, kept in results) == 2 * LAYERS * chosen * (values + 1) * FLOAT
    assert forecast()[1] - forecast(experts=1)[1] == LAYERS * chosen // 2 * values * FLOAT


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_padded_parts_have_one_size_whatever_tokens_choose(tensor: int) -> None:
    rows, results = 40, run_ranks(count, 2 * tensor, 1, 40, tensor, timeout=120)
    assert not torch.equal(results[0][1], results[-1][1])
    sent_by_plan, kept_by_plan, peak_by_plan = forecast(rows, tensor)
    _, exact, peak = forecast(None, tensor)
    chosen = 2 * LENGTH * 2  # samples, tokens, experts of a token
    for found, _, _, expected, kept in results:
        (calls, payload, sent), foreseen = all_to_alls(found), all_to_alls(expected)
        assert calls == 5 * LAYERS
        assert payload == LAYERS * (4 * RANKS * rows * DIM * FLOAT + EXPERTS * NUMBER)
        assert sent == payload // RANKS
        assert foreseen == (calls, payload, sent)
        assert sent == sent_by_plan + LAYERS * EXPERTS * NUMBER // RANKS
        of_rows, of_chosen = (DIM + 4 * FF // tensor) * FLOAT, (2 * DIM + 1) * FLOAT
        assert kept == LAYERS * (RANKS * rows * of_rows + chosen * of_chosen)
        assert kept_by_plan - exact == LAYERS * (RANKS * rows - chosen) * of_rows
        # Beside them, the parts that are sent and those that arrived.
        parts = 2 * (RANKS * rows - chosen) * DIM * FLOAT
        assert peak_by_plan - peak == pytest.approx(kept_by_plan - exact + parts)


def refused(rank: int, world: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        count(rank, world, 1, 39)
    return str(caught.value)


def test_more_rows_than_a_part_holds_are_refused_with_their_number() -> None:
    # 2 samples of 10 tokens, which may all choose the 2 experts of one rank.
    said = r"expert_max_rows=39: .* 40 rows.* Use expert_max_rows=40 or more"
    for text in run_ranks(refused, 2, timeout=120):
        assert re.search(said, text), text


def test_experts_are_reduced_over_the_ranks_that_hold_the_same_ones() -> None:
    for found, _, sizes, *_ in run_ranks(count, 4, 3, timeout=120):
        experts = sum(n for name, n in sizes.items() if ".experts." in name) * FLOAT
        others = sum(n for name, n in sizes.items() if ".experts." not in name) * FLOAT
        assert found["expert_shard", "reduce_scatter"][1] == experts // RANKS
        assert found["expert_shard", "all_gather"][1] == 2 * experts // RANKS
        padding = -VOCAB % 4 * DIM * FLOAT  # the embedding's rows do not divide by 4
        assert found["dp_shard", "reduce_scatter"][1] == others + padding
        assert ("ep", "all_to_all") in found
        assert not {axis for axis, _ in found} & {"expert_replicate"}
