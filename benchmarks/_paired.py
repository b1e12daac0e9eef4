"""Paired timing: all contenders live in the same ranks and take turns, block of steps by block of
steps, so that whatever else the machine does meets all of them.
"""

import argparse
import logging
import os
import statistics
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_only

__all__ = [
    "Arguments",
    "Turn",
    "add_arguments",
    "compare",
    "fit",
    "launch",
    "parse_arguments",
    "read_arguments",
]


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """How long to measure.

    Attributes:
        pairs: Blocks of every contender that count.
        steps: Steps of a block.
        warmup: Blocks of every contender that do not count.
        profile: Whether to print, on rank 0, what CPU time the steps that count spend where.
    """

    pairs: int
    steps: int
    warmup: int
    profile: bool

    @property
    def total_steps(self) -> int:
        """Steps of one contender; one more ends the last block."""
        return (self.warmup + self.pairs) * self.steps + 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `Arguments` to a command line."""
    parser.add_argument("--pairs", type=int, default=15, help="blocks that count")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--warmup", type=int, default=2, help="blocks that do not count")
    parser.add_argument("--profile", action="store_true", help="print CPU time by function")


def read_arguments(options: argparse.Namespace) -> Arguments:
    """Return the fields that `add_arguments` added."""
    return Arguments(
        pairs=options.pairs, steps=options.steps, warmup=options.warmup, profile=options.profile
    )


def parse_arguments(description: str | None) -> Arguments:
    """Read the command line of a script that has no options of its own.

    Args:
        description: Of the script.
    """
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    return read_arguments(parser.parse_args())


class _StoppedError(Exception):
    """Another contender failed."""


@dataclass(eq=False)
class _Round:
    """Who is next. One thread runs at a time; the order is the same on every rank."""

    names: list[str]
    arguments: Arguments
    current: int = 0
    failed: str | None = None
    finished: set[str] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)
    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def hand_over(self) -> None:
        """Let the next contender run that has not finished."""
        with self.changed:
            for _ in self.names:
                self.current = (self.current + 1) % len(self.names)
                if self.names[self.current] not in self.finished:
                    break
            self.changed.notify_all()

    def wait_for(self, name: str, *, to_end: bool = False) -> None:
        """Wait until it is the turn of `name`.

        Args:
            name: Of a contender.
            to_end: Wait until those that began later have ended instead: a run replaces functions
                of Lightning and puts back what it found, so the last to begin is the first to end.
        """
        later = set(self.names[self.names.index(name) + 1 :])

        def is_turn() -> bool:
            return later <= self.finished if to_end else self.names[self.current] == name

        with self.changed:
            self.changed.wait_for(lambda: self.failed or is_turn())
            if self.failed:
                raise _StoppedError


class Turn:
    """What a contender calls before each of its `Arguments.total_steps` steps."""

    def __init__(self, name: str, rounds: _Round) -> None:
        self._name, self._round, self._count = name, rounds, 0
        self._began = (0.0, 0.0)
        self._profile: Any = None

    def next(self) -> None:
        """End the block if it is complete, let the others run theirs, then start another."""
        arguments = self._round.arguments
        if self._count % arguments.steps == 0:
            if self._count:
                self._stop()
            self._round.hand_over()
            is_last = self._count == arguments.total_steps - 1
            self._round.wait_for(self._name, to_end=is_last)
            if arguments.profile and self._count == arguments.warmup * arguments.steps:
                import cProfile

                self._profile = cProfile.Profile(time.thread_time)
                self._profile.enable()
            _barrier()
            self._began = time.perf_counter(), time.process_time()
        self._count += 1

    def _stop(self) -> None:
        _barrier()
        wall, cpu = (
            time.perf_counter() - self._began[0],
            time.process_time() - self._began[1],
        )
        steps = self._round.arguments.steps
        self._round.wall.setdefault(self._name, []).append(wall / steps)
        self._round.cpu.setdefault(self._name, []).append(cpu / steps)
        if self._profile is not None and self._count == self._round.arguments.total_steps - 1:
            self._profile.disable()
            _print_profile(self._name, self._profile)


def _barrier() -> None:
    """Wait for what was queued here, and for the other ranks."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _print_profile(name: str, profile: Any) -> None:
    import pstats

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"-- profile of {name}")
        stats = pstats.Stats(profile)
        stats.sort_stats("tottime").print_stats(30)
        stats.sort_stats("cumulative").print_stats(60)


def compare(
    title: str,
    contenders: Mapping[str, Callable[[Turn], None]],
    arguments: Arguments,
    *,
    targets: Mapping[str, float],
) -> dict[str, float]:
    """Run the contenders in turns and print a table on rank 0.

    Args:
        title: Of the table.
        contenders: The first is what the others are compared with. Each calls `Turn.next` before
            every step.
        arguments: How long.
        targets: Contender -> largest ratio of its step time to the first one's.

    Returns:
        Median seconds of a step, by contender.
    """
    rounds = _Round(list(contenders), arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    threads = [
        threading.Thread(target=_run, args=(name, run, rounds), daemon=True)
        for name, run in contenders.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if rounds.failed:
        raise RuntimeError(rounds.failed)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("\n".join(_table(title, rounds, targets)), flush=True)
    return {n: statistics.median(t[arguments.warmup :]) for n, t in rounds.wall.items()}


def _run(name: str, contender: Callable[[Turn], None], rounds: _Round) -> None:
    try:
        rounds.wait_for(name)
        contender(Turn(name, rounds))
    except _StoppedError:
        pass
    except BaseException:
        rounds.failed = f"{name} failed:\n{traceback.format_exc()}"
    finally:
        rounds.finished.add(name)
        rounds.hand_over()


def _table(title: str, rounds: _Round, targets: Mapping[str, float]) -> Iterator[str]:
    arguments, (first, *_) = rounds.arguments, rounds.names
    wall = {n: rounds.wall[n][arguments.warmup :] for n in rounds.names}
    cpu = {n: rounds.cpu[n][arguments.warmup :] for n in rounds.names}
    width = max(map(len, rounds.names))
    yield f"{title}; {arguments.pairs} pairs of {arguments.steps} steps"
    yield f"{'':{width}}  step ms  best ms  ratio  quartiles      range          CPU ratio  target"
    for name in rounds.names:
        start = f"{name:{width}}  {1000 * statistics.median(wall[name]):7.1f}"
        start += f"  {1000 * min(wall[name]):7.1f}"
        if name == first:
            yield f"{start}  1.000"
            continue
        ratios = _ratios(wall[name], wall[first])
        low, middle, high = statistics.quantiles(ratios, n=4)
        of_cpu = statistics.median(_ratios(cpu[name], cpu[first]))
        target = targets.get(name)
        met = "" if target is None else f"<= {target:.2f} {'met' if middle <= target else 'missed'}"
        yield (
            f"{start}  {middle:5.3f}  {low:5.3f}..{high:5.3f}"
            f"  {min(ratios):5.3f}..{max(ratios):5.3f}  {of_cpu:9.3f}  {met}"
        )


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


class Steps(Protocol):
    """What is told of every step that a Trainer begins."""

    def next(self) -> None:
        """Be told that a step begins."""


class _TurnCallback(Callback):
    def __init__(self, turn: Steps) -> None:
        self.turn = turn

    def on_train_batch_start(self, *_: Any) -> None:
        self.turn.next()


def fit(
    module: pl.LightningModule,
    loader: Any,
    strategy: Any,
    turn: Steps,
    arguments: Arguments,
    **options: Any,
) -> None:
    """Train in turns, with a Trainer that does nothing but train.

    Args:
        module: What to train.
        loader: Its batches.
        strategy: As for `Trainer`.
        turn: Of this contender.
        arguments: How long.
        **options: More for `Trainer`.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "max_steps": arguments.total_steps,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [_TurnCallback(turn)],
    }
    pl.Trainer(strategy=strategy, **{**defaults, **options}).fit(module, loader)


def launch(body: Callable[[Arguments], None], arguments: Arguments, *, ranks: int) -> None:
    """Run `body` on gloo ranks of this machine, forked from this process.

    Args:
        body: A function of the script; each rank looks as if torchrun had started it.
        arguments: What `body` takes.
        ranks: How many.
    """
    # Ranks that meet in a store, as before a forward in a hook, would poll one in a file.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    method = "fork" if "fork" in mp.get_all_start_methods() else "spawn"
    mp.start_processes(_rank, (body, arguments, ranks, store.port), ranks, start_method=method)


def _rank(
    rank: int, body: Callable[[Arguments], None], arguments: Arguments, ranks: int, port: int
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID="benchmark",
    )
    rank_zero_only.rank = rank
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore("127.0.0.1", port),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
    )
    body(arguments)
    dist.barrier()
    os._exit(0)
