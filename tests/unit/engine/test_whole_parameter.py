"""Tensors in the place of sharded parameters: what they tell, and what their copies are."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_par.engine.data.whole_parameter import as_parameter
from lightning_par.upstream.dispatch import FakeTensorMode


def _saved_and_loaded(value):
    file = io.BytesIO()
    torch.save({"w": value}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["w"]


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, lambda w: pickle.loads(pickle.dumps(w)), _saved_and_loaded],
    ids=["deepcopy", "copy", "pickle", "file"],
)
def test_a_copy_is_a_plain_parameter(copied, flag):
    """As that of the parameter in whose place it stands; the shards stay out of files."""
    shard = nn.Parameter(torch.arange(6.0))
    value = as_parameter(shard * 2, shard)
    value.requires_grad_(flag)
    found = copied(value)
    assert type(found) is nn.Parameter
    assert found.requires_grad == flag
    assert found.is_leaf
    assert torch.equal(found, torch.arange(6.0) * 2)
    assert found.data_ptr() != value.data_ptr()


def test_a_deep_copy_of_two_names_is_one_parameter():
    """As of a tied parameter."""
    shard = nn.Parameter(torch.arange(6.0))
    value = as_parameter(shard * 2, shard)
    first, second = copy.deepcopy([value, value])
    assert first is second


@pytest.mark.parametrize("is_fake", [False, True])
def test_it_sets_the_flag_of_the_shards(is_fake):
    """Also in a rehearsal, where it is a fake tensor and stays one."""
    with FakeTensorMode() if is_fake else torch.enable_grad():
        shard = nn.Parameter(torch.ones(3))
        computed = shard * 2
        kind = type(computed)
        value = as_parameter(computed, shard)
        assert isinstance(value, kind)
        assert type(value * 2) is kind
        assert value.is_leaf
        value.requires_grad = False
        assert not shard.requires_grad
        value.requires_grad_()
        assert shard.requires_grad
        value.sum().backward()
    assert shard.grad.shape == (3,)
