"""Recomputation that cannot be is refused in one error with what would work."""

from typing import Any

import pytest

from lightning_par import Pipeline1F1BStrategy
from lightning_par.callbacks import ActivationCheckpointing
from lightning_par.errors import ConfigurationError
from tests.support.faults.user_mistakes import Bare
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "some"}, r"mode='some' must be 'full', 'none' or 'selective'"),
        ({"every": 0}, "every=0 must be a whole number of 1 or more"),
        ({"every": True}, "every=True must be"),
        ({"offload": "disk"}, "offload='disk' must be 'cpu' or None"),
        (
            {"per_stage": ["full", "half"]},
            r"per_stage=\['full', 'half'\] must be 'auto', or a list",
        ),
        ({"operations": "mm"}, r"operations='mm' must be a list, as in \['mm'\]"),
        ({"operations": ["mmm"]}, "names 'mmm', but torch has no operation"),
        ({"parts": "attention"}, r"must be a list, as in \['attention'\], or 'plan'"),
        ({"mode": "full", "parts": ["mlp"]}, "parts= needs mode='selective', but mode is 'full'"),
        ({"operations": ["mm"], "parts": ["mlp"]}, "Pass only one of them"),
        ({"mode": "x", "every": -1}, "2 problems"),
    ],
    ids=str,
)
def test_it_is_said_where_it_is_written(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        ActivationCheckpointing(**options)


FITS = [
    (
        {"parts": ["attn"]},
        ToyModule,
        r"parts=\['attn'\]\) matches no module inside the blocks\. .*mlp",
    ),
    ({"parts": "plan"}, ToyModule, "the plan of the model names none"),
    ({"per_stage": ["full"] * 3}, ToyModule, "lists 3 modes, but there are 2 pipeline stage"),
]


@ranks(2)
@pytest.mark.parametrize(("options", "module", "says"), FITS, ids=str)
def test_it_is_said_of_the_model_on_every_rank(
    rank: int, world: int, options: dict[str, Any], module: Any, says: str
) -> None:
    strategy = Pipeline1F1BStrategy(num_microbatches=2)
    callback = ActivationCheckpointing(**options)
    made = quiet_trainer(strategy=strategy, devices=2, max_steps=1, callbacks=[callback])
    with pytest.raises(ConfigurationError, match=says):
        made.fit(module(), loader(ToyData(4), 4))


class OneBlock(Bare):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        for block in self.model.blocks:
            block.mlp = block.mlp[0]  # nor any list inside


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"nn\.ModuleList or nn\.Sequential of two or more modules of the same class"),
        ({"parts": "plan"}, "the plan of the model names none"),
    ],
    ids=str,
)
def test_it_is_said_of_a_model_without_a_plan(options: dict[str, Any], says: str) -> None:
    made = quiet_trainer(devices=1, max_steps=1, callbacks=[ActivationCheckpointing(**options)])
    with pytest.raises(ConfigurationError, match=says):
        made.fit(OneBlock(), loader(ToyData(4), 4), loader(ToyData(4), 4))
