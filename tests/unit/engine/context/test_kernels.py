"""The contract of every attention kernel that this machine's CPU has."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_par.engine.context.kernels.aten import BlockOptions
from lightning_par.engine.context.kernels.select import choose_kernel, KERNELS
from lightning_par.errors import ConfigurationError

HERE = [k for k in KERNELS.values() if k.missing() is None and k.device_type in (None, "cpu")]
SIZES = {"batch": 2, "heads": 6, "kv_heads": 3, "dim": 8}
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 3e-2}


def draw(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(SIZES["heads"], queries), (SIZES["kv_heads"], keys), (SIZES["kv_heads"], keys)]
    shapes.append(shapes[0])
    return [
        torch.randn(2, n, t, SIZES["dim"], generator=generator, dtype=torch.float64).to(dtype)
        for n, t in shapes
    ]


def formula(inputs: list[Tensor], options: BlockOptions) -> tuple[Tensor, Tensor]:
    """Softmax in float64, 0 and -inf for a row without a key."""
    query, key, value = (x.double() for x in inputs)
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * options.scale
    if options.bias is not None:
        scores = scores + options.bias
    if options.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    dead = scores.isneginf().all(-1, keepdim=True)
    out = scores.where(~dead, 0).softmax(-1) @ value
    return out.where(~dead, 0), scores.logsumexp(-1)


def bias_of(keys: int, dtype: torch.dtype) -> Tensor:
    """Hides the end of the first sample and everything of the second."""
    bias = torch.zeros(2, 1, 1, keys, dtype=dtype)
    bias[0, ..., keys - 2 :] = -math.inf
    bias[1] = -math.inf
    return bias


def left_padded(keys: int, dtype: torch.dtype) -> Tensor:
    """Hides the start: under a causal mask the first queries see nothing."""
    bias = torch.zeros(2, 1, 1, keys, dtype=dtype)
    bias[0, ..., :2] = -math.inf
    return bias


def band(keys: int, dtype: torch.dtype) -> Tensor:
    """Query i sees keys i - 3 and i - 2, so that the first two queries see nothing."""
    near = torch.ones(5, keys, dtype=torch.bool).tril(-2).triu(-3)
    return torch.zeros(1, 1, 5, keys, dtype=dtype).masked_fill(~near, -math.inf)


CASES: dict[str, dict[str, Any]] = {
    "full": {"queries": 5, "keys": 7},
    "causal": {"queries": 7, "keys": 7, "causal": True},
    "one key": {"queries": 5, "keys": 1},
    "padded": {"queries": 5, "keys": 7, "bias": bias_of},
    "band": {"queries": 5, "keys": 7, "bias": band},
    "causal padded": {"queries": 7, "keys": 7, "causal": True, "bias": bias_of},
    "causal left padded": {"queries": 7, "keys": 7, "causal": True, "bias": left_padded},
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [k.name for k in HERE])
def test_kernel_keeps_the_contract(name: str, case: str, dtype: torch.dtype) -> None:
    given = dict(CASES[case])
    queries, keys = given.pop("queries"), given.pop("keys")
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if "bias" in given:
        given["bias"] = given["bias"](keys, wide)
    options = BlockOptions(**{"causal": False, **given}, scale=0.4)
    *inputs, grad = draw(queries, keys, dtype)
    out, logsum = KERNELS[name].forward(*inputs, options)
    wanted, wanted_logsum = formula(inputs, options)
    assert logsum.dtype is wide
    assert logsum.shape == (2, SIZES["heads"], queries)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.double(), wanted, **close)
    torch.testing.assert_close(logsum.double(), wanted_logsum, **close)

    leaves = [x.double().requires_grad_() for x in inputs]
    formula(leaves, options)[0].backward(grad.double())
    saved = logsum.masked_fill(logsum.isneginf(), 0)
    grads = KERNELS[name].backward(grad, *inputs, out.to(dtype), saved, options)
    for found, leaf, given_input in zip(grads, leaves, inputs, strict=True):
        assert found.dtype is dtype
        assert found.shape == given_input.shape
        assert leaf.grad is not None
        wide_close = {**close, "atol": 2 * close["atol"]}
        torch.testing.assert_close(found.double(), leaf.grad, **wide_close)


@pytest.mark.parametrize("name", [k.name for k in HERE])
def test_backward_uses_the_logarithm_of_the_whole(name: str) -> None:
    """Two blocks of keys with the common output and logarithm give the gradients of both."""
    options = BlockOptions(causal=False, scale=0.4)
    query, key, value, grad = draw(5, 7, torch.float64)
    kernel = KERNELS[name]
    out, logsum = kernel.forward(query, key, value, options)
    whole = kernel.backward(grad, query, key, value, out, logsum, options)
    parts = [
        kernel.backward(grad, query, key[:, :, a:b], value[:, :, a:b], out, logsum, options)
        for a, b in ((0, 3), (3, 7))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0], atol=1e-13, rtol=0)
    for index in (1, 2):
        joined = torch.cat([p[index] for p in parts], 2)
        torch.testing.assert_close(joined, whole[index], atol=1e-13, rtol=0)


def test_automatic_choice_on_the_cpu_is_torchs_own_kernel() -> None:
    for masked in (False, True):
        assert choose_kernel("auto", torch.zeros(1, 2, 3, 5), masked=masked).name == "aten_cpu"


def test_backend_that_cannot_take_a_call_says_why_and_what_can() -> None:
    missing = r"attention_backend='aten_flash' needs a CUDA device.*Use auto, aten_cpu or eager"
    if KERNELS["aten_flash"].missing() is None:
        missing = (
            r"attention_backend='aten_flash' runs on cuda, not on cpu \(this call has head dim 5"
        )
    with pytest.raises(ConfigurationError, match=missing):
        choose_kernel("aten_flash", torch.zeros(1, 2, 3, 5), masked=False)
