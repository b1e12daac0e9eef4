"""The fitted constants of the cost model, apart from the physics of `DeviceProfile`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

__all__ = ["FITTED", "Calibration", "Constants", "fitted_constants"]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Shares of the datasheet's peaks that are reached, and fixed times, in seconds.

    `kernel`, `inner_half` and `link_start` are no subject of a fit: they matter for small models
    only, where they have to be measured.

    Attributes:
        product: Share of peak FLOP/s in a large matrix product.
        product_fp8: The same of 8-bit products, casts included.
        memory: Share of the memory's bandwidth.
        link: Share of the bandwidth inside a node, in a large collective.
        network: Share of the bandwidth between nodes, of a group with one rank on each node.
        network_joint: The same, of a group that holds whole nodes.
        network_part: The same, of a group with several ranks, but not all, on each node.
        network_wait: What every doubling of a group's nodes adds, of its time on the network.
        network_part_wait: The same, of a group with several ranks, but not all, on each node.
        host: Of the host per kernel; below it, the device waits for the host.
        kernel: Of the device per kernel.
        inner_half: Inner length of a product at which a tile reaches half of its speed.
        link_start: To start a collective inside a node.
        network_start: To start a collective or a message between nodes.
        stage_start: Of a stage's forward or backward, where stages wait for their messages: the
            host waits as well, and the device then for kernels.
    """

    product: float = 0.59
    product_fp8: float = 0.54
    memory: float = 0.47
    link: float = 0.81
    network: float = 1.0
    network_joint: float = 0.90
    network_part: float = 0.89
    network_wait: float = 0.046
    network_part_wait: float = 0.037
    host: float = 10e-6
    kernel: float = 3e-6
    inner_half: float = 64.0
    link_start: float = 30e-6
    network_start: float = 60e-6
    stage_start: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured on a machine, in place of what was fitted on published runs.

    Attributes:
        constants: What is reached of the profile's numbers.
        attention_rates: Speed of attention, forward and backward, relative to a large product.
        slowdown: Entry k - 1: time of an operation while k devices of a node compute, over that of
            one that computes alone; more than 1 where they share cores or power.
        overlaps: Whether what ranks send moves beside their computation; a CPU sends with the cores
            that compute.
        waits: Entry k - 1: seconds that a collective or a message takes longer between computations
            of k devices of a node than in a loop of nothing else: a rank of a CPU waits for others
            that wait for a core, and finds the caches cold. Less than 0, but never below the start
            of a collective, where cores that fall idle in the loop wake up late. Empty: none.
        eager: Bytes/s of what operators other than products and attention read and write, where
            each runs by itself; 0: they are fused as on the devices of published runs.
        collectives: Kind -> entry k - 1: start and bytes/s of a collective inside a node while k of
            its devices are at work: gloo's reduce-scatter takes as long as its all-reduce, and
            devices that share cores share what these can send; and of a "message" to a neighbor.
            Empty: as the link says.
        exchange: Entry k - 1: how many times longer than that the collectives of k sharded replicas
            take between computations, with the copies around them. Empty: they wait as others do.
    """

    constants: Constants
    attention_rates: tuple[float, float]
    slowdown: tuple[float, ...] = (1.0,)
    overlaps: bool = True
    waits: tuple[float, ...] = ()
    eager: float = 0.0
    collectives: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    exchange: tuple[float, ...] = ()

    def crowding(self, busy: float) -> float:
        """Return the slowdown while so many devices of a node compute, on average.

        Args:
            busy: From 1; between two entries on a straight line, beyond the last one that.
        """
        return _interpolate(self.slowdown, busy)

    def wait(self, busy: float) -> float:
        """Return the seconds that every collective and message waits.

        Args:
            busy: As for `crowding`.
        """
        return _interpolate(self.waits or (0.0,), busy)

    def shared(self, busy: float) -> float | None:
        """Return by how much sharded replicas slow their collectives down; None: not measured.

        Args:
            busy: As for `crowding`.
        """
        return _interpolate(self.exchange, busy) if self.exchange else None

    def collective(self, kind: str, ranks: int, moved: float, busy: float) -> float | None:
        """Return the seconds of a collective inside a node; None: its kind was not measured.

        Args:
            kind: Which.
            ranks: Of its group.
            moved: Bytes that a rank of a ring sends.
            busy: As for `crowding`.
        """
        lines = self.collectives.get(kind)
        if not lines:
            return None
        # Start and rate as measured while so many devices are at work; log2: a tree, or a ring's
        # rounds.
        start, rate = (_interpolate(entries, busy) for entries in zip(*lines, strict=True))
        return start * math.log2(ranks) + moved / rate


def _interpolate(entries: tuple[float, ...], busy: float) -> float:
    # Entry k - 1 is of k devices; between two entries on a straight line.
    at = min(max(busy, 1.0), float(len(entries)))
    low = int(at)
    high = min(low + 1, len(entries))
    share = at - low
    return entries[low - 1] * (1 - share) + entries[high - 1] * share


FITTED: Mapping[str, Constants] = MappingProxyType(
    {
        "a100": Constants(
            product=0.84,
            memory=0.62,
            link=0.72,
            network=0.67,
            network_joint=0.93,
            network_part=0.55,
            network_wait=0.054,
            network_part_wait=0.44,
            network_start=80e-6,
            stage_start=550e-6,
            host=20e-6,
        ),
        "h100": Constants(),
    }
)
"""Family of devices -> what was fitted on published measurements of it.

**Source**: ``benchmarks/published_predictions.py``. "a100": 109 runs of Megatron-DeepSpeed on 64 to
512 A100s (vTrain), one cluster whose network of 800 Gb/s a node serves groups with a part of a node
worse the more nodes they have, and the times of four stages on one A100 (zero-bubble).
"h100": 56 runs of torchtitan, NeMo and Megatron-Core on 4 to 6,144 H100s, none of which waits for
messages between stages. Other devices take the latter: no measurement of them was at hand.
"""


def fitted_constants(device: str) -> Constants:
    """Return the constants of a device's family, by the start of its name."""
    family = next((name for name in FITTED if device.startswith(name)), "h100")
    return FITTED[family]
