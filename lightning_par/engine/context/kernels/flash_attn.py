"""Attention kernels of other packages, by name: FlashAttention 2, 3 and 4.

All take [B, S, N, H]; ours is [B, N, S, H], B batch, N heads, S tokens, H head dim. None takes a
mask. Nothing is imported before a kernel is asked for.

**Source**: Dao 2307.08691 (FlashAttention-2), Shah et al. 2407.08608 (FlashAttention-3); the
packages `flash-attn`, `flash_attn_3` and `flash-attn-4`.
"""

import importlib
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from lightning_par.engine.context.kernels.aten import (
    AtenFlashKernel,
    BlockOptions,
    Keys,
    LogSum,
    Query,
)

__all__ = ["FlashAttn3Kernel", "FlashAttn4Kernel", "FlashAttnKernel"]


class _PackageKernel(AtenFlashKernel):
    """A kernel of a package that may not be there; takes the tensors that torch's own does.

    Attributes:
        module: That holds the functions.
        functions: Private functions of it that are called.
        source: What installs it.
        capability: Compute capabilities of devices that it runs on, the lowest and the highest.
    """

    module: ClassVar[str]
    functions: ClassVar[tuple[str, str]]
    source: ClassVar[str]
    capability: ClassVar[tuple[tuple[int, int], tuple[int, int]]] = ((8, 0), (99, 0))

    def missing(self) -> str | None:
        """Say what this machine lacks, or return None if the kernel can run here."""
        lacking = super().missing()
        if lacking is not None:
            return lacking
        try:
            # Import runs the package's own checks, which may raise for a missing extension.
            module = self._load()
        except ImportError as error:
            return f"needs {self.source} ({error})"
        absent = [name for name in self.functions if not hasattr(module, name)]
        if absent:
            return f"{self.module} has no {' and no '.join(absent)}"
        (low, high), here = self.capability, torch.cuda.get_device_capability()
        if low <= here <= high:
            return None
        needed = f"{low[0]}.{low[1]}" + ("" if low == high else " or more")
        return f"needs compute capability {needed}, this device has {here[0]}.{here[1]}"

    def _load(self) -> ModuleType:
        return importlib.import_module(self.module)


class FlashAttnKernel(_PackageKernel):
    """`flash-attn` 2.7 or newer."""

    name = "flash_attn"
    module = "flash_attn.flash_attn_interface"
    functions = ("_flash_attn_forward", "_flash_attn_backward")
    source = "the extra lightning-par[flash]"

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        assert options.bias is None
        inputs = (x.transpose(1, 2) for x in (query, key, value))
        out, logsum, *_ = self._load()._flash_attn_forward(
            *inputs,
            dropout_p=0.0,
            softmax_scale=options.scale,
            causal=options.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return out.transpose(1, 2), logsum

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
        inputs = [x.transpose(1, 2) for x in (grad, query, key, value, out)]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:4]]
        self._load()._flash_attn_backward(
            *inputs,
            logsum.contiguous(),
            *grads,
            dropout_p=0.0,
            softmax_scale=options.scale,
            causal=options.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        of_query, of_key, of_value = (x.transpose(1, 2) for x in grads)
        return of_query, of_key, of_value


class FlashAttn3Kernel(_PackageKernel):
    """`flash_attn_3`, for Hopper, from the folder ``hopper`` of FlashAttention or its wheel."""

    name = "flash_attn_3"
    module = "flash_attn_interface"
    functions = ("_flash_attn_forward", "_flash_attn_backward")
    source = "the wheel flash_attn_3"
    capability = ((9, 0), (9, 0))

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        assert options.bias is None
        inputs = (x.transpose(1, 2) for x in (query, key, value))
        out, logsum, *_ = self._load()._flash_attn_forward(
            *inputs, softmax_scale=options.scale, causal=options.causal
        )
        return out.transpose(1, 2), logsum

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
        inputs = [x.transpose(1, 2) for x in (grad, query, key, value, out)]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[1:4]]
        lengths = (None,) * 6  # of packed sequences
        # By position: its names of the arguments have changed.
        self._load()._flash_attn_backward(
            *inputs,
            logsum.contiguous(),
            *lengths,
            *grads,
            options.scale,
            options.causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        of_query, of_key, of_value = (x.transpose(1, 2) for x in grads)
        return of_query, of_key, of_value


class FlashAttn4Kernel(_PackageKernel):
    """`flash-attn-4`, for Hopper and Blackwell; compiles itself at the first call.

    The package installs only the folder ``flash_attn/cute``, so that finding ``flash_attn`` says
    nothing about it, and the other way round.
    """

    name = "flash_attn_4"
    module = "flash_attn.cute.interface"
    functions = ("_flash_attn_fwd", "_flash_attn_bwd")
    source = "the extra lightning-par[fa4]"
    capability = ((9, 0), (99, 0))

    def forward(
        self, query: Query, key: Keys, value: Keys, options: BlockOptions
    ) -> tuple[Tensor, Tensor]:
        """Attend to a block; see `AttentionKernel.forward`."""
        assert options.bias is None
        inputs = (x.transpose(1, 2).contiguous() for x in (query, key, value))
        out, logsum, *_ = self._load()._flash_attn_fwd(
            *inputs, softmax_scale=options.scale, causal=options.causal, return_lse=True
        )
        return out.transpose(1, 2), logsum.contiguous()

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
        inputs = (x.transpose(1, 2).contiguous() for x in (query, key, value, out, grad))
        grads = self._load()._flash_attn_bwd(
            *inputs, logsum.contiguous(), softmax_scale=options.scale, causal=options.causal
        )
        of_query, of_key, of_value = (x.transpose(1, 2) for x in grads[:3])
        return of_query, of_key, of_value
