"""The quick walks over what a call takes and gives do what those of torch do."""

from collections import defaultdict, deque, namedtuple, OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_par.upstream.pytree import leaves_of, map_leaves, tree_leaves, tree_map

X, W = torch.ones(2), nn.Parameter(torch.ones(3))
Pair = namedtuple("Pair", ["one", "other"])
TREES: list[Any] = [
    *(X, W, None, True, 1.5, 3, "text", slice(1, 2), torch.float32, torch.device("cpu"), object()),
    *((), [], {}, (X,), [X, (W, None)], {"b": X, "a": {"c": [W, 1]}}, (X, slice(0, 1), ...)),
    *(torch.Size((2, 3)), (torch.Size((4,)), X), Pair(X, [W]), [Pair(1, X)]),
    *(OrderedDict(b=X, a=W), defaultdict(list, a=[X]), deque([X, W]), {1, 2}, [{"a": deque([X])}]),
    *(CausalLMOutput(logits=X), [CausalLMOutput(loss=X, logits=W)], torch.max(torch.ones(2, 2), 1)),
]


def marked(leaf: Any) -> Any:
    return "leaf", type(leaf), id(leaf)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_quick_walks_give_what_those_of_torch_give(tree: Any) -> None:
    wanted = tree_leaves(tree)
    assert list(map(id, leaves_of(tree))) == list(map(id, wanted))
    found, made = map_leaves(marked, tree), tree_map(marked, tree)
    assert (type(found), repr(found)) == (type(made), repr(made))
