"""Ranks of tests on one CUDA device, which all of them share, over NCCL.

    RANKS_ON_GPU=nccl pytest -n 2 tests/distributed/test_parity.py

NCCL refuses two ranks of one host on one device. Here every rank has a name of a host of its own
(`NCCL_HOSTID`), so that NCCL talks over sockets of the loopback interface, and the device gives
the processes turns. Kernels, rounding, streams and the order of collectives are those of a
machine with one device for each rank; speed is not. `RANKS_ON_GPU=gloo` sends by gloo instead.
"""

import os

from tests.support.cuda_simulation import is_wanted as is_simulated

__all__ = ["activate", "backend", "is_wanted", "on_cuda", "take_device"]

VARIABLE = "RANKS_ON_GPU"
_MOST_RANKS = 8


def is_wanted():
    """Whether ranks share the CUDA device."""
    return os.environ.get(VARIABLE) in ("nccl", "gloo")


def on_cuda():
    """Whether tests of several ranks run on a CUDA device, a simulated one or this one."""
    return is_simulated() or is_wanted()


def backend():
    """What `init_process_group` is given for the tensors of these tests."""
    return f"cpu:gloo,cuda:{os.environ.get(VARIABLE, 'nccl')}" if on_cuda() else "gloo"


def activate():
    """Make Lightning take the one device for as many as it is asked for, in every process."""
    # Without it, a question for the device would keep forked ranks from using it.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    import torch
    from lightning.fabric.accelerators import cuda as fabric
    from lightning.pytorch.accelerators import cuda as trainer

    fabric.num_cuda_devices = trainer.num_cuda_devices = lambda: _MOST_RANKS
    for accelerator in (fabric.CUDAAccelerator, trainer.CUDAAccelerator):
        accelerator.get_parallel_devices = staticmethod(
            lambda devices: [torch.device("cuda", 0) for _ in devices]
        )


def take_device(rank):
    """Give a rank its device, and NCCL a reason to allow it.

    Args:
        rank: Of this process.
    """
    import torch

    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.init()
    torch.cuda.set_device(0)
