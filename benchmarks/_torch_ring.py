"""Torch's own context-parallel template with the CPU's attention plugged in, as a baseline.

The template is private and knows CUDA's kernels only; it may be missing or differ in another
version of torch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["prepare", "torch_ring"]

_ops = torch.ops.aten


def prepare(rotate: str, *, balanced: bool) -> Any:
    """Choose how torch's template moves keys and values; return the module, or None.

    Args:
        rotate: ``"allgather"`` (its default) or ``"alltoall"``.
        balanced: Whether every rank holds two chunks.
    """
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention as template
    except ImportError:
        return None
    template.set_rotate_method(rotate)
    template._cp_options.enable_load_balance = balanced
    return template


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, template: Any) -> Tensor:
        forward = _ops._scaled_dot_product_flash_attention_for_cpu
        out, lse = template._templated_ring_attention(
            dist.group.WORLD, 2, forward, q, k, v, is_causal=causal, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.template = causal, template
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors

        def backward(**values: Any) -> Any:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            return _ops._scaled_dot_product_flash_attention_for_cpu_backward(
                *(values[name] for name in names), 0.0, values["is_causal"]
            )

        grads = ctx.template._templated_ring_attention_backward(
            dist.group.WORLD, 2, backward, grad, "grad_out", q, k, v, out, lse, ctx.causal
        )
        return *grads[:3], None, None


def torch_ring(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, template: Any) -> Tensor:
    """Attend over the ranks of the world as torch's template does.

    Args:
        q: [B, N, T/cp, H]; `k` and `v` alike.
        k: Keys.
        v: Values.
        causal: Whether a token sees only itself and those before it.
        template: From `prepare`.
    """
    out: Tensor = _Ring.apply(q, k, v, causal, template)
    return out
