"""Trees taken apart into a structure and tensors, and put together again."""

import pickle
from dataclasses import dataclass
from typing import Any

import torch

from lightning_par.engine.tensor_tree import pack, TensorSpec, unpack


@dataclass
class Sample:
    """A container that torch's pytree does not know."""

    image: torch.Tensor
    name: str


def test_a_tree_comes_back_with_its_ties_and_other_values() -> None:
    x, y = torch.randn(2, 3), torch.arange(5)
    tree: Any = {"a": (x, None, 7), "b": [y, x], "c": Sample(y, "n")}
    packed, tensors = pack(tree)
    assert len(tensors) == 2
    assert tensors[0] is x
    again = unpack(pickle.loads(pickle.dumps(packed)), [x + 1, y + 1])
    assert again["a"][0] is again["b"][1]
    assert again["c"].image is again["b"][0]
    assert again["a"][1:] == (None, 7)
    assert torch.equal(again["b"][0], y + 1)
    assert again["c"].name == "n"


def test_specs_describe_the_distinct_tensors_in_order() -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    y = torch.zeros(7, dtype=torch.int32)
    packed, _ = pack([x, y, x])
    cpu = torch.device("cpu")
    assert packed.specs == (
        TensorSpec((2, 3), torch.float64, cpu, True),
        TensorSpec((7,), torch.int32, cpu, False),
    )


def test_equal_trees_have_equal_structures_whatever_their_tensors_hold() -> None:
    first, _ = pack({"a": torch.zeros(2), "b": 1})
    second, _ = pack({"a": torch.ones(2), "b": 1})
    other, _ = pack({"a": torch.ones(2), "b": 2})
    assert first == second != other
