"""What a rank of an island holds, and how it introduces itself; checked when it is read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.channel import MessageError
from lightning_par.engine.data.islands.coding import coded_length, decode, whole_box
from lightning_par.engine.data.islands.options import Quantization

__all__ = ["Hello", "Region", "number", "read_regions"]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True)
class Region:
    """A box of a parameter that a rank holds.

    Attributes:
        name: Global FQN of the parameter.
        offset: First entry of the box in every dim.
        size: Shape of the box.
        shape: Shape of the whole parameter.
        dtype: In which it is exchanged: ``"float32"`` or ``"float64"``.
        sends: Whether it is this rank of the island that sends it.
        trains: Whether it changes; others are sent once, when a run begins.
    """

    name: str
    offset: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    sends: bool
    trains: bool

    @property
    def box(self) -> Box:
        """The box in the whole parameter."""
        return Box(self.name, self.offset, self.size)

    @property
    def alone(self) -> Box:
        """The box taken for a whole tensor, as movements are encoded."""
        return whole_box(self.name, self.size)

    @property
    def torch_dtype(self) -> torch.dtype:
        """In which it is exchanged."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Hello:
    """How a rank of an island introduces itself.

    Attributes:
        island: Number of the island.
        rank: Rank within the island.
        world: Ranks of the island.
        incarnation: Random name of this start of the island, the same on its ranks.
        outer: Options on which all islands agree.
        regions: What the rank holds.
        pending: Fragment and ticket of a movement whose answer was lost with a connection.
    """

    island: int
    rank: int
    world: int
    incarnation: str
    outer: Mapping[str, Any]
    regions: Sequence[Region]
    pending: tuple[int, str] | None = None

    def header(self) -> dict[str, Any]:
        """Return the message."""
        fields = {**vars(self), "regions": [asdict(region) for region in self.regions]}
        return {"op": "hello", **fields}

    @classmethod
    def read(cls, header: Mapping[str, Any]) -> "Hello":
        """Return what a message says.

        Raises:
            MessageError: It is no hello, or one that cannot be.
        """
        if header.get("op") != "hello":
            raise MessageError(f"the first message is {header.get('op')!r}, but has to be 'hello'")
        try:
            fields = {name: header[name] for name in cls.__dataclass_fields__}
            fields["regions"] = [_read_region(given) for given in header["regions"]]
            # A message comes from the network: each field is checked before it is used.
            world = number(header["world"], 1)
            number(header["island"])
            number(header["rank"], 0, world - 1)
            if not isinstance(fields["outer"], dict) or type(fields["incarnation"]) is not str:
                raise TypeError("outer or incarnation")
            if fields["pending"] is not None:
                fragment, ticket = fields["pending"]
                fields["pending"] = number(fragment), str(ticket)
        except (KeyError, TypeError, ValueError) as error:
            raise MessageError(f"the message 'hello' is not valid: {error!r}") from error
        return cls(**fields)


def number(value: object, least: int = 0, most: int | None = None) -> int:
    """Return a whole number of a message.

    Raises:
        ValueError: It is none, or not within these bounds.
    """
    # `type`, as True is an int.
    if type(value) is not int or value < least or (most is not None and value > most):
        end = "or more" if most is None else f"to {most}"
        raise ValueError(f"{value!r} is not a whole number of {least} {end}")
    return value


def _read_region(given: Mapping[str, Any]) -> Region:
    lists = {name: tuple(number(n) for n in given[name]) for name in ("offset", "size", "shape")}
    region = Region(**{**given, **lists})
    ends = zip(region.offset, region.size, region.shape, strict=True)
    if any(low + size > whole for low, size, whole in ends) or region.dtype not in _DTYPES:
        raise ValueError(f"{region} is not a part of a parameter")
    # Of the right type, and not merely true.
    if type(region.name) is not str or {type(region.sends), type(region.trains)} != {bool}:
        raise ValueError(f"{region} has a field of another type")
    return region


def read_regions(
    payload: memoryview, regions: Iterable[Region], kind: Quantization, *, alone: bool
) -> list[Tensor]:
    """Return the entries of every region, of its size.

    Args:
        payload: All of them, one after the other.
        regions: In the order in which they were sent.
        kind: How they were encoded.
        alone: Whether each box was encoded as a tensor of its own.

    Raises:
        MessageError: There are more or fewer bytes, or an entry is not finite.
    """
    found, place = [], 0
    for region in regions:
        box, shape = (region.alone, region.size) if alone else (region.box, region.shape)
        length = coded_length(kind, box, shape, region.torch_dtype)
        if place + length > len(payload):
            raise MessageError(
                f"the message has {len(payload):,} bytes, which are too few for {region.name}"
            )
        data = payload[place : place + length]
        found.append(decode(data, kind, box, shape, region.torch_dtype))
        # One NaN in a mean would spoil the weights of all islands.
        if not found[-1].isfinite().all():
            raise MessageError(f"the message has entries of {region.name} that are NaN or infinite")
        place += length
    if place != len(payload):
        raise MessageError(f"the message has {len(payload):,} bytes, but needs {place:,}")
    return found
