"""Laws of putting the results of micro-batches together."""

from collections import namedtuple

import pytest
import torch

from lightning_par.strategies.step.returned import merge_results

Output = namedtuple("Output", ["logits", "count"])
WEIGHTS = torch.tensor([3.0, 5.0, 0.0], dtype=torch.float64)


def merge(*results):
    return merge_results(results, WEIGHTS[: len(results)])


def test_scalars_give_the_mean_by_weight_and_weight_0_counts_nothing():
    tensors = [torch.tensor(v, requires_grad=True) for v in (2.0, 4.0, float("nan"))]
    merged = merge(*tensors)
    assert merged.item() == (3 * 2 + 5 * 4) / 8
    assert not merged.requires_grad
    assert merged.dtype is torch.float32
    assert merge(2.0, 4.0, float("nan")) == (3 * 2 + 5 * 4) / 8


def test_without_any_weight_scalars_give_the_plain_mean():
    results = [torch.tensor(2.0), torch.tensor(5.0)]
    assert merge_results(results, torch.zeros(2)).item() == 3.5


def test_tensors_with_dims_join_along_the_batch_also_when_ragged():
    merged = merge(torch.ones(2, 5), torch.zeros(2, 5), torch.full((1, 5), 7.0))
    assert merged.tolist() == [[1] * 5] * 2 + [[0] * 5] * 2 + [[7] * 5]


def test_containers_merge_entry_by_entry():
    def result(value, size):
        output = Output(torch.full((size, 3), value), torch.tensor(value))
        return {"loss": torch.tensor(value), "out": output, "names": [f"{value}"] * size}

    merged = merge(result(2.0, 2), result(4.0, 1))
    assert list(merged) == ["loss", "out", "names"]
    assert type(merged["out"]) is Output
    assert merged["out"].logits.tolist() == [[2.0] * 3, [2.0] * 3, [4.0] * 3]
    assert merged["out"].count.item() == merged["loss"].item() == (3 * 2 + 5 * 4) / 8
    assert merged["names"] == ["2.0", "2.0", "4.0"]
    pair = merge((torch.ones(1), 7), (torch.zeros(2), 7))
    assert type(pair) is tuple
    assert pair[0].tolist() == [1, 0, 0]
    assert pair[1] == 7


@pytest.mark.parametrize("value", [None, True, 7, "text"])
def test_values_that_are_equal_stay(value):
    merged = merge(value, value, value)
    assert merged == value
    assert type(merged) is type(value)


def test_values_that_differ_become_a_list():
    assert merge("a", "b", "a") == ["a", "b", "a"]
    assert merge(True, False) == [True, False]
