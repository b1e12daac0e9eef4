"""Copies between a device and the host in a stream of their own, beside the computation.

Streams and events are those of the device's torch module (`torch.cuda`). `torch.cpu` has ones that
do nothing, so that the same code runs there; its copies are complete when they return.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_par.upstream.tensor import count_of_changes

__all__ = ["BegunCopies", "CopyStream", "pin", "unpin"]


class CopyStream:
    """Copies in order, in one stream.

    Args:
        device: The device that is not the host; has to be the current one of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device, self._stream = device, self._module.Stream()

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

    def send(self, source: Tensor) -> Tensor:
        """Return a copy on the device that waits for no other work there.

        Its memory is of this stream's own pool: nothing that the current stream does may use it,
        before `receive`.

        Args:
            source: Tensor on the host. If it is pinned, it must not change before the copy is over;
                it may be freed, as torch keeps it until then.
        """
        with self._module.stream(self._stream):
            return source.to(self._device, non_blocking=True)

    def receive(self, copy: Tensor) -> None:
        """Let the current stream have what `send` gave, to use once it has called `wait`.

        Args:
            copy: Its memory goes to no later copy before what the current stream does with it, as
                asked for when it is freed, is over.
        """
        # The allocator would give the memory to the copy stream again while the current one reads
        # it.
        copy.record_stream(self._module.current_stream())

    def record_event(self) -> Any:
        """Return an event whose `synchronize` blocks until all copies so far are complete."""
        event = self._module.Event()
        event.record(self._stream)
        return event

    def wait(self) -> None:
        """Let the current stream wait for all copies so far; the host does not block."""
        self._module.current_stream().wait_stream(self._stream)


class BegunCopies:
    """Copies of batches on a device; those of pinned tensors may begin before they are needed.

    A copy that was begun lives as long as its tensor on the host and is given once, to who asks for
    that very tensor, unchanged: whoever changes it in place, or puts another in its place, gets a
    copy of that.

    Args:
        device: The device that is not the host; has to be the current one of its kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = CopyStream(device)
        self._begun: Any = WeakTensorKeyDictionary()

    def begin(self, tensor: Tensor) -> None:
        """Begin a copy, if the tensor is pinned; the host does not wait.

        Args:
            tensor: Nobody may change it before it is taken, other than by operators of torch.
        """
        # Inference tensors have no version counter, by which a change would be noticed.
        is_known = not tensor.is_inference() and tensor not in self._begun
        if is_known and _is_plain(tensor) and tensor.is_pinned():
            self._begun[tensor] = count_of_changes(tensor), self._stream.send(tensor)

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy as `Tensor.to` makes it, which may be used after `wait`.

        Args:
            tensor: Not one that needs more than a copy, such as one of a subclass, or one on the
                device: it is returned as it is.
        """
        if not _is_plain(tensor):
            return tensor
        # Given once, so that a tensor that is moved twice has two copies, as with `Tensor.to`.
        changes, copy = self._begun.pop(tensor, (0, None))
        if copy is None or changes != count_of_changes(tensor):
            copy = self._stream.send(_pinned(tensor))
        self._stream.receive(copy)
        return copy  # type: ignore[no-any-return]

    def wait(self) -> None:
        """Let the current stream wait for all copies so far; the host does not block."""
        self._stream.wait()


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor on the host is nothing but its memory."""
    is_dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    is_lazy = tensor.requires_grad or tensor.is_conj() or tensor.is_neg()
    return type(tensor) is Tensor and tensor.device.type == "cpu" and is_dense and not is_lazy


def _pinned(tensor: Tensor) -> Tensor:
    """Return a tensor's values in pinned memory, with the strides that `Tensor.to` would give."""
    if tensor.is_pinned():
        return tensor
    try:
        memory = torch.empty_like(tensor, pin_memory=True)
    except RuntimeError:  # the host can lock no more: the copy waits, as any other
        return tensor
    return memory.copy_(tensor)


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
