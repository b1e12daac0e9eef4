"""Spawned processes of a verification, which trace the steps on one or several ranks."""

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_par.checkpoint.progress import Advance, advance, counted, showing
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.run_trace import describe_error, Subject, Trace, trace_steps

__all__ = ["run_rank", "run_ranks"]

_GRACE_SECONDS = 5.0
"""Time in which the other ranks may report once one has failed; they may hang in a collective."""

Make = Callable[[], Subject]


def run_rank(make: Make, sizes: ParallelSizes, rank: int) -> tuple[Trace, Trace | None]:
    """Trace the steps on one rank, whose process group is initialized.

    Args:
        make: Function that returns a new subject, the same on every rank.
        sizes: Mesh sizes.
        rank: Global rank of this process.

    Returns:
        The trace without dropout, and the trace with dropout; the second is None on one process
        and for a model without dropout.

    **Communicates**: besides the steps, an all-gather of one number, whether a rank has dropout.
    """
    trace = trace_steps(make(), sizes, rank)
    # The others may wait for this rank in the run itself: their own errors tell of it.
    if sizes.world_size == 1 or trace.error is not None:
        return trace, None
    # Pipeline stages may differ in it, but all have to run the second time.
    found: list[Any] = [None] * sizes.world_size
    dist.all_gather_object(found, trace.dropouts)
    if not any(found):
        return trace, None
    return trace, trace_steps(make(), sizes, rank, dropout=True)


def run_ranks(
    make: Callable[..., Any],
    sizes: ParallelSizes,
    *,
    timeout: float,
    body: Callable[..., tuple[Trace, Trace | None]] = run_rank,
) -> list[tuple[Trace, Trace | None]]:
    """Trace the steps in new processes, one per rank.

    Args:
        make: Picklable function that returns a new subject, or what else `body` takes.
        sizes: Mesh sizes.
        timeout: Seconds without any answer, or step, after which the processes are terminated.
        body: What each rank runs; picklable.

    Returns:
        The traces of `body`, in the order of the ranks; a rank that failed has an `error`.
    """
    # Not fork: threads and CUDA of the caller do not survive it.
    context = multiprocessing.get_context("spawn")
    world = sizes.world_size
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes, ends = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, body, make, sizes, rank, store)
            process = context.Process(target=_worker_main, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that the death of the worker is an end of file here
            processes.append(process)
            ends.append(ours)
        try:
            return _receive(ends, timeout)
        finally:
            # Also those that answered: others may wait for them in a collective.
            for process in processes:
                process.terminate()
                process.join()


def _receive(ends: Sequence[Connection], timeout: float) -> list[tuple[Trace, Trace | None]]:
    found: dict[int, tuple[Trace, Trace | None]] = {}
    late = f"no answer in {timeout:g} s; if the machine is only slow, give verify a longer timeout"
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting:
        # Any answer begins the time anew: slow steps are no hang.
        ready = wait(list(waiting), timeout)
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            try:
                # Of a process of our own.
                answer = pickle.loads(end.recv_bytes())
            except EOFError:
                answer = Trace(error="the process died"), None
            if isinstance(answer, int):
                advance("steps", answer)
                continue
            rank = waiting.pop(end)
            found[rank] = answer
            if answer[0].error is not None:
                # Others may tell the cause better, if they can still speak.
                timeout = _GRACE_SECONDS
    silent = Trace(error=late)
    return [found.get(rank, (silent, None)) for rank in range(len(ends))]


@contextmanager
def _told(end: Connection, *_: object) -> Iterator[Advance]:
    """Send every number of steps to the process that shows them."""
    yield lambda count: end.send_bytes(pickle.dumps(count))


def _worker_main(
    end: Connection,
    body: Callable[..., tuple[Trace, Trace | None]],
    make: Callable[..., Any],
    sizes: ParallelSizes,
    rank: int,
    store: str,
) -> None:
    world = sizes.world_size
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    # The rendezvous is the file `store`; Lightning only checks that these are set.
    named = {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "GROUP_RANK": 0}
    # As under torchrun, so that Lightning takes the process for one of several and starts none.
    elastic = {"TORCHELASTIC_RUN_ID": "verify", "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(v) for name, v in {**place, **named, **elastic}.items()})
    try:
        # Before the Trainer, which then makes none.
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
        with showing(partial(_told, end)), counted("steps", "", None if rank == 0 else 0):
            answer = body(make, sizes, rank)
    except BaseException as error:
        answer = Trace(error=describe_error(error)), None
    # Pickled here: the pickler of torch.multiprocessing sends handles of tensors in shared memory,
    # which end with this process.
    end.send_bytes(pickle.dumps(answer))
