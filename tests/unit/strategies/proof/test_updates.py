"""What an optimizer of a proof goes on from."""

from typing import Any

import torch
from torch import nn

from lightning_par.strategies.proof.updates import restore


def step(layer: nn.Linear, optimizer: torch.optim.LBFGS, state: Any = None) -> float:
    """Take a step; the state is given in the first call of its closure, as in a proof."""
    given = [] if state is None else [state]

    def closure() -> torch.Tensor:
        if given:
            assert restore([optimizer], [given.pop()])
        optimizer.zero_grad()
        loss = (layer(torch.ones(4, 3).cumsum(0).cos()) ** 4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(closure().detach())


def test_lbfgs_goes_on_from_a_state_that_its_closure_restores() -> None:
    torch.manual_seed(0)
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.5, max_iter=3)
    step(layer, optimizer)
    state = optimizer.state_dict()
    other.load_state_dict(layer.state_dict())
    again = torch.optim.LBFGS(other.parameters(), lr=0.5, max_iter=3)
    copied = torch.optim.LBFGS(layer.parameters(), lr=0.5, max_iter=3)
    copied.load_state_dict(state)
    assert step(other, again, state) == step(layer, copied)
