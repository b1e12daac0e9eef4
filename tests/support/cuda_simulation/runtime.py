"""Puts the simulated device under the names by which torch and others know CUDA."""

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.support.cuda_simulation.build import build, NAME

__all__ = ["activate", "activate_in_children", "device"]

_GIB = 2**30
_loaded = {}


def device():
    """Gives the extension module; None where the simulation is not active."""
    return _loaded.get("device")


def activate():
    """Gives this process the simulated device.

    Raises:
        RuntimeError: torch was imported before.
    """
    if _loaded:
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the simulated CUDA device was activated.")
    libraries = build()
    ctypes.CDLL(str(libraries.entry), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(libraries.device), mode=ctypes.RTLD_GLOBAL)
    import torch

    spec = importlib.util.spec_from_file_location(NAME, libraries.device)
    _loaded["device"] = native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    _add_functions(torch, native)
    _add_streams(torch)
    _add_storages(torch, native)
    _add_nccl(native)
    from tests.support.cuda_simulation import attention

    attention.register()
    native.set_device(int(os.environ.get("LOCAL_RANK", 0)))


def activate_in_children():
    """Gives every Python that this process starts the simulated device: `site` is on its path."""
    here = Path(__file__).resolve()
    needed = [str(here.parent / "site"), str(here.parents[3])]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*needed, *filter(None, path)]))


def _add_functions(torch, native):
    """What `torch.cuda` expects in `torch._C`."""

    def exchange(index):
        old = native.get_device()
        if index >= 0:
            native.set_device(index)
        return old

    def stream_data(find):
        def data(index):
            stream = find(torch.device("cuda", index))
            return stream.stream_id, stream.device_index, stream.device_type

        return data

    def set_stream(**data):
        torch.accelerator.set_stream(torch.Stream(**data))

    def memory(_):
        current, peak = native.memory()
        each = {"all": {"current": current, "peak": peak}}
        return {"allocated_bytes": each, "reserved_bytes": each}

    functions = {
        "init": native.init,
        "getDeviceCount": lambda: native.NUM_DEVICES,
        "getDevice": native.get_device,
        "setDevice": native.set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": lambda index: exchange(index),  # Dynamo wants a second function
        "synchronize": native.synchronize,
        "getCurrentStream": stream_data(torch.accelerator.current_stream),
        "getDefaultStream": lambda index: (0, index, 1),  # id, device, type: CUDA is 1
        "getCurrentRawStream": lambda index: torch.accelerator.current_stream(index).stream_id,
        "setStream": set_stream,
        "memoryStats": memory,
        "resetPeakMemoryStats": lambda _: native.reset_peak(),
        "emptyCache": lambda: None,
        "ipc_collect": lambda: None,
        "getArchFlags": lambda: None,
        "isCurrentStreamCapturing": lambda: False,
        "clearCublasWorkspaces": lambda: None,
        "sleep": lambda cycles: None,
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    _set_attributes(torch, native)


def _set_attributes(torch, native):
    """What `torch.cuda` has got from `torch._C` when it was imported, or would get later."""
    cuda = torch.cuda
    cuda._exchange_device = torch._C._cuda_exchangeDevice
    cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    cuda._get_device_properties = _properties
    cuda._cudart = _runtime_library(native)
    cuda.default_generators = tuple(native.generator(i) for i in range(native.NUM_DEVICES))


def _properties(_):
    return SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        total_memory=80 * _GIB,
        major=9,
        minor=0,
        multi_processor_count=132,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )


def _runtime_library(native):
    def register(memory, size, _):
        native.pin(memory, size)
        return 0

    def unregister(memory):
        native.unpin(memory)
        return 0

    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaMemGetInfo=lambda _: (79 * _GIB, 80 * _GIB),
    )


def _add_streams(torch):
    """`torch.cuda.Stream` and `Event`, whose classes of CPU-only builds do nothing."""

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **data):
            if data:
                return super().__new__(cls, priority=priority, **data)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        @property
        def cuda_stream(self):
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):
            # No object of this class: torch.Event measures the time to none of a subclass.
            return torch.Event("cuda", enable_timing=enable_timing, blocking=blocking)

    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event


def _add_storages(torch, native):
    """Storages of a device change their size where FSDP frees and gathers parameters, and are made
    where a file is loaded onto the device that it was saved from.
    """
    plain, make = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__

    def new(cls, *size, device=None, **options):
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *size, **options, **({} if device is None else {"device": device}))
        return torch.empty(*size, dtype=torch.uint8, device=device).untyped_storage()

    def resize_(self, size):
        if self.device.type != "cuda":
            return plain(self, size)
        native.resize_storage(self, size)
        return self

    def clone(self):
        seen = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        return seen.clone().untyped_storage()

    torch.UntypedStorage.__new__ = new
    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = clone


def _add_nccl(native):
    """Groups whose backend is "nccl"."""
    from torch.distributed import distributed_c10d

    class Options(SimpleNamespace):
        pass

    class Kind(type):
        def __instancecheck__(cls, instance):
            return getattr(instance, "name", lambda: "")() == "nccl"

    class ProcessGroupNCCL(metaclass=Kind):
        def __new__(cls, store, rank, size, options):
            gloo = distributed_c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            return native.make_nccl(gloo, rank, size)

    def set_timeout(backend, timeout):
        native.set_timeout(backend, timeout.total_seconds())

    torch_backend = sys.modules["torch._C._distributed_c10d"].Backend
    torch_backend._set_default_timeout = set_timeout  # NCCL's class has one
    ProcessGroupNCCL.Options = Options
    distributed_c10d.ProcessGroupNCCL = ProcessGroupNCCL
    distributed_c10d._NCCL_AVAILABLE = True
