"""Bytes of the tensors that are alive, counted at every operation, by what they are for."""

import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_part
from lightning_par.upstream.dispatch import TorchDispatchMode
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.pytree import tree_leaves
from lightning_par.upstream.tensor import storage_key

__all__ = ["ACTIVATIONS", "COMMUNICATION", "GRADIENTS", "OPTIMIZER", "PARAMETERS", "LiveBytes"]

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
ACTIVATIONS = "activations"
COMMUNICATION = "communication buffers"


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
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._held: dict[int, _Held] = {}
        outside = [t.untyped_storage() for t in tree_leaves(besides) if isinstance(t, Tensor)]
        # Kept, as keys are used again.
        self._outside = {storage_key(storage): storage for storage in outside}
        self._kinds: Counter[str] = Counter()
        self._at_peak: Counter[str] = Counter()
        self._born = self._peak_born = 0
        self._open = ExitStack()

    def __enter__(self) -> Self:
        # FSDP frees what it has gathered without an operation.
        # FSDP2 resizes the storage of a gathered parameter to 0 (`free_storage`), and calls no
        # operator.
        original: Callable[..., Any] = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            if storage_key(storage) in self._held:
                self._count(storage)
            return result

        self._open.enter_context(replaced(torch.UntypedStorage, "resize_", resize))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._open.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its parts come here one by one
        out = func(*args, **(kwargs or {}))
        self.count(out)
        return out

    def restart(self) -> None:
        """Begin the peak anew with what is alive."""
        self.peak, self._peak_born = self.now, self._born
        self._at_peak = self._kinds.copy()

    @property
    def kinds_now(self) -> dict[str, int]:
        """Bytes alive by kind."""
        return {kind: size for kind, size in self._kinds.items() if size}

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes at the peak by kind; what nobody has marked are activations.

        A mark counts for the peak, too, if the tensor was alive then.
        """
        return {kind: size for kind, size in self._at_peak.items() if size}

    def count(self, tree: Any) -> None:
        """Count the storages of a nest of tensors from now on."""
        # Most operations give one tensor; `tree_leaves` would take longer than the rest.
        for leaf in [tree] if isinstance(tree, Tensor) else tree_leaves(tree):
            if isinstance(leaf, Tensor) and self._has_memory(leaf):
                self._count(leaf.untyped_storage())

    def mark(self, tree: Any, kind: str) -> None:
        """Say what the storages of a nest of tensors are for; they count from now on.

        Args:
            tree: DTensors stand for their local parts.
            kind: `COMMUNICATION` leaves those alone that were marked before.
        """
        for leaf in tree_leaves(tree):
            if not isinstance(leaf, Tensor):
                continue
            local = local_part(leaf.detach())
            if not self._has_memory(local):
                continue
            self._count(local.untyped_storage())
            # Not there if the storage is one of `besides`.
            held = self._held.get(storage_key(local.untyped_storage()))
            if held is None or (kind == COMMUNICATION and held.kind != ACTIVATIONS):
                continue
            # A tensor that was born after the peak has no part in it.
            for kinds in [self._kinds, *([self._at_peak] if held.born <= self._peak_born else [])]:
                kinds[held.kind] -= held.size
                kinds[kind] += held.size
            held.kind = kind

    def _has_memory(self, tensor: Tensor) -> bool:
        # Subclasses wrap others, whose operations come by here themselves.
        return type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_key(storage), storage.nbytes()
        if key in self._outside:
            return
        held = self._held.get(key)
        if held is None:
            self._born += 1
            held = self._held[key] = _Held(self._born)
            # torch keeps the Python object of a storage as long as its memory (PyObject
            # preservation), so it goes when the last tensor does.
            weakref.finalize(storage, self._forget, key)
        change = size - held.size  # it may have grown
        if not change:
            return
        held.size = size
        self.now += change
        self._kinds[held.kind] += change
        if self.now > self.peak:
            self.peak, self._peak_born = self.now, self._born
            self._at_peak = self._kinds.copy()

    def _forget(self, key: int) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.now -= held.size
            self._kinds[held.kind] -= held.size


class _Held:
    """A storage: its number, its bytes, and what it is for."""

    __slots__ = ("born", "kind", "size")

    def __init__(self, born: int) -> None:
        self.born, self.size, self.kind = born, 0, ACTIVATIONS
