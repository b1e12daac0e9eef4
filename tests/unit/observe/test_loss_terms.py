"""The terms of a loss, as a look at a step follows them."""

import pytest
import torch

from lightning_par.observe.cross_entropies import LookAtLosses


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_sum_may_go_where_there_are_no_values(device: str) -> None:
    """As the input of a module that another pipeline stage holds."""
    look = LookAtLosses([{}])
    with look.of(0):
        inputs = torch.ones(2, 3) + torch.arange(3.0)
        assert (0.5 * inputs.to(device)).device.type == device
        loss = torch.tensor(2.0) + 0.5 * torch.tensor(3.0)
    assert look.terms[0].of(float(loss)) == (2.0, 1.5)
