"""Rehearsal: one rank of a run of any size, set up and stepped on one machine without weights.

The Trainer, the strategy, the plan, the stages, the shards and the schedule are the real ones.
Large tensors have no memory (`weightless.py`), and the other ranks are not there
(`absent_ranks.py`).
"""

import gc
import multiprocessing
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
)
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint.progress import counted
from lightning_par.dtensor import local_part
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.observe.collective_hooks import Call
from lightning_par.observe.live_bytes import (
    COMMUNICATION,
    GRADIENTS,
    LiveBytes,
    OPTIMIZER,
    PARAMETERS,
)
from lightning_par.observe.weightless import WeightlessTensors
from lightning_par.profiling.comm_volume import CommVolume, CommVolumeEntry, payload_of
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.upstream.functions import replaced
from lightning_par.verification.absent_ranks import lone_world, LoneEnvironment, LoneWorld

__all__ = [
    "VALUE_CALLBACKS",
    "Collective",
    "Rehearsal",
    "StepObserver",
    "distinct_ranks",
    "rehearse",
    "rehearse_apart",
]

VALUE_CALLBACKS = (Checkpoint, EarlyStopping, LearningRateMonitor, ModelSummary, ProgressBar)
"""Callbacks that read values, or write them."""
_INSIDE = ("pp", "cp", "tp", "ep")
"""Axes whose collectives move activations; those of the others move gradients and parameters."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives in a row.

    Attributes:
        axis: As in `CommVolumeEntry`.
        operation: Likewise.
        payload: Bytes of the unsharded tensor of one call.
        calls: How many calls.
    """

    axis: str
    operation: str
    payload: int
    calls: int


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank of a run would hold and send in its first optimizer step.

    Attributes:
        rank: Global rank.
        place: The rank and its coordinates on the axes larger than 1.
        parameters: Number of parameters that the rank holds.
        memory: Kind -> bytes at the peak of a step, with the optimizer state of later steps.
        setup_peak: Most bytes alive before the first step.
        volume: Bytes of the step by mesh axis and operation.
        collectives: The calls of the step in order.
        seconds: Processor time of the rehearsal.
        host_bytes: Most memory that this process has had.
    """

    rank: int
    place: str
    parameters: int
    memory: dict[str, int]
    setup_peak: int
    volume: tuple[CommVolumeEntry, ...]
    collectives: tuple[Collective, ...]
    seconds: float
    host_bytes: int

    @property
    def peak(self) -> int:
        """Bytes at the peak of a step."""
        return sum(self.memory.values())


class _OrderedVolume(CommVolume):
    """`CommVolume` that also keeps the order of the calls, and marks buffers of sharded data."""

    def __init__(self, groups: dict[str, dist.ProcessGroup], live: LiveBytes) -> None:
        super().__init__(groups)
        self.order: list[tuple[str, str, int]] = []
        self._live = live

    @override
    def clear(self) -> None:
        super().clear()
        self.order.clear()

    @override
    def _on_call(self, call: Call, result: Any, began: Any) -> None:
        super()._on_call(call, result, began)
        if not self.enabled or call.group.size() == 1:
            return
        axis = self.axis_of(call.group)
        self.order.append((axis, call.operation, payload_of(call)))
        # What collectives of these axes move counts as activations.
        if axis.partition(" ")[0] not in _INSIDE:
            self._live.mark(call.tensors, COMMUNICATION)


@dataclass(eq=False)
class StepObserver(Callback):
    """Callback that takes down what a rank holds and sends in the first optimizer step.

    Args:
        live: Counts the memory; entered by the caller.

    Attributes:
        setup_peak: Most bytes alive before the first step.
        parameters: Number of parameters that the rank holds.
        memory: As in `Rehearsal`; empty before the end of the step.
    """

    live: LiveBytes
    setup_peak: int = 0
    parameters: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    _forward: dict[str, int] = field(default_factory=dict)
    _volume: _OrderedVolume | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        # Marked here, as their memory was made before anybody knew what for.
        self.live.mark([*pl_module.parameters(), *pl_module.buffers()], PARAMETERS)
        self.parameters = sum(local_part(p).numel() for p in pl_module.parameters())
        self.setup_peak = self.live.peak
        self.live.restart()
        model = strategy.parallel_model
        self._volume = volume = _OrderedVolume(dict(model.groups), self.live)
        self._open.enter_context(volume)
        self._open.enter_context(_marked_parameters(self.live))
        # The first look runs the step once more, which is not to be counted.
        strategy.start.after_look[id(volume)] = self._begin_anew

    def _begin_anew(self) -> None:
        assert self._volume is not None
        self._volume.clear()
        self.live.restart()

    @override
    def on_before_zero_grad(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        # Peak of the forward, which ends here: Lightning zeroes gradients between forward and
        # backward.
        self._forward = self.live.kinds
        self.live.restart()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        self.live.mark(gradients, GRADIENTS)
        # Lightning zeroes gradients after the forward: that of later steps finds those of the step
        # before.
        forward = Counter(self._forward)
        forward[GRADIENTS] += sum(local_part(grad).nbytes for grad in gradients)
        phases = dict(forward) if self._forward else {}, self.live.kinds
        # The larger of the two is the peak of a step.
        self._before = max(phases, key=lambda kinds: sum(kinds.values()))
        self.live.restart()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if not self._before:  # the first of several batches of a step
            return
        self._open.close()
        states = [state for each in trainer.optimizers for state in each.state.values()]
        self.live.mark(states, OPTIMIZER)
        # Forward and backward of later steps find the optimizer state there. What the update itself
        # takes is left out: DTensor looks shapes up there on whole fake tensors.
        held = self.live.kinds_now.get(OPTIMIZER, 0)
        self.memory = {**self._before, OPTIMIZER: held} if held else self._before

    @property
    def volume(self) -> tuple[CommVolumeEntry, ...]:
        """Bytes of the step by mesh axis and operation."""
        return () if self._volume is None else self._volume.entries()

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The calls of the step in order."""
        calls = [] if self._volume is None else self._volume.order
        runs = [(key, len(list(same))) for key, same in groupby(calls)]
        return tuple(
            Collective(axis=axis, operation=operation, payload=payload, calls=count)
            for (axis, operation, payload), count in runs
        )


@contextmanager
def _marked_parameters(live: LiveBytes) -> Iterator[None]:
    """Mark parameters that are gathered for a forward, and gradients as autograd adds them up."""
    seen: dict[int, nn.Parameter] = {}  # kept, as numbers are used again

    def see(module: nn.Module, _: Any) -> None:
        if isinstance(module, StageStub):  # its parameters are on another stage
            return
        for parameter in module.parameters(recurse=False):
            if id(parameter) in seen:
                continue  # FSDP gathers into the same tensor again
            seen[id(parameter)] = parameter
            live.mark(parameter, PARAMETERS)
            # Not of a whole tensor that stands for one: it says that it is a leaf, and is none.
            if parameter.requires_grad and parameter.grad_fn is None:
                handles.append(parameter.register_post_accumulate_grad_hook(mark))

    def mark(parameter: torch.Tensor) -> None:
        live.mark(parameter.grad, GRADIENTS)

    handles = [nn.modules.module.register_module_forward_pre_hook(see)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


MakeRun = Callable[[Callback, LoneEnvironment], tuple[pl.Trainer, pl.LightningModule, Any]]
"""Builds Trainer, module and data (or None for the data) with a callback and a plugin."""


def rehearse(make: MakeRun, *, num_nodes: int, devices: int, rank: int) -> Rehearsal:
    """Set one rank of a run up on this machine, and run one optimizer step without weights.

    Args:
        make: Builds the run: a Trainer on the CPU with that many nodes and devices, a strategy of
            this package, ``max_steps=1``, and the given callback and plugin.
        num_nodes: Number of nodes.
        devices: Devices of a node.
        rank: Global rank.

    Raises:
        ConfigurationError: There is no such rank, a process group exists already, or the Trainer is
            another.
        LightningParError: What the real run would refuse.
    """
    world_size = num_nodes * devices
    if not 0 <= rank < world_size:
        raise ConfigurationError(
            "LP905",
            f"rank={rank} does not exist: num_nodes={num_nodes} times devices={devices} have the "
            f"ranks 0 to {world_size - 1}. Pass one of these ranks.",
        )
    if dist.is_initialized():
        raise ConfigurationError(
            "LP914",
            "rehearse(...) makes its own torch.distributed process group, but this process already "
            "has a process group. Call rehearse_apart(...) instead, which runs in a new process.",
        )
    began, live = time.process_time(), WeightlessTensors()
    observer = StepObserver(live)
    # The group first: tensors that it makes are real.
    with lone_world(rank, world_size), live:
        trainer, module, data = _built(make, observer, LoneEnvironment(rank, num_nodes, devices))
        strategy = trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        strategy.processes.world = LoneWorld(strategy, live)
        operations = counted("operations", f"rehearsing rank {rank}", None)
        with _prepared(trainer, strategy, live), operations:
            trainer.fit(module, data)
    return Rehearsal(
        rank=rank,
        place=strategy.sizes.describe(rank),
        parameters=observer.parameters,
        memory=observer.memory,
        setup_peak=observer.setup_peak,
        volume=observer.volume,
        collectives=observer.collectives,
        seconds=time.process_time() - began,
        # In KiB on Linux, in bytes on macOS.
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
    )


def rehearse_apart(make: MakeRun, *, num_nodes: int, devices: int, rank: int) -> Rehearsal:
    """Do what `rehearse` does, in a process of its own, whose memory and groups end with it.

    Args:
        make: As for `rehearse`.
        num_nodes: Number of nodes.
        devices: Devices of a node.
        rank: Global rank.

    Raises:
        LightningParError: What the real run would refuse.
        ConfigurationError: This process has computed gradients on a GPU.
        RuntimeError: The process died, or raised what cannot be sent.
    """
    context = multiprocessing.get_context("fork")  # what is imported is imported there, too
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        gc.freeze()  # what was imported before stays; looking for it in rubbish takes seconds
        try:
            found: Any = rehearse(make, num_nodes=num_nodes, devices=devices, rank=rank)
        except Exception as error:
            found = _told(error)
        theirs.send(found)

    process = context.Process(target=run)
    process.start()
    # So that the death of the process is an end of file here.
    theirs.close()
    try:
        found = ours.recv()
    except EOFError:
        found = RuntimeError(
            f"the process that rehearsed rank {rank} ended without a result. Its output is above."
        )
    process.join()
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Rehearsal)
    return found


def _told(error: Exception) -> Exception:
    """Return an error that can be sent: one of ours, also if it is a cause, or the whole story."""
    cause: BaseException | None = error
    while cause is not None:
        # Lightning may have wrapped it.
        if isinstance(cause, LightningParError):
            return cause
        cause = cause.__cause__
    if "Autograd-and-Fork" in str(error):
        return ConfigurationError(
            "LP918",
            "this process has computed gradients on a GPU. A rehearsal runs in a fork of this "
            "process, in which torch can then compute no gradients. Call the rehearsal before the "
            "first gradient is computed, or in a new process, as `lightning-par rehearse` does.",
        )
    return RuntimeError("".join(traceback.format_exception(error)))


def _built(
    make: MakeRun, observer: StepObserver, environment: LoneEnvironment
) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    """Return what `make` builds.

    Raises:
        ConfigurationError: Its Trainer cannot be rehearsed.
    """
    count = environment.world_size()
    local = count // environment.num_nodes
    wanted = {"accelerator": "cpu", "num_nodes": count // local, "devices": local, "max_steps": 1}
    try:
        with warnings.catch_warnings():
            # On the CPU on purpose, whatever the machine has.
            warnings.filterwarnings("ignore", "GPU available but not used")
            trainer, module, data = make(observer, environment)
    except MisconfigurationException as error:
        raise ConfigurationError("LP918", f"make() failed: {error} {_cure(wanted)}") from error
    if not isinstance(trainer.strategy, MeshStrategy):
        name = type(trainer.strategy).__name__
        raise ConfigurationError(
            "LP903",
            f"the strategy of the Trainer is a {name}, but a rehearsal needs a strategy of "
            "lightning_par. Pass one, such as Hybrid3DStrategy(...).",
        )
    on_cpu = isinstance(trainer.accelerator, CPUAccelerator)
    found = {
        "accelerator": "cpu" if on_cpu else type(trainer.accelerator).__name__,
        "num_nodes": trainer.num_nodes,
        "devices": trainer.num_devices,
        "max_steps": trainer.max_steps,
    }
    wrong = [f"{name}={found[name]!r}" for name in wanted if found[name] != wanted[name]]
    wrong += ["no observer"] * (observer not in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.strategy.cluster_environment is not environment:
        wrong.append("a different cluster environment")
    if wrong:
        text = f"the Trainer that make() builds has {', '.join(wrong)}."
        raise ConfigurationError("LP918", f"{text} {_cure(wanted)}")
    return trainer, module, data


def _cure(wanted: dict[str, Any]) -> str:
    given = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
    return (
        f"A rehearsal runs on the CPU, also if the real run uses GPUs. Build Trainer({given}, "
        "callbacks=[observer], plugins=[environment], ...)."
    )


@contextmanager
def _prepared(
    trainer: pl.Trainer, strategy: MeshStrategy, live: WeightlessTensors
) -> Iterator[None]:
    """Leave out of a run what reads or writes values; build its model as the run would."""
    kept = [c for c in trainer.callbacks if not isinstance(c, VALUE_CALLBACKS)]  # type: ignore[attr-defined]
    trainer.callbacks, trainer.loggers = kept, []  # type: ignore[attr-defined]
    # These need values, and other ranks.
    strategy.options = replace(
        strategy.options, verify=False, on_difference="stop", gather_after_run=False
    )
    build = strategy.model_sharded_context

    @contextmanager
    def model_sharded_context() -> Iterator[None]:
        # Its tensors are on meta, or those that the initialization is recorded from.
        with live.paused(), build():
            yield

    with replaced(strategy, "model_sharded_context", model_sharded_context):
        yield


def distinct_ranks(sizes: ParallelSizes) -> list[int]:
    """Return one rank of each kind: the first of every pipeline stage, and the last of all.

    Stages differ in their blocks and in how many micro-batches are in flight; within a stage only
    the last rank may hold less, where a dim does not divide.

    Args:
        sizes: The size of every axis.
    """
    first: dict[int, int] = {}
    for rank in range(sizes.world_size):
        # Ranks in order: the first of a stage has the most of every dim that does not divide.
        first.setdefault(sizes.coordinates(rank)["pp"], rank)
    return sorted({*first.values(), sizes.world_size - 1})
