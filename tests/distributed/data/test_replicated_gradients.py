"""Gradients of whole replicas: averaged in buckets, which are sent while the backward goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from torch import nn, Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_par.engine.data import gradient_reduction
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients
from lightning_par.engine.data.replicated_parameters import find_copies
from lightning_par.mesh import build_mesh
from lightning_par.sizes import ParallelSizes
from tests.support.ranks.api import ranks

WIDTH = 4


class Tower(nn.Module):
    """Five layers, of which one is used twice, and one on chosen ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, *, uses_side: bool, is_reentrant: bool) -> Tensor:
        if uses_side:
            x = x + self.side(x)
        for layer in (*self.layers, self.layers[0]):
            y = checkpoint(layer, x, use_reentrant=True) if is_reentrant else layer(x)
            x = torch.tanh(y)
        return x.square().sum()


def tower(rank: int, *, early: bool = True, dtype: torch.dtype | None = None) -> Any:
    """Return a tower, its gradients in a bucket each, and an input of this rank."""
    torch.manual_seed(0)
    module = Tower().double()
    group = dist.group.WORLD
    assert group is not None
    copies = ReplicatedGradients(
        parameters=tuple(module.parameters()), group=group, dtype=dtype, early=early
    )
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)[rank].requires_grad_()
    return module, copies, x


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    """Return them, and leave none."""
    found = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    return found


@ranks(2)
@pytest.mark.parametrize("size", [1, 2**25])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_averages_are_those_of_distributed_data_parallel(
    rank: int, world: int, size: int, is_reentrant: bool
) -> None:
    gradient_reduction._BUCKET = size
    module, copies, x = tower(rank)
    # The side is used on both ranks, on one of them, on none.
    for step, uses in enumerate([(1, 1), (1, 1), (0, 1), (1, 0), (0, 0), (1, 1)]):
        plain, _, _ = tower(rank)
        reference = DistributedDataParallel(plain, find_unused_parameters=True)
        reference(x, uses_side=bool(uses[rank]), is_reentrant=False).backward()
        wanted = gradients(plain)
        copies.begin()
        module(x, uses_side=bool(uses[rank]), is_reentrant=is_reentrant).backward()
        copies.reduce()
        found = gradients(module)
        for name, grad in found.items():
            if name.startswith("side") and not any(uses):
                assert grad is None, step
            else:
                torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-14)
    gradient_reduction._BUCKET = 2**25


@ranks(2)
def test_buckets_leave_in_the_backward_and_gradients_are_views_of_them(
    rank: int, world: int
) -> None:
    gradient_reduction._BUCKET = 1
    module, copies, x = tower(rank)
    sent = []
    send = gradient_reduction._Bucket.send
    gradient_reduction._Bucket.send = lambda *args: (sent.append(ends), send(*args))  # type: ignore[method-assign,assignment,func-returns-value]
    for step in range(2):
        ends = False
        copies.begin()
        loss = module(x, uses_side=True, is_reentrant=False)
        loss.backward()
        ends = True
        copies.reduce()
        # The first backward shows which gradients come in parts.
        assert sent == [step == 0] * 10
        sent.clear()
        module.zero_grad()
    gradient_reduction._Bucket.send = send  # type: ignore[method-assign]
    gradient_reduction._BUCKET = 2**25
    copies = ReplicatedGradients(parameters=copies.parameters, group=copies.group)
    module(x, uses_side=True, is_reentrant=False).backward()
    copies.reduce()
    assert len({p.grad.untyped_storage().data_ptr() for p in module.parameters()}) == 1


@ranks(2)
def test_a_parameter_that_no_rank_uses_keeps_no_other_waiting(rank: int, world: int) -> None:
    gradient_reduction._BUCKET = 1
    module, copies, x = tower(rank)
    # The first bucket is that of the last parameter.
    copies.parameters = (*copies.parameters, *module.side.parameters())[2:]
    for early in (0, 0, 8):
        copies.begin()
        module(x, uses_side=False, is_reentrant=False).backward()
        assert copies._sent == early
        copies.reduce()
        assert module.side.weight.grad is None
        gradients(module)
    gradient_reduction._BUCKET = 2**25


@ranks(2)
def test_a_backward_that_is_not_announced_sends_nothing(rank: int, world: int) -> None:
    module, copies, x = tower(rank)
    for _ in range(2):
        module(x, uses_side=True, is_reentrant=False).backward()
        own = gradients(module)
        copies.begin()
        module(x, uses_side=True, is_reentrant=False).backward()
        copies.reduce()
        mean = gradients(module)
        module(x, uses_side=True, is_reentrant=False).backward()
        again = gradients(module)
        for name, grad in own.items():
            assert grad is not None
            torch.testing.assert_close(again[name], grad, rtol=0, atol=0)
            total = grad.clone()
            dist.all_reduce(total)
            torch.testing.assert_close(mean[name], total / 2, rtol=0, atol=1e-14)


@ranks(2)
def test_frozen_parameters_and_other_dtypes_and_layouts(rank: int, world: int) -> None:
    module, copies, x = tower(rank, dtype=torch.float32)
    weight = module.layers[1].weight
    weight.data = weight.data.t().contiguous().t()
    for trains in (True, False, True):
        module.side.requires_grad_(trains)
        copies.begin()
        module(x, uses_side=True, is_reentrant=False).backward()
        strides = weight.grad.stride()
        copies.reduce()
        assert weight.grad.stride() == strides
        assert weight.grad.dtype is torch.float64
        assert torch.equal(weight.grad, weight.grad.float().double())
        assert (module.side.weight.grad is not None) == trains
        module.zero_grad()


@ranks(2)
def test_a_gradient_that_is_sent_already_gets_no_second_part(rank: int, world: int) -> None:
    gradient_reduction._BUCKET = 1
    module, copies, x = tower(rank)
    copies.begin()
    module(x, uses_side=True, is_reentrant=False).backward()
    copies.reduce()
    copies.begin()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        module(x, uses_side=True, is_reentrant=True).backward()
    gradient_reduction._BUCKET = 2**25


@ranks(2)
def test_a_backward_after_one_that_failed_sends_nothing(rank: int, world: int) -> None:
    gradient_reduction._BUCKET = 1
    module, copies, x = tower(rank)
    copies.begin()
    module(x, uses_side=True, is_reentrant=False).backward()
    copies.reduce()
    module.zero_grad()
    copies.begin()
    loss = module(x, uses_side=True, is_reentrant=False)
    hook = module.layers[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    copies.end()
    hook.remove()
    module.zero_grad()
    module(x, uses_side=True, is_reentrant=False).backward()
    plain, _, _ = tower(rank)
    plain(x, uses_side=True, is_reentrant=False).backward()
    wanted = gradients(plain)
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, wanted[name], rtol=0, atol=0)
    gradient_reduction._BUCKET = 2**25


@ranks(2)
def test_conjugates_are_averaged(rank: int, world: int) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    group = dist.group.WORLD
    assert group is not None
    copies = ReplicatedGradients(parameters=[weight], group=group)
    weight.grad = torch.full_like(weight, 1 + 2j * (1 + rank)).conj()
    copies.reduce()
    assert torch.equal(weight.grad, torch.full_like(weight, 1 - 3j))
    weight.grad = weight.grad.conj()
    norm, _ = gradient_reduction.total_norm([weight], device=weight.device)
    torch.testing.assert_close(norm.item(), (2 * 3 * 10) ** 0.5)


@ranks(2)
def test_collectives_of_a_user_in_a_backward_are_apart_from_buckets(rank: int, world: int) -> None:
    gradient_reduction._BUCKET = 1
    mesh = build_mesh(ParallelSizes(data_replicate=2), "cpu")
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    resolved: Any = SimpleNamespace(canonical={})
    replicas = tuple(module.parameters())
    (copies,), _ = find_copies(module, resolved, mesh, [], [], None, replicas=replicas)
    # In the last step the first bucket is sent in the backward of one rank, and after the other.
    for uses in [(1, 1), (1, 1), (1, 0)]:
        copies.begin()
        x = module[0](torch.full((3, WIDTH), 1.0 + rank))
        x = module[1](collectives.all_reduce(x))
        if uses[rank]:
            x = x + module[2](x)
        x.square().sum().backward()
        copies.reduce()
        for grad in gradients(module).values():
            assert grad is not None
            other = grad.clone()
            dist.broadcast(other, 0)
            assert torch.equal(other, grad)
    gradient_reduction._BUCKET = 2**25
