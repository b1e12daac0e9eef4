"""Bytes between hosts: what their interfaces sent in some steps, and what the ledger counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import CommunicationProfiler
from lightning_par.models import GPTModule
from lightning_par.profiling.comm_volume import CommVolumeEntry
from tests.support.host_runs import start_ranks
from tests.support.hosts import open_hosts
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer

__all__ = ["FOUR_HOSTS", "TWO_HOSTS", "HostBytes", "Layouts", "count_host_bytes"]

Layouts = Mapping[str, dict[str, Any]]


def _sizes(tp: int, pp: int, dp: int, **more: Any) -> dict[str, Any]:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return {**dict(zip(names, (tp, pp, dp), strict=True)), **more}


TWO_HOSTS: Layouts = {
    "tp 2 x pp 2": _sizes(2, 2, 1),
    "tp 2 x dp 2, ZeRO 1": _sizes(2, 1, 2),
    "tp 2 x dp 2, ZeRO 3": _sizes(2, 1, 2, zero_stage=3),
    "tp 2 x cp 2": _sizes(2, 1, 1, context_parallel_size=2),
    "dp 4, ZeRO 1": _sizes(1, 1, 4),
    "dp 2 x 2, ZeRO 1": _sizes(1, 1, 4, data_parallel_replicate_size=2),
    "tp 4": _sizes(4, 1, 1, tensor_parallel_across_hosts=True),
}
FOUR_HOSTS: Layouts = {
    "tp 2 x pp 4": _sizes(2, 4, 1),
    "tp 2 x dp 4, ZeRO 3": _sizes(2, 1, 4, zero_stage=3),
    "tp 2 x pp 2 x dp 2, ZeRO 1": _sizes(2, 2, 2),
    "cp 4 x tp 2": _sizes(2, 1, 1, context_parallel_size=4),
    "dp 4 x 2, ZeRO 1": _sizes(1, 1, 8, data_parallel_replicate_size=4),
}
"""By the number of hosts, of two ranks each. "dp 2 x 2" are two replicas of two shards."""

BATCH, TOKENS = 8, 256
MODEL = {"model_dim": 128, "num_kv_heads": 4}
FIRST, STEPS = 3, 4
"""Batch before which the counting begins, and how many are counted; earlier ones send more."""
Row = tuple[str, str]
"""Axis and operation."""


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """Bytes that left the hosts in a step, all hosts together.

    Attributes:
        wire: What their interfaces sent, headers included.
        counted: What the ledger counted, on the links of a group's ring between two hosts.
        expected: The same, as the plan and the shapes say; without what they do not determine.
    """

    wire: float
    counted: dict[Row, int]
    expected: dict[Row, int]

    @property
    def overhead(self) -> float:
        """What the interfaces sent above the ledger, as a fraction of that.

        torch's gloo carries a reduce-scatter out as an all-reduce, which sends it twice. The rest
        is headers, and batches and losses that the ranks of a replica share.
        """
        doubled = sum(n for (_, what), n in self.counted.items() if what == "reduce_scatter")
        return self.wire / (sum(self.counted.values()) + doubled) - 1


class _Counting(CommunicationProfiler):
    """Keeps what the last step sent to other hosts, and what the interface of this one sent."""

    def __init__(self, folder: Path, devices: int) -> None:
        super().__init__(folder=folder)
        self._devices, self.wire = devices, list[int]()
        self.counted: dict[Row, int] = {}
        self.expected: dict[Row, int] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (FIRST, FIRST + STEPS):
            dist.barrier()  # what earlier batches sent has arrived
            self.wire.append(_sent_by("eth0"))
        super().on_train_batch_start(trainer, module, batch, batch_idx)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        last = self.recording.steps.last()
        self.counted, self.expected = self._leaving(last.entries), self._leaving(last.expected)
        self.recording.stop()

    def _leaving(self, entries: Sequence[CommVolumeEntry]) -> dict[Row, int]:
        return {(e.axis, e.operation): e.sent for e in entries if self._leaves(e.axis)}

    def _leaves(self, axis: str) -> bool:
        """Whether what this rank sends on its ring of an axis goes to another host."""
        group = dist.group.WORLD
        if axis != "world":
            group = self.recording.steps.comm_volume.group_of(axis)
        ranks, own = dist.get_process_group_ranks(group), dist.get_rank()
        after = ranks[(ranks.index(own) + 1) % len(ranks)]
        return after // self._devices != own // self._devices


def _sent_by(interface: str) -> int:
    """Bytes that an interface of this network namespace has sent."""
    table = Path("/proc/self/net/dev").read_text().splitlines()
    lines = dict(line.strip().split(":", 1) for line in table if ":" in line)
    return int(lines[interface].split()[8])


def _train_and_count(out: Path, layouts: Layouts, devices: int, nodes: int) -> None:
    """Train some steps of every layout on a rank, and leave what was counted in a file."""
    ids = torch.randint(256, (400, TOKENS), generator=torch.Generator().manual_seed(3))
    found = {}
    for name, layout in layouts.items():
        counting = _Counting(out, devices)
        trainer = quiet_trainer(
            devices=devices,
            num_nodes=nodes,
            strategy=Hybrid3DStrategy(**layout),
            max_steps=FIRST + STEPS + 1,
            callbacks=[counting],
            limit_val_batches=0,
            log_every_n_steps=1000,
        )
        batches = loader(
            [{"input_ids": x, "labels": x} for x in ids],
            BATCH // layout.get("data_parallel_size", 1),
        )
        trainer.fit(GPTModule(overrides=MODEL), batches)
        wire = counting.wire[1] - counting.wire[0] if trainer.local_rank == 0 else 0
        found[name] = wire, counting.counted, counting.expected
    torch.save(found, out / f"{trainer.global_rank}.pt")


def count_host_bytes(
    folder: Path, layouts: Layouts, *, nodes: int, devices: int
) -> dict[str, HostBytes]:
    """Train layouts on hosts, and count what the hosts send to each other.

    Args:
        folder: For logs and results.
        layouts: Options of the strategy, by name.
        nodes: Number of hosts.
        devices: Ranks on each.
    """
    with open_hosts(nodes, folder) as hosts:
        start_ranks(hosts, devices, _train_and_count, folder, layouts, devices, nodes)
        codes = hosts.wait(100 * len(layouts))
        assert codes == [0] * (nodes * devices), hosts.texts()
    ranks = [torch.load(folder / f"{r}.pt") for r in range(nodes * devices)]
    found = {}
    for name in layouts:
        counted, expected = Counter[Row](), Counter[Row]()
        for rank in ranks:
            counted.update(rank[name][1])
            expected.update(rank[name][2])
        wire = sum(rank[name][0] for rank in ranks) / STEPS
        found[name] = HostBytes(wire=wire, counted=dict(counted), expected=dict(expected))
    return found
