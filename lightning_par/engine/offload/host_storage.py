"""Where optimizer states are on the host: in memory, or in a file.

Note [File]: it has no name, so that it ends with the process, however that ends, and no other run
can take it for its own. Its blocks are reserved before anything is computed. How updates reach it
is in `engine.offload.pages`.
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
from lightning_par.engine.offload.host_parameter import HostParameter, local_tensor, wide_dtype
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


class HostStorage:
    """Gives zeroed tensors, and slots through which gradients and parameters go.

    Args:
        folder: Of a file for the tensors; None: they are in memory.
        size: Bytes of the file.
        tile_bytes: States of the largest tile.

    Raises:
        OffloadError: The folder is missing, cannot be written, or has not enough room.
    """

    def __init__(self, folder: Path | None, size: int, tile_bytes: int = PAGE) -> None:
        self._mapped, self._bytes, self._direct = None, None, None
        if folder is not None and size:
            self._mapped, direct = _map_file(folder, size)
            self._bytes = torch.frombuffer(self._mapped, dtype=torch.uint8)
            self._direct = None if direct is None else DirectIOFile(direct, tile_bytes)
        self._used = 0
        self._pinned: list[Tensor] = []

    def states(
        self, shape: torch.Size, dtypes: Sequence[torch.dtype]
    ) -> tuple[list[Tensor], NvmeRange | None]:
        """Return zeroed tensors of one parameter, and their pages.

        Args:
            shape: Of each.
            dtypes: Of each; in a file, each begins on a page of its own.

        Returns:
            The tensors; None for the pages if they are in memory.
        """
        if self._mapped is None or self._bytes is None:
            return [torch.zeros(shape, dtype=dtype) for dtype in dtypes], None
        start, found = self._used, []
        for dtype in dtypes:
            size = shape.numel() * dtype.itemsize
            found.append(self._bytes[self._used : self._used + size].view(dtype).view(shape))
            self._used += padded(size, PAGE)
        size = self._used - start
        if self._direct is None:
            return found, NvmeRange(self._mapped, start, size)
        return found, DirectNvmeRange(self._mapped, start, size, self._direct)

    def settle(self) -> None:
        """Wait until everything is written.

        Raises:
            OffloadError: Something could not be written.
        """
        if self._direct is not None:
            self._direct.settle()

    def slab(self, size: int, *, pins: bool) -> Tensor:
        """Return bytes for slots, page-locked if `pins`."""
        slab = torch.empty(size, dtype=torch.uint8)
        if pins and size:
            pin(slab)
            self._pinned.append(slab)
        return slab

    def close(self) -> None:
        """Unlock what was page-locked, and end the threads of the file."""
        for slab in self._pinned:
            unpin(slab)
        self._pinned = []
        if self._direct is not None:
            self._direct.close()
            self._direct = None


def _map_file(folder: Path, size: int) -> tuple[mmap.mmap, int | None]:
    """Return a file as memory, and a descriptor with O_DIRECT where that works."""
    asked = f'offload_optimizer="nvme:{folder}"'
    if not folder.is_dir():
        raise OffloadError(f"{asked}: there is no such folder. Make it, on a fast disk.")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
            return mapped, open_direct(file.fileno(), mapped)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise OffloadError(
                f"{asked}: this rank needs {size:,} bytes there, and {free:,} are free. Use "
                'another folder, state_dtype="bfloat16", or more ranks.'
            ) from error
        raise OffloadError(f"{asked} cannot be written: {error.strerror}.") from error


def offloaded_parameters(parameters: Sequence[nn.Parameter], fraction: float) -> list[nn.Parameter]:
    """Return the parameters whose states go to the host: the last ones, as their gradients are
    computed first, until they are at least `fraction` of all entries.
    """
    wanted = fraction * sum(p.numel() for p in parameters)
    chosen: list[nn.Parameter] = []
    held = 0
    for parameter in reversed(parameters):
        if held >= wanted:
            break
        chosen.append(parameter)
        held += parameter.numel()
    return chosen[::-1]


def allocate(
    parameters: Sequence[nn.Parameter], options: OffloadOptions, device: torch.device
) -> tuple[dict[nn.Parameter, HostParameter], HostStorage]:
    """Make the host's part of parameters.

    Args:
        parameters: Whose states go to the host.
        options: How.
        device: Of the parameters.

    Raises:
        OffloadError: See `HostStorage`.
    """
    size = sum(_file_size(p, options) for p in parameters) if options.folder else 0
    tile = max((_file_size(p, options, TILE) for p in parameters), default=PAGE)
    storage = HostStorage(options.folder, size, max(PAGE, tile))
    direct = options.offload_parameters
    sizes = [0 if direct else padded(_bytes(p), _ALIGNMENT) for p in parameters]
    count = 1 if options.delayed_update is False else 2
    pins = options.pins(device)
    slabs = [storage.slab(sum(sizes), pins=pins) for _ in range(0 if direct else count)]
    held, offset = {}, 0
    for parameter, size in zip(parameters, sizes, strict=True):
        local = local_tensor(parameter)
        wide, moments = _dtypes(local.dtype, options)
        views = (s[offset : offset + _bytes(parameter)] for s in slabs)
        (master, mean, square), pages = storage.states(local.shape, (wide, moments, moments))
        held[parameter] = HostParameter(
            parameter,
            master,
            mean,
            square,
            [view.view(local.dtype).view(local.shape) for view in views],
            pages,
        )
        offset += size
    return held, storage


def _dtypes(dtype: torch.dtype, options: OffloadOptions) -> tuple[torch.dtype, torch.dtype]:
    wide = wide_dtype(dtype)
    return wide, wide if wide is torch.float64 else options.moments


def _bytes(parameter: nn.Parameter) -> int:
    local = local_tensor(parameter)
    return local.numel() * local.element_size()


def _file_size(parameter: nn.Parameter, options: OffloadOptions, most: int | None = None) -> int:
    """Return the bytes of states in the file, of all entries or of at most so many."""
    local = local_tensor(parameter)
    entries = local.numel() if most is None else min(local.numel(), most)
    wide, moments = _dtypes(local.dtype, options)
    return sum(padded(entries * dtype.itemsize, PAGE) for dtype in (wide, moments, moments))
