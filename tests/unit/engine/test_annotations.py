"""Shapes in the engine's annotations are checked while tests run."""

import pytest
import torch
from jaxtyping import TypeCheckError

from lightning_par.engine.context.attention import attention
from lightning_par.engine.tensor.vocab_parallel import vocab_parallel_cross_entropy


def test_call_with_shapes_that_the_annotations_refuse_is_an_error() -> None:
    query, key = torch.zeros(2, 3, 5, 7), torch.zeros(2, 3, 4, 7)
    with pytest.raises(TypeCheckError, match="parameter 'key'"):
        attention(query, key, key)
    with pytest.raises(TypeCheckError, match="parameter 'target'"):
        vocab_parallel_cross_entropy(
            torch.zeros(2, 3), torch.zeros(5, dtype=torch.int64), vocab_size=3, group=None
        )
