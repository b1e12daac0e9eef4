"""Memory for optimizer states on the host, or a file for them, and pinned memory for copies.

Note [File]: the file has no name, so that it vanishes with the process, however that ends, and no
other run can open it. Its blocks are reserved before anything is computed, so that a full disk ends
a run at its start. `nvme` tells how updates read and write it.

Note [Slab]: all slots of a rank are views of one pinned slab, or of two with a delayed update.
It is locked with one system call, and torch's pinned allocator would round each tensor up
to a power of two.
"""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn, Tensor

from lightning_par.engine.offload.copy_stream import pin, unpin
from lightning_par.engine.offload.host_parameter import HostParameter, local_tensor
from lightning_par.engine.offload.nvme import (
    DirectIOFile,
    DirectNvmeRange,
    NvmeRange,
    open_direct,
    padded,
    PAGE,
    TILE,
)
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.errors import OffloadError

__all__ = ["HostStorage", "allocate", "offloaded_parameters"]

_ALIGNMENT = 64
"""Bytes at which slots begin: cache lines, for vector loads and DMA."""


class HostStorage:
    """Allocates optimizer states, and pinned slabs for copies.

    Args:
        folder: Folder of the file for the states; None: they are in memory.
        size: Bytes of the file.
        tile_bytes: Bytes of the states in the largest tile.

    Raises:
        OffloadError: The folder is missing, is not writable, or has too little free space.
    """

    def __init__(self, folder: Path | None, size: int, tile_bytes: int = PAGE) -> None:
        self._mapped, self._bytes, self._direct = None, None, None
        if folder is not None and size:
            self._mapped, direct = _map_file(folder, size)
            # One view of the whole map: states are slices of it, and keep it alive.
            self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self._direct = None if direct is None else DirectIOFile(direct, tile_bytes)
        self._used = 0
        self._pinned: list[Tensor] = []

    def states(
        self, shape: torch.Size, dtypes: Sequence[torch.dtype]
    ) -> tuple[list[Tensor], NvmeRange | None]:
        """Allocate the states of one parameter, all zero.

        Args:
            shape: Shape of every state.
            dtypes: One dtype for each state; in a file, each begins on a page of its own.

        Returns:
            The tensors, and their range in the file; None instead of it if they are in memory.
        """
        if self._mapped is None or self._bytes is None:
            return [torch.zeros(shape, dtype=dtype) for dtype in dtypes], None
        start, found = self._used, []
        for dtype in dtypes:
            size = shape.numel() * dtype.itemsize
            found.append(self._bytes[self._used : self._used + size].view(dtype).view(shape))
            # On a page of its own, as madvise and O_DIRECT work on pages.
            self._used += padded(size, PAGE)
        size = self._used - start
        if self._direct is None:
            return found, NvmeRange(self._mapped, start, size)
        return found, DirectNvmeRange(self._mapped, start, size, self._direct)

    def wait_for_writes(self) -> None:
        """Wait until everything is written.

        Raises:
            OffloadError: Something could not be written.
        """
        if self._direct is not None:
            self._direct.wait()

    def slab(self, size: int, *, pins: bool) -> Tensor:
        """Return `size` bytes for slots, page-locked if `pins`; see Note [Slab]."""
        slab = torch.empty(size, dtype=torch.uint8)
        if pins and size:
            pin(slab)
            self._pinned.append(slab)
        return slab

    def close(self) -> None:
        """Unlock the pinned slabs, and stop the threads that read and write the file."""
        # Addresses stay registered when a slab is freed, and could not be pinned again.
        for slab in self._pinned:
            unpin(slab)
        self._pinned = []
        if self._direct is not None:
            self._direct.close()
            self._direct = None


def _map_file(folder: Path, size: int) -> tuple[mmap.mmap, int | None]:
    """Make and map a file; also return a descriptor with O_DIRECT where that works."""
    asked = f'offload_optimizer="nvme:{folder}"'
    if not folder.is_dir():
        raise OffloadError(
            "LP602", f"{asked}: there is no such folder. Create this folder on a fast disk."
        )
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Not ftruncate: a sparse file fails with SIGBUS in the middle of a step.
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
            return mapped, open_direct(file.fileno(), mapped)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise OffloadError(
                "LP602",
                f"{asked}: this rank needs {size:,} bytes there, but only {free:,} bytes are "
                'free. Use another folder, state_dtype="bfloat16", or more ranks.',
            ) from error
        raise OffloadError(
            "LP602",
            f"{asked}: the file of optimizer states cannot be written there ({error.strerror}). "
            "Use a folder on a local disk to which you can write.",
        ) from error


def offloaded_parameters(parameters: Sequence[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """Return the parameters whose states are on the host, at least `fraction` of all entries.

    They are the last ones: their gradients are computed first, and have the whole backward to move.
    """
    wanted = fraction * sum(p.numel() for p in parameters)
    chosen: list[nn.Parameter] = []
    held = 0
    # From the end, until the wanted fraction is reached.
    for parameter in reversed(parameters):
        if held >= wanted:
            break
        chosen.append(parameter)
        held += parameter.numel()
    return chosen[::-1]


def allocate(
    parameters: Sequence[nn.Parameter], options: OffloadOptions, device: torch.device
) -> tuple[dict[nn.Parameter, HostParameter], HostStorage]:
    """Allocate the states and slots of parameters.

    Args:
        parameters: Parameters whose states are on the host.
        options: What is offloaded, and how.
        device: Device of the parameters.

    Raises:
        OffloadError: See `HostStorage`.
    """
    size = sum(_file_size(p, options) for p in parameters) if options.folder else 0
    tile = max((_file_size(p, options, TILE) for p in parameters), default=PAGE)
    storage = HostStorage(options.folder, size, max(PAGE, tile))
    on_host = options.offload_parameters  # gradients are there already: no slots
    # Aligned, so that each slot begins on a cache line of its own.
    sizes = [0 if on_host else padded(_bytes(p), _ALIGNMENT) for p in parameters]
    count = 1 if options.delayed_update is False else 2
    pins = options.pins(device)
    slabs = [storage.slab(sum(sizes), pins=pins) for _ in range(0 if on_host else count)]
    held, offset = {}, 0
    for parameter, size in zip(parameters, sizes, strict=True):
        local = local_tensor(parameter)
        wide, moments = _dtypes(local.dtype, options)
        views = (s[offset : offset + _bytes(parameter)] for s in slabs)
        (master, mean, square), nvme = storage.states(local.shape, (wide, moments, moments))
        held[parameter] = HostParameter(
            parameter,
            master,
            mean,
            square,
            [view.view(local.dtype).view(local.shape) for view in views],
            nvme,
        )
        offset += size
    return held, storage


def _dtypes(dtype: torch.dtype, options: OffloadOptions) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of master and moments."""
    wide = torch.promote_types(dtype, torch.float32)
    return wide, wide if wide is torch.float64 else options.moments


def _bytes(parameter: nn.Parameter) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def _file_size(parameter: nn.Parameter, options: OffloadOptions, most: int | None = None) -> int:
    """Return the bytes of a parameter's states in the file, for at most `most` entries."""
    local = local_tensor(parameter)
    entries = local.numel() if most is None else min(local.numel(), most)
    wide, moments = _dtypes(local.dtype, options)
    return sum(padded(entries * dtype.itemsize, PAGE) for dtype in (wide, moments, moments))
