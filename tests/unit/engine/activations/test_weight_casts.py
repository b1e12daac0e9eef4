"""A backward casts weights once more, in place of what autograd would keep."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from weakref import finalize

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_par.engine.activations.weight_casts import cast_again, saving_no_casts
from lightning_par.engine.pipeline.split_backward import (
    defer_weight_gradients,
    Deferred,
    WeightGradients,
)
from lightning_par.errors import ConfigurationError
from lightning_par.observe.live_bytes import LiveBytes

SIZE = 64
FORWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "product with a transposed weight": lambda x, w: x @ w.transpose(0, 1),
    "product with parts of a weight": lambda x, w: torch.cat([x @ w[:9].t(), x @ w[9:].t()], -1),
    "product of a batch": lambda x, w: torch.bmm(x[None], w.unflatten(0, (1, -1)))[0],
    "convolution": lambda x, w: F.conv1d(x.t()[None], w[..., None])[0].t(),
    "a weight that is computed": lambda x, w: F.linear(x, 2 * w),
}


def saving(*, again: bool) -> AbstractContextManager[None]:
    return saving_no_casts() if again else nullcontext()


def gradients(forward: Callable[[Tensor, Tensor], Tensor], *, again: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(5, SIZE, requires_grad=True), nn.Parameter(torch.randn(SIZE, SIZE))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), saving(again=again):
        y = forward(x, weight)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    return [x.grad, weight.grad]


@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_are_the_same_bits(name: str) -> None:
    wanted, found = (gradients(FORWARDS[name], again=again) for again in (False, True))
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)


def test_no_cast_waits_for_the_backward() -> None:
    net = nn.Sequential(*[nn.Linear(SIZE, SIZE, bias=False) for _ in range(6)])
    x, held = torch.randn(1, SIZE, requires_grad=True), {}
    for again in (False, True):
        cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with LiveBytes(besides=[*net.parameters()]) as live:
            with cast, saving(again=again):
                y = net(x)
            held[again] = live.now
            del y
    assert held[False] >= 6 * 2 * SIZE * SIZE
    assert held[True] < 2 * SIZE * SIZE


class Heads(nn.Module):
    """Layers that read one tensor, to which code may write between two reads."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.norm, self.writes = nn.LayerNorm(SIZE), writes
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, found = self.norm(x).view(2, -1, SIZE), []
        for layer in self.layers:
            found.append(layer(x))
            if self.writes:
                with torch.no_grad():
                    x.mul_(2)
        return torch.cat(found)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_layers_that_read_one_tensor_save_one_cast_of_it(writes: bool, weights: bool) -> None:
    gradients, held = [], []
    for shares in (False, True):
        torch.manual_seed(0)
        net, x = Heads(writes=writes), torch.randn(400, SIZE, requires_grad=True)
        if shares:
            cast_again(net, "cpu", weights=weights)
        for _ in range(4):  # casts are compared in the first forwards
            with LiveBytes(besides=[*net.parameters(), x]) as live:
                with torch.autocast("cpu", torch.bfloat16):
                    y = net(x)
                held.append(live.now)
            y.float().square().sum().backward()
            del y
        gradients.append([x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    cast = 2 * x.numel()
    freed = held[3] - held[-1]
    assert freed >= 2 * cast if not writes else freed < cast


def test_values_that_have_no_backward_are_freed() -> None:
    """An output that an operation saves, such as a softmax, would else hold itself."""
    layer, freed = nn.Linear(3, 4), list[str]()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), saving_no_casts():
        y = layer(torch.randn(2, 3)).softmax(-1)
    finalize(y, freed.append, "softmax")
    del y
    assert freed == ["softmax"]


def test_a_value_that_is_changed_before_its_backward_is_refused() -> None:
    with saving_no_casts():
        y = torch.ones(2, requires_grad=True).exp()
    with torch.no_grad():
        y.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_cast_of_the_users_that_is_written_to_is_kept() -> None:
    weight, x = nn.Parameter(torch.full((2, 2), 0.4)), torch.ones(1, 2, requires_grad=True)
    with saving_no_casts():
        cast = weight.to(torch.bfloat16)
        with torch.no_grad():
            cast.round_()
        (x.to(torch.bfloat16) @ cast).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[0, 0]]


def test_torch_func_runs_inside() -> None:
    layer = nn.Linear(3, 3)
    cast_again(layer, "cpu")

    def loss(x: Tensor) -> Tensor:
        return layer(x).float().sum()

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        found = torch.func.grad(loss)(torch.ones(3))
    torch.testing.assert_close(found, layer.weight.bfloat16().sum(0).float(), rtol=2e-2, atol=1e-2)


def test_hooks_around_get_what_is_no_cast() -> None:
    layer, seen = nn.Linear(3, 4), list[tuple[int, ...]]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    x = 2 * torch.randn(2, 3, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16), saving_no_casts():
        y = layer(x)
    y.sum().backward()
    assert seen == [(2, 3)]
    assert layer.weight.grad is not None


def test_a_deferred_gradient_keeps_no_cast() -> None:
    net, waiting = nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(6)]), list[Deferred]()
    weight_gradients = WeightGradients()
    defer_weight_gradients(net, weight_gradients)
    cast = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    with LiveBytes(besides=[*net.parameters()]) as live:
        with cast:
            y = net(torch.randn(1, SIZE, requires_grad=True))
        held = [live.now]
        with weight_gradients.collect(waiting):
            y.float().sum().backward()
        held.append(live.now)
    assert len(waiting) == 6
    assert max(held) < 2 * SIZE * SIZE


def test_a_weight_that_is_changed_before_its_backward_is_refused() -> None:
    layer, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), saving_no_casts():
        y = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(
        ConfigurationError, match=r"changed a weight of shape \(3, 3\) in place between"
    ):
        y.sum().backward()


def test_a_checkpoint_around_a_block_runs_it_again() -> None:
    """Layers of transformers checkpoint themselves so."""
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        if wraps:
            cast_again(net, "cpu")
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = checkpoint(net, x, use_reentrant=False)
        y.float().square().sum().backward()
        found.append([x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
