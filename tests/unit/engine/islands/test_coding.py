"""Tensors in few bits equal their definition, in any box."""

import pytest
import torch

from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.coding import coded_length, decode, encode, whole_box

KINDS = ("none", "bf16", "int8", "int4")


def by_hand(values: torch.Tensor, kind: str) -> torch.Tensor:
    """The definition, entry by entry."""
    if kind == "none":
        return values
    if kind == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    top, flat, out = (127 if kind == "int8" else 7), values.flatten().tolist(), []
    for low in range(0, len(flat), 256):
        block = flat[low : low + 256]
        largest = torch.tensor(max(map(abs, block)), dtype=torch.float32)
        scale = float(largest / top)
        out += [round(x / scale) * scale for x in block]
    return torch.tensor(out, dtype=values.dtype).view(values.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(), (3,), (256,), (7, 5), (11, 13, 5)])
def test_coding_equals_its_definition(kind: str, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    arrives = encode(values, kind).values(torch.float64)
    torch.testing.assert_close(arrives, by_hand(values, kind), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "box",
    [
        whole_box("w", (11, 13, 5)),
        Box("w", (4, 0, 0), (7, 13, 5)),
        Box("w", (0, 6, 0), (11, 7, 5)),
        Box("w", (3, 2, 1), (2, 3, 3)),
        Box("w", (11, 0, 0), (0, 13, 5)),
    ],
)
def test_a_box_decodes_the_bits_of_the_whole(kind: str, box: Box) -> None:
    values = torch.randn(11, 13, 5, generator=torch.Generator().manual_seed(2))
    coded = encode(values, kind)
    data = coded.pack(box)
    assert len(data) == coded_length(kind, box, (11, 13, 5), torch.float32)
    ends = [slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True)]
    arrives = decode(memoryview(data), kind, box, (11, 13, 5), torch.float32)
    assert torch.equal(arrives, coded.values(torch.float32)[tuple(ends)])


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_zeros_stay_zeros(kind: str) -> None:
    assert not encode(torch.zeros(300), kind).values(torch.float32).any()
