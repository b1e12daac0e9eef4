"""Attention calls of a model, sent over the context axis.

Shapes: B batch, N query heads, K key/value heads, T tokens, H head dim.

Note [Interception]: while a block of the model runs, a `TorchFunctionMode` of the running thread
intercepts its calls of `F.scaled_dot_product_attention` and of `attention`. Nothing is patched:
another thread, another model, and code outside of the blocks see torch's own. A module of a block
that is recomputed in the backward enters the mode by itself.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function, TorchFunctionMode

from lightning_par.engine.annotations import Bool, Float
from lightning_par.engine.context.mixing import check_mixing
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError

__all__ = ["attention", "intercept_attention"]


def attention(
    query: Float[Tensor, "B N T H"],
    key: Float[Tensor, "B K T H"],
    value: Float[Tensor, "B K T V"],
    *,
    causal: bool = False,
    key_mask: Bool[Tensor, "#B T"] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    sinks: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "B N T V"]:
    """Attend; on any number of context-parallel ranks the same.

    On one device this is `F.scaled_dot_product_attention`, which a model may call as well. This
    function also takes packed documents, of which only what is needed is sent.

    Args:
        query: [B, N, T, H].
        key: [B, K, T, H]; N is a multiple of K.
        value: [B, K, T, V]; heads may have another size than those of the keys.
        causal: Whether a token sees only itself and those before it.
        key_mask: [B or 1, T], True for the keys that may be seen; None: all.
        cu_seqlens: Boundaries 0, ..., T of the documents that are packed into every sample, counted
            in the whole sequence, whatever part of it is here; None: one document. A tensor on the
            CPU, or a list, costs no waiting.
        window: (left, right): a token sees so many tokens before and after itself, besides itself;
            under a causal mask none after. None: all. What no window reaches is not sent.
        scale: Multiplies the products; None: 1 / sqrt(H).
        sinks: [N], a product for each head that counts in the softmax of every token, and brings
            no value, as in gpt-oss; None: there are none.

    Returns:
        [B, N, T, V]; 0 for a token that sees no key.

    Examples:
        >>> x = torch.randn(1, 2, 6, 4)
        >>> attention(x, x, x, causal=True, cu_seqlens=[0, 4, 6]).shape
        torch.Size([1, 2, 6, 4])
    """
    # Gives the mode, and tensor subclasses, this call before it falls apart into torch's own.
    if has_torch_function((query, key, value)):
        taken: Tensor = handle_torch_function(
            attention,
            (query, key, value),
            query,
            key,
            value,
            causal=causal,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            window=window,
            scale=scale,
            sinks=sinks,
        )
        return taken
    bounds = _bounds(cu_seqlens) or [0, query.shape[2]]
    parts = [
        _attend(
            *(x[:, :, a:b] for x in (query, key, value)),
            causal=causal,
            seen=None if key_mask is None else key_mask[:, None, None, a:b],
            window=window,
            scale=scale,
            sinks=sinks,
        )
        for a, b in pairwise(bounds)
        if a < b
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    seen: Tensor | None,
    window: tuple[int, int] | None,
    scale: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend inside of one document; `seen` is [B or 1, 1, 1, T], the rest as in `attention`."""
    tokens = query.shape[2]
    if (causal and (seen is not None or sinks is not None)) or window is not None:
        left, right = window or (tokens, 0)
        near = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device)
        near = near.tril(0 if causal else right).triu(-left)
        seen = near if seen is None else seen & near
    mask = seen
    if sinks is not None:
        mask = _with_sinks(sinks, seen, query)
        key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=causal and mask is None,
        scale=scale,
        # Fewer key/value heads than query heads.
        enable_gqa=query.shape[1] != key.shape[1],
    )
    # A row that sees nothing is NaN in some kernels of torch, and 0 here.
    return out if seen is None else out * seen.any(-1, keepdim=True)


def _with_sinks(sinks: Tensor, seen: Tensor | None, query: Tensor) -> Tensor:
    """Return [B or 1, N, T, T + 1], what is added to the products: the last key is the sink.

    Args:
        sinks: [N].
        seen: Which keys may be seen, broadcast to [B, N, T, T]; None: all.
        query: [B, N, T, H].
    """
    tokens = query.shape[2]
    own = query.new_zeros(1, 1, tokens, tokens)
    if seen is not None:
        own = torch.where(seen, own, -math.inf)
    last = sinks.to(query.dtype)[None, :, None, None].expand(len(own), -1, tokens, 1)
    return torch.cat([own.expand(-1, len(sinks), -1, -1), last], -1)


def _bounds(cu_seqlens: Tensor | Sequence[int] | None) -> list[int]:
    if cu_seqlens is None:
        return []
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)


class _Interception(TorchFunctionMode):
    """Sends attention calls of this thread over the context axis; see Note [Interception]."""

    def __init__(self, axis: SequenceShard) -> None:
        super().__init__()
        self._axis = axis
        self.is_active = self.is_sum = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        # Outside of a divided step, as in validation on whole sequences, nothing is taken over.
        if self._axis.layout is None:
            return func(*args, **options)
        if func is F.scaled_dot_product_attention:
            return self._dot_product(*args, **options)
        if func is attention:
            return self._attention(*args, **options)
        if func is F.multi_head_attention_forward:
            raise ConfigurationError(
                "LP305",
                "nn.MultiheadAttention cannot be divided over "
                f"context_parallel_size={self._axis.group.size()} ranks, since its attention is "
                "computed inside torch. Call F.scaled_dot_product_attention or "
                "lightning_par.attention in the block instead.",
            )
        if self._axis.looks and not self.is_sum:
            check_mixing(func, args, options, self._axis.layout.local)
        return func(*args, **options)

    def _dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        ranks = self._axis.group.size()
        if dropout_p > 0:
            raise ConfigurationError(
                "LP305",
                f"dropout_p={dropout_p} of attention probabilities is not supported with "
                f"context_parallel_size={ranks}: the backward would have to drop the same pairs "
                "of tokens as the forward. Set the dropout of attention to 0.",
            )
        visible = None
        if attn_mask is not None:
            # Masks of fewer dims are broadcast from the left, as torch does.
            shape = (1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape)
            # A mask for each pair of tokens would need rows of other ranks.
            if is_causal or shape[1:3] != (1, 1) or shape[-1] != query.shape[-2]:
                raise ConfigurationError(
                    "LP305",
                    f"attn_mask of shape {tuple(attn_mask.shape)} with is_causal={is_causal} is "
                    f"not supported with context_parallel_size={ranks}. A mask can only say which "
                    f"keys are visible: its shape has to be [B, 1, 1, {query.shape[-2]}], without "
                    "is_causal. Use is_causal=True for a causal mask, or "
                    "lightning_par.attention(causal=..., key_mask=..., cu_seqlens=...).",
                )
            visible = attn_mask.reshape(shape)[:, 0, 0]
        return self._attend(query, key, value, causal=is_causal, visible=visible, scale=scale)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        window: tuple[int, int] | None,
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        options: dict[str, Any] = {"causal": causal, "visible": key_mask, "window": window}
        options |= {"scale": scale, "sinks": sinks}
        return self._attend(query, key, value, documents=_bounds(cu_seqlens), **options)

    def _attend(self, *tensors: Tensor, **options: Any) -> Tensor:
        device = tensors[0].device.type
        if torch.is_autocast_enabled(device):  # as torch does for its own attention
            kind = torch.get_autocast_dtype(device)
            tensors = tuple(x.to(kind) for x in tensors)
        query, key, value = tensors
        dim, wanted = query.shape[-1], value.shape[-1]
        if dim == wanted:
            return self._axis.attend(query, key, value, **options)
        # Kernels want heads of one size: zeros change neither the products nor the output.
        if options["scale"] is None:
            # Of the real head dim, and not of the padded one.
            options["scale"] = 1 / math.sqrt(dim)
        size = max(dim, wanted)
        query, key, value = (F.pad(x, (0, size - x.shape[-1])) for x in (query, key, value))
        return self._axis.attend(query, key, value, **options)[..., :wanted]


def _summing(mode: _Interception, inner: Forward) -> Forward:
    """Let a module sum over the tokens of this rank: it has its sums added up over the ranks."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode.is_sum = True
        try:
            return inner(*args, **kwargs)
        finally:
            mode.is_sum = False

    return forward


def _inside(mode: _Interception, inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Modules inside a block do not enter again: a mode that is on the stack twice is asked
        # twice.
        if mode.is_active:
            return inner(*args, **kwargs)
        mode.is_active = True
        try:
            with mode:
                return inner(*args, **kwargs)
        finally:
            mode.is_active = False

    return forward


def _wrapped_modules(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the block and the modules in it that are not torch's own, which call no attention."""
    for module in block.modules():
        # A module of the block that is recomputed alone is not below the block's own forward.
        if module is block or not type(module).__module__.startswith("torch."):
            yield module


def intercept_attention(
    blocks: Iterable[nn.Module], axis: SequenceShard, sums: Iterable[nn.Module] = ()
) -> None:
    """Let the attention in these blocks see the tokens of all ranks; see Note [Interception].

    Args:
        blocks: Their forwards, and those of their modules, are wrapped.
        axis: This rank's shard of the sequences.
        sums: Modules in them that may sum over tokens, as the plan adds their sums up.
    """
    mode = _Interception(axis)
    for module in sums:
        wrap_forward(module, partial(_summing, mode), "sums_over_tokens")
    for block in blocks:
        for module in _wrapped_modules(block):
            wrap_forward(module, partial(_inside, mode), "context_attention")
