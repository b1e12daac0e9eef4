"""Bytes of the tensors that are alive, counted at every operation."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts what operations allocate while it is entered, and when it is freed again.

    Attributes:
        now: Bytes alive of what was allocated inside.
        peak: The most there were at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for tensor in filter(is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known or id(storage) in before:
                continue
            self._known.add(key)
            size = storage.nbytes()
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, size)
        return out

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
