"""Kernels that attend to one block of keys, behind one contract.

Shapes: B batch, N query heads, K key/value heads (N a multiple of K), S queries, T keys, H head
dim.

The contract: `forward` gives the output, normalized within the block, and the logarithm of the sum
of the exponentials (natural, float32, or float64 for float64); a query without a visible key has
output 0 and -inf. `backward` takes output and logarithm of the whole attention, of which this block
is a part; the logarithm of a query that sees nothing anywhere is 0. A block is never empty, and a
causal one is square, so that kernels that align the triangle at the other end agree.

**Source**: Dao, FlashAttention-2 (2307.08691), section 3.1, for the backward from the logarithm.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_par.engine.annotations import Float
from lightning_par.upstream.aten import (
    cudnn_cuda,
    cudnn_cuda_backward,
    efficient_cuda,
    efficient_cuda_backward,
    flash_cpu,
    flash_cpu_backward,
    flash_cuda,
    flash_cuda_backward,
)

__all__ = [
    "AtenCpuKernel",
    "AtenCudnnKernel",
    "AtenEfficientKernel",
    "AtenFlashKernel",
    "AttentionKernel",
    "BlockOptions",
    "EagerKernel",
    "wide",
]

Query = Float[Tensor, "B N S H"]
Keys = Float[Tensor, "B K T H"]
Bias = Float[Tensor, "#B 1 #S T"]
LogSum = Float[Tensor, "B N S"]
_HALF = (torch.bfloat16, torch.float16)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockOptions:
    """Which pairs of a block count, and how.

    Attributes:
        causal: Whether query i sees keys 0 .. i only; then S = T.
        scale: Multiplies the products.
        bias: [B or 1, 1, S or 1, T], 0 for a visible key and -inf for a masked one, in the dtype
            of `wide`; None: every key is visible. One row if causal. Only for kernels that take
            one.
    """

    causal: bool
    scale: float
    bias: Bias | None = None


class AttentionKernel(ABC):
    """One way to compute a block.

    Attributes:
        name: What a user calls it.
        takes_bias: Whether keys may be masked.
        device_type: Where it runs; None: anywhere.
    """

    name: ClassVar[str]
    takes_bias: ClassVar[bool] = True
    device_type: ClassVar[str | None] = None

    def missing(self) -> str | None:
        """Say what this machine lacks, or return None if the kernel can run here."""
        if self.device_type == "cuda" and not torch.cuda.is_available():
            return "needs a CUDA device"
        return None

    def refusal(self, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Say why the kernel cannot take such tensors, or return None if it can.

        Args:
            device: Of the tensors.
            dtype: Of the tensors.
            head_dim: H.
        """
        if self.device_type not in (None, device.type):
            return f"runs on {self.device_type}, not on {device.type}"
        return self._refusal(dtype, head_dim)

    def _refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        return None

    @abstractmethod
    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Query, LogSum]:
        """Attend to a block.

        Args:
            query: [B, N, S, H].
            key: [B, K, T, H].
            value: [B, K, T, H].
            options: Of the block.

        Returns:
            The output [B, N, S, H] in any dtype at least as wide as the query's, and the logarithm
            [B, N, S].
        """

    @abstractmethod
    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Query, Keys, Keys]:
        """Return the gradients of query, key and value.

        Args:
            grad: Of the whole attention's output.
            query: As in the forward.
            key: As in the forward.
            value: As in the forward.
            out: Of the whole attention, in the query's dtype.
            logsum: Of the whole attention.
            options: As in the forward.
        """


def _mark_dead(out: Tensor, logsum: Tensor, options: BlockOptions) -> tuple[Tensor, Tensor]:
    """Give rows without a visible key the output 0 and -inf; kernels differ in what they say."""
    if options.bias is None:
        return out, logsum
    visible = options.bias == 0
    seen = visible.cumsum(-1)[:, :, 0] > 0 if options.causal else visible.any(-1)
    dead = ~seen  # [B, 1, S or 1]
    return out.masked_fill(dead[..., None], 0), logsum.masked_fill(dead, -math.inf)


class EagerKernel(AttentionKernel):
    """Plain matrix products in float32 or wider: the reference, and for what no other can."""

    name = "eager"

    # Query heads in groups that share a key/value head: [B, K, N/K, S, H] @ [B, K, 1, H, T].
    def _scores(self, query: Tensor, key: Tensor, options: BlockOptions) -> Tensor:
        """Return [B, K, N/K, S, T]."""
        scores = (query * options.scale) @ key.transpose(-1, -2)[:, :, None]
        if options.bias is not None:
            scores = scores + options.bias[:, :, None].to(scores.dtype)
        if options.causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        return scores

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        kind, heads = wide(query.dtype), key.shape[1]
        grouped = query.to(kind).unflatten(1, (heads, -1))
        scores = self._scores(grouped, key.to(kind), options)
        logsum = scores.logsumexp(-1)
        # -inf - -inf would be NaN: a row that sees nothing gets weights exp(-inf) = 0.
        weights = (scores - logsum.masked_fill(logsum.isneginf(), 0)[..., None]).exp()
        out = weights @ value.to(kind)[:, :, None]
        return out.flatten(1, 2), logsum.flatten(1, 2)

    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `AttentionKernel.backward`."""
        kind, heads = wide(query.dtype), key.shape[1]
        grouped, given, made = (x.to(kind).unflatten(1, (heads, -1)) for x in (query, grad, out))
        keys, values = key.to(kind), value.to(kind)
        scores = self._scores(grouped, keys, options)
        # From the logarithm of the whole attention: this block's part of the softmax,
        # unnormalized.
        weights = (scores - logsum.unflatten(1, (heads, -1))[..., None]).exp()
        of_weights = given @ values.transpose(-1, -2)[:, :, None]
        # d softmax: P * (dP - sum(dO * O)), where sum(dO * O) is over the whole attention's
        # output.
        of_scores = weights * (of_weights - (given * made).sum(-1, keepdim=True)) * options.scale
        of_query = (of_scores @ keys[:, :, None]).flatten(1, 2)
        # Summed over the query heads that share the key/value head.
        of_key = (of_scores.transpose(-1, -2) @ grouped).sum(2)
        of_value = (weights.transpose(-1, -2) @ given).sum(2)
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


class AtenCpuKernel(AttentionKernel):
    """The kernel behind `F.scaled_dot_product_attention` on the CPU."""

    name = "aten_cpu"
    device_type = "cpu"

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        out, logsum = flash_cpu(
            query, key, value, 0.0, options.causal, attn_mask=options.bias, scale=options.scale
        )
        return _mark_dead(out, logsum, options)

    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `AttentionKernel.backward`."""
        grads: tuple[Tensor, Tensor, Tensor] = flash_cpu_backward(
            grad,
            query,
            key,
            value,
            out,
            logsum,
            0.0,
            options.causal,
            attn_mask=options.bias,
            scale=options.scale,
        )
        return grads


class AtenFlashKernel(AttentionKernel):
    """The FlashAttention that torch brings for CUDA: FA2, or what
    `torch.nn.attention.activate_flash_attention_impl` put in its place.
    """

    name = "aten_flash"
    takes_bias = False
    device_type = "cuda"

    def _refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype not in _HALF:
            return f"supports bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
        if head_dim % 8 or head_dim > 256:
            return f"supports head dims that are multiples of 8 up to 256, not {head_dim}"
        return None

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        assert options.bias is None
        out, logsum, *_ = flash_cuda(
            query, key, value, 0.0, options.causal, False, scale=options.scale
        )
        return out, logsum

    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `AttentionKernel.backward`."""
        assert options.bias is None
        # Without dropout nothing reads the state of the generator, but it must be a tensor.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.empty((), dtype=torch.uint64, device=query.device)
        lengths = None, None, query.shape[2], key.shape[2]
        grads: tuple[Tensor, Tensor, Tensor] = flash_cuda_backward(
            grad,
            query,
            key,
            value,
            out,
            logsum.contiguous(),
            *lengths,
            0.0,
            options.causal,
            state,
            unused,
            scale=options.scale,
        )
        return grads


class AtenCudnnKernel(AtenFlashKernel):
    """The attention of cuDNN, which torch prefers on Hopper and newer devices."""

    name = "aten_cudnn"

    def missing(self) -> str | None:
        """Say what this machine lacks, or return None if the kernel can run here."""
        lacking = super().missing()
        if lacking is not None:
            return lacking
        if not torch.backends.cuda.cudnn_sdp_enabled():
            return "is switched off (torch.backends.cuda.enable_cudnn_sdp)"
        if not torch.backends.cudnn.is_available():
            return "needs a torch with cuDNN"
        if torch.cuda.get_device_capability() < (9, 0):
            return "needs compute capability 9.0 or more"
        return None

    def _refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return "has no deterministic backward"
        if head_dim > 128:
            return f"supports head dims up to 128, not {head_dim}"
        return super()._refusal(dtype, head_dim)

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        assert options.bias is None
        out, logsum, *_ = cudnn_cuda(
            query, key, value, None, True, 0.0, options.causal, scale=options.scale
        )
        return out, logsum.view(query.shape[:3])  # some versions of torch give it a last dim of 1

    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `AttentionKernel.backward`."""
        assert options.bias is None
        state = torch.zeros((), dtype=torch.int64, device=query.device)  # of a dropout of 0
        # The gradients are wrong where the output and its gradient differ in their strides.
        grads: tuple[Tensor, Tensor, Tensor] = cudnn_cuda_backward(
            grad.contiguous(),
            query,
            key,
            value,
            out.contiguous(),
            logsum.contiguous()[..., None],
            state,
            state,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            options.causal,
            scale=options.scale,
        )
        return grads


class AtenEfficientKernel(AttentionKernel):
    """The memory-efficient attention that torch brings for CUDA: float32, and masked keys."""

    name = "aten_efficient"
    device_type = "cuda"

    def _refusal(self, dtype: torch.dtype, head_dim: int) -> str | None:
        if dtype is torch.float64:
            return "supports float32, bfloat16 and float16, not float64"
        if head_dim % 8:
            return f"supports head dims that are multiples of 8, not {head_dim}"
        return None

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        group = query.shape[1] // key.shape[1]
        out, logsum, *_ = efficient_cuda(
            query,
            # The kernel knows no grouped heads.
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            self._aligned(options.bias, query),
            True,
            0.0,
            options.causal,
            scale=options.scale,
        )
        logsum = logsum[..., : query.shape[2]]  # the kernel rounds S up to a multiple of 32
        return _mark_dead(out, logsum, options)

    def backward(
        self,
        grad: Query,
        query: Query,
        key: Keys,
        value: Keys,
        out: Query,
        logsum: LogSum,
        options: BlockOptions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients; see `AttentionKernel.backward`."""
        group, heads = query.shape[1] // key.shape[1], key.shape[1]
        padded = F.pad(logsum, (0, -query.shape[2] % 32), value=math.inf).contiguous()
        # In half precision the kernel reads the output as if its memory were [B, S, N, H], whatever
        # its strides are.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        state = torch.zeros((), dtype=torch.int64, device=query.device)
        of_query, of_key, of_value, _ = efficient_cuda_backward(
            grad,
            query,
            key.repeat_interleave(group, 1),
            value.repeat_interleave(group, 1),
            self._aligned(options.bias, query),
            out,
            padded,
            state,
            state,
            0.0,
            [True, True, True, False],
            options.causal,
            scale=options.scale,
        )
        if group > 1:
            of_key, of_value = (
                x.float().unflatten(1, (heads, group)).sum(2).to(x.dtype)
                for x in (of_key, of_value)
            )
        return of_query, of_key, of_value

    @staticmethod
    def _aligned(bias: Tensor | None, query: Tensor) -> Tensor | None:
        """Return a bias for every pair, whose rows start at multiples of 16 bytes.

        The least number of the dtype instead of -inf: the kernel gives NaN for rows that are
        wholly -inf.
        """
        if bias is None:
            return None
        keys = bias.shape[-1]
        room = bias.new_zeros((*bias.shape[:-1], -(-keys // 8) * 8), dtype=query.dtype)
        # Rows are allocated with a multiple of 8 entries: 16 bytes in half precision.
        room[..., :keys] = bias.clamp(min=torch.finfo(query.dtype).min).to(query.dtype)
        return room[..., :keys].expand(*query.shape[:3], keys)
