"""The device mesh: the only place that makes process groups. Its axes are those of `sizes.py`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_par.errors import MeshError
from lightning_par.sizes import AXES, EXPERT_AXES, ParallelSizes
from lightning_par.upstream.distributed import set_timeout

__all__ = ["ParallelMesh", "build_mesh"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelMesh:
    """The device mesh of a run and the place of this rank in it.

    Attributes:
        sizes: The size of every axis.
        device_mesh: The mesh with all of `AXES`, also those of size 1.
        rank: Global rank of this process.
        data_group: Ranks that hold the same part of the model and see other samples.
        token_group: Ranks that hold the same part of the model and see other tokens: of other
            samples, or of the same.
        replica_group: Ranks that hold the parts of one copy of the model and see the same samples.
        timeout: Time limit of a collective in any group; None: the default of torch.
        expert_mesh: The mesh with `EXPERT_AXES`; None without expert parallelism.
        links: Name -> group that only one kind of message uses, once it has been made: between
            neighboring pipeline stages, and for the gradients of whole replicas.
    """

    sizes: ParallelSizes
    device_mesh: DeviceMesh
    rank: int
    data_group: dist.ProcessGroup
    token_group: dist.ProcessGroup
    replica_group: dist.ProcessGroup
    timeout: timedelta | None = None
    expert_mesh: DeviceMesh | None = None
    links: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """Coordinate of this rank on every axis."""
        return self.sizes.coordinates(self.rank)

    @property
    def data_rank(self) -> int:
        """Index of the replica that this rank belongs to, 0 .. data - 1."""
        return self.sizes.data_rank(self.rank)

    @property
    def device_type(self) -> str:
        """``"cpu"`` or ``"cuda"``."""
        return self.device_mesh.device_type

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along one of `AXES`."""
        return self.device_mesh.get_group(axis)

    def named_groups(self) -> dict[str, dist.ProcessGroup]:
        """Return the groups of this rank by name: axes larger than 1, of experts too, and ``data``,
        ``replica`` and ``tokens``.

        Where two are the same group, the axis comes first.
        """
        sizes = zip(AXES, self.sizes.shape, strict=True)
        axes = {axis: self.group(axis) for axis, size in sizes if size > 1}
        if self.expert_mesh is not None:
            # Without "pp" and "tp", which are the same groups as above.
            axes |= {axis: self.expert_mesh.get_group(axis) for axis in EXPERT_AXES[1:4]}
        others = {"data": self.data_group, "replica": self.replica_group}
        return {**axes, **others, "tokens": self.token_group}

    def rank_at(self, axis: str, coordinate: int) -> int:
        """Return the global rank at `coordinate` of `axis` and this rank's place on the others."""
        place = {**self.place, axis: coordinate}
        rank = 0
        # AXES are in the order of the ranks, outermost first.
        for name, size in zip(AXES, self.sizes.shape, strict=True):
            rank = rank * size + place[name]
        return rank

    def describe(self) -> str:
        """Return ``rank 5 (pp 1, tp 1)``, naming the axes that are larger than 1."""
        return self.sizes.describe(self.rank)

    def subgroup(
        self, axes: Sequence[str], keep: Sequence[Sequence[int]]
    ) -> dist.ProcessGroup | None:
        """Make a process group of the ranks whose coordinates on `axes` are listed.

        Every rank must call this.

        Args:
            axes: Axes along which members differ.
            keep: For each of `axes`, the coordinates that take part.

        Returns:
            The group of this rank, or None if this rank is not in one.
        """
        wanted = set(itertools.product(*keep))
        groups = []
        # All groups of the world, as each rank has to take part in making each of them.
        for members in self.sizes.groups(axes):
            places = [self.sizes.coordinates(rank) for rank in members]
            inside = list(zip(members, places, strict=True))
            groups.append([r for r, p in inside if tuple(p[a] for a in axes) in wanted])
        return _make_groups(groups, self.timeout)


def _make_groups(
    groups: Sequence[list[int]], timeout: timedelta | None
) -> dist.ProcessGroup | None:
    # A collective over the world: every rank passes the same lists in the same order.
    mine, _ = dist.new_subgroups_by_enumeration([list(g) for g in groups], timeout=timeout)
    return mine if isinstance(mine, dist.ProcessGroup) else None


def build_mesh(
    sizes: ParallelSizes, device_type: str, timeout: timedelta | None = None
) -> ParallelMesh:
    """Make the device mesh and the groups of a run; every rank must call this.

    Args:
        sizes: Their product is the world size.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: Time limit of a collective in any group, also in the world group; None: the default
            of torch.

    Raises:
        MeshError: The world has another size.

    **Communicates**: makes process groups over all ranks.
    """
    world = dist.get_world_size()
    if sizes.world_size != world:
        raise MeshError(
            "LP102",
            f"{sizes} needs {sizes.world_size} ranks, but torch.distributed runs with {world} "
            f"ranks. Start {sizes.world_size} processes, or use other sizes.",
        )
    mesh = init_device_mesh(device_type, sizes.shape, mesh_dim_names=AXES)
    if timeout is not None:
        # `init_device_mesh` takes no timeout, and the world may have been made by somebody else.
        for group in (None, *(mesh.get_group(axis) for axis in AXES)):
            set_timeout(group, timeout)
    data_group = _make_groups(sizes.groups(("dp_replicate", "dp_shard")), timeout)
    replica_group = _make_groups(sizes.groups(("pp", "cp", "tp")), timeout)
    token_group = data_group
    # Without context parallelism both are the same ranks, and one communicator is enough.
    if sizes.context > 1:
        token_group = _make_groups(sizes.groups(("dp_replicate", "dp_shard", "cp")), timeout)
    assert data_group is not None
    assert token_group is not None
    assert replica_group is not None
    return ParallelMesh(
        sizes=sizes,
        device_mesh=mesh,
        rank=dist.get_rank(),
        data_group=data_group,
        token_group=token_group,
        replica_group=replica_group,
        timeout=timeout,
        expert_mesh=None
        if sizes.expert == 1
        else init_device_mesh(device_type, sizes.expert_shape, mesh_dim_names=EXPERT_AXES),
    )
