"""Which part of every parameter each rank holds, computed before any process starts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import Shard

from lightning_par.dtensor import cut_box
from lightning_par.engine.experts.apply import expert_shard_dim
from lightning_par.engine.tensor.parameters import tensor_placements
from lightning_par.plan.parallel_plan import match_pattern
from lightning_par.plan.resolved_plan import balance_blocks, ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.sizes import AXES, EXPERT_AXES, ParallelSizes

__all__ = ["Cut", "ParameterPlacement", "RankKind", "count_rank_kinds", "find_placements"]

_GATHERED = ("dp_shard", "expert_shard")


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One sharding of a parameter, applied to the shard that earlier cuts left.

    Attributes:
        axis: Mesh axis over which it is sharded, one of `AXES` or `EXPERT_AXES`.
        dim: Dim of the parameter that is cut.
        parts: Number of shards.
    """

    axis: str
    dim: int
    parts: int


_Sharding = tuple[tuple[int, ...], torch.dtype, tuple[Cut, ...]]
"""Shape, dtype and cuts of a parameter: equal ones take as many bytes on every rank."""


@dataclass(frozen=True, kw_only=True)
class ParameterPlacement:
    """The stages and the shards of a parameter.

    Attributes:
        name: Canonical FQN.
        ties: The other FQNs of the same parameter.
        shape: Global shape.
        dtype: Data type of the parameter.
        stages: Pipeline stages that hold it.
        pipeline_ranks: Ranks on the ``pp`` axis that hold it.
        cuts: The shardings, in the order in which they are applied.
        reason: Why tensor parallelism leaves it whole; empty if it is sharded or the size is 1.
    """

    name: str
    ties: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    stages: tuple[int, ...]
    pipeline_ranks: tuple[int, ...]
    cuts: tuple[Cut, ...]
    reason: str

    def local_shape(
        self, rank: int, sizes: ParallelSizes, *, gathered: bool = False
    ) -> tuple[int, ...] | None:
        """Return the shape of a rank's shard, or None if it holds none.

        Args:
            rank: Global rank.
            sizes: Sizes of the mesh.
            gathered: Give the shape in the forward, where FSDP has gathered its shards.
        """
        place = _place(rank, sizes)
        if place["pp"] not in self.pipeline_ranks:
            return None
        used = [cut for cut in self.cuts if not (gathered and cut.axis in _GATHERED)]
        # In the order of the cuts: tensor parallelism first, then what FSDP divides of its shard.
        return _shard(self.shape, used, place)

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest shard between two steps, which is the first one."""
        first = dict.fromkeys((*AXES, *EXPERT_AXES), 0)
        return prod(_shard(self.shape, self.cuts, first)) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Ranks on the same place of the ``pp`` axis that hold as many bytes between two steps.

    Attributes:
        first: The lowest global rank of them.
        count: Number of ranks.
        size: Bytes of weights that each of them holds.
    """

    first: int
    count: int
    size: int


def count_rank_kinds(
    placements: Sequence[ParameterPlacement], sizes: ParallelSizes
) -> list[RankKind]:
    """Return the kinds of ranks, those of the first pipeline rank first.

    Stages of equal parameters are counted once: thousands of ranks take seconds.

    Args:
        placements: Of every parameter of the model.
        sizes: Sizes of the mesh.
    """
    per_stage = sizes.world_size // sizes.pipeline
    known: dict[frozenset[tuple[_Sharding, int]], list[RankKind]] = {}
    found = []
    for stage in range(sizes.pipeline):
        held = [p for p in placements if stage in p.pipeline_ranks]
        alike = Counter((p.shape, p.dtype, p.cuts) for p in held)
        key = frozenset(alike.items())
        if key not in known:
            known[key] = _kinds_of_stage(alike, range(per_stage), sizes)
        found += [replace(kind, first=kind.first + stage * per_stage) for kind in known[key]]
    return found


def _kinds_of_stage(
    alike: Mapping[_Sharding, int], ranks: Iterable[int], sizes: ParallelSizes
) -> list[RankKind]:
    first: dict[int, int] = {}
    counts = Counter[int]()
    for rank in ranks:
        place = _place(rank, sizes)
        size = sum(
            count * prod(_shard(shape, cuts, place)) * dtype.itemsize
            for (shape, dtype, cuts), count in alike.items()
        )
        first.setdefault(size, rank)
        counts[size] += 1
    return [RankKind(first=rank, count=counts[size], size=size) for size, rank in first.items()]


def _shard(shape: Sequence[int], cuts: Iterable[Cut], place: Mapping[str, int]) -> tuple[int, ...]:
    return cut_box("", shape, [(cut.dim, cut.parts, place[cut.axis]) for cut in cuts]).shape


def find_placements(
    model: nn.Module,
    resolved: ResolvedPlan,
    sizes: ParallelSizes,
    *,
    rank_of_stage: Sequence[int] = (0,),
    stage_blocks: Sequence[int] | None = None,
) -> list[ParameterPlacement]:
    """Compute the placement of every parameter of a model.

    Args:
        model: The whole model; its parameters may be on meta.
        resolved: Its plan, checked at these sizes.
        sizes: Sizes of the mesh.
        rank_of_stage: The pipeline rank that holds each stage.
        stage_blocks: Number of blocks of every stage; None balances them.
    """
    bounds = balance_blocks(resolved, len(rank_of_stage), stage_blocks)
    placements = tensor_placements(model, resolved)
    names: dict[str, list[str]] = {}
    for name, canonical in resolved.canonical.items():
        names.setdefault(canonical, []).append(name)
    found = []
    for name, parameter in model.named_parameters():
        every = names[name]
        held = {s for n in every for s in resolved.stages_of(n, bounds)}
        tensor = placements[name]
        # A style may shard where the axis has one rank.
        dim = tensor.dim if isinstance(tensor, Shard) and sizes.tensor > 1 else None
        shape = tuple(parameter.shape)
        found.append(
            ParameterPlacement(
                name=name,
                ties=tuple(n for n in every if n != name),
                shape=shape,
                dtype=parameter.dtype,
                stages=tuple(sorted(held)),
                pipeline_ranks=tuple(sorted({rank_of_stage[s] for s in held})),
                cuts=tuple(_cuts(name, shape, dim, resolved, sizes)),
                reason="" if dim is not None or sizes.tensor == 1 else _reason(name, resolved),
            )
        )
    return found


def _cuts(
    name: str, shape: Sequence[int], dim: int | None, resolved: ResolvedPlan, sizes: ParallelSizes
) -> list[Cut]:
    owner = name.rpartition(".")[0]
    tensor = [] if dim is None else [Cut(axis="tp", dim=dim, parts=sizes.tensor)]
    # Patterns name the module that holds experts; parameters may lie below it.
    divided = sizes.expert > 1 and any(
        match_pattern(p, ".".join(owner.split(".")[: p.count(".") + 1]))
        for p in resolved.plan.experts
    )
    if divided:
        cuts = [Cut(axis="ep", dim=0, parts=sizes.expert), *tensor]
        shards = sizes.expert_shape[2]
        if shards > 1:
            taken = {cut.dim for cut in cuts}
            last = expert_shard_dim(shape, taken, shards)
            cuts.append(Cut(axis="expert_shard", dim=last, parts=shards))
        return cuts
    if sizes.data_shard > 1 and shape:
        return [*tensor, Cut(axis="dp_shard", dim=0, parts=sizes.data_shard)]
    return tensor


def _place(rank: int, sizes: ParallelSizes) -> dict[str, int]:
    """Return the index of a rank on every axis, also on those that experts see."""
    place, left = sizes.coordinates(rank), rank
    for axis, size in reversed(list(zip(EXPERT_AXES, sizes.expert_shape, strict=True))):
        left, place[axis] = divmod(left, size)
    return place


def _reason(name: str, resolved: ResolvedPlan) -> str:
    owner = name.rpartition(".")[0]
    style = resolved.styles.get(owner)
    if style is None:
        return "no pattern of the plan's tensor styles matches its module"
    reason = TENSOR_STYLES[style].reason
    return f"{style}: {reason}" if reason else style
