"""Attention with explicit masks in float64, and what every rank of a ring should have of it."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.context.apply import build_axis
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.mesh import build_mesh, ParallelSizes


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention; every dim has its own size."""

    causal: bool = False
    documents: tuple[int, ...] = ()
    window: tuple[int, int] | None = None
    padded: bool = False
    tokens: int = 37
    heads: int = 8
    kv_heads: int = 8
    dim: int = 16
    batch: int = 3
    dtype: torch.dtype = torch.float64
    scale: float | None = None
    has_sinks: bool = False

    def sinks(self) -> Tensor | None:
        """[N], one for each head; a leaf."""
        numbers = torch.linspace(-2, 3, self.heads, dtype=self.dtype)
        return numbers.requires_grad_() if self.has_sinks else None

    def draw(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator().manual_seed(7)
        shapes = [(self.batch, n, self.tokens, self.dim) for n in (self.heads, self.kv_heads)]
        return [
            torch.randn(s, generator=generator, dtype=torch.float64).to(self.dtype)
            for s in (shapes[0], shapes[1], shapes[1], shapes[0])
        ]

    @property
    def visible(self) -> Tensor | None:
        """[B, T]: other lengths in every sample, and nothing in the last one."""
        if not self.padded:
            return None
        lengths = [self.tokens, self.tokens // 3, 0]
        return torch.tensor([[i < n for i in range(self.tokens)] for n in lengths])

    @property
    def pairs(self) -> Tensor:
        """[B or 1, 1, T, T]: which query sees which key."""
        bounds = self.documents or (0, self.tokens)
        sizes = torch.tensor(bounds).diff()
        document = torch.arange(len(sizes)).repeat_interleave(sizes)
        seen = document[:, None] == document[None]
        if self.causal:
            seen = seen.tril()
        if self.window is not None:
            seen = seen.triu(-self.window[0]).tril(self.window[1])
        seen = seen[None, None]
        return seen if self.visible is None else seen & self.visible[:, None, None]

    def attend_whole(self, dtype: torch.dtype) -> list[Tensor]:
        """Output and gradients of one process with the whole mask; 0 where nothing is seen."""
        *inputs, grad = (x.to(dtype) for x in self.draw())
        query, key, value = (x.requires_grad_() for x in inputs)
        out, sinks = self._attend(query, key, value)
        out = out.where(self.pairs.any(-1, keepdim=True), 0)
        out.backward(grad)
        leaves = [query, key, value, *([] if sinks is None else [sinks])]
        return [out.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor | None]:
        sinks = self.sinks()
        if sinks is None:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=self.pairs, scale=self.scale, enable_gqa=True
            )
            return out, None
        key, value = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (key, value))
        products = query @ key.mT * (self.scale or self.dim**-0.5)
        products = products.masked_fill(~self.pairs, -torch.inf)
        last = sinks.to(query.dtype)[None, :, None, None].expand(*products.shape[:3], 1)
        return torch.cat([products, last], -1).softmax(-1)[..., :-1] @ value, sinks


def make_axis(world: int, **options: Any) -> SequenceShard:
    """The context axis of a mesh of nothing else."""
    return build_axis(build_mesh(ParallelSizes(context=world), "cpu"), ContextOptions(**options))


def attend_divided(case: Case, axis: SequenceShard) -> list[Tensor]:
    """Output and gradients of this rank's tokens; the gradient of sinks is of all tokens."""
    axis.set_length(case.tokens)
    *inputs, grad = (axis.shard_tensor(x, 2) for x in case.draw())
    query, key, value = (x.requires_grad_() for x in inputs)
    visible = case.visible
    out = axis.attend(
        query,
        key,
        value,
        causal=case.causal,
        documents=case.documents,
        window=case.window,
        visible=None if visible is None else axis.shard_tensor(visible, 1),
        scale=case.scale,
        sinks=(sinks := case.sinks()),
    )
    out.backward(grad)
    found = [out.detach(), *(x.grad for x in (query, key, value))]
    if sinks is not None:  # as of any weight: each rank has what its queries say
        dist.all_reduce(sinks.grad, group=axis.group)
        found.append(sinks.grad)
    return found  # type: ignore[return-value]


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The largest difference of each tensor, relative to the largest number of the wanted one."""
    pairs = zip(found, wanted, strict=True)
    return [float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs]


def worst_error(case: Case, axis: SequenceShard) -> float:
    """Of output and gradients of this rank against float64 in one process."""
    wanted = replace(case).attend_whole(torch.float64)
    found = attend_divided(case, axis)
    scales = [w.abs().max() for w in wanted]
    parts = [w if w.ndim == 1 else axis.shard_tensor(w, 2) for w in wanted]
    assert [f.shape for f in found] == [p.shape for p in parts]
    assert all(f.dtype is case.dtype for f in found)
    differences = zip(found, parts, scales, strict=True)
    return max(float((f.double() - p).abs().max() / s) for f, p, s in differences)
