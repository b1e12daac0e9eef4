"""On a CUDA device: every usable attention kernel keeps the contract, and a ring of logical members
equals attention in one piece.
"""

import math
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.context.kernels.aten import AttentionKernel, BlockOptions
from lightning_par.engine.context.kernels.select import KERNELS
from lightning_par.engine.context.ring_attention import KeyMask, ring_attention
from lightning_par.engine.context.ring_p2p import KeyValues, PendingExchange, RingChannel
from lightning_par.engine.context.ring_schedule import RingSchedule, TokenLayout, Transfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
USABLE = [k for k in KERNELS.values() if k.device_type != "cpu" and k.missing() is None]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
CUDA = torch.device("cuda")


class ThreadChannel(RingChannel):
    """Messages between members that are threads of one process."""

    def __init__(self, member: int, boxes: dict[tuple[int, int], queue.Queue[Any]]) -> None:
        self._member, self._boxes = member, boxes

    def post(
        self,
        send: Transfer | None,
        receive: Transfer | None,
        source: KeyValues,
        dtype: torch.dtype | None = None,
    ) -> PendingExchange:
        if send is not None:
            self._boxes[self._member, send.peer].put(source.at(send.intervals))
        works: Any = [] if receive is None else [receive]
        return PendingExchange(None, None, works)

    def wait(self, pending: PendingExchange) -> KeyValues | None:
        if not pending.works:
            return None
        receive: Any = pending.works.pop()
        got: KeyValues = self._boxes[receive.peer, self._member].get(timeout=60)
        return got


def draw(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [x.to(CUDA, dtype) for x in drawn]


def whole(inputs: list[Tensor], grad: Tensor, pairs: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients in float64 by plain products; 0 where nothing is seen."""
    leaves = [x.double().requires_grad_() for x in inputs]
    query, key, value = leaves
    group = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(group, 1).transpose(-1, -2) * scale
    weights = scores.masked_fill(~pairs, -math.inf).softmax(-1)
    weights = weights.where(pairs.any(-1, keepdim=True), 0)
    out = weights @ value.repeat_interleave(group, 1)
    out.backward(grad.double())
    return [out.detach(), *(x.grad.nan_to_num(0) for x in leaves)]  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", USABLE, ids=lambda k: k.name)
def test_kernel_keeps_the_contract(
    kernel: AttentionKernel, causal: bool, masked: bool, dtype: torch.dtype
) -> None:
    if kernel.refusal(device=CUDA, dtype=dtype, head_dim=64) or (masked and not kernel.takes_bias):
        pytest.skip(f"{kernel.name} does not take this")
    queries, keys = (70, 70) if causal else (50, 70)
    *inputs, grad = draw(
        (2, 6, queries, 64), (2, 3, keys, 64), (2, 3, keys, 64), (2, 6, queries, 64), dtype=dtype
    )
    bias, pairs = None, torch.ones(2, 1, queries, keys, dtype=torch.bool, device=CUDA)
    if causal:
        pairs = pairs.tril()
    if masked:
        seen = torch.arange(keys, device=CUDA) < torch.tensor([[41], [0]], device=CUDA)
        pairs = pairs & seen[:, None, None]
        bias = torch.zeros(2, 1, 1, keys, device=CUDA).masked_fill(~seen[:, None, None], -math.inf)
    options = BlockOptions(causal=causal, scale=0.2, bias=bias)
    out, logsum = kernel.forward(*inputs, options)
    assert logsum.dtype is torch.float32
    assert logsum.shape == (2, 6, queries)
    assert torch.equal(logsum.isneginf(), ~pairs.any(-1).expand(2, 6, queries))
    saved = logsum.masked_fill(logsum.isneginf(), 0)
    names, wanted = ("out", "query", "key", "value"), whole(inputs, grad, pairs, 0.2)
    merged = out.to(dtype)  # a ring gives what it has summed, in any layout
    layouts = (merged.contiguous(), merged.transpose(1, 2).contiguous().transpose(1, 2))
    for given in (*layouts, merged):
        grads = kernel.backward(grad, *inputs, given, saved, options)
        for name, got, want in zip(names, (out, *grads), wanted, strict=True):
            error = (got.double() - want).abs().max() / want.abs().max()
            assert float(error) < TOLERANCE[dtype], f"{name}, strides of out {given.stride()}"


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize(("causal", "masked"), [(True, False), (False, False), (False, True)])
def test_ring_of_threads_is_at_most_twice_as_far_as_torchs_own(
    causal: bool, masked: bool, members: int
) -> None:
    length, dtype, scale = 512, torch.bfloat16, 0.125
    layout = TokenLayout(length=length, ring=members)
    schedule = RingSchedule(layout=layout, causal=causal)
    *inputs, grad = draw(*[(2, n, length, 64) for n in (8, 2, 2, 8)], dtype=dtype)
    seen = torch.ones(2, length, dtype=torch.bool, device=CUDA)
    if masked:
        seen[0, 300:] = False
    pairs = seen[:, None, None].expand(2, 1, length, length)
    pairs = pairs.tril() if causal else pairs
    places = [
        torch.cat([torch.arange(a, b, device=CUDA) for a, b in layout.of_member(m)])
        for m in range(members)
    ]
    mask = KeyMask(torch.stack([seen[:, at] for at in places])) if masked else None
    boxes = {(a, b): queue.Queue[Any]() for a in range(members) for b in range(members)}
    found: list[Any] = [None] * members

    def run(member: int) -> None:
        leaves = [x[:, :, places[member]].requires_grad_() for x in inputs]
        out = ring_attention(
            *leaves,
            schedule=schedule,
            member=member,
            channel=ThreadChannel(member, boxes),
            scale=scale,
            mask=mask,
        )
        with torch.autograd.set_multithreading_enabled(False):  # members wait for each other
            out.backward(grad[:, :, places[member]])
        found[member] = [out.detach(), *(x.grad for x in leaves)]

    threads = [threading.Thread(target=run, args=(m,)) for m in range(members)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    wanted = whole(inputs, grad, pairs, scale)
    # A kernel that rounds once, as that for CPUs, is luckier than a sum of rounded parts can be.
    once = torch.finfo(dtype).eps / 2
    worst = max(once, *map(distance, torchs_own(inputs, grad, pairs, scale), wanted))
    for index, want in enumerate(wanted):
        for member, at in enumerate(places):
            error = (found[member][index].double() - want[:, :, at]).abs().max() / want.abs().max()
            assert float(error) <= 2 * worst


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def torchs_own(inputs: list[Tensor], grad: Tensor, pairs: Tensor, scale: float) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*leaves, attn_mask=pairs, scale=scale, enable_gqa=True)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]
