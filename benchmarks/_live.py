"""Bytes of the tensors that are alive, counted at every operation."""

import weakref
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts, while it is entered, the storages that operations give, each once, until it is gone.

    A storage that no operation has allocated, such as that of a tensor read from a file, counts
    from its first view on: it takes memory like any other. What was there before and is not to
    count has to be named. Of a DTensor, the local part counts.

    Args:
        besides: A nest of tensors that do not count.

    Attributes:
        now: Bytes alive.
        peak: The most there were at once.
    """

    def __init__(self, besides: Any = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        outside = [t.untyped_storage() for t in tree_leaves(besides) if isinstance(t, Tensor)]
        self._outside = {storage._cdata: storage for storage in outside}  # kept, as keys are reused

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its parts come here one by one
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._outside:
            return
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self.now += size - self._sizes.get(key, 0)  # it may have grown
        self._sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
