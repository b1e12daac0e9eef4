"""An optimizer with master weights steps as one in float32 does, and survives a reload."""

import copy

import torch
from torch import nn, Tensor

from lightning_par.engine.master_weights import keep_dtypes, MASTER, masters_in_place

STEPS = 4


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 5), (7,))]


def take(optimizer: torch.optim.Optimizer, step: int) -> None:
    held = optimizer.param_groups[0]["params"]
    for parameter, grad in zip(held, gradients(step), strict=True):
        parameter.grad = grad.to(parameter.dtype)
    with masters_in_place(optimizer):
        optimizer.step()


def make(dtype: torch.dtype) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    start = [torch.linspace(-2, 2, 15).view(3, 5), torch.linspace(0, 1, 7)]
    held = [nn.Parameter(value.bfloat16().to(dtype)) for value in start]
    return held, torch.optim.AdamW(held, lr=1e-4)


def test_masters_step_as_float32_does_and_the_model_gets_their_rounding() -> None:
    short, optimizer = make(torch.bfloat16)
    long, wanted = make(torch.float32)
    for step in range(STEPS):
        take(optimizer, step)
        take(wanted, step)
    for parameter, want in zip(short, long, strict=True):
        state = optimizer.state[parameter]
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(state[MASTER], want.detach())
        assert torch.equal(parameter.detach(), want.detach().bfloat16())
        assert torch.equal(state["exp_avg"], wanted.state[want]["exp_avg"])
    assert optimizer.param_groups[0]["params"] == short
    assert all(MASTER not in wanted.state[p] for p in long)


def test_steps_too_small_for_the_weight_add_up() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(64):
        parameter.grad = torch.full_like(parameter, 2**-12)
        with masters_in_place(optimizer):
            optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((3,), 1 - 2**-6, dtype=torch.bfloat16))


def test_masters_are_loaded_in_their_own_dtype() -> None:
    short, optimizer = make(torch.bfloat16)
    for step in range(2):
        take(optimizer, step)
    saved = copy.deepcopy(optimizer.state_dict())
    again, resumed = make(torch.bfloat16)
    keep_dtypes(resumed)
    resumed.load_state_dict(saved)
    assert {value.dtype for s in resumed.state.values() for value in s.values()} == {torch.float32}
    for parameter, value in zip(again, short, strict=True):
        parameter.data.copy_(value.data)
    for step in range(2, STEPS):
        take(optimizer, step)
        take(resumed, step)
    for ours, theirs in zip(short, again, strict=True):
        assert torch.equal(optimizer.state[ours][MASTER], resumed.state[theirs][MASTER])


def test_a_parameter_without_gradient_stays() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with masters_in_place(optimizer):
        optimizer.step()
    assert not optimizer.state
