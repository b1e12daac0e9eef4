"""Adam with moments in fewer bits, on one process: the update of torch, rounded at random."""

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from lightning_par import optimizers
from lightning_par.engine.offload.rounding import entry_index, mixed, random_bits
from lightning_par.errors import ConfigurationError

FORMS = ("float32", "bfloat16", "packed")
CLOSE = {"float32": 1e-5, "bfloat16": 0.02, "packed": 0.3}
"""Of the way that weights went: 2**-8 and 2**-3 of a moment, rounded in every step."""


def weights(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((7, 5), (3,), (), (0, 4), (2, 3, 5))
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def gradients(steps: int = 8) -> Iterator[list[Tensor]]:
    """Gradients of sizes from 1e-6 to 1e3, with signs that mostly stay."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        found = []
        for weight in weights():
            size = torch.logspace(-6, 3, max(1, weight.numel())).view(-1)[: weight.numel()]
            noise = torch.randn(weight.shape, generator=generator)
            found.append(size.view(weight.shape) * (1 + 0.5 * noise))
        yield found


def train(optimizer: torch.optim.Optimizer, held: list[nn.Parameter], **options: Any) -> None:
    for found in gradients(**options):
        for parameter, grad in zip(held, found, strict=True):
            parameter.grad = grad.to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("states", FORMS)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("maximize", [False, True])
def test_update_is_that_of_torch(name: str, states: Any, maximize: bool) -> None:
    held, same, start = weights(), weights(), weights()
    options: Any = {"lr": 0.1, "betas": (0.8, 0.99), "eps": 1e-9, "weight_decay": 0.05}
    train(getattr(optimizers, name)(held, **options, maximize=maximize, states=states), held)
    train(getattr(torch.optim, name)(same, **options, maximize=maximize), same)
    for parameter, wanted, before in zip(held, same, start, strict=True):
        way = (wanted - before).abs().max().item() if wanted.numel() else 0.0
        torch.testing.assert_close(parameter, wanted, rtol=0, atol=CLOSE[states] * way)


@pytest.mark.parametrize("states", FORMS)
def test_moments_keep_their_expectation(states: Any) -> None:
    """After 300 steps of gradient 1 the mean square is 1 - 0.999^300 = 0.259, which rounding to the
    nearest would never reach. Packed, roundings of an entry are up to 1/16, so that an entry is off
    by 0.05, and the mean of 8192 by 6e-4.
    """
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = optimizers.Adam([weight], lr=0.0, states=states)
    weight.grad = torch.ones(64, 128)
    for _ in range(300):
        optimizer.step()
    optimizer.states = "float32"  # reads what is kept, for one more step
    weight.grad.zero_()
    optimizer.step()
    held = optimizer.state[weight]
    assert float(held["exp_avg"].mean()) == pytest.approx(0.9, abs=5e-3)
    wanted = 0.999 * (1 - 0.999**300)
    assert float(held["exp_avg_sq"].mean()) == pytest.approx(wanted, abs=3e-3)


def test_random_bits_are_a_hash_of_the_index_in_the_whole_tensor() -> None:
    """In Python's numbers, which have no sign and no last bit; beyond 2**32, too."""
    place = (3, 2**31 - 1, 2)
    index = entry_index((2, 3, 4), place, (9, 2**31 + 5, 7), torch.device("cpu"))
    found = random_bits(index, seed=2**32 - 5)
    for at in ((0, 0, 0), (1, 2, 3), (1, 0, 2)):
        i, j, k = (first + step for first, step in zip(place, at, strict=True))
        wanted = mixed(((i * (2**31 + 5) + j) * 7 + k) ^ (2**32 - 5))
        assert int(found[at]) % 2**32 == wanted


@pytest.mark.parametrize("states", FORMS)
def test_result_does_not_depend_on_how_the_work_is_divided(
    states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, same = weights(), weights()
    train(optimizers.AdamW(held, states=states), held)
    monkeypatch.setattr(optimizers, "_CPU_TILE", 4)
    # Columns that are next to each other, as of a transposed layer.
    same[0].data = same[0].data.T.contiguous().T
    train(optimizers.AdamW(same, states=states), same)
    assert all(map(torch.equal, held, same))


@pytest.mark.parametrize("states", FORMS)
def test_a_copy_and_a_loaded_optimizer_go_on(states: Any) -> None:
    held, others = weights(), weights()
    optimizer = optimizers.AdamW(held, lr=0.1, states=states)
    train(optimizer, held, steps=3)
    for other, weight in zip(others, held, strict=True):
        other.data = weight.data.clone()
    loaded = optimizers.AdamW(others, states=states)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    clone = copy.deepcopy(optimizer)
    copied = clone.param_groups[0]["params"]
    for each, parameters in ((optimizer, held), (loaded, others), (clone, copied)):
        train(each, parameters)
        assert all(map(torch.equal, parameters, held))


@pytest.mark.parametrize("states", FORMS)
def test_what_is_not_finite_is_seen(states: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optimizers.AdamW([weight], states=states)
    for _ in range(2):
        weight.grad = torch.tensor([1.0, float("nan"), 1.0])
        optimizer.step()
    assert weight.isnan().tolist() == [False, True, False]


def test_16_bit_weights_have_the_moments_that_were_asked_for() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for states, bits in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            held = weights(dtype)
            optimizer = optimizers.AdamW(held, states=states)  # type: ignore[arg-type]
            train(optimizer, held)
            assert held[0].dtype is dtype
            assert optimizer.state[held[0]]["exp_avg"].dtype is bits


def test_closure_gives_the_loss() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = optimizers.Adam([weight], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    torch.testing.assert_close(weight.detach(), torch.full((3,), 0.9))


def test_unknown_form_is_refused() -> None:
    says = "states='int8' must be 'float32', 'bfloat16' or 'packed'."
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        optimizers.AdamW(weights(), states="int8")  # type: ignore[arg-type]


def test_what_the_update_does_not_compute_is_refused() -> None:
    says = "optimizers.AdamW does not support {}. Use torch.optim.AdamW."
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones_like(number)
    with pytest.raises(ConfigurationError, match=says.format("complex parameters")):
        optimizers.AdamW([number]).step()
    rows = nn.Embedding(4, 2, sparse=True)
    rows(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match=says.format("sparse gradients")):
        optimizers.AdamW(rows.parameters()).step()
    held = weights()
    optimizer = optimizers.AdamW(held)
    optimizer.load_state_dict(torch.optim.AdamW(weights(), amsgrad=True).state_dict())
    with pytest.raises(ConfigurationError, match=says.format("amsgrad=True")):
        train(optimizer, held)
