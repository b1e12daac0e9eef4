"""Activation offloading: what a forward saves for the backward is kept in the host's memory.

On CUDA copies run on a side stream, from and to pinned memory, beside the computation; torch's
`save_on_cpu` copies on the stream that computes. On the CPU, and on meta, tensors stay where they
are.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.upstream.dispatch import TorchDispatchMode
from lightning_par.upstream.pytree import tree_map
from lightning_par.upstream.tensor import storage_key

__all__ = ["HostCopy", "hold_on_host", "kept_on_host"]

_SMALLEST = 1 << 20  # bytes; below, a copy costs more than the memory is worth


@dataclass(eq=False)
class HostCopy:
    """A CUDA tensor that was copied to the host.

    Args:
        tensor: The tensor, whose memory may be freed afterwards.
        stream: Stream on which copies run.
    """

    tensor: Any
    stream: Any
    _host: Tensor = field(init=False)

    def __post_init__(self) -> None:
        source, self.device = self.tensor.detach(), self.tensor.device
        # Held no longer: the memory on the device is free once the copy is over.
        self.tensor = None
        self._host = torch.empty_like(source, device="cpu", pin_memory=True)
        # The copy begins when the tensor has been computed.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._host.copy_(source, non_blocking=True)
        # The allocator must not reuse the memory before the copy has read it.
        source.record_stream(self.stream)

    def back(self) -> Tensor:
        """Return the tensor on its device; work on the current stream waits for it."""
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self.stream):
            tensor = self._host.to(self.device, non_blocking=True)
        # On the device: the host goes on.
        current.wait_stream(self.stream)
        tensor.record_stream(current)
        return tensor


_streams: dict[torch.device, Any] = {}


def _leave(tensor: Any, stays: frozenset[int] = frozenset()) -> Any:
    """Start copying a large CUDA tensor to the host; return anything else detached.

    Args:
        tensor: The value that is saved.
        stays: Memory that is not freed anyway, see `_memory`.
    """
    if not isinstance(tensor, Tensor) or tensor.device.type != "cuda":
        return tensor.detach() if isinstance(tensor, Tensor) else tensor
    # Subclasses (DTensor, nested tensors) would lose what they hold besides their memory.
    small = type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes < _SMALLEST
    if small or _memory(tensor) in stays:
        return tensor.detach()
    device = tensor.device
    # One stream for a device, for the life of the process: streams are scarce.
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return HostCopy(tensor, _streams[device])


def _return(held: Any) -> Any:
    return held.back() if isinstance(held, HostCopy) else held


def _memory(tensor: Tensor) -> int:
    return storage_key(local_part(tensor).untyped_storage())


def kept_on_host(held: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Return a context in which tensors that autograd saves are offloaded to the host.

    Args:
        held: Tensors whose memory is not freed anyway, as that of parameters.
    """
    # By memory, as views of a parameter are saved as well.
    stays = frozenset(_memory(tensor.detach()) for tensor in held)
    return torch.autograd.graph.saved_tensors_hooks(partial(_leave, stays=stays), _return)


class _Keep(TorchDispatchMode):
    """Runs a forward, and keeps the outputs of chosen operations."""

    def __init__(
        self,
        keeps: Callable[[Any, Sequence[Any]], bool],
        kept: dict[Any, list[Any]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept = keeps, kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.keeps(func, args):
            # In the order of the calls of one operator, which a recomputation repeats.
            self.kept[func].append(tree_map(_leave, out))
        return out


class _Give(TorchDispatchMode):
    """Runs the recomputation, and returns the outputs that were kept, in the same order."""

    def __init__(
        self,
        keeps: Callable[[Any, Sequence[Any]], bool],
        kept: dict[Any, list[Any]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keeps, self.kept = keeps, kept
        self.given: dict[Any, int] = defaultdict(int)

    # Each recomputation of the block begins with the first output.
    def __enter__(self) -> Any:
        self.given.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.keeps(func, args):
            return func(*args, **(kwargs or {}))
        index = self.given[func]
        self.given[func] += 1
        return tree_map(_return, self.kept[func][index])


def hold_on_host(
    keeps: Callable[[Any, Sequence[Any]], bool],
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward, which keeps on the host, and of its recomputation.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts` does the same on the device.

    Args:
        keeps: Tells, from an operation and its arguments, whether to keep the output.
    """
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _Keep(keeps, kept), _Give(keeps, kept)
