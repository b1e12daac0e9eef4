"""Laws of the clocks: offsets between hosts are right to within the error that they name."""

import time

import pytest
import torch.distributed as dist

from lightning_par.engine.clock import ClockOffset, HostClock, measure_offset
from tests.support.ranks.api import ranks

AHEAD = {"a": 0.0, "b": 1234.5, "c": -77.25}


@ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abca", "abcc"])
def test_offsets_between_hosts_are_found_to_within_their_error(rank, world, hosts):
    def now():
        return time.monotonic() + AHEAD[hosts[rank]]

    offset = measure_offset(dist.group.WORLD, now=now, host=hosts[rank])
    assert abs(offset.seconds + AHEAD[hosts[rank]]) <= offset.error
    found = [None] * world
    dist.all_gather_object(found, offset)
    same = {host: {found[r] for r in range(world) if hosts[r] == host} for host in hosts}
    assert all(len(offsets) == 1 for offsets in same.values())
    assert found[0] == ClockOffset(seconds=0.0, error=0.0)


@ranks(2)
def test_ranks_of_one_host_share_its_clock(rank, world):
    assert measure_offset(dist.group.WORLD) == ClockOffset(seconds=0.0, error=0.0)


def test_marks_of_the_host_are_seconds_of_its_monotonic_clock():
    clock, before = HostClock(), time.monotonic()
    first, second = clock.read([clock.mark(), clock.mark()])
    assert before <= first <= second <= time.monotonic()
