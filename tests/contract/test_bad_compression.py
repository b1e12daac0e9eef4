"""Wrong choices of gradient compression: one message each, before any process starts."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

import lightning_par
from lightning_par.errors import ConfigurationError
from tests.support.models.compression import replicas
from tests.support.models.mixture import layout, make
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks

MISTAKES: dict[str, tuple[Any, str]] = {
    "method": ("zip", r"gradient_compression='zip' must be 'fp16', .* or 'int8'"),
    "field": (
        {"method": "topk", "densty": 0.1},
        r"gradient_compression has no field 'densty'\. .*; did you mean 'density'\?",
    ),
    "no method": ({"rank": 4}, r"gradient_compression=\{'rank': 4\} is not complete: .*'method'"),
    "rank": ({"method": "powersgd", "rank": 0}, r"rank=0 must be a whole number of 1 or more"),
    "density": ({"method": "topk", "density": 0}, r"density=0 must be a number of more than 0"),
    "density of many": ({"method": "topk", "density": 2.0}, r"density=2.0 must .* at most 1"),
    "start": ({"method": "int8", "start_step": -1}, r"start_step=-1 must be a whole number of 0"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_values_that_do_not_exist(name: str) -> None:
    chosen, says = MISTAKES[name]
    with pytest.raises(ConfigurationError, match=says):
        replicas(chosen)


@pytest.mark.parametrize("kind", ["Hybrid3DStrategy", "ZeROOffloadStrategy"])
def test_sharded_gradients(kind: str) -> None:
    says = r"gradient_compression='int8' with zero_stage=[12] is not supported: .* Use zero_stage=0"
    with pytest.raises(ConfigurationError, match=says):
        getattr(lightning_par, kind)(gradient_compression="int8")


@ranks(2)
def test_divided_experts(rank: int, world: int) -> None:
    sizes = layout(ep=2, zero=0, context_parallel_size=2)
    strategy = lightning_par.Hybrid3DStrategy(**sizes, gradient_compression="int8")
    trainer = quiet_trainer(strategy=strategy, devices=2, max_steps=1)
    says = r"='int8' is not supported with expert_parallel_size=2, .* Use expert_parallel_size=1"
    with pytest.raises(ConfigurationError, match=says):
        trainer.fit(make()[0], DataLoader(make()[1], 2))


@ranks(1)
def test_sums_on_the_host(rank: int, world: int) -> None:
    strategy = replicas("int8", offload_options={"accumulate_on": "host"})
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1)
    says = r"='int8' is not supported with accumulate_on='host': .* Use accumulate_on='device'"
    with pytest.raises(ConfigurationError, match=says):
        trainer.fit(make()[0], DataLoader(make()[1], 2))


@pytest.mark.parametrize("option", ["zero_stage", "offload_options"])
def test_names_that_zero_offload_gives_itself(option: str) -> None:
    with pytest.raises(TypeError, match=rf"ZeROOffloadStrategy has no option '{option}'.*stage="):
        lightning_par.ZeROOffloadStrategy(**{option: 0})


def test_all_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        lightning_par.GradientCompression(method="zip", rank=0, density=-1)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in ("'zip'", "rank=0", "density=-1"))


@pytest.mark.parametrize("chosen", ["int8", {"method": "int8"}])
def test_plain_names_and_fields_are_the_same(chosen: Any) -> None:
    wanted = lightning_par.GradientCompression(method="int8")
    assert replicas(chosen).options.gradient_compression == wanted
    assert replicas(wanted).options.gradient_compression == wanted
