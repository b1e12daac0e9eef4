"""Numbers, and tensors and arrays of numbers: told apart, compared, joined and computed alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.observe.contents import copy_of, is_written_to, UNCHANGEABLE
from lightning_par.strategies.step.batch_weights import BatchWeights
from lightning_par.upstream.tensor import count_of_changes

__all__ = [
    "LATER",
    "Mark",
    "all_equal",
    "as_list",
    "change_of",
    "combined",
    "goes_on",
    "is_count",
    "is_near",
    "is_of_losses",
    "is_on_host",
    "is_same",
    "is_value",
    "join",
    "joins_to",
    "kind_of_list",
    "like",
    "linear_mark",
    "nothing_like",
    "size_of",
    "takes_values",
    "wide",
]

LATER = " in a later step"
"""Ends the name of a value that a step leaves which begins with what another one has left."""
_LARGEST = 2**26
"""How many entries a value has that is followed."""
_COPIED = 2**16
"""Bytes of an array of which a copy is made to see whether it was written to."""


def is_value(value: Any) -> bool:
    """Whether a value is a number, or a tensor or an array of numbers, that is followed."""
    if type(value) is Tensor:
        is_other = value.is_complex() or value.is_meta or value.is_inference()
        return value.layout == torch.strided and not is_other and 0 < value.numel() <= _LARGEST
    if type(value) is np.ndarray:
        return value.dtype.kind in "biuf" and 0 < value.size <= _LARGEST
    if type(value) is int:
        return value.bit_length() <= 64
    return type(value) in (bool, float) or isinstance(value, np.integer | np.floating)


def size_of(value: Any) -> int:
    """Return how many entries a value has."""
    return math.prod(np.shape(value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are of one kind and shape, and equal; NaN equals NaN."""
    if isinstance(one, list) or type(one) is not type(other) or np.shape(one) != np.shape(other):
        return one is other
    if isinstance(one, Tensor):
        if one.device != other.device or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return bool(one == other or (one != one and other != other))


def all_equal(values: Sequence[Any]) -> bool:
    """Whether all values are the first one again."""
    return all(is_same(value, values[0]) for value in values)


def is_count(value: Any) -> bool:
    """Whether a value consists of integers."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() and value.dtype != torch.bool
    return np.asarray(value).dtype.kind in "iu"


def wide(value: Any) -> Tensor:
    """Return a value in float64."""
    if isinstance(value, Tensor):
        return value.detach().double()
    return torch.from_numpy(np.array(value, dtype=np.float64, order="C"))


def change_of(before: Any, end: Any) -> Tensor:
    """Return what was added to a value; all of it, where there was none of its shape."""
    made = wide(end)
    if before is None or np.shape(before) != np.shape(end):
        return made
    return made - wide(before).to(made.device)


def is_near(change: Tensor, whole: Tensor, tolerance: float) -> bool:
    """Whether a change is that of the whole, up to roundings of its largest entry."""
    if not bool(torch.isfinite(whole).all()):
        return bool(torch.equal(change, whole))
    return bool(((change - whole).abs() <= tolerance * whole.abs().max()).all())


def joins_to(parts: Sequence[Any], whole: Any, tolerance: float) -> bool:
    """Whether the values of the parts, joined along dim 0, are that of the whole."""
    shape, shapes = np.shape(whole), [np.shape(part) for part in parts]
    if not shape or any(not each or each[1:] != shape[1:] for each in shapes):
        return False
    joined = torch.cat([wide(part) for part in parts])
    return joined.shape == shape and torch.allclose(joined, wide(whole), tolerance, tolerance)


def join(values: Sequence[Any]) -> Any:
    """Return values joined along dim 0; the last one, where that is not possible."""
    if len({(type(value), np.shape(value)[1:]) for value in values}) > 1:
        return values[-1]
    return torch.cat(list(values)) if isinstance(values[0], Tensor) else np.concatenate(values)


def kind_of_list(
    value: Any, parts: Sequence[Any], in_a_row: Sequence[Any], tolerance: float
) -> str:
    """Return what a new list is: "joined" from those of the parts, "appended" to by each part, "of
    one length", or "unlike".

    Args:
        value: That of the whole.
        parts: Those of the parts.
        in_a_row: Those of the parts, one after the other.
        tolerance: Of roundings, relative.
    """
    if not isinstance(value, list):
        return "unlike"
    # `tensor.squeeze().tolist()` of one sample is a number.
    parts, in_a_row = [as_list(part) for part in parts], [as_list(each) for each in in_a_row]
    if len(in_a_row[-1]) > len(parts[-1]):
        return "appended"
    if all(len(part) == len(value) for part in parts):
        return "of one length"
    joined = [entry for part in parts for entry in part]
    is_joined = len(joined) == len(value) and all(
        _is_entry(one, other, tolerance) for one, other in zip(joined, value, strict=True)
    )
    return "joined" if is_joined else "unlike"


def _is_entry(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two entries of lists are the same; tensors and objects are not compared."""
    if isinstance(one, float) and isinstance(other, float):
        is_near_to = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        return is_near_to or (one != one and other != other)
    return type(one) not in UNCHANGEABLE or bool(one == other)


def as_list(value: Any) -> list[Any]:
    """Return a list; of another value one with that entry."""
    return value if isinstance(value, list) else [value]


def nothing_like(value: Any) -> Any:
    """Return what a sum of such values begins with."""
    if isinstance(value, Tensor | np.ndarray):
        return value * 0
    return type(value)()


def linear_mark(value: Tensor) -> float:
    """Return a number that is linear in the entries of a value, and stands for them."""
    places = torch.linspace(1, 2, value.numel(), dtype=value.dtype, device=value.device)
    return float((value.flatten() * places).sum())


def like(value: Any, number: Tensor) -> Any:
    """Return a number as a value of the same kind; a count stays an integer."""
    number = number.round() if is_count(value) else number
    if isinstance(value, Tensor):
        return number.to(value.device, value.dtype)
    if isinstance(value, np.ndarray):
        return number.cpu().numpy().astype(value.dtype)
    return type(value)(number.item())


@dataclass(frozen=True)
class Mark:
    """A value as it is now.

    Attributes:
        value: The value; a tensor without its graph.
        changes: How often a tensor was written to; 0 for others, of which `value` is a copy.
    """

    value: Any
    changes: int

    @classmethod
    def of(cls, value: Any) -> "Mark":
        """Note a value."""
        if isinstance(value, Tensor):
            return cls(value.detach(), count_of_changes(value))
        is_large = isinstance(value, np.ndarray) and value.nbytes > _COPIED
        return cls(value if is_large else copy_of(value), 0)

    def is_same(self, other: "Mark") -> bool:
        """Whether the other one has the same value; one that was written to counts as another."""
        one, another = self.value, other.value
        are_tensors = isinstance(one, Tensor) and isinstance(another, Tensor)
        if are_tensors and one.data_ptr() == another.data_ptr():
            return self.changes == other.changes
        return is_same(one, another)


def is_on_host(value: Any) -> bool:
    """Whether a value can be compared without a wait for a device."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def takes_values(value: Tensor | np.ndarray) -> bool:
    """Whether a tensor or an array can be written to."""
    if isinstance(value, np.ndarray):
        return bool(value.flags.writeable)
    return is_written_to(value) and not value.requires_grad


def is_of_losses(value: Any, start: Any) -> bool:
    """Whether a value that all parts of a look leave alike may be a mean over samples."""
    is_number = not is_count(value) and np.shape(value) == () and not isinstance(value, bool)
    return is_number and bool((change_of(start, value) != 0).any())


def goes_on(
    start: Any, whole: Any, parts: Sequence[Any], in_a_row: Sequence[Any], tolerance: float
) -> bool:
    """Whether the parts, one after the other, leave a value as the whole does.

    Args:
        start: Before the step.
        whole: After the step on all samples.
        parts: After the step on each part.
        in_a_row: After the step on each part, where the first one began with `start`.
        tolerance: Of roundings, relative.
    """
    change, end = change_of(start, whole), change_of(start, in_a_row[-1])
    # The losses of a model that knows nothing yet are all equal, and one of them seems to be the
    # largest, as lengths of samples that are all alike do.
    is_tied = all(is_near(change_of(start, value), change, tolerance) for value in parts)
    return is_near(end, change, tolerance) and not is_tied


def combined(
    values: Sequence[Any], start: Any, places: list[int], name: str, weights: BatchWeights
) -> Any:
    """Return the value of the batch.

    Args:
        values: Of micro-batches.
        start: Of which they began.
        places: Their numbers.
        name: Its name.
        weights: Of the micro-batches.
    """
    is_sum = name in weights.sums
    # Nothing has to be computed, nor a device waited for.
    if not is_sum and not any(isinstance(v, Tensor) for v in values) and all_equal(values):
        return values[-1]
    device = next((v.device for v in values if isinstance(v, Tensor)), torch.device("cpu"))
    every = torch.stack([wide(value).to(device) for value in values])
    # A number may be an integer for some micro-batches only, as `min(1, x)` is.
    kind = next((value for value in values if not is_count(value)), values[-1])
    if is_sum:
        # A sum over samples whose roundings hid that it goes on adds to what was there.
        is_alike = start is not None and np.shape(start) == np.shape(values[0])
        adds = is_alike and name + LATER not in weights.sums
        begin = wide(start).to(device) if adds else torch.zeros_like(every[0])
        return like(kind, begin + (every - begin).sum(0))
    shares = weights.shares.to(every)
    if name in weights.by_samples:
        shares = torch.tensor([float(size) for size in weights.sizes]).to(every)
    shares = shares if len(places) == len(shares) else shares[places]
    # Without a weight every micro-batch counts.
    shares = torch.where(shares.sum() > 0, shares, torch.ones_like(shares))
    # NaN where the weight is 0 does not matter.
    weighed = torch.where(shares > 0, every.movedim(0, -1), 0) * shares
    return like(kind, weighed.sum(-1) / shares.sum())
