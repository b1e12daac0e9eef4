"""Layers of the decoder models: rotary embedding, grouped-query attention, MLPs and norms.

Shapes: B batch, T tokens, D model dim, N query heads, K key/value heads, H head dim, F feed-forward
dim.

Note [Sequence length inside a block]: under sequence parallelism a block gets only a shard of the
tokens, which is gathered right before attention and the MLP. No module here therefore derives
positions from the hidden state; the model computes the rotary tables once and passes them down.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.engine.context.attention import attention
from lightning_par.engine.tensor.chunked_logits import chunked_logits
from lightning_par.errors import ConfigurationError

__all__ = [
    "Attention",
    "GeluMLP",
    "KeyValueCache",
    "NormKind",
    "RotaryEmbedding",
    "SwiGLU",
    "head_logits",
    "make_norm",
    "rotate",
]

NormKind = Literal["rmsnorm", "layernorm"]


def make_norm(kind: NormKind, dim: int, *, eps: float, bias: bool) -> nn.Module:
    """Return a normalization over the last dim.

    Args:
        kind: ``"rmsnorm"`` (never has a bias) or ``"layernorm"``.
        dim: D.
        eps: Epsilon, added to the mean square or the variance.
        bias: Whether a LayerNorm has a bias.
    """
    if kind == "rmsnorm":
        return nn.RMSNorm(dim, eps=eps)
    return nn.LayerNorm(dim, eps=eps, bias=bias)


def head_logits(head: nn.Module, hidden: Tensor, *, chunked: bool) -> Tensor:
    """Return the logits [B, T, V] of a head.

    Args:
        head: A linear layer.
        hidden: [B, T, D].
        chunked: Whether a loss computes them in chunks; see `linear_cross_entropy`.
    """
    logits: Tensor = chunked_logits(hidden, head) if chunked else head(hidden)
    return logits


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (RoPE): cosine and sine tables, without parameters or buffers.

    The frequencies are computed in float32 at every call: a buffer would be cast along with the
    weights of a model in bfloat16, where positions above 256 are not exact.

    Args:
        head_dim: H, even.
        theta: Base of the wavelengths, 2 pi theta^(2i/H).

    **Source**: Su et al., RoFormer (2104.09864), section 3.4.2, with pairs (i, i + H/2) as in
    Llama.
    """

    def __init__(self, head_dim: int, *, theta: float = 10_000.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta

    def forward(self, position_ids: Tensor) -> Tensor:
        """Return cosines and sines.

        Args:
            position_ids: [B or 1, T], int64.

        Returns:
            [2, B or 1, 1, T, H], float32: cosines, then sines; the dim of size 1 broadcasts over
            heads.
        """
        exponents = torch.arange(
            0, self.head_dim, 2, dtype=torch.float32, device=position_ids.device
        )
        frequencies = self.theta ** (-exponents / self.head_dim)
        angles = position_ids[:, None, :, None].to(torch.float32) * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of the last dim by the angle of its position.

    Args:
        x: [B, N, T, H], queries or keys.
        rotary: [2, B or 1, 1, T, H], float32, from `RotaryEmbedding`.

    Returns:
        [B, N, T, H] in the dtype of `x`; computed in float32 or wider.
    """
    cos, sin = rotary.unbind()
    low, high = x.chunk(2, dim=-1)
    rotated = torch.cat((-high, low), dim=-1)
    # The tables are float32, so the products are, too; the result has the dtype of x again.
    return (x * cos + rotated * sin).type_as(x)


class _CachedLayer:
    """Keys and values of one layer, [B, K, T, H]; None before the first."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]


class KeyValueCache:
    """The keys and values of the tokens that attention has seen, layer by layer.

    Its methods have the names of those of the caches of transformers.

    Args:
        num_layers: L.
    """

    def __init__(self, num_layers: int) -> None:
        self.layers = [_CachedLayer() for _ in range(num_layers)]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return T, the number of tokens of a layer."""
        return self.layers[layer_idx].get_seq_length()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a layer; return those of all tokens."""
        layer = self.layers[layer_idx]
        if layer.keys is not None and layer.values is not None:
            keys = torch.cat((layer.keys, keys), dim=2)
            values = torch.cat((layer.values, values), dim=2)
        layer.keys, layer.values = keys, values
        return keys, values


class Attention(nn.Module):
    """Causal grouped-query attention (GQA): N query heads share K key/value heads.

    `num_heads` and `num_kv_heads` are read at every call: tensor parallelism lowers them to the
    local numbers of heads. `head_dim` never changes.

    Args:
        model_dim: D.
        num_heads: N, a multiple of K.
        num_kv_heads: K.
        bias: Whether the four projections have a bias.
        dropout: Dropout probability of the attention weights and of the output.

    **Source**: Ainslie et al., GQA (2305.13245).
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.head_dim = model_dim // num_heads
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.dropout = dropout
        self.query = nn.Linear(model_dim, num_heads * self.head_dim, bias=bias)
        self.key = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=bias)
        self.value = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(num_heads * self.head_dim, model_dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        cache: KeyValueCache | None = None,
        layer_idx: int = 0,
    ) -> Tensor:
        """Attend to the same and earlier tokens.

        Args:
            hidden: [B, T, D].
            rotary: Cosines and sines [2, B or 1, 1, T, H]; None: positions are in the embeddings.
            documents: For each row the boundaries 0, ..., T of its documents, none of which sees
                another; None: a row is one.
            cache: Holds earlier tokens, and gets those of `hidden`; for rows of one document.
            layer_idx: Number of the layer in it.

        Returns:
            [B, T, D].

        Raises:
            ConfigurationError: There are documents, and attention weights are dropped.
        """
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        batch, length, _ = query.shape
        query = query.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = key.view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = value.view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        if cache is not None:
            mixed = self._attend_cached(query, *cache.update(key, value, layer_idx))
        elif documents is None:
            mixed = F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=self.dropout if self.training else 0.0,
                is_causal=True,
                # Only where it is needed: it rules out some kernels.
                enable_gqa=self.num_kv_heads != self.num_heads,
            )
        else:
            self._check_dropout()
            rows = zip(query.split(1), key.split(1), value.split(1), documents, strict=True)
            mixed = torch.cat(
                [attention(q, k, v, causal=True, cu_seqlens=bounds) for q, k, v, bounds in rows]
            )
        mixed = mixed.transpose(1, 2).reshape(batch, length, self.num_heads * self.head_dim)
        result: Tensor = self.drop(self.out(mixed))
        return result

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend from the last tokens to all; without dropout, as nothing trains with a cache."""
        new, total = query.shape[2], key.shape[2]
        mask = None
        if 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool, device=query.device)
            mask = mask.tril(total - new)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=new == total,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )

    def _check_dropout(self) -> None:
        if self.training and self.dropout:
            raise ConfigurationError(
                "LP912",
                f"dropout={self.dropout} of attention probabilities is not supported if a row "
                "holds several documents (cu_seqlens). Use dropout=0, or put one document in each "
                "row.",
            )


class SwiGLU(nn.Module):
    """Gated MLP ``down(silu(gate(x)) * up(x))``.

    Args:
        model_dim: D.
        ff_dim: F.
        bias: Whether the projections have a bias.
        dropout: Dropout probability of the output.

    **Source**: Shazeer, GLU variants improve transformer (2002.05202), equation 6.
    """

    def __init__(
        self, model_dim: int, ff_dim: int, *, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(model_dim, ff_dim, bias=bias)
        self.up = nn.Linear(model_dim, ff_dim, bias=bias)
        self.down = nn.Linear(ff_dim, model_dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        result: Tensor = self.drop(self.down(F.silu(self.gate(hidden)) * self.up(hidden)))
        return result


class GeluMLP(nn.Module):
    """MLP ``down(gelu(up(x)))`` with the tanh approximation of GELU, as in GPT-2.

    Args:
        model_dim: D.
        ff_dim: F.
        bias: Whether the projections have a bias.
        dropout: Dropout probability of the output.

    **Source**: Hendrycks and Gimpel (1606.08415), section 2.
    """

    def __init__(
        self, model_dim: int, ff_dim: int, *, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.up = nn.Linear(model_dim, ff_dim, bias=bias)
        self.down = nn.Linear(ff_dim, model_dim, bias=bias)
        self.drop = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        result: Tensor = self.drop(self.down(F.gelu(self.up(hidden), approximate="tanh")))
        return result
