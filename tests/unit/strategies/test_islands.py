"""Where an island is, and what cannot be combined with it."""

import copy
import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging

from lightning_par import Hybrid3DStrategy
from lightning_par.engine.data.islands.options import Outer
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.island_place import find_island, find_place
from tests.support.parity import train


def test_place_is_that_of_the_options_or_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find_island(None) == (0, 1)
    assert find_island(Outer(island=1, islands=3)) == (1, 3)
    monkeypatch.setenv("LIGHTNING_PAR_ISLAND", "2/4")
    monkeypatch.setenv("LIGHTNING_PAR_SERVER", "host:29600")
    monkeypatch.setenv("LIGHTNING_PAR_KEY", "a key of 16 bytes")
    place = find_place(Outer(), 1, 2)
    assert (place.island, place.server, place.key) == (2, "host:29600", b"a key of 16 bytes")
    assert find_place(Outer(server="other:1"), 0, 1).server == "other:1"
    assert find_place(Outer(server="one:1,two:2"), 0, 1).server == "one:1,two:2"


@pytest.mark.parametrize("given", [None, "2", "4/4", "a/b"])
def test_island_that_nobody_names_is_an_error(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_PAR_ISLAND", raising=False)
    if given is not None:
        monkeypatch.setenv("LIGHTNING_PAR_ISLAND", given)
    with pytest.raises(ConfigurationError, match=re.escape("LIGHTNING_PAR_ISLAND=0/4")):
        find_island(Outer())
    for server in ("nowhere", "one:1,two", "one:1,"):
        with pytest.raises(ConfigurationError, match="LIGHTNING_PAR_SERVER=host:port"):
            find_place(Outer(server=server), 0, 1)


def test_option_is_read_and_refused_with_an_optimizer_on_the_host() -> None:
    assert MeshOptions(outer={"every": 3}).outer == Outer(every=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="outer has no field 'evry'"):
        Hybrid3DStrategy(outer={"evry": 3})
    with pytest.raises(ConfigurationError, match="outer= is not supported with offload_options="):
        Hybrid3DStrategy(outer={}, offload_options={})


OUTER = {"island": 0, "islands": 1, "server": "127.0.0.1:1", "timeout": 0}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"callbacks": [WeightAveraging()]}, "a callback that averages weights"),
        ({"trainer": {"precision": "bf16-true"}}, "Use precision='bf16-mixed'"),
    ],
)
def test_what_would_not_be_exchanged_is_refused(
    options: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_KEY", "a key of 16 bytes")
    with pytest.raises(ConfigurationError, match=text):
        train(Hybrid3DStrategy(outer=OUTER), devices=1, batch_size=2, **options)
    torch.set_default_dtype(torch.float32)


def test_nothing_is_left_in_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PAR_KEY", "a key of 16 bytes")
    seen: list[pl.Trainer] = []
    copies: list[type] = []

    class Keep(pl.Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(trainer)
            callbacks = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
            copies.extend(type(callback) for callback in callbacks)
            raise KeyError("stop")

    with pytest.raises(KeyError):
        train(Hybrid3DStrategy(outer=OUTER), devices=1, batch_size=2, callbacks=[Keep()])
    torch.set_default_dtype(torch.float32)
    names = [type(callback).__name__ for callback in seen[0].callbacks]  # type: ignore[attr-defined]
    assert "Keep" in names
    assert "IslandRounds" not in names
    assert copies[0] is pl.Callback  # the proof of the first step copies them, and meets nobody
