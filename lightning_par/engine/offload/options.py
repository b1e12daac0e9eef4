"""What may be chosen about offloading, checked before anything is built."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_par.engine.offload.cpu_kernels import KERNELS
from lightning_par.errors import ConfigurationError, either, raise_problems
from lightning_par.option_fields import read_fields

__all__ = ["OffloadOptions", "read_offload_options"]

_NVME = "nvme:"
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """How optimizer states and updates move to the host.

    Attributes:
        offload_optimizer: True: to the memory of the host; ``"nvme:/folder"``: states to a file in
            this folder.
        offload_fraction: Which part of the parameters; the others are updated on the device.
        offload_parameters: Also keep the parameters on the host and bring them to the device
            block by block; at ZeRO stage 3 with several replicas.
        delayed_update: Number of the first step whose update is computed during the step after
            it, and published after that step's backward; False: none is.
        overlap: "auto" sends gradients during the backward, and updates during it, too, where
            nothing has to know all gradients first; "off" does both after it.
        pin_memory: Page-lock the memory through which gradients and parameters go; "auto": if the
            device is not the CPU.
        bucket_size_mb: MiB of gradients that are updated together.
        cpu_kernel: ``"native"``, ``"torch"`` or ``"auto"``; see `engine.offload.cpu_kernels`.
        state_dtype: Of the moments: ``"float32"`` or ``"bfloat16"``.
        accumulate_on: Where gradients of several batches are added up: ``"device"``, or ``"host"``,
            to which each batch then sends its own.

    Raises:
        ConfigurationError: With every value that does not exist.
    """

    offload_optimizer: bool | str = True
    offload_fraction: float = 1.0
    offload_parameters: bool = False
    delayed_update: bool | int = False
    overlap: Literal["auto", "off"] = "auto"
    pin_memory: bool | Literal["auto"] = "auto"
    bucket_size_mb: float = 32
    cpu_kernel: Literal["native", "torch", "auto"] = "auto"
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    accumulate_on: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        problems = [*self._misplaced()]
        for name, valid in (
            ("overlap", ("auto", "off")),
            ("pin_memory", (True, False, "auto")),
            ("cpu_kernel", KERNELS),
            ("state_dtype", tuple(_STATE_DTYPES)),
            ("accumulate_on", ("device", "host")),
        ):
            value = getattr(self, name)
            if value not in valid:
                problems.append(f"{name}={value!r} must be {either([repr(v) for v in valid])}.")
        start = self.delayed_update
        if start is True or not isinstance(start, int) or start < 0:
            problems.append(
                f"delayed_update={start!r} must be the number of the first delayed step, 0 or "
                "more, or False."
            )
        size = self.bucket_size_mb
        if not isinstance(size, int | float) or isinstance(size, bool) or not 0 < size < math.inf:
            problems.append(f"bucket_size_mb={size!r} must be a number of more than 0.")
        raise_problems(ConfigurationError, problems)

    def _misplaced(self) -> Iterator[str]:
        """Say what is wrong about what goes where."""
        place, fraction = self.offload_optimizer, self.offload_fraction
        named = isinstance(place, str) and len(place) > len(_NVME) and place.startswith(_NVME)
        if place is not True and not named:
            yield f"offload_optimizer={place!r} must be True or 'nvme:/folder'."
        if isinstance(fraction, bool) or not isinstance(fraction, int | float):
            yield f"offload_fraction={fraction!r} must be a number from 0 to 1."
            return
        if not 0 <= fraction <= 1:
            yield f"offload_fraction={fraction!r} must be a number from 0 to 1."
        if fraction != 1 and self.delayed_update is not False:
            yield (
                f"offload_fraction={fraction} with delayed_update={self.delayed_update}: the part "
                "on the device would be a step ahead. Use one of them."
            )
        if fraction != 1 and self.accumulate_on == "host":
            yield (
                f"accumulate_on='host' with offload_fraction={fraction}: gradients of the part on "
                "the device stay there. Use one of them."
            )
        if self.offload_parameters and (fraction != 1 or self.delayed_update is not False):
            yield (
                "offload_parameters=True writes every parameter in place: it needs "
                f"offload_fraction=1.0 and delayed_update=False, but they are {fraction} and "
                f"{self.delayed_update}."
            )

    @property
    def folder(self) -> Path | None:
        """Where a file holds the states; None: they are in memory."""
        place = self.offload_optimizer
        return Path(place[len(_NVME) :]) if isinstance(place, str) else None

    @property
    def moments(self) -> torch.dtype:
        """The dtype of the moments of a parameter of at most 32 bits."""
        return _STATE_DTYPES[self.state_dtype]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that are updated together."""
        return max(1, int(self.bucket_size_mb * 2**20))

    def delays(self, step: int) -> bool:
        """Whether the update of a step is published after the backward of the next one."""
        return self.delayed_update is not False and step >= self.delayed_update

    def pins(self, device: torch.device) -> bool:
        """Whether memory is page-locked for copies to and from `device`."""
        if device.type == "cpu":
            return False
        return self.pin_memory is True or self.pin_memory == "auto"


def read_offload_options(
    options: OffloadOptions | Mapping[str, Any] | None,
) -> OffloadOptions | None:
    """Return the options of offloading; None: nothing is offloaded.

    Args:
        options: Or their fields by name.

    Raises:
        ConfigurationError: A field does not exist or has no such value.
    """
    if options is None or isinstance(options, OffloadOptions):
        return options
    return read_fields(OffloadOptions, options, "offload_options")
