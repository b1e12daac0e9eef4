"""The processes behind `ranks.py`: a zygote that has imported torch, and the gloo ranks it forks.

The zygote never runs autograd nor a collective, so that it has one thread and can be forked in
milliseconds. It alone owns the ranks: it forks, kills and reaps them, so that no pid is signalled
after it may have been given to another process.
"""

import ast
import collections
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import os
import pickle
import random
import resource
import signal
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path

import pytest

from tests.support import one_gpu
from tests.support.cuda_simulation import is_wanted
from tests.support.gloo_device import share_gloo_device

__all__ = ["main"]

GROUP_TIMEOUT = timedelta(seconds=300)
"""Of the default process group; longer than any test, because the harness cuts a hang itself."""
_PRELOAD = (
    "numpy",
    "pytest",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "tests.support.parity",
    "lightning_par.cli",
)


def main(descriptor):
    """Serves requests until the other end closes, then takes every rank along.

    Args:
        descriptor: The file descriptor of a socket to the test process.
    """
    die_with_parent()
    control = Connection(descriptor)
    gc.disable()  # it finds nothing in what modules define, and takes a third of the time
    for name in _PRELOAD:
        importlib.import_module(name)
    gc.enable()
    reuse_meshes()
    reuse_groups()
    skip_hopeless_shardings()
    read_entry_points_once()
    share_gloo_device()
    keep_printing_stacks()
    gc.collect()
    gc.freeze()
    children = set()
    try:
        while True:
            request, *arguments = control.recv()
            if request == "fork":
                pids = [fork_rank(control, rank, log) for rank, log in enumerate(arguments[0])]
                children.update(pids)
                control.send(pids)
            elif request == "signal":
                for pid in arguments[0]:
                    os.kill(pid, arguments[1])
                control.send(None)
            else:
                control.send([reap(pid, dying) for pid, dying in arguments[0].items()])
                children.difference_update(arguments[0])
    except EOFError:
        for pid in children:
            reap(pid, dying=False)


def die_with_parent():
    """Asks Linux to kill this process when its parent dies; elsewhere the closed socket ends it."""
    if sys.platform == "linux":
        parent = os.getppid()
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def reuse_meshes():
    """Makes `init_device_mesh` give the same mesh, with the same groups, for the same arguments.

    DTensor caches process-group names, so groups must outlive the tests; without this, each test
    would leave its groups' sockets and threads behind.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh

    make, meshes = device_mesh.init_device_mesh, {}

    @functools.wraps(make)
    def init_device_mesh(device_type, mesh_shape, **options):
        key = (device_type, tuple(mesh_shape), repr(sorted(options.items())))
        if key not in meshes:
            meshes[key] = make(device_type, mesh_shape, **options)
        return meshes[key]

    dist.init_device_mesh = device_mesh.init_device_mesh = init_device_mesh


_TAKEN = collections.Counter()
"""How many groups of a kind the running job has made."""


def reuse_groups():
    """Makes `new_group` give a later job the groups of earlier ones; within a job all differ.

    Making one takes longer than most tests, and its threads and sockets stay until the end of the
    process. So one that a job destroys stays, too, for later ones.
    """
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    make, made = distributed_c10d.new_group, collections.defaultdict(list)
    destroy = distributed_c10d.destroy_process_group

    @functools.wraps(make)
    def new_group(ranks=None, timeout=None, backend=None, **options):
        key = (None if ranks is None else tuple(ranks), timeout, backend, repr(options))
        groups, taken = made[key], _TAKEN[key]
        _TAKEN[key] += 1
        if taken == len(groups):
            groups.append(make(ranks, timeout, backend, **options))
        return groups[taken]

    @functools.wraps(destroy)
    def destroy_process_group(group=None):
        if not any(group in groups for groups in made.values()):
            destroy(group)

    for module in (dist, device_mesh, distributed_c10d):
        module.new_group = new_group
    for module in (dist, distributed_c10d):
        module.destroy_process_group = destroy_process_group


def skip_hopeless_shardings():
    """Makes DTensor weigh only the shardings that an operator in place can have.

    What it computes in place keeps the sharding that it has. torch makes the shardings of all
    dims of the mesh first, and then leaves out nearly all: for each shape that an optimizer meets
    35 ms of a core on three dims, where this takes 3. What is left is the same, in the same order.
    """
    from torch.distributed.tensor._ops import utils

    expand = utils.expand_to_full_mesh_op_strategy

    @functools.wraps(expand)
    def expand_to_full_mesh_op_strategy(mesh, op_schema, strategies, **options):
        if options.get("inplace_op"):
            held = op_schema.args_strategy[0].strategies[0].output_spec.placements
            first = options.get("input_index", 1)
            kept = [s for s in strategies if s[first] in held and s[0] in (None, s[first])]
            found = expand(mesh, op_schema, kept, **options) if kept else None
            if found and found.strategies:
                return found
        return expand(mesh, op_schema, strategies, **options)

    utils.expand_to_full_mesh_op_strategy = expand_to_full_mesh_op_strategy


def read_entry_points_once():
    """Makes Trainers look for callbacks of installed packages once.

    Each reads the metadata of all packages, and a case that is proved makes two Trainers: a
    twentieth of its time.
    """
    from lightning.fabric.utilities import registry

    registry.entry_points = functools.cache(registry.entry_points)


def print_stacks():
    """Makes this process print its stacks when it crashes and when it gets SIGUSR1."""
    faulthandler.disable()  # else it takes its handlers for installed, whoever replaced them
    faulthandler.enable(file=2)  # a test may have replaced sys.stderr
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=2)


def keep_printing_stacks():
    """Makes ranks print their stacks after a Trainer too.

    At its end a Trainer puts back the handler that Python knows of for every signal, and Python
    knows of none of those that print stacks.
    """
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    teardown = _SignalConnector.teardown

    @functools.wraps(teardown)
    def teardown_and_print_stacks(connector):
        teardown(connector)
        print_stacks()

    _SignalConnector.teardown = teardown_and_print_stacks


def fork_rank(control, rank, log):
    """Forks one rank, which talks over the descriptor that arrives next on `control`."""
    descriptor = recv_handle(control)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            serve_rank(rank, Connection(descriptor), log)
            status = 0
        finally:
            os._exit(status)
    os.close(descriptor)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # here too, so that it holds when the first kill comes
    return pid


def reap(pid, dying):
    """Ends a rank and what it started; gives how it had ended by itself, or "killed".

    Args:
        pid: Of a child that has not been reaped.
        dying: Whether it has closed its socket, and so gets a second to end by itself.
    """
    deadline = time.monotonic() + dying
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(pid, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # a rank leads a group: its data loader workers go with it
    if not done:
        os.waitpid(pid, 0)
        return "killed"
    code = os.waitstatus_to_exitcode(status)
    return f"died by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"


def serve_rank(rank, connection, log):
    """Runs jobs until the other end closes."""
    os.setpgid(0, 0)
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        os.ftruncate(descriptor, 0)
        print_stacks()
        reply = run_job(rank, job)
        gc.collect()  # before the answer, after which this process is stopped
        connection.send(reply)


def run_job(rank, job):
    """Runs one job; gives ("ok", value, reusable, requests) or (kind, message, traceback, time)."""
    import torch.distributed as dist

    connected = False
    try:
        prepare(rank, job)
        connected = True
        function = load_function(job["module"], job["file"], job["qualname"])
        args, kwargs = pickle.loads(job["arguments"])
        with undone(kwargs.values()), requests() as asked:
            value = dump(function(rank, job["world"], *args, **kwargs))
        return "ok", value, dist.is_initialized(), pickle.dumps(asked)
    except BaseException as error:
        when = time.monotonic()
        kind = "error" if connected else "unconnected"
        kind = "skip" if type(error).__name__ == "Skipped" else kind
        name = "" if kind == "skip" else f"{type(error).__name__}: "
        frames = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, frames))
        return kind, f"{name}{error}", text, when


@contextlib.contextmanager
def undone(arguments):
    """Takes back what a test has patched: its `monkeypatch` here is a copy that pytest forgets."""
    try:
        yield
    finally:
        for argument in arguments:
            if isinstance(argument, pytest.MonkeyPatch):
                argument.undo()


def requests():
    """A context that gives what this rank asks NCCL for; None without the simulated device."""
    if not is_wanted():
        return contextlib.nullcontext()
    from tests.support.cuda_simulation.order import record_requests

    return record_requests()


def dump(value):
    """Pickles what a rank gives back; tensors of a device arrive on the CPU."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, held):
            if isinstance(held, torch.Tensor) and held.device.type == "cuda":
                return held.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return NotImplemented

    file = io.BytesIO()
    Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def prepare(rank, job):
    """Brings the process to the state in which every job starts."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    os.environ.clear()
    os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank), ROLE_RANK=str(rank))
    os.chdir(job["cwd"])
    sys.path[:] = job["sys_path"]
    _TAKEN.clear()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.autograd.set_detect_anomaly(False)
    torch.use_deterministic_algorithms(False)
    rank_zero_only.rank = rank  # Lightning read it when the zygote imported it
    if is_wanted():
        torch.cuda.set_device(rank)
    elif one_gpu.is_wanted():
        one_gpu.take_device(rank)
    if not dist.is_initialized():
        store = dist.FileStore(job["store"], job["world"])
        dist.init_process_group(
            one_gpu.backend(),
            store=store,
            rank=rank,
            world_size=job["world"],
            timeout=GROUP_TIMEOUT,
        )


def load_function(module, file, qualname):
    """Gives the function that the test process named; a test's own body if it is decorated."""
    function = load_module(module, file)
    for name in qualname.split("."):
        function = getattr(function, name)
    return getattr(function, "rank_body", function)


def load_module(name, file):
    """Imports a module; a test module by its file, so that asserts show their values."""
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == file:
        return loaded
    if not Path(file).name.startswith("test_"):
        return importlib.import_module(name)
    from _pytest.assertion.rewrite import rewrite_asserts

    if "." in name:
        importlib.import_module(name.rpartition(".")[0])
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, file))
    source = Path(file).read_bytes()
    tree = ast.parse(source, file)
    rewrite_asserts(tree, source, file)
    sys.modules[name] = module
    exec(compile(tree, file, "exec", dont_inherit=True), module.__dict__)
    return module


if __name__ == "__main__":
    main(int(sys.argv[1]))
