"""Values of states that the encoder refuses, with their names, before anything is written."""

import warnings

import pytest
import torch

from lightning_par.checkpoint.json_encoding import Encoder
from lightning_par.errors import CheckpointError


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        (torch.sparse_coo, r"a sparse tensor.*Store its to_dense\(\)"),
        (torch.sparse_csr, r"a sparse tensor.*Store its to_dense\(\)"),
        (torch.jagged, r"a nested tensor.*Store its to_padded_tensor\(0\)"),
    ],
)
def test_a_tensor_that_is_not_dense_is_named(layout: torch.layout, told: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: sparse CSR tensors are in beta
        dense = torch.eye(3)
        made = {
            torch.sparse_coo: dense.to_sparse,
            torch.sparse_csr: dense.to_sparse_csr,
            torch.jagged: lambda: torch.nested.nested_tensor([dense[0], dense[1, :2]]),
        }[layout]()
    encoder = Encoder("file")
    with pytest.raises(CheckpointError, match=rf"callbacks\.Counting\.counts\[1\] is {told}"):
        encoder.encode({"counts": [1, made]}, "callbacks.Counting")
    assert encoder.tensors == {}
