"""A whole tensor that stands for bytes in files until somebody looks at them."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_par.checkpoint.tensor_files import StoredTensor
from lightning_par.dtensor import Box, local_box, local_part
from lightning_par.upstream.pytree import tree_map

__all__ = ["UnreadTensor", "read_part"]

# What `Module._load_from_state_dict` and hooks ask of an entry before it is copied. Getters of
# properties reach `__torch_function__` as their `__get__`.
_SEEN_WITHOUT_READING = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "is_meta")
) | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__}


class UnreadTensor(Tensor):
    """Entry of a state dict of which a module on a mesh copies its part, and nothing else is read.

    A module's own code may rename, drop or count such entries for nothing; what it computes from
    one reads it whole. Made by `of`.
    """

    source: StoredTensor | Tensor

    @staticmethod
    def of(source: StoredTensor | Tensor) -> "UnreadTensor":
        """Return what stands for `source`, a whole tensor."""
        # On "meta": it has the shape and the dtype, but no memory.
        made = torch.empty(source.shape, dtype=source.dtype, device="meta").as_subclass(
            UnreadTensor
        )
        made.source = source
        return made

    def read(self) -> Tensor:
        """Return the whole tensor."""
        return self.source.read() if isinstance(self.source, StoredTensor) else self.source

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SEEN_WITHOUT_READING:
            seen = super().__torch_function__
            return seen(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        # `_load_from_state_dict` ends in `param.copy_(entry)`, under no_grad; of a DTensor only
        # the local shard is then read.
        if func is Tensor.copy_ and not isinstance(args[0], cls):
            target, entry = args[0], args[1]
            read_part(entry.source, local_box("tensor", target), local_part(target))
            return target

        # Anything else is arithmetic of the user's hook, which needs the values: read, and gone
        # on with as a plain tensor.
        def whole(leaf: Any) -> Any:
            return leaf.read() if isinstance(leaf, cls) else leaf

        return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def read_part(source: StoredTensor | Tensor, box: Box, out: Tensor) -> None:
    """Copy a part of a whole tensor.

    Args:
        source: The whole tensor.
        box: The part.
        out: Receives it; has its shape, any dtype and any device.
    """
    if isinstance(source, StoredTensor):
        source.read_box(box.offset, out)
        return
    for dim, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        source = source.narrow(dim, low, size)
    out.copy_(source)
