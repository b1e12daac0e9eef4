"""A rehearsed rank sends what the same rank of a real run does, call by call."""

from functools import partial

import pytest

from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.verification.rehearse import rehearse_apart, StepObserver
from tests.support.exhaustive import some
from tests.support.models.rehearsed import build
from tests.support.ranks.api import run_ranks

LAYOUTS = {
    "tensor-pipeline-data": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "data_parallel_size": 2,
        "num_microbatches": 3,
    },
    "zero-3": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 4,
        "zero_stage": 3,
    },
}
OBJECTS = {("world", "broadcast"), ("pp", "broadcast")}
"""Pickles of random states, and of what the last stage logs: there is none of either."""


def real(rank, world, sizes):
    """Run one step on a real rank; return its bytes, calls and memory."""
    with LiveBytes() as live:
        observer = StepObserver(live)
        trainer, module, data = build(sizes, callbacks=[observer])
        trainer.fit(module, data)
    return observer.volume, observer.collectives, observer.memory


def make(sizes, observer, environment):
    return build(sizes, plugins=[environment], callbacks=[observer])


def named(axis):
    """Groups that have no name have a number, which depends on what was made before."""
    return "unnamed" if axis.isdigit() else axis


def sent(volume):
    found = {(named(e.axis), e.operation): (e.calls, e.payload, e.sent) for e in volume}
    return {key: value for key, value in found.items() if key not in OBJECTS}


def calls(collectives):
    found = [(named(c.axis), c.operation, c.payload, c.calls) for c in collectives]
    return [call for call in found if call[:2] not in OBJECTS]


@pytest.mark.parametrize("name", some(LAYOUTS, {"zero-3"}))
def test_bytes_calls_and_memory_are_those_of_real_ranks(name):
    sizes = LAYOUTS[name]
    ranks = run_ranks(real, 8, sizes, timeout=600, fresh=True)
    for rank in (0, 7):
        volume, collectives, memory = ranks[rank]
        found = rehearse_apart(partial(make, sizes), num_nodes=1, devices=8, rank=rank)
        assert sent(found.volume) == sent(volume)
        assert calls(found.collectives) == calls(collectives)
        assert len(sent(volume)) > 4
        assert found.peak == pytest.approx(sum(memory.values()), rel=0.1)
