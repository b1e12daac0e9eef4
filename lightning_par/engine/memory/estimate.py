"""Estimate of the bytes of a rank, on its device and on its host, from shapes alone.

Parameters have b bytes each. A rank holds p of them after all sharding, and P' before that of FSDP;
u are those of the largest FSDP unit (a block, or all that is outside of blocks).

===================  ============================================  =============================
kind                 on the device                                 on the host, if offloaded
===================  ============================================  =============================
parameters           b p
gathered             b P' (ZeRO 0 to 2), 2 b u (ZeRO 3)
gradients            b p; offloaded: a bucket and 3.5 b u at most  b p, twice if delayed; their
                                                                   sum, if it is made there
compression          what it did not send of gradients
optimizer            2 b p                                         master and two moments
===================  ============================================  =============================

With `offload_fraction`, that fraction counts as offloaded. Offloaded parameters are on the host;
states in a file are not counted. Nothing is gathered with one replica, where gradients are
compressed, or at ZeRO 0 without other axes and offloading. Activations, and what the allocator
caches, come on top.

**Source**: Rajbhandari et al. 1910.02054, section 3; Ren et al. 2101.06840, section 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.memory.placement import find_placements, ParameterPlacement
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.units import in_words

__all__ = ["MemoryEstimate", "MemoryRow", "estimate_memory", "misfits"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes of one kind on one rank.

    Attributes:
        kind: First column of the table in this module's docstring.
        device: Bytes on the device.
        host: Bytes on the host.
    """

    kind: str
    device: int
    host: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the rank that holds the most.

    Attributes:
        rows: One row for each kind.
    """

    rows: tuple[MemoryRow, ...]

    @property
    def device(self) -> int:
        """Bytes on the device."""
        return sum(row.device for row in self.rows)

    @property
    def host(self) -> int:
        """Bytes on the host."""
        return sum(row.host for row in self.rows)

    def __str__(self) -> str:
        cells = [("kind", "device", "host")]
        rows = [(row.kind, row.device, row.host) for row in self.rows]
        for kind, device, host in [*rows, ("all of these", self.device, self.host)]:
            cells.append((kind, in_words(device, 3), in_words(host, 3)))
        return "\n".join(f"{kind:<14}{device:>14}{host:>14}" for kind, device, host in cells)


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A parameter on one rank: its entries after and before FSDP's sharding, and its unit."""

    entries: int
    gathered: int
    dtype: torch.dtype
    trains: bool
    unit: str

    @property
    def size(self) -> int:
        return self.dtype.itemsize

    @property
    def wide(self) -> int:
        """Bytes of an entry of the master weight."""
        return max(4, self.size)


def estimate_memory(
    module: nn.Module,
    resolved: ResolvedPlan,
    sizes: ParallelSizes,
    *,
    zero_stage: int,
    offload: OffloadOptions | None,
    rank_of_stage: Sequence[int] = (0,),
    stage_blocks: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    compression: GradientCompression | None = None,
) -> MemoryEstimate:
    """Estimate the bytes of the rank that holds the most on its device.

    Args:
        module: The whole model; its parameters may be on meta.
        resolved: Resolved plan of the model.
        sizes: Sizes of the mesh.
        zero_stage: ZeRO stage, 0 to 3.
        offload: Options of offloading; None: nothing is offloaded.
        rank_of_stage: Pipeline rank of every stage.
        stage_blocks: Number of blocks of every stage; None balances them.
        dtype: Dtype of the parameters in the run; None: the one that they have.
        compression: Compression of the gradients that replicas exchange, if any.
    """
    placements = find_placements(
        module, resolved, sizes, rank_of_stage=rank_of_stage, stage_blocks=stage_blocks
    )
    found = []
    # Ranks that differ in another axis hold as much as each other: one for each stage.
    for rank in range(0, sizes.world_size, sizes.world_size // sizes.pipeline):
        # The first rank of a stage has the larger shard where a size does not divide evenly.
        shares = _shares(module, resolved, sizes, placements, rank, dtype)
        compresses = compression is not None and sizes.data > 1
        rows = _rows(shares, sizes, zero_stage, offload, waits=compresses)
        if compression is not None and compresses:
            rows = _with_compression(rows, compression, shares, sizes)
        found.append(MemoryEstimate(tuple(rows)))
    # By the device first, as that is what runs out.
    return max(found, key=lambda estimate: (estimate.device, estimate.host))


def _shares(
    module: nn.Module,
    resolved: ResolvedPlan,
    sizes: ParallelSizes,
    placements: Sequence[ParameterPlacement],
    rank: int,
    dtype: torch.dtype | None,
) -> list[_Share]:
    found = []
    parameters = dict(module.named_parameters())
    for placement in placements:
        shape = placement.local_shape(rank, sizes)
        if shape is None:
            continue
        blocks = (b for b in resolved.block_names if placement.name.startswith(b + "."))
        floats = placement.dtype.is_floating_point
        found.append(
            _Share(
                entries=math.prod(shape),
                # After tensor and expert parallelism, before FSDP.
                gathered=math.prod(placement.local_shape(rank, sizes, gathered=True) or ()),
                dtype=dtype if dtype is not None and floats else placement.dtype,
                trains=parameters[placement.name].requires_grad,
                unit=next(blocks, ""),
            )
        )
    return found


def _with_compression(
    rows: Sequence[MemoryRow],
    compression: GradientCompression,
    shares: Sequence[_Share],
    sizes: ParallelSizes,
) -> list[MemoryRow]:
    kept = sum(
        compression.remembered_bytes(share.entries, share.dtype, sizes.data)
        for share in shares
        if share.trains
    )
    # Compression needs whole replicas, on which nothing is gathered.
    whole = [replace(row, device=0) if row.kind == "gathered" else row for row in rows]
    return [*whole[:-1], MemoryRow(kind="compression", device=kept), whole[-1]]


def _rows(
    shares: Sequence[_Share],
    sizes: ParallelSizes,
    zero_stage: int,
    offload: OffloadOptions | None,
    *,
    waits: bool,
) -> list[MemoryRow]:
    """Return the rows without compression.

    Args:
        shares: Parameters of one rank.
        sizes: Sizes of the mesh.
        zero_stage: ZeRO stage, 0 to 3.
        offload: Options of offloading; None: nothing is offloaded.
        waits: Whether no gradient is final before the backward ends.
    """
    units = _units(shares)
    largest, whole = max(units, default=0), sum(units)
    trained = [share for share in shares if share.trains]
    local = sum(share.entries * share.size for share in trained)
    gathered = 0
    # Whole replicas need no FSDP without other axes.
    are_whole = zero_stage == 0 and offload is None and sizes.data == sizes.world_size
    if sizes.data > 1 and not (are_whole and sizes.expert == 1):
        # Stage 3: the block at work and the next one, which is gathered beside it.
        gathered = min(2 * largest, whole) if zero_stage == 3 else whole
    rows = [
        MemoryRow(kind="parameters", device=sum(s.entries * s.size for s in shares)),
        MemoryRow(kind="gathered", device=gathered),
    ]
    if offload is None:
        rows.append(MemoryRow(kind="gradients", device=local))
        rows.append(MemoryRow(kind="optimizer", device=2 * local))
        return rows
    # Such gradients are all on the device until the backward ends.
    waits = waits or sizes.pipeline > 1 or sizes.context > 1 or offload.overlap == "off"
    # Measured: FSDP2 holds gradients of 3.5 blocks while it reduces them.
    bucket = offload.bucket_bytes + (7 * largest // 2 if sizes.data > 1 else 0)
    slots = 1 if offload.delayed_update is False else 2
    part = offload.offload_fraction
    offloaded = int(part * local)
    # Offloaded gradients leave bucket by bucket, unless all wait for the end.
    gradients = local if waits else local - offloaded + min(offloaded, bucket)
    states = 0 if offload.folder is not None else int(part * _states(trained, offload))
    if offload.offload_parameters:
        rows[0] = MemoryRow(kind="parameters", device=0, host=rows[0].device)
        gradients = min(local, 2 * largest)
    sums = 0
    if offload.accumulate_on == "host" and not offload.offload_parameters:
        # A sum for each slot, in the dtype of the masters.
        sums = sum(s.entries * s.wide for s in trained)
    rows.append(MemoryRow(kind="gradients", device=gradients, host=slots * (offloaded + sums)))
    # The others have moments on the device, and a float32 master if they have 16 bits.
    left = sum(s.entries * (2 * s.size if s.size > 2 else 4 + 2 * 4) for s in trained)
    rows.append(MemoryRow(kind="optimizer", device=int((1 - part) * left), host=states))
    return rows


def _units(shares: Sequence[_Share]) -> list[int]:
    """Return the bytes of every FSDP unit when it is gathered."""
    units: dict[str, int] = {}
    for share in shares:
        units[share.unit] = units.get(share.unit, 0) + share.gathered * share.size
    return list(units.values())


def _states(shares: Sequence[_Share], offload: OffloadOptions) -> int:
    """Return the bytes of master weights and moments on the host."""
    total = 0
    for share in shares:
        # float64 parameters have float64 moments.
        moment = share.wide if share.wide == 8 else offload.moments.itemsize
        total += share.entries * (share.wide + 2 * moment)
    return total


def misfits(
    estimate: MemoryEstimate,
    *,
    device: int | None,
    host: int | None,
    ranks_per_host: int,
    shared: bool = False,
) -> list[str]:
    """Return a sentence for each memory that is too small; an empty list if there is none.

    Args:
        estimate: Bytes of the rank that holds the most.
        device: Bytes of a device; None: unknown.
        host: Bytes that are free on the host; None: unknown.
        ranks_per_host: Number of ranks that share the host.
        shared: Whether device and host are the same memory, as on the CPU.
    """
    problems = []
    if device is not None and not shared and estimate.device > device:
        problems.append(
            f"every device needs {estimate.device / _GIB:.2f} GiB without activations, but has "
            f"{device / _GIB:.2f} GiB"
        )
    # On a CPU device and host are one memory.
    needed = (estimate.host + (estimate.device if shared else 0)) * ranks_per_host
    if host is not None and needed > host:
        problems.append(
            f"the host needs {needed / _GIB:.2f} GiB of CPU memory for its {ranks_per_host} "
            f"ranks, but {host / _GIB:.2f} GiB are available"
        )
    return problems
