"""Triton kernels on the CPU: triton's own interpreter, with what it lacks for those of Liger.

Import this before a package whose kernels are to run so, in a process that was started with
TRITON_INTERPRET=1.
"""

import numpy as np
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


def _with_floats(arg):
    """A kernel gets a float as a tensor, as it does where it is compiled."""
    if isinstance(arg, float):
        handle = interpreter.TensorHandle(np.array([arg], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _convert(arg)


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


interpreter._implicit_cvt = _with_floats
libdevice.rsqrt = _rsqrt
