"""The profile of the devices that are here: shipped, or measured by ``lightning-par calibrate``."""

import os
import re
from dataclasses import replace
from pathlib import Path

import torch

from lightning_par.engine.memory.measured import available_memory
from lightning_par.errors import ConfigurationError, nearest
from lightning_par.planner.profiles import device_names, DeviceProfile, load_profile

__all__ = ["find_profile"]

_CALIBRATED = "here"
"""How ``lightning-par calibrate`` calls a device."""


def find_profile(given: str | None, device: torch.device, ranks: int) -> DeviceProfile:
    """Return the profile of the devices of a node, with the memory that they really have.

    Args:
        given: Name of a shipped profile, or path of a file of the user's own, with one device or
            one that is called "here". None: that of the GPU's name, or of a core.
        device: Device of this rank.
        ranks: Of a node, which share its memory and cores if the device is the CPU.

    Raises:
        ConfigurationError: There is no such profile, or none for this GPU.
    """
    if given is not None and (given.endswith(".json") or Path(given).is_file()):
        found = _own(given)
    elif given is not None or device.type != "cuda":
        found = load_profile(given or "cpu")
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        found = load_profile(_of_gpu(torch.cuda.get_device_name(device), total))
    found = replace(found, node=ranks)
    if device.type == "cuda":
        return replace(found, memory=torch.cuda.get_device_properties(device).total_memory)
    # The shipped profile is that of one core.
    if found.name == "cpu":  # of a core; a rank has a few, or a part of one
        asks = getattr(os, "sched_getaffinity", None)
        here = len(asks(0)) if asks is not None else os.cpu_count() or 1
        # Threads that torch uses, but no more cores than there are for a rank.
        cores = min(float(torch.get_num_threads()), here / ranks)
        found = replace(found, flops=cores * found.flops, bandwidth=cores * found.bandwidth)
    free = available_memory()
    return found if free is None else replace(found, memory=free / ranks)


def _own(path: str) -> DeviceProfile:
    """Return the device of a file of the user's own."""
    names = [name for name in device_names(path) if name not in device_names()]
    chosen = _CALIBRATED if _CALIBRATED in names else names[0] if len(names) == 1 else None
    if chosen is None:
        raise ConfigurationError(
            "LP908",
            f"profile={path!r} does not say which device to use: its devices are "
            f"{', '.join(names) or 'only those that lightning_par also has'}. Keep one device in "
            f"the file, or name the device to use {_CALIBRATED!r}.",
        )
    return load_profile(chosen, path)


def _of_gpu(name: str, memory: float) -> str:
    """Return the shipped profile whose family is a word of a GPU's name; of several the one with
    the nearest memory.
    """
    # "NVIDIA H100 80GB HBM3" has the words "h100", "80", "hbm3".
    words = re.findall(r"[a-z]*\d+", name.lower())
    found = [known for known in device_names() if known.partition("-")[0] in words]
    if not found:
        raise ConfigurationError(
            "LP908",
            "there is no profile of "
            f"{name!r}{nearest(name.lower(), device_names(), otherwise='.')} Measure this GPU "
            "with lightning-par calibrate --out mine.json and pass profile='mine.json', or pass "
            f"the profile of a similar GPU: {', '.join(device_names())}.",
        )
    return min(found, key=lambda known: abs(load_profile(known).memory - memory))
