"""One gloo device for all process groups of a process, hence one thread that wakes all the time."""

import os

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["share_gloo_device"]


def share_gloo_device():
    """Makes every gloo group of this process, from now on, use the same device.

    Each device has a thread that wakes a hundred times a second. A process that has run a few
    hundred tests would do nothing else.
    """
    plain = distributed_c10d.ProcessGroupGloo
    devices = []

    class Kind(type):
        def __instancecheck__(cls, instance):
            return isinstance(instance, plain)

        def __getattr__(cls, name):
            return getattr(plain, name)

    class SharedDevice(metaclass=Kind):
        def __new__(cls, store, rank, size, timeout=None):
            if not devices:
                name = os.environ.get("GLOO_SOCKET_IFNAME")
                known = plain.create_device(interface=name) if name else None
                devices.append(known or plain.create_default_device())
            options = plain._Options()
            options._devices = devices
            if timeout is not None:
                options._timeout = timeout
            return plain(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo = SharedDevice
