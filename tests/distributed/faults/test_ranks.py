"""A rank that dies, raises, stops or never returns: every process ends and the user reads why."""

import math
import random
import re
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lightning_par.engine.activity import Activity
from lightning_par.strategies.processes.rank_status import RankStatus, RankStatusFile
from tests.support.exhaustive import some
from tests.support.faults.runs import Fault, FaultRun, run_with_fault

PLACES = ("pp 0, tp 0", "pp 0, tp 1", "pp 1, tp 0", "pp 1, tp 1")
ACTION = r"(stage \d, [a-z' ]+ of micro-batch \d|[a-z_ ]+)"
TIMEOUT = 5.0
KILLED = "(was killed|is killed by signal: Killed|exited unexpectedly)"


def assert_all_ended(run: FaultRun, limit: float) -> None:
    """Every process ended in time, none well."""
    assert all(s is not None and s <= limit for s in run.seconds), (run.seconds, run.logs)
    assert all(run.codes), run.codes


def kills() -> list[Fault]:
    seeded = random.Random(5)
    return [
        Fault(
            kind="kill",
            rank=rank,
            step=seeded.randrange(1, 8),
            delay=seeded.uniform(0, 0.05),
        )
        for rank in (0, 1, 3)
    ]


@pytest.mark.alone
@pytest.mark.parametrize(
    "fault", some(kills(), kills()[1:]), ids=lambda f: f"rank {f.rank} step {f.step}"
)
def test_killed_rank_ends_every_process_and_is_named(fault: Fault, tmp_path: Path) -> None:
    run = run_with_fault(4, fault, tmp_path)
    assert_all_ended(run, 5.0)
    place = PLACES[fault.rank]
    # A step takes about as long as the delay, hence the next one may have begun.
    step = rf"step ({fault.step}|{fault.step + 1}|{fault.step + 2}|{fault.step + 3})"
    says = rf"cannot continue: rank {fault.rank} \({place}\) has died, in {ACTION}, {step}\."
    assert len(run.blames(says)) == 3, run.logs


@pytest.mark.alone
def test_rank_that_raises_ends_every_process_and_is_named(tmp_path: Path) -> None:
    run = run_with_fault(4, Fault(kind="raise", rank=2, step=3), tmp_path)
    assert_all_ended(run, 5.0)
    assert run.blames(r"on rank 2 \(pp 1, tp 0\), in start of the batch, step 3") == [2]
    says = r"rank 2 \(pp 1, tp 0\) raised KeyError: 'no such key' in start of the batch, step 3\."
    assert run.blames(says) == [0, 1, 3]
    assert run.blames("Traceback") == [2], "stacks of ranks that are not the cause"
    if sys.platform == "linux":  # reads /proc
        listened = {a for log in run.logs for a in re.findall("listens on (.*)", log)}
        assert {a for addresses in listened for a in addresses.split(", ")} == {"127.0.0.1"}


def test_a_rank_that_communicates_alone_ends_every_process_and_is_named(tmp_path: Path) -> None:
    run = run_with_fault(2, Fault(kind="save", rank=0, step=3), tmp_path, timeout=300.0)
    assert_all_ended(run, 240.0)  # it is found in half a minute where the machine is idle
    says = (
        r"different places, .*: rank 0 \(.*\) in save \(runs.py:\d+\), from on_train_batch_start \("
    )
    assert run.blames(
        rf"{says}.*; rank 1 \(.*\) in .*Every rank has to make each call.* LP713\]"
    ), run.logs


@pytest.mark.parametrize(
    ("rank", "limit"),
    [
        pytest.param(0, math.inf, marks=pytest.mark.exhaustive),
        pytest.param(1, TIMEOUT + 5, marks=pytest.mark.alone),
    ],
    ids=["rank 0", "rank 1"],
)
def test_stopped_rank_ends_every_process_and_is_named(
    rank: int, limit: float, tmp_path: Path
) -> None:
    fault = Fault(kind="stop", rank=rank, step=3)
    run = run_with_fault(2, fault, tmp_path, timeout=TIMEOUT)
    assert_all_ended(run, limit)
    says = rf"rank {rank} \(tp {rank}\) has been in {ACTION}, step 3 for \d+ s, and its process \d+"
    assert run.blames(says) == [1 - rank]
    assert run.blames(r"a larger timeout= than 0:00:05\.") == [1 - rank]


@pytest.mark.exhaustive
def test_rank_that_never_returns_ends_and_shows_where_it_waited(tmp_path: Path) -> None:
    run = run_with_fault(4, Fault(kind="loop", rank=1, step=3), tmp_path, timeout=TIMEOUT)
    assert_all_ended(run, math.inf)
    assert run.blames(r"rank 1 \(pp 0, tp 1\) has been in start of the batch, step 3 for") == [
        *range(4)
    ]
    assert run.blames("in _wait_for_ever") == [1]


@pytest.mark.parametrize(
    ("kind", "cause", "blame"),
    [
        ("kill worker", rf"worker .*{KILLED}", rf"raised .*{KILLED}"),
        ("sample raises", r"KeyError: Caught KeyError in DataLoader worker", r"raised KeyError"),
        ("sample loops", r"in _wait_for_ever", r"has been in .* for \d+ s"),
    ],
)
def test_a_loader_that_fails_on_one_rank_ends_every_process(
    kind: str, cause: str, blame: str, tmp_path: Path
) -> None:
    hangs = kind == "sample loops"
    fault = Fault(kind=kind, rank=1, step=3)
    run = run_with_fault(2, fault, tmp_path, timeout=TIMEOUT if hangs else 300.0)
    assert_all_ended(run, math.inf if hangs else 120.0)  # not by the time limit
    assert 1 in run.blames(cause), run.logs
    assert 0 in run.blames(rf"rank 1 \(tp 1\) {blame}"), run.logs


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_hangs_ends_with_its_rank(tmp_path: Path) -> None:
    fault = Fault(kind="sample loops in a worker", rank=1, step=3)
    run = run_with_fault(2, fault, tmp_path, timeout=TIMEOUT)
    assert_all_ended(run, math.inf)
    assert 0 in run.blames(r"rank 1 \(tp 1\) has been in .* for \d+ s"), run.logs
    pid = re.search(r"hangs in process (\d+)", run.logs[1])
    assert pid is not None
    assert not Path(f"/proc/{pid[1]}").exists() or "Z" in Path(f"/proc/{pid[1]}/stat").read_text()


TAKES_THE_FIRST_LOCK = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 0)
print("has it", flush=True)
sys.stdin.read()
"""


def test_dead_rank_stays_dead_while_another_one_asks_for_its_lock() -> None:
    path = RankStatusFile.create(2)
    try:
        board = RankStatusFile(path, [4, 5], 5, Activity())
        assert not board.look()[0].is_dead  # nobody has come to the first place yet
        came = RankStatusFile(path, [4, 5], 4, Activity())
        path.open("rb").close()  # gives back every lock that this process has on the file
        for is_dead in (False, True):  # the first process is the rank, the second one asks
            command = [sys.executable, "-c", TAKES_THE_FIRST_LOCK, str(path)]
            with subprocess.Popen(command, stdin=PIPE, stdout=PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"has it\n"
                assert board.look()[0].is_dead is is_dead
                process.kill()
            assert board.look()[0].is_dead
        board.close()
        came.close()
    finally:
        path.unlink()


def test_board_tells_what_a_rank_does_and_how_it_ended(tmp_path: Path) -> None:
    path = RankStatusFile.create(2)
    try:
        activity = Activity()
        assert str(activity.now()) == "starting"
        activity.step = 17
        board = RankStatusFile(path, [4, 5], 5, activity)
    finally:
        path.unlink()
    activity.begin("backward", 3, stage=1)
    absent, mine = board.look()
    assert absent.status is RankStatus.ABSENT
    assert (mine.rank, str(mine.activity)) == (5, "stage 1, backward of micro-batch 3, step 17")
    board.say(RankStatus.FAILED, "KeyError: 'x'")
    mine = board.look()[1]
    assert (mine.status, mine.fault, mine.is_dead) == (RankStatus.FAILED, "KeyError: 'x'", False)
    board.say(RankStatus.FAILED, "a word that is long ä " * 40)
    told = board.look()[1].fault
    assert 500 < len(told.encode()) <= 600
    assert told.removesuffix(" ...").split(" ")[-1] in ["a", "word", "that", "is", "long", "ä"]
    assert told.endswith(" ...")
    board.close()
    activity.begin("between steps")
    assert str(activity.now()) == "between steps, step 17"
