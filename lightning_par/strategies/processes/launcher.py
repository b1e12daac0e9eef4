"""Launching the processes of a node, after what can be checked without them has been checked."""

import inspect
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.callbacks import BaseFinetuning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint.progress import showing
from lightning_par.errors import ConfigurationError, MeshError
from lightning_par.strategies.components.progress_bar import progress_of
from lightning_par.strategies.processes.shared_folders import last_behind_url
from lightning_par.upstream.functions import diverted
from lightning_par.upstream.lightning import (
    launch_scripts,
    SubprocessScriptLauncher,
    TunerExit,
)

__all__ = ["PreflightLauncher", "refuse_prompt"]

_LAUNCHER = "LIGHTNING_PAR_LAUNCHER"
"""Environment variable that tells a process which one has started it."""
_PERIOD = 0.2
_GRACE = 3.0
"""Seconds in which this process may end by itself once one that it started has failed."""
_logger = logging.getLogger(__name__)


class PreflightLauncher(SubprocessScriptLauncher):
    """Starts one process per device, as for DDP; under torchrun or SLURM it starts none.

    Args:
        cluster_environment: Knows the ranks.
        num_processes: Number of devices on this node.
        num_nodes: Number of nodes.
        preflight: Called with the trainer and the model before any process starts; raises to stop.
        explain: Called with an exception of the run; may add a note to it, or return a clearer one.

    Attributes:
        data: What the user passed to the Trainer's method as the data of its loop, or None.
        observes: Whether a process of ours that fails ends all the others. `RankWatch` knows more,
            as long as it is there.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        preflight: Callable[[pl.Trainer | None, Any], None],
        explain: Callable[[BaseException], BaseException | None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._preflight, self._explain = preflight, explain
        self.data: Any = None
        self.observes = True

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether a Trainer in a notebook may have it; `refuse_prompt` says where it may not."""
        return True

    @property
    def sees_processes(self) -> bool:
        """Whether a process of this launcher that ends early ends the others."""
        return bool(self.procs) or os.environ.get(_LAUNCHER) == str(os.getppid())

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        self._end_if_orphaned()
        # Before other processes are started: errors of options are printed once, and within
        # seconds.
        self._preflight(trainer, args[0] if args else None)
        bound = inspect.signature(function).bind(*args, **kwargs)
        given = bound.arguments
        if trainer is not None and given.get("ckpt_path") == "last":
            given["ckpt_path"] = last_behind_url(trainer) or "last"
        self.data = given.get("train_dataloaders", given.get("dataloaders"))
        self.cluster_environment.validate_settings(
            num_devices=self.num_processes, num_nodes=self.num_nodes
        )
        # After `validate_settings`, which knows its environment's own rules.
        self._check_count()
        starts = self.num_processes * self.num_nodes > 1  # alone it sets no variables either
        externally = self.cluster_environment.creates_processes_externally
        # A second method of the Trainer finds the processes of the first one.
        if starts and not self.procs and not externally:
            os.environ[_LAUNCHER] = str(os.getpid())  # the other processes inherit it
            try:
                launch_scripts(self)
            finally:
                del os.environ[_LAUNCHER]
        with ExitStack() as stack:
            stack.enter_context(self._observed())
            stack.enter_context(showing(progress_of(trainer)))
            # Alone, this package leaves threads and Lightning's functions as they are.
            if starts:
                stack.enter_context(diverted(BaseFinetuning.filter_on_optimizer, _not_held))
                _divide_cores(self.num_processes)
            try:
                return function(*bound.args, **bound.kwargs)
            # Not an error: a tuner leaves the fit by it.
            except TunerExit:
                raise
            except BaseException as error:
                # Also for KeyboardInterrupt and SystemExit: others wait for a rank that leaves.
                clearer = self._explain(error)
                if clearer is not None:
                    raise clearer from error
                raise

    def _end_if_orphaned(self) -> None:
        """End this process if the one that started it was gone before this one could watch it.

        It would wait at the rendezvous for a rank that does not come: importing takes seconds, in
        which the other one may have been told to end, or have raised.
        """
        launcher = os.environ.get(_LAUNCHER)
        if launcher is None or self.sees_processes:
            return
        try:
            # Alive where a rank has started this process by itself, whose variables it has.
            os.kill(int(launcher), 0)
        except ProcessLookupError:
            _say_gone(int(launcher))
            os._exit(1)

    def _check_count(self) -> None:
        """Refuse another number of processes than the Trainer was told.

        Raises:
            MeshError: With both numbers.
        """
        count, wanted = self.cluster_environment.world_size(), self.num_processes * self.num_nodes
        if self.cluster_environment.creates_processes_externally and count != wanted:
            raise MeshError(
                "LP712",
                f"{count} processes were started, but the Trainer expects "
                f"num_nodes={self.num_nodes} times devices={self.num_processes}, which is "
                f"{wanted}. Start one process for each device, with the same number of devices on "
                "every host. Pass this number to the Trainer as devices=, and the number of "
                "hosts as num_nodes=. With SLURM use the same --ntasks-per-node in every part of "
                "a heterogeneous job.",
            )

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Surrounds a run, in which a thread watches for the end of other processes."""
        observe = None
        # Either this process started others, or it was started by one.
        if self.procs:
            observe = self._observe_children
        elif self.sees_processes:
            observe = self._observe_launcher
        if observe is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(
            target=observe, args=(over,), name="process-observer", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _observe_launcher(self, over: threading.Event) -> None:
        """End this process if the one that started it is gone while nobody else watches."""
        launcher = int(os.environ[_LAUNCHER])
        while not over.wait(_PERIOD):
            # An orphan gets another parent (init, or a subreaper).
            if self.observes and os.getppid() != launcher:
                _say_gone(launcher)
                os._exit(1)

    def _observe_children(self, over: threading.Event) -> None:
        """End all processes of this node if one that was started here fails while nobody else
        watches.
        """
        # While a run goes on `RankWatch` sees more, and says more.
        while not self.observes or not any(process.poll() for process in self.procs):
            if over.wait(_PERIOD):
                return
        # The exception of this process, if there is one, is to be printed first.
        if not over.wait(_GRACE) and self.observes:
            _logger.critical("%s All processes of this node end.", _describe(self.procs))
            self.kill(getattr(signal, "SIGKILL", signal.SIGTERM))
            os._exit(1)


def refuse_prompt(num_devices: int) -> None:
    """Refuse to start processes from a notebook or a prompt, which is no script to run again.

    Args:
        num_devices: Of the run.

    Raises:
        ConfigurationError: Python is interactive.
    """
    # Forked ranks are no way out: a fork loses the threads of a process that has run a backward.
    if hasattr(sys, "ps1"):
        raise ConfigurationError(
            "LP711",
            f"{num_devices} devices need {num_devices} processes, each of which runs your script, "
            "but a notebook or a Python prompt has no script. At a prompt, write the code into a "
            "file and run this file with python. In a notebook, begin the cell with `%%writefile "
            "train.py`, and run `!python train.py` in the next cell. With devices=1 any strategy "
            "can train at the prompt or in the notebook itself.",
        )


def _divide_cores(num_processes: int) -> None:
    """Divide the cores among the processes of a node, unless the environment says otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    # The cores that this process may use, which a container may restrict, where the system tells.
    asks = getattr(os, "sched_getaffinity", None)
    cores = len(asks(0)) if asks is not None else os.cpu_count() or 1
    count = max(1, cores // num_processes)
    torch.set_num_threads(count)
    os.environ["OMP_NUM_THREADS"] = str(count)


def _say_gone(launcher: int) -> None:
    _logger.critical("the process that started this process (pid %d) has ended.", launcher)


def _describe(processes: Sequence["subprocess.Popen[bytes]"]) -> str:
    failed = [(rank, p) for rank, p in enumerate(processes, 1) if p.returncode]
    said = [f"local rank {rank} (pid {p.pid}) with status {p.returncode}" for rank, p in failed]
    return f"these processes ended before or after a run: {', '.join(said)}. Their output is above."


def _not_held(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
    """Return the parameters that an optimizer does not hold; Lightning compares their values, of
    which a rank has parts only.
    """
    given = list(params)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    # By identity: comparing a shard with a whole tensor would fail or gather.
    new = [p for p in given if id(p) not in held]
    if len(new) < len(given):
        rank_zero_warn(
            f"{len(given) - len(new)} of the {len(given)} parameters that are added to the "
            "optimizer are already in it, and stay in their parameter group. In "
            "configure_optimizers, pass the optimizer only parameters with requires_grad=True."
        )
    return new
