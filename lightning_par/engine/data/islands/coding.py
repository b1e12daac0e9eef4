"""Tensors in few bits: what of a box of a tensor is on the wire.

=======  =================================================  ================
kind     what is sent                                       bytes an entry
=======  =================================================  ================
none     the entries                                        4 (float64: 8)
bf16     the entries, rounded                               2
int8     round(127 x / s), s the largest |x| of its block   1 + 4/256
int4     round(7 x / s), two in a byte                      1/2 + 4/256
=======  =================================================  ================

A block is 256 entries of the flattened whole tensor. Ranks that hold different boxes of a tensor
get the numbers of their entries, and the scales of the blocks in which these lie; so that they
decode the same bits whatever the mesh.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_par.dtensor import Box, narrowed
from lightning_par.engine.data.islands.options import Quantization

__all__ = ["Coded", "coded_length", "decode", "encode", "whole_box"]

_BLOCK = 256
_LARGEST = {"int8": 127, "int4": 7}
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Coded:
    """A whole tensor in few bits.

    Attributes:
        kind: Key of the table above.
        codes: Entries, or whole numbers in int8; of the tensor's shape.
        scales: Of its blocks, [ceil(n / 256)] in float32; empty without blocks.
    """

    kind: Quantization
    codes: Tensor
    scales: Tensor

    def pack(self, box: Box) -> bytes:
        """Return the bytes of a box of the tensor."""
        # Of the box's entries, in order; scales only of the blocks that it touches.
        codes = narrowed(self.codes, box).contiguous().view(-1)
        scales = self.scales
        if self.kind in _LARGEST:
            scales = scales[_blocks(box, tuple(self.codes.shape))[0]]
        # codes + 7 is 0 to 14, which fits into 4 bits; an odd last entry is paired with a 0.
        if self.kind == "int4":
            low, high = F.pad(codes + 7, (0, codes.numel() % 2)).view(torch.uint8).view(-1, 2).T
            codes = low | (high << 4)
        return _as_bytes(codes) + _as_bytes(scales)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the tensor that arrives, in a dtype."""
        shape = tuple(self.codes.shape)
        return _scale(self.kind, self.codes, self.scales, whole_box("", shape), shape, dtype)


@torch.no_grad()
def encode(values: Tensor, kind: Quantization) -> Coded:
    """Return a tensor in few bits.

    Args:
        values: Any shape, finite, float32 or float64, on the CPU.
        kind: Key of the table above.
    """
    if kind == "none":
        return Coded(kind, values, torch.empty(0))
    if kind == "bf16":
        return Coded(kind, values.bfloat16(), torch.empty(0))
    flat = values.reshape(-1)
    # By the flattened whole tensor: the same numbers share a scale on whatever mesh.
    blocks = F.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    # A block of zeros would be divided by a scale of 0.
    scales = blocks.abs().amax(1).float().clamp_(min=torch.finfo(torch.float32).tiny)
    scales /= _LARGEST[kind]
    codes = (blocks / scales[:, None]).round_().clamp_(-_LARGEST[kind], _LARGEST[kind])
    return Coded(kind, codes.to(torch.int8).view(-1)[: flat.numel()].view(values.shape), scales)


def coded_length(kind: Quantization, box: Box, shape: Shape, dtype: torch.dtype) -> int:
    """Return the number of bytes of a box of a tensor of this shape."""
    entries = torch.Size(box.shape).numel()
    if kind not in _LARGEST:
        return entries * (2 if kind == "bf16" else dtype.itemsize)
    codes = entries if kind == "int8" else -(-entries // 2)
    return codes + 4 * len(_blocks(box, shape)[0])


def decode(
    data: memoryview, kind: Quantization, box: Box, shape: Shape, dtype: torch.dtype
) -> Tensor:
    """Return the entries of a box, of its shape.

    Args:
        data: What `Coded.pack` gave, of `coded_length` bytes.
        kind: How the tensor was encoded.
        box: The box.
        shape: Shape of the whole tensor.
        dtype: Of the result, and of the entries if `kind` is "none".
    """
    entries = torch.Size(box.shape).numel()
    if not entries:
        return torch.empty(box.shape, dtype=dtype)
    # A copy, as the memory of a message is reused, and torch wants it writable.
    read = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if kind not in _LARGEST:
        return read.view(torch.bfloat16 if kind == "bf16" else dtype).view(box.shape).to(dtype)
    length = entries if kind == "int8" else -(-entries // 2)
    # A copy: a view as float32 has to begin at a multiple of 4 bytes.
    codes, scales = read[:length], read[length:].clone().view(torch.float32)
    if kind == "int4":
        # In the order in which `pack` paired them: low half first.
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:entries].view(torch.int8) - 7
    return _scale(kind, codes.view(torch.int8).view(box.shape), scales, box, shape, dtype)


def whole_box(name: str, shape: Shape) -> Box:
    """Return the box that is a whole tensor."""
    return Box(name, (0,) * len(shape), shape)


def _scale(
    kind: Quantization, codes: Tensor, scales: Tensor, box: Box, shape: Shape, dtype: torch.dtype
) -> Tensor:
    values = codes.to(dtype)
    if kind in _LARGEST:
        values *= scales.to(dtype)[_blocks(box, shape)[1]].view(box.shape)
    return values


def _blocks(box: Box, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return the numbers of the blocks in which a box lies, and for each of its entries which of
    these it is.
    """
    if box.shape == shape:
        places = torch.arange(torch.Size(shape).numel()) // _BLOCK
        return torch.arange(-(-len(places) // _BLOCK)), places
    # Of a contiguous tensor; on meta, without its memory.
    strides = torch.empty(shape, device="meta").stride()
    flat = torch.zeros((1,) * len(shape), dtype=torch.int64)
    dims = zip(box.offset, box.shape, strides, strict=True)
    for dim, (low, size, stride) in enumerate(dims):
        line = torch.arange(low, low + size) * stride
        # [size of dim 0, size of dim 1, ...] by broadcasting: the flat index of each entry.
        flat = flat + line.view([-1 if d == dim else 1 for d in range(len(shape))])
    places = flat.view(-1) // _BLOCK
    touched = torch.zeros(-(-torch.Size(shape).numel() // _BLOCK), dtype=torch.bool)
    touched[places] = True  # not torch.unique, which sorts
    return touched.nonzero().view(-1), (touched.cumsum(0) - 1)[places]


def _as_bytes(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
