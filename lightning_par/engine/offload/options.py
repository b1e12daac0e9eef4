"""Options of ZeRO-Offload, checked when they are made."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lightning_par.engine.offload.cpu_kernels import KERNELS
from lightning_par.engine.option_fields import read_fields
from lightning_par.errors import ConfigurationError, either, raise_problems

__all__ = ["OffloadOptions", "read_offload_options"]

_NVME = "nvme:"
_STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """What is offloaded to the host, and how.

    Attributes:
        offload_optimizer: Where master weights and moments are: True: in the memory of the host;
            ``"nvme:/folder"``: in a file in this folder.
        offload_fraction: Fraction of the parameters whose optimizer states are offloaded; the
            others are updated on the device.
        offload_parameters: Also keep the parameters on the host, and copy them to the device block
            by block; needs ZeRO stage 3 and several replicas.
        delayed_update: First step whose update is computed during the next step, and applied after
            the backward of that one (delayed parameter update); False: no step's is.
        overlap: ``"auto"``: send each gradient as soon as autograd has computed it, and update its
            bucket during the backward where nothing depends on all gradients; ``"off"``: do both
            after the backward.
        pin_memory: Whether the memory for copies is page-locked; ``"auto"``: if the device is not
            the CPU.
        bucket_size_mb: MiB of gradients that are updated together.
        cpu_kernel: ``"native"``, ``"torch"`` or ``"auto"``; see `engine.offload.cpu_kernels`.
        state_dtype: Dtype of the moments: ``"float32"`` or ``"bfloat16"``.
        accumulate_on: Where gradients of several batches are added up: on the ``"device"``, or on
            the ``"host"``, to which each batch then sends its own.

    Raises:
        ConfigurationError: Values are wrong, or exclude each other; the message lists all of them.
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
        problems = [*self._wrong_placement()]
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
        raise_problems(ConfigurationError, "LP902", problems)

    def _wrong_placement(self) -> Iterator[str]:
        """Yield the problems of the options that say what is where."""
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
                f"offload_fraction={fraction} is not supported with "
                f"delayed_update={self.delayed_update}, since the part of the optimizer on the "
                "device would be one step ahead of the delayed part on the CPU. Use only one of "
                "these options."
            )
        if fraction != 1 and self.accumulate_on == "host":
            yield (
                f"accumulate_on='host' is not supported with offload_fraction={fraction}, since "
                "the gradients of parameters that are not offloaded are accumulated on the device. "
                "Use only one of these options."
            )
        if self.offload_parameters and (fraction != 1 or self.delayed_update is not False):
            yield (
                "offload_parameters=True needs offload_fraction=1.0 and delayed_update=False, "
                f"since it writes every parameter in place, but offload_fraction={fraction} and "
                f"delayed_update={self.delayed_update} were passed. Leave these two out."
            )

    @property
    def folder(self) -> Path | None:
        """Folder of the file that holds the states; None: they are in memory."""
        place = self.offload_optimizer
        return Path(place[len(_NVME) :]) if isinstance(place, str) else None

    @property
    def moments(self) -> torch.dtype:
        """Dtype of the moments, unless the parameter is float64."""
        return _STATE_DTYPES[self.state_dtype]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of gradients that are updated together."""
        return max(1, int(self.bucket_size_mb * 2**20))

    def delays(self, step: int) -> bool:
        """Whether the update of a step is applied after the backward of the next one."""
        return self.delayed_update is not False and step >= self.delayed_update

    def pins(self, device: torch.device) -> bool:
        """Whether memory is page-locked for copies to and from `device`."""
        if device.type == "cpu":
            return False
        return self.pin_memory is True or self.pin_memory == "auto"


def read_offload_options(
    options: OffloadOptions | Mapping[str, Any] | None,
) -> OffloadOptions | None:
    """Return options that a user gave; None: nothing is offloaded.

    Args:
        options: The options, or a dict of their fields.

    Raises:
        ConfigurationError: A field does not exist, or its value is wrong.
    """
    if options is None or isinstance(options, OffloadOptions):
        return options
    return read_fields(OffloadOptions, options, "offload_options")
