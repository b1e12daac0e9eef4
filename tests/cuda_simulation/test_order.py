"""What ranks ask of NCCL fits together: the order of collectives, and of messages of pipelines.

Each is checked twice: with a communicator for each pair of ranks, made at its first use, and with
one for each group, as `init_process_group(device_id=...)` makes them.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.schedules import SCHEDULES
from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.order import check_order, OrderError, record_requests
from tests.support.models.staged import build, data, Staged
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")


def check(records: Any) -> None:
    for shared in (False, True):
        check_order(records, shared=shared)


class Asking(Channel):
    """The host waits for all that the stage has computed before it sends: the worst case."""

    def send_tensors(self, tensors: Any) -> None:
        torch.cuda.current_stream().synchronize()
        super().send_tensors(tensors)


def run_schedules(rank: int, world: int, cells: Any) -> Any:
    """What this rank asks for under each schedule and number of micro-batches."""
    found = []
    for name, count in cells:
        stages = world * SCHEDULES[name].stages_per_rank
        bounds = tuple((round(i * 8 / stages), round((i + 1) * 8 / stages)) for i in range(stages))
        batch = {key: x.cuda() for key, x in data(3 * count - 1).items()}
        with record_requests() as requests:
            staged = Staged(build(blocks=8).cuda(), bounds, schedule=name, channel=Asking)
            staged.train(batch, count)
            staged.evaluate(batch, count)
        found.append(requests)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_messages_of_every_schedule_end(world: int) -> None:
    cells = [(name, count) for name in sorted(SCHEDULES) for count in (1, 3, 2 * world)]
    found = run_ranks(run_schedules, world, cells, timeout=120)
    for cell, *records in zip(cells, *found, strict=True):
        assert all(record.asked for record in records)
        try:
            check(records)
        except OrderError as error:
            error.add_note(str(cell))
            raise


LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2 x pp2": (4, 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "cp2 x dp2, zero 3": (4, 2, {"context_parallel_size": 2, "zero_stage": 3}),
    "cp4": (4, 1, {"context_parallel_size": 4}),
    "pp2 x dp2, zero 2": (4, 2, {"pipeline_parallel_size": 2, "zero_stage": 2, "schedule": "zbv"}),
}


def train(rank: int, world: int, replicas: int, options: dict[str, Any]) -> Any:
    """What this rank asks for in two steps, a validation, and the end of the run."""
    sizes = dict.fromkeys(("tensor", "pipeline", "context"), 1)
    options = {f"{name}_parallel_size": n for name, n in sizes.items()} | options
    strategy = Hybrid3DStrategy(data_parallel_size=replicas, **options)
    trainer = quiet_trainer(strategy=strategy, devices=world, max_steps=2, gradient_clip_val=1.0)
    with record_requests() as requests:
        trainer.fit(ToyModule(), loader(ToyData(16, ignored=True), 4), loader(ToyData(8), 4))
    return requests


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_of_a_layout_ask_for_the_same(name: str) -> None:
    world, replicas, options = LAYOUTS[name]
    records = run_ranks(train, world, replicas, options, timeout=120)
    assert all(record.asked for record in records)
    check(records)


def one_group(kind: str, source: int, target: int) -> str:
    return "pp activations"


def run_in_one_group(rank: int, world: int) -> Any:
    """As `run_schedules`, with activations and gradients in one group."""
    with patch("lightning_par.engine.pipeline.stage_links.group_name", one_group):
        return run_schedules(rank, world, [("1f1b", 4)])[0]


def two_collectives(rank: int, x: Any, y: Any, group: Any) -> Any:
    calls = [(dist.all_reduce, (x,)), (dist.broadcast, (y, 0))]
    return [call(*given, group=group, async_op=True) for call, given in calls[:: -1 if rank else 1]]


def another_shape(rank: int, x: Any, y: Any, group: Any) -> Any:
    return dist.all_reduce(y if rank else x, group=group, async_op=True)


def another_dtype(rank: int, x: Any, y: Any, group: Any) -> Any:
    return dist.all_reduce(x.int() if rank else x, group=group, async_op=True)


def one_call_more(rank: int, x: Any, y: Any, group: Any) -> Any:
    return [dist.all_reduce(x, group=group, async_op=True) for _ in range(1 + rank)]


def send_before_receive(rank: int, x: Any, y: Any, group: Any) -> Any:
    return dist.isend(x, 1 - rank, group=group), dist.irecv(y[:3], 1 - rank, group=group)


def receive_of_another_size(rank: int, x: Any, y: Any, group: Any) -> Any:
    return dist.irecv(y, 0, group=group) if rank else dist.isend(x, 1, group=group)


def batch_of_one(rank: int, x: Any, y: Any, group: Any) -> Any:
    """Where it is the first, a batch makes the communicator of the whole group."""
    if rank:
        return dist.irecv(x, 0, group=group)
    return dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, group)])


def in_a_batch(rank: int, x: Any, y: Any, group: Any) -> Any:
    """Not a defect: what a batch sends and receives is under way at once."""
    kinds = [(dist.isend, x), (dist.irecv, y[:3])]
    return dist.batch_isend_irecv([dist.P2POp(kind, t, 1 - rank, group) for kind, t in kinds])


DEFECTS = {
    two_collectives: "collective 0 of group .* differs",
    another_shape: r"rank 0: all_reduce of Float \[\[3\]\].*\n  rank 1: all_reduce of .* \[\[4\]\]",
    another_dtype: "rank 1: all_reduce of Int",
    one_call_more: "rank 0: nothing\n",
    send_before_receive: "would hang under NCCL:",
    receive_of_another_size: "a send and its receive differ:",
    batch_of_one: "never use the communicator",
}


UNDER_WAY: list[Any] = []
"""Works that may never end; who lets go of a receive waits for it."""


def plant(rank: int, world: int, defects: Any) -> Any:
    """What this rank asks for in each defect; nobody waits, as gloo might not come to an end."""
    found = []
    for defect in defects:
        group = dist.new_group([0, 1])
        with record_requests() as requests:
            tensors = torch.ones(3, device="cuda"), torch.ones(4, device="cuda")
            UNDER_WAY.append(defect(rank, *tensors, group))
        found.append(requests)
    return found


def test_planted_defects_are_caught() -> None:
    found = zip(*run_ranks(plant, 2, [*DEFECTS, in_a_batch], fresh=True), strict=True)
    for message, records in zip(DEFECTS.values(), found, strict=False):
        with pytest.raises(OrderError, match=message):
            check_order(records)
    check(next(found))


def differ(rank: int, world: int) -> None:
    x, y = torch.ones(3, device="cuda"), torch.ones(4, device="cuda")
    UNDER_WAY.append(two_collectives(rank, x, y, dist.new_group([0, 1])))


def test_what_ranks_ask_for_is_checked_in_every_test() -> None:
    with pytest.raises(OrderError, match=r"collective 0 of group .* differs"):
        run_ranks(differ, 2, fresh=True)


def test_one_group_for_both_directions_would_hang() -> None:
    """Note [Two groups] in p2p.py."""
    records = run_ranks(run_in_one_group, 2)
    with pytest.raises(OrderError, match="would hang under NCCL:"):
        check_order(records)
