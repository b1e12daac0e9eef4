"""Random numbers for DTensors: those that one process draws for the whole tensor.

Torch gives each shard numbers of its own. A hook that adds noise to gradients or weights, or an
optimizer that draws (Langevin dynamics), would compute something else than one process.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.library import Library, register_torch_dispatch

from lightning_par.dtensor import local_part, shard_of, whole
from lightning_par.upstream.dispatch import remove_kernels

__all__ = ["whole_random_draws"]

_IN_PLACE = (
    *("normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("random_", "random_.to", "random_.from", "bernoulli_.float"),
)
_LIKE = ("rand_like", "randn_like", "randint_like", "randint_like.low_dtype")
_BY_VALUES = ("bernoulli",)
_LOCK = threading.Lock()
_running: list[Library] = []
"""The kernels, once for each run of this process that draws by them."""


@contextmanager
def whole_random_draws() -> Iterator[None]:
    """Inside, each rank draws the numbers of a whole DTensor and keeps those of its shard.

    The generators of the ranks of a DTensor have to be alike, as they are between steps. A draw
    takes the memory of the whole tensor; only `bernoulli`, which reads it, communicates. Runs that
    live side by side in one process share the kernels; the last one to end removes them.
    """
    with _LOCK:
        # Kernels are global in torch: registered once, for however many runs.
        if not _running:
            library = Library("aten", "FRAGMENT")
            for name in (*_IN_PLACE, *_LIKE, *_BY_VALUES):
                register_torch_dispatch(f"aten::{name}", DTensor, _draw, lib=library)
        else:
            library = _running[0]
        _running.append(library)
    try:
        yield
    finally:
        with _LOCK:
            _running.remove(library)
            if not _running:
                remove_kernels(library)


def _draw(
    _: Any, operator: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
) -> Any:
    tensor, *rest = args
    local, name = local_part(tensor), str(operator).split(".")[1]
    if name in _BY_VALUES:
        given = whole(tensor)
    else:  # numbers are drawn in the order of the memory
        shape, strides = tensor.shape, tensor.stride()
        # Strides of the whole: a transposed tensor gets its numbers in the order of its memory.
        given = torch.empty_strided(shape, strides, dtype=local.dtype, device=local.device)
    drawn = shard_of(operator(given, *rest, **(kwargs or {})), tensor)
    if not name.endswith("_"):
        return drawn
    local.copy_(local_part(drawn))
    return tensor
