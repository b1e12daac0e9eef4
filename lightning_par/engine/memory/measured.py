"""Measured bytes of a rank: of tensors, of saved activations, of the device, of the process."""

import errno
import os
import resource
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn, Tensor

from lightning_par.dtensor import local_part
from lightning_par.engine.activity import resident_memory
from lightning_par.upstream.pytree import tree_leaves

__all__ = [
    "SavedActivations",
    "address_space",
    "available_memory",
    "bytes_held",
    "current_memory",
    "lacks_memory",
    "peak_memory",
]

_STATM = Path("/proc/self/statm")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SAID = ("can't allocate memory", "not enough memory", "bad_alloc")
"""What torch says of the host's memory, in a plain RuntimeError."""


def bytes_held(tree: Any) -> int:
    """Return the bytes of the tensors in a pytree on this rank; shared storages count once.

    Args:
        tree: Any pytree; of a DTensor, this rank's shard counts.
    """
    tensors = (local_part(t) for t in tree_leaves(tree) if isinstance(t, Tensor))
    # By address: views and ties share memory.
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}
    return sum(storages.values())


def current_memory(device: torch.device) -> int:
    """Return the bytes that a rank holds now: on a GPU those of tensors, else of the process.

    Args:
        device: Device of the rank.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_memory() or _most_resident()


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that a rank held: on a GPU since the last `reset_peak_memory_stats`,
    else since the process began.

    Args:
        device: Device of the rank.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(_most_resident(), resident_memory())  # the kernel updates the first one late


def _most_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_memory() -> int | None:
    """Return the bytes that are free on this machine, or in its container; None where the system
    does not say.
    """
    found = []
    if _MEMINFO.exists():
        lines = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    limit, used = (_CGROUP / name for name in ("memory.max", "memory.current"))
    # A container may have less than the machine.
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found, default=None)


def address_space() -> tuple[int, int] | None:
    """Return the bytes of address space of this process and its limit (``ulimit -v``); None where
    there is no limit, or the system does not say.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"), limit


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an exception says that there is no more memory, of a device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def _address(tensor: Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


class _Saved:
    """Holds a tensor that autograd saved; its deletion tells that the backward is done with it."""

    def __init__(self, tensor: Tensor, owner: "SavedActivations") -> None:
        self.tensor, self._owner, self._key = tensor, owner, _address(tensor)
        owner._hold(self._key, tensor.untyped_storage().nbytes())

    def __del__(self) -> None:
        self._owner._free(self._key)


class SavedActivations:
    """Context that counts the bytes autograd saves for the backward, without parameters.

    Attributes:
        peak: Largest number of bytes that were saved at once.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._now = 0
        self._held: dict[int, tuple[int, int]] = {}
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        self._open = ExitStack()

    def __enter__(self) -> Self:
        # FSDP gathers a parameter for its forward only: its address is not known before.
        # For all modules, as a hook of one would not see blocks that are made later.
        hook = nn.modules.module.register_module_forward_pre_hook(self._see_parameters)
        self._open.callback(hook.remove)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._open.enter_context(hooks)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _see_parameters(self, module: nn.Module, _: Any) -> None:
        # A strategy may answer reads of `_parameters`: here only what is in memory counts, and a
        # module of another pipeline stage has nothing there.
        for parameter in dict.values(module._parameters):
            if parameter is not None:
                self._parameters[_address(parameter)] = weakref.ref(parameter)

    def _is_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor shares the memory of a parameter that is still alive; the address of a
        freed one may belong to an activation by now.
        """
        address = _address(tensor)
        known = self._parameters.get(address)
        parameter = None if known is None else known()
        return parameter is not None and _address(parameter) == address

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        # A wrapper subclass, such as a DTensor, has no storage of its own to count.
        plain = type(tensor) in (Tensor, nn.Parameter)
        return _Saved(tensor, self) if plain and not self._is_parameter(tensor) else tensor

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        return saved.tensor if isinstance(saved, _Saved) else saved

    def _hold(self, key: int, size: int) -> None:
        users, _ = self._held.get(key, (0, size))
        self._held[key] = users + 1, size
        # Autograd may save a tensor several times: its memory is there once.
        if not users:
            self._now += size
            self.peak = max(self.peak, self._now)

    def _free(self, key: int) -> None:
        users, size = self._held.pop(key)
        if users > 1:
            self._held[key] = users - 1, size
        else:
            self._now -= size
