"""A precision that cannot be is refused in one error with what would work."""

from typing import Any

import pytest

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import MixedPrecision
from lightning_par.errors import ConfigurationError
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"precision": "16"}, r"precision='16' must be '16-mixed', 'bf16-mixed' or 'bf16-true'"),
        (
            {"reduce_dtype": "int8"},
            "reduce_dtype='int8' must be 'bfloat16', 'float16' or 'float32'",
        ),
        (
            {"precision": "16-mixed", "float8": True},
            "needs precision='bf16-mixed', but it is '16-m",
        ),
        ({"float8": "mxfp8"}, "needs precision='bf16-true', but it is 'bf16-mixed'"),
        ({"float8": "e4m3"}, "float8='e4m3' must be False, True, 'tensorwise', 'rowwise' or 'mx"),
        ({"init_scale": 0}, "init_scale=0 must be more than 0"),
        ({"growth_interval": 0.5}, "growth_interval=0.5 must be a whole number of 1 or more"),
        ({"precision": "x", "reduce_dtype": "y"}, "2 problems"),
    ],
    ids=str,
)
def test_it_is_said_where_it_is_written(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        MixedPrecision(**options)


@pytest.mark.parametrize(
    ("trainer", "options", "says"),
    [
        (
            {"precision": "bf16-mixed"},
            {"precision": "bf16-true"},
            r"MixedPrecision\('bf16-true'\) and Trainer\(precision='bf16-mixed'\) ask for",
        ),
        (
            {},
            {"reduce_dtype": "bfloat16"},
            "reduce_dtype='bfloat16' needs a strategy of lightning_par",
        ),
        ({}, {"float8": True}, "capability 8.9 or higher, but the Trainer runs on cpu"),
        (
            {},
            {"float8": "mxfp8", "precision": "bf16-true"},
            "capability 10.0 or higher, but the Trainer runs on cpu",
        ),
    ],
    ids=str,
)
def test_it_is_said_of_the_trainer(
    trainer: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    made = quiet_trainer(devices=1, max_steps=1, callbacks=[MixedPrecision(**options)], **trainer)
    with pytest.raises(ConfigurationError, match=says):
        made.fit(ToyModule(), loader(ToyData(4), 4), loader(ToyData(4), 4))


@ranks(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_that_says_the_same_or_nothing_agrees(
    rank: int, world: int, precision: Any
) -> None:
    strategy = Hybrid3DStrategy(tensor_parallel_size=2)
    callbacks = [MixedPrecision("bf16-mixed")]
    made = quiet_trainer(
        strategy=strategy, devices=2, max_steps=1, precision=precision, callbacks=callbacks
    )
    module = ToyModule(blocks=2)
    made.fit(module, loader(ToyData(4), 4), loader(ToyData(4), 4))
    made.validate(module, loader(ToyData(4), 4))
    assert made.precision == "bf16-mixed"
