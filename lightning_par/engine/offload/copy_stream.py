"""Copies between a device and the host that run beside the computation.

The module of torch for the device gives the streams; that of the CPU has streams and events that do
nothing, so that the same code runs there, and its copies are done when they return.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["CopyStream", "pin", "unpin"]


class CopyStream:
    """Copies in a stream of its own, in the order in which it is asked.

    Args:
        device: The one that is not the host; the current one of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy what the current stream has computed; its memory may be given up at once.

        Args:
            source: On the device.
            target: On the host, of the same shape; complete once `mark` is reached.
        """
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            source.record_stream(self._stream)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to where the current stream does not read any more; see `settle`.

        Args:
            source: On the host; it must not change before `mark` is reached.
            target: On the device, of the same shape.
        """
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """Return an event whose `synchronize` waits until everything asked for is copied."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Let the current stream wait until everything asked for is copied."""
        self._module.current_stream().wait_stream(self._stream)


def pin(memory: Tensor) -> None:
    """Page-lock memory of exactly this size.

    torch's own allocator of pinned memory rounds up to a power of two.

    Args:
        memory: On the host; locked until `unpin`, which has to come before it is freed.
    """
    runtime: Any = torch.cuda.cudart()
    size = memory.numel() * memory.element_size()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)))


def unpin(memory: Tensor) -> None:
    """Undo `pin`."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))
