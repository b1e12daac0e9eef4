"""A tree that one rank gives to others arrives as it is there, numbers in one message."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_par.engine.tensor_tree import TreeBroadcast
from tests.support.one_gpu import on_cuda
from tests.support.ranks.api import ranks


def tree(rank, text):
    device = "cuda" if on_cuda() else "cpu"
    generator = torch.Generator().manual_seed(rank)
    numbers = [
        torch.tensor(0.1 + rank),
        torch.tensor(1e300, dtype=torch.float64),
        torch.tensor(2**60 + rank),
        torch.tensor(bool(rank)),
        torch.tensor(0.3, dtype=torch.bfloat16, requires_grad=True),
    ]
    matrix = torch.randn((2, 3), generator=generator).T
    return {
        "numbers": [n.to(device) for n in numbers],
        "matrix": matrix.to(device),
        "host": torch.arange(rank + 4),
        "text": text,
    }


@ranks(2)
@pytest.mark.parametrize("source", [0, 1])
def test_every_rank_gets_the_tree_of_the_source(rank, world, source):
    sends = TreeBroadcast(dist.group.WORLD, source)
    for text in ("one", "one", "another"):
        found, wanted = sends.broadcast(tree(rank, text)), tree(source, text)
        assert found["text"] == text
        assert torch.equal(found["matrix"], wanted["matrix"])
        assert found["matrix"].is_contiguous(), "kernels would round in another order on one rank"
        assert torch.equal(found["host"], wanted["host"])
        for got, want in zip(found["numbers"], wanted["numbers"], strict=True):
            assert got.dtype is want.dtype
            assert got.device.type == want.device.type
            assert torch.equal(got, want)


@ranks(2)
def test_what_did_not_change_is_not_sent_again(rank, world):
    """A note, then two tensors with dims, and numbers in three kinds: float64, int64, bool."""
    sends = TreeBroadcast(dist.group.WORLD, 0)
    for text, messages in (("one", 7), ("one", 6), ("another", 7)):
        with patch.object(dist, "broadcast", wraps=dist.broadcast) as sent:
            sends.broadcast(tree(rank, text))
        assert sent.call_count == messages


ODD = torch.int16, torch.uint16, torch.float8_e5m2, torch.complex64


@ranks(2)
@pytest.mark.parametrize("dtype", ODD, ids=str)
def test_dtypes_that_no_backend_sends_arrive_as_they_are(rank, world, dtype):
    """Neither gloo nor NCCL has a message of int16, as sound comes in; nor has a conjugate view."""
    device = "cuda" if on_cuda() else "cpu"
    values = torch.arange(12).reshape(3, 4)
    if dtype.is_complex:
        values = torch.complex(values.float(), values.float() + 1).conj()
    given = [values.to(dtype).T, values[:, 1:2].to(dtype), values[:0].to(dtype), values[2, 1]]
    given[3] = given[3].to(dtype)
    given = [tensor.to(device) for tensor in given]
    sent = given if rank == 0 else None
    found = TreeBroadcast(dist.group.WORLD, 0).broadcast(sent)
    for got, want in zip(found, given, strict=True):
        assert got.dtype is dtype
        assert got.device.type == device
        assert got.shape == want.shape
        assert got.tolist() == want.tolist()
