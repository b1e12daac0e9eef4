"""What CUDA does not forgive is an error on the simulated device, each shown by a defect."""

import math

import pytest
import torch
import torch.distributed as dist

from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.waits import record_traffic
from tests.support.ranks.api import RankError, run_ranks

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")


@pytest.fixture(autouse=True)
def _known_to_the_host():
    """Nothing of an earlier test is under way."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:  # the defect that the test planted
        torch.cuda.synchronize()


@pytest.fixture
def stream():
    return torch.cuda.Stream()


def test_tensors_of_two_devices_do_not_meet():
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        torch.ones(3, device="cuda") + torch.ones(3)
    three = torch.ones(3, device="cuda") + torch.tensor(2.0)  # a scalar may come from the CPU
    assert three.tolist() == [3, 3, 3]


@pytest.mark.parametrize("write", ["first", "second"])
def test_two_streams_need_an_event(stream, write):
    x = torch.ones(3, device="cuda")
    if write == "first":
        x.mul_(2)
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="no event orders the two"):
        x.mul_(3)


def test_an_event_orders_two_streams(stream):
    x = torch.ones(3, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 3
    torch.cuda.current_stream().wait_event(stream.record_event())
    assert (x + y).tolist() == [4, 4, 4]


def test_two_streams_may_read(stream):
    x = torch.ones(3, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 3
    assert x.sum().item() == 3
    stream.synchronize()
    assert y.tolist() == [3, 3, 3]


def test_memory_that_another_stream_uses_is_not_freed(stream):
    x = torch.ones(3, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 3
    del x
    with pytest.raises(RuntimeError, match="freed without record_stream"):
        torch.zeros(1, device="cuda")
    stream.synchronize()
    del y


def test_recorded_memory_may_be_freed(stream):
    x = torch.ones(3, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 3
    x.record_stream(stream)
    del x
    torch.cuda.current_stream().wait_stream(stream)
    assert y.tolist() == [3, 3, 3]


def test_what_has_not_arrived_is_not_there():
    host = torch.zeros(3, pin_memory=True)
    host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
    assert all(map(math.isnan, host.tolist()))
    torch.cuda.current_stream().record_event().synchronize()
    assert host.tolist() == [1, 1, 1]


def test_the_source_of_a_copy_stays_until_it_is_over():
    host = torch.ones(3).pin_memory()
    x = host.to("cuda", non_blocking=True)
    host.zero_()
    with pytest.raises(RuntimeError, match="changed pinned memory of shape"):
        torch.cuda.synchronize()
    del x


def test_copies_from_memory_that_is_not_pinned_wait():
    with record_traffic() as traffic:
        torch.ones(3).to("cuda", non_blocking=True)
    assert [cause for cause, *_ in traffic.waits] == ["unpinned copy from the host"]
    pinned = torch.ones(3).pin_memory()
    with record_traffic() as traffic:
        pinned.to("cuda", non_blocking=True)
    assert not traffic.waits
    assert traffic.copied == {"from the host": 12}


@pytest.mark.parametrize("ask", [float, bool, torch.Tensor.tolist, torch.Tensor.nonzero])
def test_who_asks_for_a_number_waits(ask):
    x = torch.ones(1, device="cuda")
    with record_traffic() as traffic:
        ask(x)
    assert traffic.waits.total() == 1


def test_generators_of_device_and_host_are_apart():
    torch.manual_seed(1)
    host = torch.get_rng_state()
    one = torch.nn.functional.dropout(torch.ones(99, device="cuda"))
    assert torch.equal(torch.get_rng_state(), host)
    state = torch.cuda.get_rng_state()
    two = torch.rand(99, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(99, device="cuda"), two)
    torch.manual_seed(1)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(99, device="cuda")), one)


def _use_a_sum_too_early(rank, world):
    x = torch.ones(3, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    try:
        return x * 2
    finally:
        work.wait()


def test_a_sum_that_nobody_waited_for_is_not_there():
    with pytest.raises(RankError, match="'all_reduce' on stream"):
        run_ranks(_use_a_sum_too_early, 2)


def _swap_receives(rank, world, order):
    kinds = torch.float32, torch.float64
    buffers = [torch.full((3,), float(rank), dtype=kind, device="cuda") for kind in kinds]
    if rank == 0:
        works = [dist.isend(buffer, 1) for buffer in buffers]
    else:
        works = [dist.irecv(buffers[place], 0) for place in order]
    for work in works:
        work.wait()
    return [buffer.tolist() for buffer in buffers]


def test_receives_come_in_the_order_of_the_sends():
    assert run_ranks(_swap_receives, 2, (0, 1))[1] == [[0] * 3] * 2
    with pytest.raises(RankError, match="rank 0 sends"):
        run_ranks(_swap_receives, 2, (1, 0), fresh=True)


def _send_what_nccl_has_no_message_for(rank, world):
    with pytest.raises(ValueError, match="Tensors must be contiguous"):
        dist.broadcast(torch.ones(2, 3, device="cuda").T, 0)
    with pytest.raises(TypeError, match="not supported for NCCL process group: Short"):
        dist.broadcast(torch.ones(2, dtype=torch.int16, device="cuda"), 0)
    with pytest.raises(TypeError, match="not supported for NCCL process group: Short"):
        dist.isend(torch.ones(2, dtype=torch.int16, device="cuda"), 1 - rank)


def test_some_tensors_are_not_sent():
    run_ranks(_send_what_nccl_has_no_message_for, 2)
