"""A CUDA device for a CPU-only torch, to run tests of several ranks on without a GPU.

    CUDA_SIMULATION=1 pytest tests/distributed/test_parity.py

Device type "cuda" is there, with memory of the host behind it and CPU kernels behind the CUDA
dispatch key, and so are streams, events, pinned memory, a generator for each device, and NCCL,
which is gloo. What CUDA does not forgive is an error here, too:

- tensors of two devices in one operator (a scalar of the CPU may take part);
- memory that two streams use, one of them writing, with no event between the two;
- memory that is freed while another stream may use it, without `record_stream`;
- a result that is read on the host before it has arrived: until somebody waits, it is NaN;
- pinned memory that the host changes while its copy to the device is under way.

`waits.py` counts where the host waits for the device, and `order.py` compares what all ranks ask of
NCCL: collectives that differ, and messages or communicators that would wait for each other. Not
simulated: kernels of CUDA and their rounding, graphs, time.

`native/` is the device in C++, `build.py` compiles it once for a version of torch, `runtime.py`
puts it under torch's own names before anything else imports torch. torch's own example of a device,
openreg, could not carry this: it is not part of the wheels, and its type is "privateuseone", which
must not be called "cuda", so that neither Lightning's CUDA accelerator nor code that asks for
"cuda", for `torch.cuda` or for NCCL would run on it.
"""

import os

from tests.support.cuda_simulation.build import missing

__all__ = ["VARIABLE", "is_wanted", "refusal"]

VARIABLE = "CUDA_SIMULATION"
"""Environment variable that says 1 where tests are to run on the simulated device."""


def is_wanted():
    """Whether tests run on the simulated device."""
    return os.environ.get(VARIABLE) == "1" and missing() is None


def refusal():
    """Why they do not, although they are to; None if they do, or are not to."""
    return missing() if os.environ.get(VARIABLE) == "1" else None
