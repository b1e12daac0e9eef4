"""`lightning_par.attention` in one process: torch's attention with the mask written out."""

import pytest
import torch

from lightning_par import attention
from tests.support.attention_reference import Case, errors

PACKED = (0, 5, 5, 6, 17, 37)
CASES = {
    "causal": Case(causal=True, kv_heads=2),
    "causal padded": Case(causal=True, padded=True),
    "packed": Case(documents=PACKED),
    "window": Case(causal=True, window=(6, 0)),
    "window causal, right part of no use": Case(causal=True, window=(6, 3), padded=True),
    "window on both sides": Case(window=(3, 9), padded=True),
    "window packed": Case(causal=True, window=(4, 0), documents=PACKED),
    "sinks": Case(causal=True, kv_heads=2, has_sinks=True),
    "sinks padded": Case(padded=True, has_sinks=True),
    "sinks packed": Case(causal=True, window=(4, 0), documents=PACKED, has_sinks=True),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_equals_torch_with_the_whole_mask(name: str) -> None:
    case = CASES[name]
    *inputs, grad = case.draw()
    leaves, sinks = [x.requires_grad_() for x in inputs], case.sinks()
    options = {"causal": case.causal, "key_mask": case.visible, "window": case.window}
    out = attention(*leaves, cu_seqlens=case.documents or None, sinks=sinks, **options)
    out.backward(grad)
    leaves += [] if sinks is None else [sinks]
    found = [out.detach(), *(x.grad for x in leaves)]
    assert max(errors(found, case.attend_whole(torch.float64))) <= 5e-15
