"""The processes of a run: sizes, mesh, launcher, and the collectives that Lightning asks for."""

from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_par.engine.activity import Activity
from lightning_par.errors import MeshError
from lightning_par.mesh import build_mesh, ParallelMesh
from lightning_par.sizes import AutoRule, fit_sizes, ParallelSizes, Size
from lightning_par.strategies.processes.launcher import PreflightLauncher
from lightning_par.strategies.processes.rendezvous import loopback_store, use_loopback
from lightning_par.strategies.processes.watchdog import open_status_file, RankWatch
from lightning_par.upstream.lightning import init_process_group, reduce_tensor, set_launcher

__all__ = ["MeshProcesses"]


class MeshProcesses(ParallelStrategy):
    """Starts the processes of a run and gives them a mesh.

    Args:
        sizes: Arguments of `fit_sizes` that the user chose.
        auto: Rule for the sizes left to "auto".
        process_group_backend: Of torch.distributed; None chooses by device.
        timeout: After which a collective gives up.
        lightning_options: What Lightning passes to every parallel strategy.
    """

    def __init__(
        self,
        *,
        sizes: dict[str, Size],
        auto: AutoRule,
        process_group_backend: str | None,
        timeout: timedelta | None,
        lightning_options: dict[str, Any],
    ) -> None:
        super().__init__(**lightning_options)
        self.num_nodes = 1
        self._sizes_asked, self._auto = sizes, auto
        self._process_group_backend, self._timeout = process_group_backend, timeout
        self._sizes: ParallelSizes | None = None
        self._mesh: ParallelMesh | None = None
        self.activity = Activity()
        self._watch: RankWatch | None = None

    @property
    def sizes(self) -> ParallelSizes:
        """The size of every axis.

        Raises:
            MeshError: They do not fit the devices.
        """
        if self._sizes is None:
            self._sizes = fit_sizes(
                num_devices=self.num_nodes * self.num_processes,
                devices_per_node=self.num_processes,
                auto=self._auto,
                **self._sizes_asked,  # type: ignore[arg-type]
            )
        return self._sizes

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of this run.

        Raises:
            MeshError: The processes have not been set up.
        """
        if self._mesh is None:
            raise MeshError("the mesh exists once the Trainer has set up its processes.")
        return self._mesh

    @property
    def num_processes(self) -> int:
        """Devices on this node."""
        return len(self.parallel_devices) if self.parallel_devices else 1

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to shard the data: only over replicas."""
        return self.sizes.data > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {
            "num_replicas": self.sizes.data,
            "rank": self.sizes.data_rank(self.global_rank),
        }

    @property
    def process_group_backend(self) -> str:
        """Backend of torch.distributed; CUDA runs also get gloo, for objects and batches on the
        CPU.
        """
        chosen, device = self._process_group_backend, self.root_device
        if device.type == "cpu" or (chosen is not None and ":" in chosen):
            return chosen or "gloo"
        chosen = chosen or dist.get_default_backend_for_device(device)
        return f"cpu:gloo,{device.type}:{chosen}"

    @override
    def _configure_launcher(self) -> None:
        _ = self.sizes
        assert self.cluster_environment is not None
        launcher = PreflightLauncher(
            self.cluster_environment,
            self.num_processes,
            self.num_nodes,
            self._preflight,
            self._explain,
        )
        set_launcher(self, launcher)

    def _preflight(self, trainer: pl.Trainer | None, model: Any) -> None:
        """Refuse what cannot work before any other process starts."""

    def _explain(self, error: BaseException) -> None:
        """Tell the other ranks of an exception, and the user of its cause."""
        if self._watch is not None:
            self._watch.explain(error)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions which rank this is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        sizes = self.sizes
        super().setup_environment()
        reset_seed()
        self.set_world_ranks()
        self._meet()
        if self._mesh is None:
            self._mesh = build_mesh(sizes, self.root_device.type, self._timeout)
        if self._watch is None and self.world_size > 1:
            board = open_status_file(self.global_rank, self.local_rank, self.activity)
            if board is not None:
                self._watch = RankWatch(board, sizes, self._timeout)
                self._observe_children(False)

    def _meet(self) -> None:
        """Make the default process group; the processes of one node meet on its loopback."""
        environment = self.cluster_environment
        assert environment is not None
        store = None
        if self.num_nodes == 1:
            use_loopback()
            if isinstance(environment, LightningEnvironment) and not dist.is_initialized():
                store = loopback_store(environment.main_port, self.global_rank, self.world_size)
        backend = self.process_group_backend
        init_process_group(environment, backend, timeout=self._timeout, store=store)

    def _observe_children(self, observes: bool) -> None:
        if isinstance(self.launcher, PreflightLauncher):
            self.launcher.observes = observes

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            self._observe_children(True)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over `group`; ranks of one replica hold the same values."""
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        group = self._mesh.data_group if group is None else group
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning averages its counts of samples; 3.5 is not 3
        return reduce_tensor(tensor, group, reduce_op=reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together with every rank of the world."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        group = self.mesh.data_group if group is None else group
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)
