"""Interfaces between hosts send what the ledger counts and the plan foresees, and little more."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.host_bytes import count_host_bytes, FOUR_HOSTS, Layouts, TWO_HOSTS

OVERHEAD = 0.1
"""Headers, the batch, which a pipeline shares, and questions to the store: more in slow steps."""
FLAT, HIERARCHICAL = "dp 4, ZeRO 1", "dp 2 x 2, ZeRO 1"
COVERING = {HIERARCHICAL: TWO_HOSTS[HIERARCHICAL]}
LARGE = [pytest.mark.exhaustive, pytest.mark.timeout(900)]
CELLS: list[Any] = [
    (2, COVERING),
    pytest.param(2, TWO_HOSTS, marks=LARGE),
    pytest.param(4, FOUR_HOSTS, marks=LARGE),
]


@pytest.mark.parametrize(("nodes", "layouts"), CELLS)
def test_hosts_send_what_the_ledger_says(nodes: int, layouts: Layouts, tmp_path: Path) -> None:
    found = count_host_bytes(tmp_path, layouts, nodes=nodes, devices=2)
    for name, sent in found.items():
        assert 0 < sent.overhead < OVERHEAD, (name, sent)
        if "context_parallel_size" not in layouts[name]:  # of those the plan says nothing
            foreseen = {row: n for row, n in sent.counted.items() if row[1] != "broadcast"}
            assert foreseen == sent.expected, name
    if FLAT in found:  # replicas across hosts, shards inside: two thirds of the bytes
        flat, hierarchical = (sum(found[n].counted.values()) for n in (FLAT, HIERARCHICAL))
        assert hierarchical == pytest.approx(flat * 2 / 3, rel=0.01)
