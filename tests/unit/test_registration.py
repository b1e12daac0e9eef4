"""A plain ``import lightning_par`` is enough for the strategies' names, and costs no Lightning."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lightning_par
from lightning_par import registration, strategies
from lightning_par.registration import register_strategies, STRATEGIES
from lightning_par.strategies.mesh_strategy import MeshStrategy

OURS_FIRST = """
import sys, lightning_par
from lightning_par.registration import _RegistryFinder
assert "lightning" not in sys.modules
import lightning.pytorch as pl
from lightning.pytorch.strategies import StrategyRegistry
assert not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path)
assert "lightning_par.strategies" not in sys.modules
assert "zero_offload_stage_3" in StrategyRegistry.available_strategies()
trainer = pl.Trainer(strategy="hybrid3d", accelerator="cpu", devices=1, logger=False)
assert type(trainer.strategy) is lightning_par.Hybrid3DStrategy
module = sys.modules["lightning.pytorch.strategies"]
assert module.__spec__.loader is module.__loader__ and module.__loader__.get_source
"""


def test_names_are_registered_when_lightning_is_imported_later() -> None:
    run = subprocess.run([sys.executable, "-c", OURS_FIRST], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_names_are_registered_when_lightning_is_there_already() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    assert {*STRATEGIES} <= {*StrategyRegistry.available_strategies()}
    made = StrategyRegistry.get("zero_offload_stage_2")
    assert type(made) is lightning_par.ZeROOffloadStrategy
    assert made.zero_stage == 2
    before = dict(StrategyRegistry)
    register_strategies()  # a second time, as after a reload
    assert dict(StrategyRegistry) == before


def test_every_preset_is_registered_under_its_name() -> None:
    presets = {n for n in strategies.__all__ if getattr(strategies, n) is not MeshStrategy}
    named = {getattr(strategies, n).strategy_name: n for n in presets}
    assert {n: kind for n, (kind, _, options) in STRATEGIES.items() if not options} == named
    assert {kind for kind, _, _ in STRATEGIES.values()} == presets


def test_a_failed_import_of_lightning_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "registry_of_a_test.py").write_text(
        "import os\nif 'FAILS' in os.environ: raise ImportError\n"
        "from lightning.fabric.strategies.registry import _StrategyRegistry\n"
        "StrategyRegistry = _StrategyRegistry()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registration, "_REGISTRY_MODULE", "registry_of_a_test")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv("FAILS", "1")
    register_strategies()
    with pytest.raises(ImportError):
        __import__("registry_of_a_test")
    monkeypatch.delenv("FAILS")
    module: ModuleType = __import__("registry_of_a_test")
    assert {*module.StrategyRegistry} == {*STRATEGIES}
    del sys.modules["registry_of_a_test"]


def test_lazy_exports_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(str(lightning_par.__file__)).read_text())
    (choice,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: str(node.module).removeprefix("lightning_par.")
        for node in choice.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    packages = {name for name, module in seen.items() if module == "lightning_par"}
    seen = {name: module for name, module in seen.items() if name not in packages}
    assert packages == {*lightning_par._PACKAGES}  # type: ignore[attr-defined]
    assert seen == lightning_par._EXPORTS  # type: ignore[attr-defined]
    assert {*lightning_par.__all__} == {*seen, "__version__"}
    assert {*lightning_par.__all__, "models", "huggingface"} <= {*dir(lightning_par)}
    for name in lightning_par.__all__:
        assert getattr(lightning_par, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Hybrid4DStrategy'"):
        lightning_par.Hybrid4DStrategy  # type: ignore[attr-defined]  # noqa: B018
