"""States in a file: past the cache or through the map, the same bits as in memory."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from lightning_par.engine.offload import host_storage, nvme
from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.engine.offload.nvme import DirectNvmeRange, PAGE
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import OffloadError

STEPS, TILE = 4, 4096


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "TILE", TILE)
    monkeypatch.setattr(host_storage, "TILE", TILE)


def network(dtype: torch.dtype) -> nn.Sequential:
    """Of five tiles and a bit, of exactly two, of less than one, and of nothing."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 333), nn.Tanh(), nn.Linear(333, 7)).to(dtype)
    model.even = nn.Parameter(torch.randn(2 * TILE, dtype=dtype))
    model.nothing = nn.Parameter(torch.empty(0, dtype=dtype))
    return model


def make_host(
    model: nn.Module, place: Any, threads: int = 1, **more: Any
) -> tuple[HostOptimizer, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    options = OffloadOptions(offload_optimizer=place, **more)
    worker = UpdateWorker(choose_kernel("torch", Path()), threads)
    return HostOptimizer(
        optimizer, device=torch.device("cpu"), options=options, worker=worker
    ), optimizer


def take_step(host: HostOptimizer, optimizer: Any, model: nn.Module, step: int) -> None:
    host.begin(step, streams=False, largest=float("inf"))
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)
    host.finish()
    optimizer.step()


def train(place: Any, dtype: torch.dtype, threads: int = 1, **more: Any) -> list[Tensor]:
    """Also looks at the states, and changes a parameter, between two steps."""
    model = network(dtype)
    host, optimizer = make_host(model, place, threads, **more)
    seen = []
    for step in range(STEPS):
        take_step(host, optimizer, model, step)
        if step == 1:
            host.flush()
            found = [s for p in model.parameters() for s in optimizer.state[p].values()]
            seen += [state.clone() for state in found]
            with torch.no_grad():
                model.even.mul_(0.5)
    host.flush()
    seen += [s.clone() for p in model.parameters() for s in optimizer.state[p].values()]
    seen += [p.detach().clone() for p in model.parameters()]
    host.close()
    return seen


CASES: dict[str, tuple[torch.dtype, int, dict[str, Any]]] = {
    "float64": (torch.float64, 1, {}),
    "bfloat16, two threads": (torch.bfloat16, 2, {}),
    "short moments": (torch.bfloat16, 1, {"state_dtype": "bfloat16"}),
    "delayed, small buckets": (torch.float32, 1, {"delayed_update": 1, "bucket_size_mb": 1e-3}),
}


def through_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_storage, "open_direct", lambda file, mapped: None)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mapped", [False, True], ids=["direct", "mapped"])
def test_bits_are_those_of_states_in_memory(
    name: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, threads, more = CASES[name]
    if mapped:
        through_the_map(monkeypatch)
    in_file = train(f"nvme:{tmp_path}", dtype, threads, **more)
    in_memory = train(True, dtype, threads, **more)
    assert len(in_file) == len(in_memory) > 20
    assert all(map(torch.equal, in_file, in_memory))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs")
def test_file_system_without_direct_access_gives_the_same_bits() -> None:
    """Most versions of tmpfs have none."""
    in_file = train("nvme:/dev/shm", torch.float32)
    assert all(map(torch.equal, in_file, train(True, torch.float32)))


def direct_host(tmp_path: Path) -> tuple[nn.Module, HostOptimizer, Any]:
    model = network(torch.float32)
    host, optimizer = make_host(model, f"nvme:{tmp_path}")
    if not all(isinstance(held.nvme, DirectNvmeRange) for held in host._held.values()):
        pytest.skip("the file system of the tests has no O_DIRECT")
    return model, host, optimizer


def test_a_step_reads_and_writes_every_state_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, host, optimizer = direct_host(tmp_path)
    moved = {"preadv": 0, "pwritev": 0}

    def counting(name: str) -> Callable[..., int]:
        call = getattr(os, name)

        def count(*args: Any) -> int:
            size = call(*args)
            moved[name] += size
            return int(size)

        return count

    for name in moved:
        monkeypatch.setattr(nvme.os, name, counting(name))
    take_step(host, optimizer, model, 0)
    sections = [3 * nvme.padded(4 * p.numel(), PAGE) for p in model.parameters()]
    assert moved == {"preadv": sum(sections), "pwritev": sum(sections)}
    host.close()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_disk_that_fails_is_reported(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, host, optimizer = direct_host(tmp_path)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(nvme.os, call, fail)
        with pytest.raises(OffloadError, match=r"could not be read or written: .*error"):
            take_step(host, optimizer, model, 0)
    host.close()


def test_update_that_fails_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Each bucket fails in its second tile, and gives its buffers back."""
    model = network(torch.float32)
    host, optimizer = make_host(model, f"nvme:{tmp_path}", bucket_size_mb=1e-3)
    kernel = host._worker.kernel

    class Broken:
        name, is_parallel = kernel.name, False

        def __call__(self, rule: Any, tensors: Any, **more: Any) -> None:
            if tensors.first:
                raise ValueError("broken")
            kernel(rule, tensors, **more)

    host._worker.kernel = Broken()
    for step in range(3):
        with pytest.raises(ValueError, match="broken"):
            take_step(host, optimizer, model, step)
    host.close()


def test_direct_access_that_shows_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme.os, "preadv", lambda file, views, at: PAGE)  # reads nothing
    host, _ = make_host(network(torch.float32), f"nvme:{tmp_path}")
    kinds = {type(held.nvme) for held in host._held.values()}
    assert DirectNvmeRange not in kinds
    host.close()
