"""Time of single operations: matrix products, streams through memory, collectives, messages."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_par.planner.constants import Constants
from lightning_par.planner.profiles import DeviceProfile

__all__ = ["Clock", "Collective", "ranks_inside"]

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.8), (64, 128, 0.8))
"""Rows, columns, and speed relative to the largest: small tiles read their inputs more often."""


def ranks_inside(size: int, stride: int, node: int) -> int:
    """Return how many ranks of a group share a node.

    Args:
        size: Ranks of the group.
        stride: Distance of neighbors in the numbering of ranks: the product of the inner axes.
        node: Devices of a node.
    """
    # Ranks of the group are `stride` apart, so that a node holds node / stride of them.
    return math.gcd(size, max(1, node // stride))


@dataclass(frozen=True)
class Clock:
    """Times of operations on one device, in seconds.

    Attributes:
        device: Physics.
        constants: What is reached of it.
        width: Bytes of an element of products and hidden states.
        crowding: Slowdown by the other devices of the node that compute.
        wait: What every collective and message takes longer because of them.
        busy: How many devices of the node compute.
    """

    device: DeviceProfile
    constants: Constants
    width: float = 2.0
    crowding: float = 1.0
    wait: float = 0.0
    busy: float = 1.0

    @property
    def flops(self) -> float:
        """FLOP/s that large products reach."""
        return self.device.flops * self.constants.product / self.crowding

    @property
    def bandwidth(self) -> float:
        """Bytes/s of the memory that streams reach."""
        return self.device.bandwidth * self.constants.memory / self.crowding

    @property
    def kernel(self) -> float:
        """Seconds of a kernel, whatever it does."""
        return self.constants.kernel * self.crowding

    def product(
        self, M: float, N: float, K: float, batch: float = 1, *, fp8: bool = False
    ) -> float:
        """Return the time of [M, K] x [K, N]: tiles in waves, or memory."""
        device, share = self.device, self.constants
        # Devices without 8-bit products compute in 16 bits.
        fp8 = fp8 and device.fp8_flops > 0
        rate = device.fp8_flops * share.product_fp8 / self.crowding if fp8 else self.flops
        bandwidth, width = self.bandwidth, 1 if fp8 else self.width
        time = _tiles(device.processors, rate, bandwidth, share.inner_half, M, N, K, batch)
        read = batch * (width * (M * K + K * N) + self.width * M * N)
        # The roofline: whichever of arithmetic and memory takes longer.
        return max(time, read / bandwidth) + self.kernel

    def stream(self, size: float, kernels: float = 1) -> float:
        """Return the time of element-wise work that moves `size` bytes through memory."""
        return size / self.bandwidth + kernels * self.kernel

    @property
    def shared(self) -> float | None:
        """By how much sharded replicas slow their collectives down; None: it was not measured."""
        calibration = self.device.calibration
        return calibration.shared(self.busy) if calibration else None

    def eager(self, size: float, operators: float) -> float:
        """Return the time of operators that move `size` bytes, each by itself."""
        assert self.device.calibration is not None
        return size * self.crowding / self.device.calibration.eager + operators * self.kernel

    def collective(self, kind: Collective, size: float, ranks: int, inside: int) -> float:
        """Return the time of a collective.

        Args:
            kind: Which.
            size: Bytes of the whole, of which every rank has, gets or reduces a part.
            ranks: Size of the group.
            inside: How many of its ranks share a node. The node's other groups run at once.
        """
        if ranks == 1:
            return 0.0
        share, device = self.constants, self.device
        passes = 2 if kind == "all_reduce" else 1
        # Bytes that a rank of a ring sends: (n - 1) / n of the whole, twice for an all-reduce.
        moved = passes * (ranks - 1) / ranks * size
        if ranks <= inside:
            calibrated = device.calibration
            if calibrated is not None:
                measured = calibrated.collective(kind, ranks, moved, self.busy)
                if measured is not None:
                    return self.wait + measured
            return self.wait + passes * share.link_start + moved / (device.link * share.link)
        nodes = ranks / inside
        # Every group has the network ports of its ranks on the node.
        joint = share.network_joint if inside == device.node else share.network_part
        reached = share.network if inside == 1 else joint
        part = 1 < inside < device.node
        wait = share.network_part_wait if part else share.network_wait
        # Not faster than the links inside of a node, by which the ranks of a node share the
        # ports.
        rate = min(device.link * share.link, device.network * reached * inside)
        slower = 1 + wait * math.log2(nodes)
        # Rounds between nodes: a tree needs log2 of them.
        start = self.wait + passes * share.network_start * math.log2(nodes)
        return start + moved / rate * slower

    def message(self, size: float, *, between_nodes: bool) -> float:
        """Return the time of a message of `size` bytes to a neighbor on the pipeline axis."""
        share, device = self.constants, self.device
        calibrated = device.calibration
        if calibrated is not None and not between_nodes:
            measured = calibrated.collective("message", 2, size, self.busy)
            if measured is not None:  # cores that wake up late do so in what was measured, too
                # A wait below 0 is that of cores that wake up late.
                return max(0.0, self.wait) + measured
        if between_nodes:
            start, rate = share.network_start, device.network * share.network
        else:
            start, rate = share.link_start, device.link * share.link
        return self.wait + start + size / rate


@lru_cache(maxsize=1 << 18)
def _tiles(
    processors: int,
    rate: float,
    bandwidth: float,
    inner_half: float,
    M: float,
    N: float,
    K: float,
    batch: float,
) -> float:
    """Return the time of the best tiling; a product with few tiles may also be cut along K."""
    best = math.inf
    for rows, columns, speed in _TILES:
        # Tiles run in waves of as many as there are processors; the last wave may be part full.
        tiles = math.ceil(M / rows) * math.ceil(N / columns) * batch
        for parts in (1, 2, 4) if tiles < processors and K >= 1024 else (1,):
            waves = math.ceil(tiles * parts / processors)
            # `inner_half`: starting and ending a tile costs as much as that many steps along K.
            tile = 2 * rows * columns * (K / parts + inner_half) / (rate / processors * speed)
            # The parts' sums are written and read in float32.
            summed = 0.0 if parts == 1 else 8 * M * N * batch / bandwidth
            best = min(best, waves * tile + summed)
    return best
