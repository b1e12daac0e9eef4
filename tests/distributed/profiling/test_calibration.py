"""Ranks that measure their machine agree on it, and predict from it."""

import json
import os
from functools import partial

import pytest
import torch
import torch.distributed as dist

from lightning_par.checkpoint.progress import showing
from lightning_par.commands.calibrate import as_profile
from lightning_par.planner.profiles import load_profile
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.planner.step_time import predict_step
from lightning_par.profiling import calibration, link_rates
from lightning_par.profiling.calibration import measure
from lightning_par.profiling.link_rates import KINDS, measure_waits
from lightning_par.profiling.rounds import Rounds
from lightning_par.sizes import ParallelSizes
from tests.support.progress import Kept
from tests.support.ranks.api import ranks

SHAPE = TransformerShape(layers=2, model_dim=64, heads=4, length=128, vocab=256)


@ranks(3)
@pytest.mark.parametrize("local", [3, 1])
def test_ranks_agree_and_their_profile_predicts(rank, world, local, tmp_path, monkeypatch):
    """Of narrow layers, a few times; and no group is left behind.

    Threads of idle groups of gloo would slow down what is measured next.
    """
    monkeypatch.setattr(calibration, "_SLOWDOWN_ROUNDS", 1)
    monkeypatch.setattr(link_rates, "_WAIT_ROUNDS", 1)
    for name in ("measure_exchange", "measure_waits"):
        narrow = partial(getattr(link_rates, name), width=48)
        monkeypatch.setattr(calibration, name, narrow)
    made, living = watch_groups(monkeypatch)
    kept = Kept(tmp_path / f"kept {rank}")
    with showing(kept):
        found = measure(torch.device("cpu"), torch.float32, local, round_seconds=0.001)
    assert made
    # Of groups of others a rank has nothing.
    assert set(living) <= {dist.GroupMember.NON_GROUP_MEMBER}
    assert [done - total for _, _, done, total in kept.works()] == [0] * (rank == 0)
    assert len(found.slowdown) == local
    assert len(found.waits) == (local if local > 1 else 0)
    if local > 1:
        lines = [line for kind, line in found.collectives.items() if kind != "message"]
        starts = [min(line[k][0] for line in lines) for k in range(local)]
        assert all(wait >= -start for wait, start in zip(found.waits, starts, strict=True))
    assert (found.link is None) == (local == 1)
    assert (found.network is None) == (local == 3)
    every: list = [None] * world
    dist.all_gather_object(every, found)
    assert every == [found] * world
    entry, networks = as_profile("here", found, local=local, source="measured")
    path = tmp_path / f"{rank}.json"
    path.write_text(json.dumps({"devices": {"here": entry}, "networks": networks}))
    device = load_profile("here", path)
    assert device.node == local
    assert device.calibration.waits == found.waits
    layout = Layout(sizes=ParallelSizes(data_shard=3))
    assert predict_step(SHAPE, layout, device).seconds > 0


def watch_groups(monkeypatch):
    """Gives lists of the groups that are made from now on, and of those that are not destroyed."""
    make, destroy, made, living = dist.new_group, dist.destroy_process_group, [], []

    def new_group(ranks):
        made.append(make(ranks))
        living.append(made[-1])
        return made[-1]

    def destroy_process_group(group):
        living.remove(group)
        destroy(group)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", destroy_process_group)
    return made, living


@ranks(4)
def test_layers_of_ranks_that_share_a_core_wait_for_their_collectives(rank, world):
    """All ranks get one core; beside a link that takes no time, everything is waiting."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        rounds = Rounds(torch.device("cpu"), torch.float32, 0.001)
        rates = dict.fromkeys(KINDS, ((0.0, 1e15),) * world)
        waits = measure_waits(rounds, world, rates, 1e15, width=32)
    finally:
        os.sched_setaffinity(0, cores)
    assert waits[0] == 0
    assert min(waits[1:]) > 0
