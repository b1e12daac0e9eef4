"""What `record_construction` cannot replay is refused, and the message says what to do."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError, PlanError
from tests.unit.engine.init.test_deferred_init import build, holder, one, values


def asks_item(module: nn.Module) -> None:
    module.w = nn.Parameter(torch.randn(3))
    module.scale = float(module.w.std())


def asks_copy(module: nn.Module) -> None:
    module.w = nn.Parameter(torch.randn(3))
    torch.zeros(3).copy_(module.w.detach())


def asks_device(module: nn.Module) -> None:
    module.w = nn.Parameter(torch.randn(3))
    module.host = module.w.detach().cpu().numpy()


@pytest.mark.parametrize("fill", [asks_item, asks_copy, asks_device])
def test_asking_for_values_during_construction_is_refused(fill: Callable[..., None]) -> None:
    with pytest.raises(PlanError, match="needs the values of 'w' of Module while the model is"):
        build(holder(fill))


def test_parameter_never_initialized_is_refused() -> None:
    model, record = build(holder(lambda m: setattr(m, "w", nn.Parameter(torch.empty(3, 5)))))
    with pytest.raises(PlanError, match=r"parameter 'w' is made with .* its 15 values"):
        values(model, record)


def test_parameter_made_outside_is_refused() -> None:
    _, record = build(lambda: nn.Linear(3, 5))
    stranger = nn.Parameter(torch.empty(3, 7, device="meta"))
    assert not record.knows(stranger)
    with pytest.raises(PlanError, match=r"the parameter x of shape \(3, 7\) was not made inside"):
        record.initialize(stranger, name="x", seed=0, device="cpu")
    model, record = build(holder(lambda m: setattr(m, "w", stranger)))
    with pytest.raises(PlanError, match="the parameter w was made on the meta device outside"):
        values(model, record)


def test_parameter_copied_from_an_outside_meta_tensor_is_refused() -> None:
    stranger = torch.empty(3, 5, device="meta")

    def fill(module: nn.Module) -> None:
        module.w = nn.Parameter(torch.empty(3, 5))
        module.w.data.copy_(stranger)

    with pytest.raises(PlanError, match="of the parameter w reads a tensor on the meta device"):
        one(holder(fill))


def test_draw_that_a_buffer_also_keeps_is_refused() -> None:
    def fill(module: nn.Module) -> None:
        signs = torch.randn(3, 5)
        module.register_buffer("signs", signs)
        module.w = nn.Parameter(signs * 0.1)

    with pytest.raises(PlanError, match="the parameter w is initialized from random values"):
        one(holder(fill))


def test_patch_is_removed_after_an_error_and_nesting_is_refused() -> None:
    before = nn.Module.register_parameter
    with pytest.raises(ConfigurationError, match="is active"), record_construction():
        build(lambda: nn.Linear(3, 5))
    assert nn.Module.register_parameter is before
    assert not nn.Linear(3, 5).weight.is_meta
