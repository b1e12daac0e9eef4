"""Options of gradient compression, checked before anything is built."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, Literal

import torch

from lightning_par.engine.option_fields import read_fields
from lightning_par.errors import ConfigurationError, either, raise_problems
from lightning_par.sizes import is_count, ParallelSizes

__all__ = ["GradientCompression", "check_compression", "read_compression"]

Method = Literal["fp16", "bf16", "powersgd", "topk", "int8"]
_METHODS = get_args(Method)


@dataclass(frozen=True, kw_only=True)
class GradientCompression:
    """Options of gradient compression between replicas.

    Attributes:
        method: ``"fp16"`` and ``"bf16"`` send them rounded; ``"int8"`` in 8 bits with a scale for
            every 256; ``"topk"`` sends the largest ones only; ``"powersgd"`` sends matrices as
            products of narrow ones. The last three remember what they left out, and add it to the
            next gradient.
        rank: Columns of the narrow matrices of ``"powersgd"``.
        density: Fraction of the entries that ``"topk"`` sends.
        start_step: Number of first steps that send whole gradients.

    Raises:
        ConfigurationError: With every value that does not exist.

    Examples:
        >>> compression = GradientCompression(method="powersgd", rank=8, start_step=100)
    """

    method: Method
    rank: int = 4
    density: float = 0.01
    start_step: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.method not in _METHODS:
            problems.append(
                f"gradient_compression={self.method!r} must be "
                f"{either([repr(m) for m in _METHODS])}."
            )
        if not is_count(self.rank):
            problems.append(f"rank={self.rank!r} must be a whole number of 1 or more.")
        number = isinstance(self.density, int | float) and not isinstance(self.density, bool)
        if not number or not 0 < self.density <= 1:
            problems.append(
                f"density={self.density!r} must be a number of more than 0 and at most 1."
            )
        if not is_count(self.start_step, 0):
            problems.append(f"start_step={self.start_step!r} must be a whole number of 0 or more.")
        raise_problems(ConfigurationError, "LP902", problems)

    def remembered_bytes(self, entries: int, dtype: torch.dtype, replicas: int) -> int:
        """Return the bytes that a rank keeps for the error of a gradient.

        Args:
            entries: Number of entries of the gradient.
            dtype: Dtype of the gradient.
            replicas: Number of replicas, which share the second rounding of "int8".
        """
        # Errors are kept in float32 at least, as `_ErrorFeedback` does.
        wide = max(4, dtype.itemsize)
        each = {"topk": wide, "int8": wide * (1 + 1 / replicas), "powersgd": wide}
        return round(entries * each.get(self.method, 0))


def read_compression(
    chosen: GradientCompression | Mapping[str, Any] | str | None, zero_stage: int
) -> GradientCompression | None:
    """Return how gradients are compressed; None: they are sent whole.

    Args:
        chosen: The options, or their fields by name, or the method alone.
        zero_stage: ZeRO stage of the strategy.

    Raises:
        ConfigurationError: There is no such method, field or value, or the ZeRO stage is not 0.
    """
    if chosen is None:
        return None
    if isinstance(chosen, str):
        chosen = {"method": chosen}
    if not isinstance(chosen, GradientCompression):
        chosen = read_fields(GradientCompression, chosen, "gradient_compression")
    if zero_stage != 0:
        raise ConfigurationError(
            "LP609",
            f"gradient_compression={chosen.method!r} with zero_stage={zero_stage} is not "
            "supported: compression needs whole gradients on every replica, and ZeRO stages 1 to "
            "3 shard them. Use zero_stage=0. If the model then does not fit in GPU memory, also "
            "keep the optimizer in CPU memory: Hybrid3DStrategy(zero_stage=0, "
            f"gradient_compression={chosen.method!r}, offload_options={{}}).",
        )
    return chosen


def check_compression(
    chosen: GradientCompression | None, sizes: ParallelSizes, *, accumulates_on: str = "device"
) -> None:
    """Raise unless all gradients are summed over the same replicas, once a step.

    Args:
        chosen: Options of compression, if any.
        sizes: Sizes of the mesh axes.
        accumulates_on: See `OffloadOptions`.

    Raises:
        ConfigurationError: Experts are sharded, or gradients of several batches leave one by one.
    """
    if chosen is not None and accumulates_on == "host":
        raise ConfigurationError(
            "LP609",
            f"gradient_compression={chosen.method!r} is not supported with accumulate_on='host': "
            "the gradients of every accumulated batch would be compressed, and the compression "
            "error could not be undone if the step is skipped. Use accumulate_on='device', or "
            "leave gradient_compression out.",
        )
    if chosen is not None and sizes.expert > 1:
        raise ConfigurationError(
            "LP609",
            f"gradient_compression={chosen.method!r} is not supported with "
            f"expert_parallel_size={sizes.expert}, since the gradients of sharded experts are "
            "summed over other ranks than the other gradients. Use expert_parallel_size=1, or "
            "leave gradient_compression out.",
        )
