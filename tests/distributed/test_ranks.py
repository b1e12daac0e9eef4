"""Laws of the multi-rank harness: what runs, what is reported, what comes after a failure."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops import utils as sharding_ops

from tests.support.exhaustive import some
from tests.support.ranks import api
from tests.support.ranks.api import RankError, ranks, run_ranks

ROOT = Path(__file__).resolve().parents[2]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def get_pid(rank, world):
    return os.getpid()


def add_up(rank, world, *terms, factor=1):
    x = torch.full((3,), float(rank))
    dist.all_reduce(x)
    return x[0].item() + factor * sum(terms)


def fail(rank, world, guilty):
    """The guilty rank raises while the others wait for it in a collective."""
    sys.stdout.write(f"rank {rank} was here\n")
    if rank == guilty:
        raise KeyError(f"no key on {rank}")
    dist.barrier()


def wait_for(rank, world, guilty, act):
    """The guilty rank acts instead of joining the collective."""
    sys.stdout.write("before the wait\n")
    if rank == guilty:
        act()
    dist.barrier()


def fit_and_wait_for(rank, world, guilty, act):
    fit(rank, world)
    wait_for(rank, world, guilty, act)


def sleep_deep_down(depth=80):
    if depth:
        sleep_deep_down(depth - 1)
    sleep_long()


def sleep_long(rank=0, world=1):
    time.sleep(1000)


def leave(status=3):
    os._exit(status)


def abort_deep_down(depth=80):
    if depth:
        abort_deep_down(depth - 1)
    abort()


def abort():
    os.abort()


def compare(rank, world):
    values = [rank, 7]
    assert values == [0, 8]


def dirty(rank, world):
    number = torch.rand(()).item()
    os.environ["DIRT"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return number


def look(rank, world):
    clean = "DIRT" not in os.environ and torch.is_grad_enabled()
    return clean, torch.zeros(()).dtype, torch.rand(()).item()


def destroy_group(rank, world):
    dist.destroy_process_group()


def make_mesh(rank, world):
    return id(dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")))


def start_child(rank, world):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid


def load_with_workers(rank, world):
    data = torch.arange(12.0).reshape(6, 2)
    return len(list(torch.utils.data.DataLoader(data, batch_size=2, num_workers=2)))


def skip(rank, world):
    pytest.skip("not here")


def fit(rank, world):
    """A Trainer on the ranks as they are; gives what it took them for."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    before = dist.group.WORLD
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(BoringModel())
    name = type(trainer.strategy.cluster_environment).__name__
    return name, trainer.global_rank, trainer.world_size, dist.group.WORLD is before


def is_gone(pid):
    """Whether no process has that pid, waiting up to two seconds for it."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        os.sched_yield()
    return False


@ranks(3)
@pytest.mark.parametrize("size", [2, 5])
def test_all_reduce_sums_over_the_world(rank, world, size):
    x = torch.full((size,), float(rank))
    dist.all_reduce(x)
    assert x.tolist() == [world * (world - 1) / 2] * size


def test_ranks_that_do_not_connect_are_started_again_once() -> None:
    """Both times they have no interface; the test's own function is never called."""
    with (
        pytest.warns(UserWarning, match="2 ranks did not connect, and are started again"),
        pytest.raises(RankError, match="no_such_interface") as caught,
    ):
        run_ranks(fail, 2, 0, fresh=True, env={"GLOO_SOCKET_IFNAME": "no_such_interface"})
    assert caught.value.kind == "unconnected"
    assert "was here" not in str(caught.value)


@ranks(2)
def test_a_message_arrives_at_the_next_rank(rank, world):
    x = torch.arange(5.0)
    if rank == 0:
        dist.send(x, 1)
    else:
        y = torch.empty(5)
        dist.recv(y, 0)
        assert torch.equal(x, y)


@ranks(2)
def test_fixtures_reach_the_ranks(rank, world, tmp_path):
    (tmp_path / str(rank)).touch()
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == world


@ranks(2, env={"COLOR": "blue"}, fresh=True)
def test_environment_variables_reach_the_ranks_and_look_like_torchrun(rank, world):
    assert (os.environ["COLOR"], os.environ["RANK"]) == ("blue", str(rank))
    assert dist.is_torchelastic_launched()
    assert torch.get_num_threads() == 1


def test_run_ranks_gives_the_value_of_every_rank():
    assert run_ranks(add_up, 3, 1, 2, factor=10) == [33.0] * 3


def test_ranks_that_answer_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(api.time, "sleep", None)
    assert run_ranks(add_up, 2, 1) == [2.0, 2.0]


def test_ranks_are_kept_between_calls_and_fresh_ones_are_not():
    kept, fresh = run_ranks(get_pid, 2), run_ranks(get_pid, 2, fresh=True)
    assert run_ranks(get_pid, 2) == kept
    assert len({*kept, *fresh}) == 4
    assert all(map(is_gone, fresh))


@pytest.mark.parametrize("guilty", [0, 2])
def test_a_raising_rank_is_reported_and_the_next_call_runs_on_new_ranks(guilty):
    before = run_ranks(get_pid, 3)
    with pytest.raises(RankError) as failure:
        run_ranks(fail, 3, guilty)
    text = str(failure.value)
    assert f"rank {guilty} of 3 failed in fail: KeyError: 'no key on {guilty}'" in text
    assert 'raise KeyError(f"no key on {rank}")' in text
    assert f"--- log of rank {guilty} ---\nrank {guilty} was here" in text
    assert (failure.value.rank, failure.value.kind) == (guilty, "error")
    after = run_ranks(get_pid, 3)
    assert not {*before} & {*after}
    assert all(map(is_gone, before))


def test_a_hang_is_cut_at_the_timeout_and_shows_where_each_rank_is():
    run_ranks(fit, 2)  # new ranks make their group before the time starts; a Trainer resets signals
    start = time.monotonic()
    with pytest.raises(RankError) as failure:
        run_ranks(wait_for, 2, 1, sleep_deep_down, timeout=10)
    assert time.monotonic() - start < 120  # sleep_long takes far longer
    text = str(failure.value)
    assert "rank 0, 1 of 2 did not answer within 10 s in wait_for" in text
    assert "in barrier" in text
    assert "in sleep_long\n" in text  # the last call of a stack that is longer than what is shown
    assert run_ranks(add_up, 2) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("act", "message", "stack"),
    [
        (abort, "died by SIGABRT", "in abort"),
        (abort_deep_down, "died by SIGABRT", "in abort\n"),
        (leave, "exited with status 3", ""),
    ],
)
def test_a_dead_rank_is_reported_with_how_it_died_and_where(act, message, stack):
    """After a Trainer too, which at its end takes away the handlers that print stacks."""
    says = f"rank 1 of 2 failed in fit_and_wait_for: {message}"
    with pytest.raises(RankError, match=says) as failure:
        run_ranks(fit_and_wait_for, 2, 1, act)
    assert failure.value.kind == "died"
    assert stack in str(failure.value)
    assert run_ranks(add_up, 2) == [1.0, 1.0]


def test_a_failed_assert_shows_its_values():
    with pytest.raises(RankError, match=r"assert \[1, 7\] == \[0, 8\]|assert \[0, 7\] =="):
        run_ranks(compare, 2)


def test_a_job_starts_from_the_same_state_as_the_first_one():
    numbers = run_ranks(dirty, 2)
    assert run_ranks(look, 2) == [(True, torch.float32, n) for n in numbers]


def test_ranks_without_their_process_group_are_not_used_again():
    before = run_ranks(get_pid, 2)
    run_ranks(destroy_group, 2)
    assert run_ranks(add_up, 2) == [1.0, 1.0]
    assert not {*before} & {*run_ranks(get_pid, 2)}


def test_the_same_mesh_is_made_once():
    assert run_ranks(make_mesh, 2) == run_ranks(make_mesh, 2)


def test_what_a_rank_started_dies_with_it():
    assert all(map(is_gone, run_ranks(start_child, 2, fresh=True)))


def test_a_rank_can_have_data_loader_workers():
    assert run_ranks(load_with_workers, 2) == [3, 3]


def test_a_skip_on_the_ranks_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        run_ranks(skip, 2)


def test_a_function_inside_a_function_is_refused():
    with pytest.raises(ValueError, match="<lambda> is not at module level"):
        run_ranks(lambda rank, world: None, 2)


def test_a_trainer_uses_the_ranks_and_the_process_group_that_are_there():
    expected = [("TorchElasticEnvironment", rank, 2, True) for rank in range(2)]
    assert run_ranks(fit, 2) == expected


@pytest.mark.parametrize("how", some([signal.SIGKILL, signal.SIGINT], [signal.SIGINT]))
def test_every_process_dies_when_the_test_process_is_killed(how, tmp_path):
    code = """
        import signal  # a background job of a shell ignores SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from tests.distributed.test_ranks import get_pid, sleep_long
        from tests.support.ranks.api import run_ranks
        print(*run_ranks(get_pid, 2), flush=True)
        run_ranks(sleep_long, 2)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)},
        text=True,
    )
    with process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(how)
    assert all(map(is_gone, pids))


PATCHED = None


def patch(rank, world, monkeypatch, skips):
    monkeypatch.setattr(sys.modules[__name__], "PATCHED", rank)
    if skips:
        skip(rank, world)


def get_patched(rank, world):
    return PATCHED


def test_what_a_test_patches_in_ranks_is_taken_back(monkeypatch):
    run_ranks(patch, 2, monkeypatch=monkeypatch, skips=False)
    assert run_ranks(get_patched, 2) == [None, None]
    with pytest.raises(pytest.skip.Exception):
        run_ranks(patch, 2, monkeypatch=monkeypatch, skips=True)
    assert run_ranks(get_patched, 2) == [None, None]


@ranks(4)
def test_shardings_that_are_skipped_are_those_that_torch_leaves_out(rank, world, monkeypatch):
    expand, compared = sharding_ops.expand_to_full_mesh_op_strategy, []

    def compare(*args, **options):
        found = expand(*args, **options)
        assert found.strategies == expand.__wrapped__(*args, **options).strategies
        compared.append(options["inplace_op"])
        return found

    monkeypatch.setattr(sharding_ops, "expand_to_full_mesh_op_strategy", compare)
    mesh = dist.init_device_mesh("cpu", (2, 2))
    # Shapes that no test has on a mesh: what torch has once found it keeps.
    for length, placements in enumerate(
        ((Shard(0), Shard(1)), (Shard(1), Shard(1)), (Replicate(), Shard(0))), start=211
    ):
        x, y = (
            DTensor.from_local(torch.rand(length, 6), mesh, placements, run_check=False)
            for _ in range(2)
        )
        y.mul_(0.5).lerp_(x, 0.1)
        x.addcdiv_(y, y.sqrt().add_(1e-8), value=-1.0)
        x.add_(y, alpha=-0.1)
    assert compared.count(True) >= 12
    assert compared.count(False) >= 3
    with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
        DTensor.from_local(torch.rand(223), mesh, [Replicate(), Partial()]).sigmoid_()
