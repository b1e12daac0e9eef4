"""Master weights: an optimizer that steps in float32 while the model computes in fewer bits.

bfloat16 has 8 digits in base 2, so that a step of less than 1/256 of a weight is lost. The
optimizer therefore keeps a copy in float32 and the model gets its rounding.

Note [Where masters are]: in the optimizer's state of their parameter, under one more name. So they
are saved, loaded and resharded like momenta.

**Source**: Micikevicius et al. 1710.03740, section 3.1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, Tensor
from torch.optim import Optimizer

from lightning_par.dtensor import like_parameter

__all__ = ["MASTER", "keep_dtypes", "masters_in_place"]

MASTER = "master"
"""Name of a master weight in the optimizer's state."""

_SHORT = (torch.bfloat16, torch.float16)


@contextmanager
def masters_in_place(optimizer: Optimizer) -> Iterator[None]:
    """Replace 16-bit parameters in the optimizer by float32 masters, with float32 gradients.

    At the end the parameters get the rounded masters.
    """
    swapped = []
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            # A parameter without a gradient is not stepped on, and needs no master.
            if parameter.grad is not None and parameter.dtype in _SHORT:
                master = _take_master(optimizer, parameter)
                # In the group of the optimizer, which steps on whatever it finds there.
                group["params"][index] = master
                swapped.append((group["params"], index, parameter, master))
    try:
        yield
    finally:
        for held, index, parameter, master in swapped:
            held[index] = parameter
            _put_master(optimizer, parameter, master)


def _take_master(optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
    state: dict[str, Any] = optimizer.state.pop(parameter, {})
    value = state.pop(MASTER, None)
    # Made of the weight in the first step; later ones find it in the state.
    master = like_parameter(parameter, parameter.detach().float() if value is None else value)
    assert parameter.grad is not None
    master.grad = parameter.grad.float()
    if state:
        # The state follows the key: an optimizer looks it up by the parameter that it steps on.
        optimizer.state[master] = state
    return master


@torch.no_grad()
def _put_master(optimizer: Optimizer, parameter: Tensor, master: nn.Parameter) -> None:
    parameter.copy_(master)
    state: dict[str, Any] = optimizer.state.pop(master, {})
    # Also a state that the optimizer has just begun.
    optimizer.state[parameter] = {**state, MASTER: master.detach()}


def keep_dtypes(optimizer: Optimizer) -> None:
    """Make the optimizer load states in the dtypes that they were saved in, as masters and moments
    in fewer bits need it; torch would cast them to the dtype of their parameter.
    """
    # From the hook before to the hook after, as the latter is not given the state.
    loading: list[dict[str, Any]] = []

    def before(_: Optimizer, state: dict[str, Any]) -> None:
        loading.append(state)

    def after(_: Optimizer) -> None:
        state = loading.pop()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        for number, parameter in zip(numbers, held, strict=True):
            for name, value in state["state"].get(number, {}).items():
                if name != "step" and isinstance(value, Tensor):
                    loaded = value.to(device=parameter.device, copy=True)
                    optimizer.state[parameter][name] = loaded

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
