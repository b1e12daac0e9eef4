"""The processes of a run: sizes, mesh, launcher, and the collectives that Lightning asks for.

Length: what a run is made of before a module is there, in its order.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor

from lightning_par.dtensor import whole_values
from lightning_par.engine.activity import Activity, BETWEEN_STEPS
from lightning_par.engine.collectives import meet
from lightning_par.engine.data.islands.client import Place
from lightning_par.engine.rng import collect_random_states, restore_random_states
from lightning_par.engine.tensor.whole_draws import whole_random_draws
from lightning_par.errors import MeshError
from lightning_par.mesh import build_mesh, ParallelMesh
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.data.replica_view import as_replica
from lightning_par.strategies.decisions import Decisions
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.post_mortem.memory_death import MemoryWatch
from lightning_par.strategies.processes.deferred_signals import DeferredSignals
from lightning_par.strategies.processes.host_status import HostStatusServer
from lightning_par.strategies.processes.hosts import (
    check_placement,
    find_common_route,
    gather_hosts,
    HostOf,
    meet_hosts,
    name_common_interface,
    number_of,
    with_ranks,
)
from lightning_par.strategies.processes.interface import Route
from lightning_par.strategies.processes.interruption import Interruption
from lightning_par.strategies.processes.island_place import find_island, find_place
from lightning_par.strategies.processes.launcher import PreflightLauncher, refuse_prompt
from lightning_par.strategies.processes.module_copies import explain_copy
from lightning_par.strategies.processes.rendezvous import (
    init_alone,
    leave_at_exit,
    loopback_store,
    spare_forks,
    use_loopback,
)
from lightning_par.strategies.processes.run_progress import RunProgress
from lightning_par.strategies.processes.shared_folders import (
    check_folder_is_shared,
    check_path_is_shared,
    checkpoint_folders,
)
from lightning_par.strategies.processes.watchdog import (
    is_communication_error,
    RankWatch,
)
from lightning_par.strategies.processes.world import RealWorld, World
from lightning_par.strategies.processes.world_collectives import check_world_collectives
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.lightning import (
    init_process_group,
    leave_samplers,
    trainer_of,
    view_data_hooks,
)

__all__ = ["MeshProcesses"]

_PATIENCE = timedelta(seconds=120)
"""How long ranks of one node that no launcher watches wait for each other."""


def _agree_to_all(what: str) -> None:
    """Let every rank do what it wants, where no hook is at work."""


class MeshProcesses:
    """Launches the processes of a run, arranges them in a mesh, and watches them.

    Until `attach`, there is one device, as for a strategy that no Trainer has taken.

    Args:
        options: Sizes, backend and timeout that the user chose.

    Attributes:
        world: The other ranks, for those who depend on them; a rehearsal sets one without any.
        activity: What this rank is doing, for messages about ranks that fail.
        decisions: What the run found out by itself, such as the rule of its loss.
        interruption: Whether an exception is being handled, and on which ranks.
        agree: Refuses what a hook is about to do on some ranks only; see `WholeView.agree`.
        copy: Under a pipeline, a module and its copy inside of the user's module, if there is one.
    """

    def __init__(self, options: MeshOptions) -> None:
        self._options = options
        self._devices: list[torch.device] = []
        self._num_nodes, self._rank = 1, 0
        self.shown_rank: int | None = None
        self._environment: ClusterEnvironment | None = None
        self._sizes: ParallelSizes | None = None
        self._mesh: ParallelMesh | None = None
        self._launcher: PreflightLauncher | None = None
        self._watch: RankWatch | None = None
        self._hosts: list[HostOf] | None = None
        self._route: Route | None = None
        self._variables: list[str] = []
        self._owns_group = False
        self._filter: Any = None
        self.world: World = RealWorld()
        self.activity, self.decisions = Activity(), Decisions()
        self._opened = ExitStack()
        self.catch_up: Callable[[], None] | None = None  # set with the model
        self.agree: Callable[[str], None] = _agree_to_all
        self.interruption = Interruption(options.timeout)
        self._signals, self._progress = DeferredSignals(), RunProgress()
        self._memory, self._shared = MemoryWatch(), set[str]()
        self._collectives = ExitStack()
        self.copy: tuple[str, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave process groups, threads and the run behind."""
        # A copy of the strategy, as a proof or a tuner makes it, sets processes up for itself.
        left = dict.fromkeys(("_mesh", "_launcher", "_watch", "_filter", "catch_up"))
        interruption = Interruption(self._options.timeout)
        own: dict[str, Any] = {"interruption": interruption, "_signals": DeferredSignals()}
        own |= {"_progress": RunProgress(), "_shared": set(), "_memory": MemoryWatch()}
        own |= {"_collectives": ExitStack(), "_opened": ExitStack()}
        return {**vars(self), **left, **own, "_owns_group": False}

    def attach(
        self,
        devices: list[torch.device],
        num_nodes: int,
        environment: ClusterEnvironment | None,
    ) -> ClusterEnvironment | None:
        """Take what the Trainer knows; return the environment that knows the ranks.

        Args:
            devices: Devices of this node.
            num_nodes: Number of nodes.
            environment: The one that Lightning has found.

        Raises:
            ConfigurationError: See `with_ranks`.
        """
        self._devices, self._num_nodes = devices, num_nodes
        # Before Lightning asks it anything: ranks are numbered as the mesh needs them.
        environment = self._environment = with_ranks(environment, num_nodes * self.num_local)
        self._rank = number_of(environment, num_nodes, self.num_local)
        if environment is not None:
            environment.set_global_rank(self._rank)
            environment.set_world_size(num_nodes * self.num_local)
        # Only the first rank of the first island logs.
        # Far beyond any rank: no process of another island is rank zero.
        others = 0 if self._options.outer is None else self.island << 20
        rank_zero_only.rank = self.rank + others  # type: ignore[attr-defined]
        return environment

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self._num_nodes

    @property
    def num_local(self) -> int:
        """Number of devices, hence processes, of this node."""
        return len(self._devices) or 1

    @property
    def rank(self) -> int:
        """Global rank of this process: those of one node follow each other.

        So neighbours on the innermost axes share a node, also where a scheduler deals ranks out
        to the nodes in turn; then it is not the scheduler's number.
        """
        return self._rank

    @property
    def rank_of_step(self) -> int:
        """Global rank that the user's code is told; another one where it writes for rank 0."""
        return self._rank if self.shown_rank is None else self.shown_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return 1 if self._environment is None else self._environment.world_size()

    @property
    def speaks(self) -> bool:
        """Whether this process logs what all processes of its node find alike.

        The first one does, and each that no process of ours has started: its log may be another.
        """
        environment, launcher = self._environment, self._launcher
        is_first = environment is None or environment.local_rank() == 0
        return is_first or launcher is None or not launcher.sees_processes

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        local_rank = 0 if self._environment is None else self._environment.local_rank()
        return self._devices[local_rank]

    @property
    def sizes(self) -> ParallelSizes:
        """The size of every axis.

        Raises:
            MeshError: They do not fit the devices, or are still to be chosen.
        """
        if self._sizes is None:
            num_devices = self._num_nodes * self.num_local
            self._sizes = self._options.fit_sizes(num_devices, self.num_local)
        return self._sizes

    @property
    def island(self) -> int:
        """Number of the island that these processes are; see `Outer`."""
        return find_island(self._options.outer)[0]

    def find_place(self) -> Place:
        """Return where this rank is among the islands.

        Raises:
            ConfigurationError: There is no server or no key.
        """
        assert self._options.outer is not None
        return find_place(self._options.outer, self.rank, self.world_size)

    @property
    def samplers(self) -> dict[str, int]:
        """Into how many parts the samples are divided, and which one is of this process.

        Islands may have different numbers of replicas: the samples are divided among the islands,
        and then among their replicas. Each island validates and tests with all of them.
        """
        trainer = trainer_of(self.interruption.module)
        divides = trainer is None or trainer.training
        island, islands = find_island(self._options.outer) if divides else (0, 1)
        # Islands alternate, so that each has samples from all over an epoch.
        rank = self.sizes.data_rank(self.rank) * islands + island
        return {"num_replicas": self.sizes.data * islands, "rank": rank}

    @contextmanager
    def as_replica(self) -> Iterator[None]:
        """Surrounds code of data sets, which is told ranks and numbers of replicas."""
        sizes = self._sizes
        if sizes is None or sizes.data == sizes.world_size:
            yield
            return
        rank, count = sizes.data_rank(self.rank), property(lambda _: sizes.data)
        of_trainer = replaced(pl.Trainer, "world_size", count)
        with as_replica(rank, sizes.data), of_trainer, replaced(self, "shown_rank", rank):
            yield

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of this run.

        Raises:
            MeshError: The processes have not been set up.
        """
        if self._mesh is None:
            raise MeshError(
                "LP104",
                "strategy.mesh was read before the Trainer had set up its processes and made the "
                "mesh. Read strategy.mesh in setup or a later hook.",
            )
        return self._mesh

    @property
    def backend(self) -> str:
        """Backend of torch.distributed; CUDA runs also get gloo, for objects and batches on the
        CPU.
        """
        chosen, device = self._options.process_group_backend, self.device
        # "cuda:nccl,cpu:gloo": the user has chosen for each device.
        if device.type == "cpu" or (chosen is not None and ":" in chosen):
            return chosen or "gloo"
        chosen = chosen or dist.get_default_backend_for_device(device)
        return f"cpu:gloo,{device.type}:{chosen}"

    def make_launcher(
        self, preflight: Callable[[pl.Trainer | None, Any], None]
    ) -> PreflightLauncher:
        """Return the launcher of this node's processes.

        Args:
            preflight: Checks what can be checked before any process starts.

        Raises:
            MeshError: The sizes do not fit the devices.
            ConfigurationError: A notebook or a prompt would have to start processes.
        """
        if self._options.auto_rule == "planned":
            self._options.possible_sizes(self._num_nodes * self.num_local, self.num_local)
        else:
            _ = self.sizes
        assert self._environment is not None
        if self.world_size > 1 and not self._environment.creates_processes_externally:
            refuse_prompt(self.world_size)
        self._launcher = PreflightLauncher(
            self._environment, self.num_local, self._num_nodes, preflight, self._explain
        )
        return self._launcher

    def _explain(self, error: BaseException) -> BaseException | None:
        """Tell the other ranks of an exception, and the user of its cause; return a clearer one."""
        clearer: BaseException | None = None
        raised_here = not is_communication_error(error)
        # Another rank is gone: whoever asks the store from now on might wait for ever.
        if not raised_here:
            self.interruption.tear()
        if self._watch is not None:
            self._watch.tell(error)
        if self.copy and raised_here and self.activity.now().action == BETWEEN_STEPS:
            clearer = explain_copy(error, self.copy)
        clearer = clearer or self._memory.explain(error, self.interruption.module, self.activity)
        if self._watch is not None:
            self._watch.explain(clearer or error)
        return clearer

    def set_up(self) -> None:
        """Make the process group and the mesh, and start to watch the ranks of this node.

        **Communicates**: makes process groups over all ranks, then a few names between them.
        """
        self.attach(self._devices, self._num_nodes, self._environment)
        self._rendezvous()
        waits = self._waits
        # Sizes that are planned need the model first: `choose` then makes the mesh.
        if not waits:
            self._arrange()
        if self.world_size > 1 and "PL_GLOBAL_SEED" in os.environ:
            # The state of one process that ran the same script. Lightning's `reset_seed` would go
            # back to the state before what the script has drawn.
            cpu = torch.device("cpu")
            restore_random_states(self.broadcast(collect_random_states(cpu), 0), cpu)
        # Once per run: `set_up` is called for every method of the Trainer.
        if self._watch is None and self.world_size > 1:
            self._opened.enter_context(whole_values())
            assert self._environment is not None
            local_rank = self._environment.local_rank()
            sizes = ParallelSizes(data_shard=self.world_size) if waits else self.sizes
            server = None
            if self._route is not None and local_rank == 0:
                server = HostStatusServer(self._route.address)
            given = self.rank, local_rank, self.activity, sizes, server
            file, others = self.world.open_status_file(*given)
            if file is not None:
                rest = file, sizes, self._options.timeout, others, server
                self._watch = RankWatch(*rest, speaks=self.speaks, leave=self._memory.leave)
                self._observe_children(False)
            elif server is not None:
                server.close()
        trainer = trainer_of(self.interruption.module)
        if trainer is not None:
            view_data_hooks(trainer, self.as_replica)
            leave_samplers(trainer)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            for folder in checkpoint_folders(trainer):
                self.check_folder(folder)

    def check_folder(self, folder: str) -> None:
        """Refuse a folder for checkpoints that some hosts do not share; looks once.

        Raises:
            CheckpointError: On every rank.

        **Communicates**: see `check_folder_is_shared`.
        """
        # Behind a URL rank 0 sees what is missing, once all have written.
        if self._hosts is not None and folder not in self._shared and "://" not in folder:
            check_folder_is_shared(folder, self._hosts)
            self._shared.add(folder)

    def check_path(self, path: str) -> None:
        """Refuse a checkpoint that only some hosts see.

        Raises:
            CheckpointError: On every rank.

        **Communicates**: see `check_path_is_shared`.
        """
        if self._hosts is not None and "://" not in path:
            check_path_is_shared(path, self._hosts)

    def _arrange(self) -> None:
        """Make the mesh, if there is none."""
        if self.sizes.data == 1 and self._filter is None:
            # All ranks log the same values; Lightning cannot know.
            message = re.compile(".*sync_dist=True.*when logging on epoch")
            self._filter = ("ignore", message, Warning, None, 0)
            # `filterwarnings` would also let every warning that was shown come once more.
            filters: Any = warnings.filters  # a list
            filters.insert(0, self._filter)
        if self._mesh is None:
            timeout = self.world.timeout(self._options.timeout)
            self._mesh = build_mesh(self.sizes, self.device.type, timeout)
        # Of the mesh before: which collectives are refused depends on its sizes.
        self._collectives.close()
        self._collectives.enter_context(check_world_collectives(self._mesh, self.activity))
        self._collectives.enter_context(whole_random_draws())

    def choose(self, sizes: ParallelSizes) -> None:
        """Arrange the processes of a run, which are set up, in a mesh of these sizes.

        **Communicates**: makes process groups over all ranks, unless the mesh has these sizes.
        """
        if sizes != self._sizes:
            self._sizes, self._mesh = sizes, None
        self._check_placement()
        self._arrange()
        if self._watch is not None:
            self._watch.sizes = sizes

    def _rendezvous(self) -> None:
        """Make the default process group; the processes of one node meet on its loopback."""
        spare_forks()
        environment, timeout = self._environment, self._options.timeout
        assert environment is not None
        store: Any = self._meet_hosts() if self._num_nodes > 1 else None
        self._variables += self._name_interface()
        if self._num_nodes == 1:
            # One device gets a group as well, since DTensor and FSDP2 ask for one.
            if self.world_size == 1 and not dist.is_initialized():
                # Nobody to meet: no port, no variables, and `close` can leave nothing behind.
                init_alone(self.backend, timeout)
                self._owns_group, self._mesh = True, None
                return
            if isinstance(environment, LightningEnvironment) and not dist.is_initialized():
                # Who starts ranks by hand starts them together; nobody else sees that one died.
                started_here = self._launcher is not None and self._launcher.sees_processes
                patience = None if started_here else _PATIENCE
                store = loopback_store(environment.main_port, self.rank, self.world_size, patience)
        place = {"global_rank": self.rank, "world_size": self.world_size}
        if not dist.is_initialized() and self.backend.endswith(":nccl"):
            leave_at_exit(self.interruption)  # Lightning does so for "nccl" alone
        init_process_group(environment, self.backend, timeout=timeout, store=store, **place)

    def _meet_hosts(self) -> Any:
        """Meet the ranks of all hosts; return the store, or None if there is a group already."""
        assert self._environment is not None
        store, address = None, self._environment.main_address
        if not dist.is_initialized():
            given = self._environment, self.rank, self.world_size, self._options.timeout
            store, self._hosts = meet_hosts(*given)
        elif self._hosts is None:
            self._hosts = gather_hosts(address)
        if not self._waits:
            self._check_placement()
        self._route = find_common_route(self._hosts, self.rank, address)
        return store

    @property
    def _waits(self) -> bool:
        """Whether the sizes are still to be chosen."""
        return self._sizes is None and self._options.auto_rule == "planned"

    def _check_placement(self) -> None:
        if self._hosts is not None and not self._options.tensor_parallel_across_hosts:
            check_placement(self.sizes, self._hosts)

    def _name_interface(self) -> list[str]:
        """Tell gloo and NCCL the interface to use; return the variables that were set for it."""
        if self._num_nodes == 1:
            return use_loopback()
        if self._route is None or self._hosts is None:
            return []
        return name_common_interface(self._hosts, self.rank, self._route)

    @contextmanager
    def naming_interface(self) -> Iterator[None]:
        """Surrounds what may make a process group, also after the run has ended."""
        named = self._name_interface()
        try:
            yield
        finally:
            for variable in named:
                os.environ.pop(variable, None)

    def begin_loop(self) -> None:
        """Defer signals, and follow the progress of training."""
        trainer = self._defer_signals()
        is_training = trainer is not None and trainer.state.stage == RunningStage.TRAINING
        if is_training:
            self._memory.begin(trainer, self.activity, self.device)
        if self.rank == 0 and is_training:
            self._progress.begin(trainer, follows=self.world_size > 1)

    def _defer_signals(self) -> Any:
        """Answer signals between two batches from now on; return the Trainer, if there is one."""
        trainer = trainer_of(self.interruption.module)
        if trainer is not None:
            self._signals.begin(trainer)
        return trainer

    def end_loop(self) -> None:
        """Answer those that came during the last batch, unless this loop runs inside training."""
        self._signals.end()

    def _observe_children(self, observes: bool) -> None:
        if self._launcher is not None:
            self._launcher.observes = observes

    def close(self) -> None:
        """Stop watching, and leave the environment as it was; the launcher observes again."""
        self._signals.close()
        self._collectives.close()
        self._opened.close()
        self._progress.close(trainer_of(self.interruption.module))
        while self._variables:
            os.environ.pop(self._variables.pop(), None)
        filters: Any = warnings.filters  # a list
        if self._filter in filters:
            filters.remove(self._filter)
        self._filter = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
            self._observe_children(True)
        if self._owns_group:
            self._owns_group = False
            # The user may have destroyed it.
            if dist.is_initialized():
                dist.destroy_process_group()

    def meet(self) -> None:
        """Wait for every rank, where a rank that does so alone can be named; see `meet`."""
        if self.world_size > 1 and dist.group.WORLD is not None:
            meet(dist.group.WORLD, self._options.timeout)

    def barrier(self, name: str | None) -> None:
        """Wait for every rank, unless an exception keeps some away; `name` is the Trainer's."""
        self.agree("strategy.barrier")
        if dist.is_initialized() and self.interruption.ranks_are_together():
            dist.barrier()
        # The Trainer has just registered its handlers, and calls no hook before this one.
        if name == "run-stage":
            self._defer_signals()

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Return the object that the rank `source` gives; this rank's own while ranks are apart."""
        if not dist.is_initialized() or not self.interruption.ranks_are_together():
            return value
        self.agree("strategy.broadcast")
        box = [value]
        dist.broadcast_object_list(box, source)
        return box[0]

    def before_exchange(self, name: str) -> None:
        """Do what has to come before an exchange that the user's step, or a hook, asks for: compare
        it with what other ranks do, and gather the blocks that this rank's forward has skipped.

        Args:
            name: Name of the exchange, for messages.
        """
        self.agree(name)
        if self.catch_up is not None:
            self.catch_up()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the replicas, or over `group`; ranks of one replica hold the same values."""
        if not isinstance(tensor, Tensor) or self._mesh is None or not dist.is_initialized():
            return tensor
        self.before_exchange("strategy.reduce")
        group = self._mesh.data_group if group is None else group
        if isinstance(reduce_op, str):
            reduce_op = getattr(dist.ReduceOp, "AVG" if reduce_op == "mean" else reduce_op.upper())
        averages = reduce_op == dist.ReduceOp.AVG
        if averages and not tensor.is_floating_point():
            tensor = tensor.double()  # Lightning averages its counts of samples; 3.5 is not 3
        # gloo has no averages
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM if averages else reduce_op, group=group)
        return tensor.div_(group.size()) if averages else tensor

    def decide(self, decision: bool, *, unanimous: bool) -> bool:
        """Return whether all ranks of the world agree or, unless `unanimous`, at least one does.

        **Communicates**: one all-reduce of one number over all ranks.
        """
        if not dist.is_initialized() or not self.interruption.ranks_are_together():
            return decision
        self.agree("strategy.reduce_boolean_decision")
        votes = torch.tensor(int(decision))  # on the host: nobody has to wait for the device
        dist.all_reduce(votes)
        return bool(votes == self.world_size) if unanimous else bool(votes)
