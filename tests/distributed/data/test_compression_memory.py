"""What is remembered of compressed gradients, without a Trainer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_par.engine.data.compression.methods import choose_compressor, GradientBucket
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.data.compression.reduction import CompressedGradients
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.models.compression import WIDTH
from tests.support.ranks.api import ranks


def compress(
    parameters: dict[str, nn.Parameter],
    options: GradientCompression,
    dtype: torch.dtype | None = None,
) -> CompressedGradients:
    device = torch.device("cpu")
    return CompressedGradients(parameters, dist.group.WORLD, options, device, dtype)


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_everything_arrives_in_the_end(rank: int, world: int, method: str) -> None:
    """What was applied and what is remembered are together what was computed."""
    options = GradientCompression(method=method, density=0.05, rank=2)
    compressor = choose_compressor(options, dist.group.WORLD)
    torch.manual_seed(rank)
    computed = torch.zeros(WIDTH * WIDTH + 7, dtype=torch.float64)
    applied = torch.zeros_like(computed)
    for step in range(5):
        grads = [torch.randn(WIDTH, WIDTH).double(), torch.randn(7).double() * 10**step]
        bucket = GradientBucket(0, grads)
        computed += bucket.buffer()
        compressor.reduce(bucket)
        applied += world * bucket.buffer()
    held = compressor.state()
    left = held["owed"][0].clone()
    if method == "int8":  # each rank makes a part of the mean
        parts = [torch.zeros_like(held["made"][0]) for _ in range(world)]
        dist.all_gather(parts, held["made"][0])
        left += torch.cat(parts, 1).flatten()[: len(left)]
    dist.all_reduce(computed)
    dist.all_reduce(left)
    assert float(left.abs().max()) > 1e-3
    torch.testing.assert_close(applied + left, computed, rtol=1e-12, atol=1e-9)


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_scale_of_the_loss_changes_no_bit(rank: int, world: int, method: str) -> None:
    """Powers of two, as of a `GradScaler`, from step to step another one."""
    options = GradientCompression(method=method, rank=1, density=0.1)
    found = []
    for scales in ([1.0] * 4, [2.0**16, 2.0**16, 2.0**15, 2.0**17]):
        parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        compressed = compress({"a": parameter}, options)
        torch.manual_seed(rank)
        grads = []
        for scale in scales:
            parameter.grad = torch.randn(WIDTH, WIDTH) * scale
            compressed.reduce(scale)
            grads.append(parameter.grad / scale)
        found.append(grads)
    if method == "powersgd":  # matrices are made orthonormal, which rounds
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two)
    else:
        assert all(map(torch.equal, *found))


@ranks(2)
@pytest.mark.parametrize("method", ["int8", "topk", "powersgd"])
def test_what_is_owed_waits_while_nobody_uses_a_parameter(
    rank: int, world: int, method: str
) -> None:
    torch.manual_seed(rank)
    pair = [nn.Parameter(torch.zeros(WIDTH, WIDTH)) for _ in "ab"]
    options = GradientCompression(method=method, rank=1, density=0.05)
    compressed = compress(dict(zip("ab", pair, strict=True)), options)
    computed, applied = ([torch.zeros(WIDTH, WIDTH) for _ in pair] for _ in "ca")
    for step in range(12):
        pair[0].grad = pair[1].grad = None
        now = step % 2
        pair[now].grad = torch.randn(WIDTH, WIDTH)
        computed[now] += pair[now].grad
        compressed.reduce()
        assert pair[1 - now].grad is None
        applied[now] += world * pair[now].grad
    held = compressed.state()["compressor"]
    left = held["owed"][0].clone()
    if method == "int8":
        parts = [torch.zeros_like(held["made"][0]) for _ in range(world)]
        dist.all_gather(parts, held["made"][0])
        left += torch.cat(parts, 1).flatten()[: len(left)]
    whole = torch.cat([c.flatten() for c in reversed(computed)])
    dist.all_reduce(left)
    dist.all_reduce(whole)
    arrived = torch.cat([a.flatten() for a in reversed(applied)])
    assert float(left.norm()) > 1e-3 * float(whole.norm())
    torch.testing.assert_close(arrived + left, whole, rtol=1e-4, atol=1e-3)


@ranks(2)
def test_matrix_that_was_zero_is_sent_later(rank: int, world: int) -> None:
    parameter = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    compressed = compress({"a": parameter}, GradientCompression(method="powersgd", rank=2))
    wanted = torch.outer(torch.arange(1.0, WIDTH + 1), torch.linspace(-1, 1, WIDTH))
    for found in (torch.zeros(WIDTH, WIDTH), wanted, wanted):
        parameter.grad = found.clone()
        compressed.reduce()
        torch.testing.assert_close(parameter.grad, found, rtol=1e-4, atol=1e-3)


@ranks(2)
def test_parameters_without_a_gradient(rank: int, world: int) -> None:
    """What one replica has counts half; what nobody has stays away."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    options = GradientCompression(method="topk", density=1.0)
    compressed = compress(dict(zip("abc", parameters, strict=True)), options)
    parameters[rank].grad = torch.full((4,), 2.0)
    compressed.reduce()
    assert parameters[2].grad is None
    for parameter in parameters[:2]:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [1.0] * 4


@ranks(2)
def test_short_gradients_may_be_added_in_a_longer_type(rank: int, world: int) -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    options = GradientCompression(method="int8", start_step=1)
    compressed = compress({"a": parameter}, options, torch.float32)
    with CommVolume({"data": dist.group.WORLD}) as volume:
        parameter.grad = torch.tensor([1.0, 256.0 * (1 - rank)], dtype=torch.bfloat16)
        compressed.reduce()
    # Whether there is a gradient, whether it is finite, and two entries of 4 bytes.
    assert volume.total(operation="all_reduce").payload == 4 + 4 + 2 * 4
    assert parameter.grad.tolist() == [1.0, 128.0]
