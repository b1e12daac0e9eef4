"""A host optimizer by itself: one process, plain parameters, no Trainer."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint

from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.engine.offload.options import OffloadOptions, read_offload_options
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import CheckpointError, ConfigurationError, OffloadError

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


def network(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh()).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype)


@contextmanager
def on_host(
    optimizer: torch.optim.Optimizer, threads: int = 1, **options: Any
) -> Iterator[HostOptimizer]:
    kernel = choose_kernel(options.pop("cpu_kernel", "torch"), Path())
    host = HostOptimizer(
        optimizer,
        device=CPU,
        options=OffloadOptions(**options),
        worker=UpdateWorker(kernel, threads),
    )
    try:
        yield host
    finally:
        host.close()


def step_on_host(
    host: HostOptimizer, optimizer: Any, step: int, loss: Tensor, *, streams: bool = True
) -> None:
    host.begin(step, streams=streams, largest=float("inf"))
    loss.backward()
    host.finish()
    optimizer.step()


def train(model: nn.Module, steps: int, **options: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer, **options) as host:
        for step in range(steps):
            step_on_host(host, optimizer, step, model(batch(step)).square().sum())
    return [p.detach().clone() for p in model.parameters()]


def train_plainly(model: nn.Module, steps: int) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def close(one: list[Tensor], two: list[Tensor]) -> None:
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 32])
def test_buckets_of_any_size_give_what_the_optimizer_would(size: float) -> None:
    close(train(network(), 4, bucket_size_mb=size), train_plainly(network(), 4))


def test_threads_divide_tensors_and_change_no_bit(tmp_path: Path) -> None:
    """One tensor is larger than a thread's share; the kernel is the native one."""
    results = []
    for threads in (1, 3):
        torch.manual_seed(1)
        weight = nn.Parameter(torch.randn(70_001))
        optimizer = torch.optim.AdamW([weight], **OPTIONS)
        kernel = choose_kernel("native", tmp_path)
        worker = UpdateWorker(kernel, threads)
        host = HostOptimizer(optimizer, device=CPU, options=OffloadOptions(), worker=worker)
        for step in range(3):
            step_on_host(host, optimizer, step, (weight * torch.arange(70_001)).sum())
        host.close()
        results.append(weight.detach().clone())
    assert torch.equal(*results)


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    model, unused = network(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    model[0].weight.requires_grad_(False)
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW([*model.parameters(), unused], **OPTIONS)
    with on_host(optimizer) as host:
        step_on_host(host, optimizer, 0, model(batch(0)).sum())
    assert torch.equal(model[0].weight, before)
    assert unused.tolist() == [1.0, 1.0]
    assert unused not in optimizer.state
    assert set(optimizer.state) == {p for p in model.parameters() if p.requires_grad}


def test_gradients_are_gone_before_the_optimizer_steps() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    left = []
    with on_host(optimizer) as host:
        optimizer.register_step_pre_hook(
            lambda *_: left.append([p.grad for p in model.parameters()])
        )
        step_on_host(host, optimizer, 0, model(batch(0)).sum())
    assert left == [[None] * 4]


def test_scheduler_and_hooks_see_the_users_optimizer() -> None:
    """Rates are read when the step is asked for."""
    results = []
    for offloads in (True, False):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        host = None
        if offloads:
            kernel = choose_kernel("torch", Path())
            worker = UpdateWorker(kernel, 1)
            host = HostOptimizer(optimizer, device=CPU, options=OffloadOptions(), worker=worker)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(step)).square().sum()
            if host is None:
                loss.backward()
                optimizer.step()
            else:
                step_on_host(host, optimizer, step, loss)
            rates.step()
        if host is not None:
            host.close()
        results.append([p.detach().clone() for p in model.parameters()])
    close(*results)


def test_closed_host_leaves_a_working_optimizer_behind() -> None:
    """Two steps on the host, two on the device, are four steps."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer) as host:
        for step in range(2):
            step_on_host(host, optimizer, step, model(batch(step)).square().sum())
    for step in range(2, 4):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()
    close([p.detach() for p in model.parameters()], train_plainly(network(), 4))


def test_value_that_the_user_gives_a_parameter_counts() -> None:
    """See Note [Stale masters]; untouched entries keep what float32 knows of them."""
    model = network(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    weight = model[2].weight
    with on_host(optimizer) as host:
        for step in range(3):
            step_on_host(host, optimizer, step, model(batch(step, torch.bfloat16)).sum())
        host.flush()
        master = optimizer.state[weight]["master"].clone()
        assert not torch.equal(master, master.bfloat16().float())  # steps too small for bfloat16
        with torch.no_grad():
            weight[0, 0] = 2.0
        host.begin(3, streams=True, largest=float("inf"))
        seen = optimizer.state[weight]["master"]
        assert seen[0, 0] == 2.0
        assert torch.equal(seen.view(-1)[1:], master.view(-1)[1:])


def test_value_given_behind_a_delayed_update_is_refused() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer, delayed_update=0) as host:
        step_on_host(host, optimizer, 0, model(batch(0)).sum())
        with torch.no_grad():
            model[0].bias.zero_()
        for look in (host.flush, partial(host.begin, 1, streams=False, largest=float("inf"))):
            with pytest.raises(OffloadError, match=r"shape \(7,\) was changed while its delayed"):
                look()


def test_states_of_a_delayed_update_are_complete_where_they_are_read() -> None:
    """Which the parameters are not yet."""
    model, plain = network(), network()
    optimizer, other = (torch.optim.AdamW(m.parameters(), **OPTIONS) for m in (model, plain))
    before = [p.detach().clone() for p in model.parameters()]
    plain(batch(0)).sum().backward()
    other.step()
    with on_host(optimizer, delayed_update=0) as host:
        step_on_host(host, optimizer, 0, model(batch(0)).sum())
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            found, wanted = optimizer.state[mine], other.state[theirs]
            for name, value in wanted.items():
                close([found[name], found.get(name), copy.deepcopy(found)[name]], [value] * 3)
            close(list(found.values()), [dict(found.items())[name] for name in found])
        close(list(model.parameters()), before)


class Recomputed(nn.Module):
    """Reentrant recomputation uses one weight in two parts of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()[0]
        self.last = nn.Linear(7, 5).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for _ in range(2):
            x = self.last(checkpoint(self.inner, x, use_reentrant=True).tanh())
        return x


def test_gradient_that_comes_in_parts_is_added() -> None:
    """They would leave with the first part only; the norm is that of the sum."""
    norms = []

    def prepared() -> nn.Module:
        torch.manual_seed(2)
        return Recomputed()

    model = prepared()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer) as host:
        for step in range(2):
            host.begin(step, streams=False, largest=float("inf"))
            model(batch(step)).square().sum().backward()
            host.finish()
            pairs = host.offloaded_gradients.norms(lambda _: True)
            norms.append(sum(float(norm) ** 2 for norm, _ in pairs) ** 0.5)
            optimizer.step()
    plain = prepared()
    other = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    for step in range(2):
        other.zero_grad()
        plain(batch(step)).square().sum().backward()
        total = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert norms[step] == pytest.approx(float(total), rel=1e-12)
        other.step()
    close([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])


def test_streamed_gradient_that_comes_in_parts_is_refused() -> None:
    torch.manual_seed(2)
    model = Recomputed()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer, bucket_size_mb=1e-6) as host:
        host.begin(0, streams=True, largest=float("inf"))
        with pytest.raises(OffloadError, match=r"computed in several parts.*overlap='off'"):
            model(batch(0)).sum().backward()


def test_dropped_gradients_change_nothing() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer) as host:
        host.begin(0, streams=False, largest=float("inf"))
        model(batch(5)).sum().backward()
        host.finish()
        host.drop()
        optimizer.step()
        assert not optimizer.state
        for step in range(2):
            step_on_host(host, optimizer, step, model(batch(step)).square().sum())
    close([p.detach() for p in model.parameters()], train_plainly(network(), 2))


def test_states_of_another_optimizer_are_refused() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    with on_host(optimizer) as host:
        weight = model[0].weight
        says = r"its states lack step, exp_avg, exp_avg_sq"
        with pytest.raises(CheckpointError, match=says):
            host.load(weight, {"momentum_buffer": weight}, lambda value, out: None)


REFUSED = {
    "sgd": (lambda p: torch.optim.SGD(p), r"returned torch.optim.sgd.SGD, but only"),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), r"Adam\(amsgrad=True\) cannot"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_optimizers_are_refused(name: str) -> None:
    make, says = REFUSED[name]
    with (
        pytest.raises(ConfigurationError, match=says),
        on_host(make(network().parameters())),  # type: ignore[arg-type]
    ):
        pass


WRONG = [
    ({"delayed_update": True}, r"delayed_update=True must be the number of the first"),
    ({"delayed_update": -1}, r"delayed_update=-1 must be"),
    ({"offload_optimizer": "disk"}, r"offload_optimizer='disk' must be True or 'nvme:/folder'\."),
    ({"offload_fraction": 1.5}, r"offload_fraction=1.5 must be a number from 0 to 1\."),
    ({"offload_fraction": "half"}, r"offload_fraction='half' must be a number from 0 to 1\."),
    ({"offload_fraction": 0.5, "delayed_update": 2}, r"0.5 is not supported with delayed_update=2"),
    ({"offload_parameters": True, "delayed_update": 2}, r"1.0 and delayed_update=False, .*=2"),
    ({"overlap": "on"}, r"overlap='on' must be 'auto' or 'off'\."),
    ({"pin_memory": "yes"}, r"pin_memory='yes' must be True, False or 'auto'\."),
    ({"bucket_size_mb": 0}, r"bucket_size_mb=0 must be a number of more than 0\."),
    ({"cpu_kernel": "avx"}, r"cpu_kernel='avx' must be 'native', 'torch' or 'auto'\."),
    ({"cpu_kernel": "compile"}, r"cpu_kernel='compile' must be 'native', 'torch' or 'auto'\."),
    ({"state_dtype": "int8"}, r"state_dtype='int8' must be 'float32' or 'bfloat16'\."),
    ({"overlap": 1, "bucket_size_mb": "big"}, r"2 problems:\n  - overlap=1.*\n  - bucket_size_mb="),
    (
        {"bucket_size": 3},
        r"offload_options has no field 'bucket_size'.*did you mean 'bucket_size_mb'\?",
    ),
]


@pytest.mark.parametrize(("options", "says"), WRONG)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        read_offload_options(options)


def test_options_say_what_they_mean() -> None:
    options = read_offload_options({"delayed_update": 3, "state_dtype": "bfloat16"})
    assert options is not None
    assert [options.delays(step) for step in (0, 2, 3, 4)] == [False, False, True, True]
    assert options.moments is torch.bfloat16
    assert options.bucket_bytes == 32 * 2**20
    assert not options.pins(CPU)
    assert options.pins(torch.device("cuda"))
    assert read_offload_options(None) is None
    assert not OffloadOptions().delays(10**6)
