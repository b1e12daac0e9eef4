"""A host that dies or freezes, or a network that is cut: every survivor ends and says why."""

import re
from pathlib import Path

import pytest

from tests.support.exhaustive import some
from tests.support.faults.hosts import FAULTS, run_with_host_fault

TIMEOUT = 20.0
OTHERS = {0: r"rank 2 \(pp 1, tp 0\), rank 3 \(pp 1, tp 1\)"}
OTHERS[1] = r"rank 0 \(pp 0, tp 0\), rank 1 \(pp 0, tp 1\)"
ENDED = r"answers, but its processes have ended"
CUT = r"does not answer at 10\.77\.0\.\d: it is down, or the network to it is cut"
FROZEN = r"answers at 10\.77\.0\.\d, but its processes do not: they are frozen"
LOST = r"cannot find rank 0 by MASTER_ADDR='nohost' .*Set MASTER_ADDR on every host to a name"
SAID = {
    "host killed": ENDED,
    "first host killed": ENDED,
    "link cut for ever": CUT,
    "host frozen": FROZEN,
    "first host frozen": FROZEN,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", some(SAID, [name for name in SAID if name != "host killed"]))
def test_survivors_name_the_host_the_ranks_and_what_they_waited_for(
    name: str, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    run = run_with_host_fault(fault, tmp_path, timeout=TIMEOUT)
    assert None not in run.codes, (run.seconds, run.said)
    assert 0 not in run.codes, (run.codes, run.said)
    assert run.seconds < TIMEOUT + 10, run.said
    assert run.left == []
    told = [host for host in (0, 1) if not (fault.ends and host == fault.host)]
    for host in told:
        for rank in (2 * host, 2 * host + 1):
            own = rf"rank {rank} \(pp {host}, tp {rank % 2}\) on host host{host}, in "
            did = r"(stage \d, [a-z' ]+ of micro-batch \d|[a-z_ ]+), step \d+"
            why = rf"cannot continue: host host{1 - host} \({OTHERS[host]}\) {SAID[name]}"
            found = re.findall(f"{own}{did}, {why}", run.said[rank])
            assert len(found) == 1, run.said[rank]


@pytest.mark.parametrize("name", ["no such name"])
def test_name_that_nobody_knows_is_said_on_every_host(name: str, tmp_path: Path) -> None:
    run = run_with_host_fault(FAULTS[name], tmp_path, timeout=3.0)
    assert list(run.codes) == [1] * 4, run.said
    assert run.seconds < 3 + 60  # four processes start, on a busy machine
    assert run.left == []
    assert [len(re.findall(LOST, said)) for said in run.said] == [1] * 4, run.said


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["link cut for 5 s", "1 % of packets lost"])
def test_run_outlives_a_short_cut_and_lost_packets(name: str, tmp_path: Path) -> None:
    run = run_with_host_fault(FAULTS[name], tmp_path, timeout=60)
    assert list(run.codes) == [0] * 4, run.said
    assert run.left == []
