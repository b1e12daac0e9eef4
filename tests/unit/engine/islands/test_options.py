"""Options of islands: what they take, and one clear error for what they do not."""

import math
import re
from typing import Any

import pytest

from lightning_par.engine.data.islands.options import Outer, read_outer
from lightning_par.errors import ConfigurationError


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"every": 0}, "every=0 must be a whole number of 1 or more."),
        ({"every": True}, "every=True must be"),
        ({"fragments": 2.5}, "fragments=2.5 must be"),
        ({"overlap": -1}, "overlap=-1 must be a whole number of 0 or more."),
        ({"optimizer": "adam"}, "'adam' must be 'nesterov', 'average' or 'sgd'."),
        ({"quantize": "int2"}, "quantize='int2' must be 'none', 'bf16', 'int8' or 'int4'."),
        ({"lr": 0}, "lr=0 must be a number of more than 0."),
        ({"lr": math.nan}, "lr=nan must be"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and less than 1."),
        ({"grace": -2}, "grace=-2 must be a number of seconds"),
        ({"timeout": "1 h"}, "timeout='1 h' must be"),
        (
            {"optimizer": "average", "lr": 0.5},
            "weights, so lr=0.5 and momentum=None have no effect",
        ),
        ({"optimizer": "nesterov", "momentum": 0}, "needs a momentum of more than 0"),
        ({"every": 12, "fragments": 4, "overlap": 3}, "Use overlap=2 or less."),
        ({"every": 2, "fragments": 3}, "Use fragments=2 or less."),
        ({"island": 1}, "island= and islands= must be passed together"),
        ({"island": 2, "islands": 2}, "island= a number from 0 to islands - 1"),
    ],
)
def test_impossible_value_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        Outer(**fields)


def test_every_problem_is_in_one_message() -> None:
    with pytest.raises(ConfigurationError, match=r"2 problems:\n.*every=0.*\n.*grace=-1"):
        Outer(every=0, grace=-1)


def test_defaults_are_those_of_the_outer_optimizer() -> None:
    rates = {name: Outer(optimizer=name) for name in ("nesterov", "average", "sgd")}
    assert {n: (o.lr, o.momentum) for n, o in rates.items()} == {
        "nesterov": (0.7, 0.9),
        "average": (1.0, 0.0),
        "sgd": (1.0, 0.0),
    }


def test_islands_need_not_agree_on_where_they_are() -> None:
    here = Outer(island=0, islands=2, server="a:1", timeout=5).agreement()
    assert here == Outer(island=1, islands=2, server="b:2").agreement()
    assert here != Outer(every=49).agreement()


def test_dict_of_fields_is_read() -> None:
    assert read_outer({"every": 7, "grace": 1}) == Outer(every=7, grace=1)
    assert read_outer(None) is None
    with pytest.raises(ConfigurationError, match=r"outer has no field 'evry'.*every"):
        read_outer({"evry": 7})
