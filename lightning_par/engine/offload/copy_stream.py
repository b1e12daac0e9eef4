"""Copies between a device and the host in a stream of their own, beside the computation.

Streams and events are those of the device's torch module (`torch.cuda`). `torch.cpu` has ones that
do nothing, so that the same code runs there; its copies are complete when they return.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["CopyStream", "pin", "unpin"]


class CopyStream:
    """Copies in order, in one stream.

    Args:
        device: The device that is not the host; has to be the current one of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream()

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """Copy a tensor that the current stream computes; the caller may free it at once.

        Args:
            source: Tensor on the device.
            target: Tensor of the same shape on the host; complete after `record_event`.
        """
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            # Else the allocator could hand its memory out again before it is copied.
            source.record_stream(self._stream)

    def to_device(self, source: Tensor, target: Tensor) -> None:
        """Copy to a tensor that the current stream does not use until `wait`.

        Args:
            source: Tensor on the host; it must not change before `record_event` is reached.
            target: Tensor of the same shape on the device.
        """
        # What was asked of the current stream before still reads the old values.
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def record_event(self) -> Any:
        """Return an event whose `synchronize` blocks until all copies so far are complete."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def wait(self) -> None:
        """Let the current stream wait for all copies so far; the host does not block."""
        self._module.current_stream().wait_stream(self._stream)


def pin(memory: Tensor) -> None:
    """Page-lock the memory of a tensor, no more than that.

    `torch.empty(pin_memory=True)` rounds up to a power of two, up to twice the bytes.

    Args:
        memory: Tensor on the host; call `unpin` before it is freed.
    """
    # Registering locks memory that is allocated already; other devices than CUDA have no such call.
    runtime: Any = torch.cuda.cudart()
    size = memory.numel() * memory.element_size()
    torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), size, 0)))


def unpin(memory: Tensor) -> None:
    """Unlock the memory of a tensor that `pin` locked."""
    runtime: Any = torch.cuda.cudart()
    torch.cuda.check_error(int(runtime.cudaHostUnregister(memory.data_ptr())))
