"""Hosts whose clocks differ train, and their actions lie on one time line."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import PipelineProfiler
from tests.support.host_runs import start_ranks
from tests.support.hosts import open_hosts
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer

AHEAD = 3600.0
STEPS = 3


def train_and_time(out: Path) -> None:
    """Train two stages with a profiler, and leave what this host's clock says in a file."""
    strategy = Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=2)
    place: dict[str, Any] = {"devices": 1, "num_nodes": 2, "strategy": strategy}
    profiler = PipelineProfiler(folder=out / "profile")
    trainer = quiet_trainer(**place, max_steps=STEPS, callbacks=[profiler], log_every_n_steps=1)
    trainer.fit(ToyModule(blocks=2), loader(ToyData(4 * STEPS), 4))
    (out / f"{trainer.global_rank}").write_text(str(time.monotonic()))


def actions(trace: Path, rank: int, kind: str) -> list[tuple[float, float]]:
    """When the actions of a rank began and ended, in seconds, in the order of time."""
    events = json.loads(trace.read_text())["traceEvents"]
    found = [e for e in events if e["pid"] == rank and e.get("cat") == kind]
    return sorted((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found)


@pytest.mark.skipif(not Path("/proc/self/ns/time").exists(), reason="clocks are not in namespaces")
def test_actions_of_hosts_whose_clocks_differ_follow_each_other(tmp_path: Path) -> None:
    with open_hosts(2, tmp_path, ahead=AHEAD) as hosts:
        start_ranks(hosts, 1, train_and_time, tmp_path)
        assert hosts.wait(150) == [0, 0], hosts.texts()
    clocks = [float((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert clocks[1] - clocks[0] > AHEAD - 100
    report = (tmp_path / "profile" / "report.html").read_text()
    error = float(re.findall(r"clocks of the hosts agree to within ([\d.]+) ms", report)[0]) / 1e3
    assert 0 < error < 5
    trace = tmp_path / "profile" / "trace.json"
    for kind, first in (("forward", 0), ("backward", 1)):
        before, after = actions(trace, first, kind), actions(trace, 1 - first, kind)
        assert len(before) == len(after) == STEPS * 4  # micro-batches
        # A process that has sent may have to wait for a core before it notes its own end.
        for (begins, _), (_, ends) in zip(before, after, strict=True):
            assert begins - error < ends < begins + 60
