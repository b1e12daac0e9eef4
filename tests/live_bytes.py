"""Counts what tensors hold in memory, as they come and go."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is on, counts the storages that operations give, each once, until it is gone.

    Attributes:
        held: Bytes now.
        peak: The most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if type(leaf) in (Tensor, torch.nn.Parameter) and not leaf.is_meta:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.finalize(storage, self._forget, key, size)
        self.held += size
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.held -= size
