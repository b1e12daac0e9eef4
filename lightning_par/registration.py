"""Registers the names of the strategies with Lightning, without importing Lightning.

Note [Registration]: ``Trainer(strategy="hybrid3d")`` has to work after a plain ``import
lightning_par``, and ``import lightning_par.engine`` must not import Lightning. So the names are
registered at once where Lightning's registry exists already, and otherwise by a finder on
``sys.meta_path`` as soon as somebody imports that registry. At that moment Lightning is only half
imported; therefore a name stands for a function, which imports the strategies when it is called.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["STRATEGIES", "register_strategies"]

STRATEGIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "tensor_parallel": ("TensorParallelStrategy", "tensor parallelism", {}),
    "pipeline_1f1b": ("Pipeline1F1BStrategy", "pipeline parallelism, one forward one backward", {}),
    "sequence_ring": ("SequenceRingStrategy", "context parallelism with ring attention", {}),
    "hybrid3d": ("Hybrid3DStrategy", "tensor, pipeline, context and data parallelism together", {}),
    "auto_parallel": ("AutoParallelStrategy", "the layout that is predicted to be fastest", {}),
    "zero_offload": ("ZeROOffloadStrategy", "sharded data parallelism, optimizer on the host", {}),
    "islands": (
        "IslandsStrategy",
        "every device trains alone, and averages weights with the other devices every few steps",
        {},
    ),
    **{
        f"zero_offload_stage_{stage}": (
            "ZeROOffloadStrategy",
            f"ZeRO stage {stage}, optimizer on the host",
            {"stage": stage},
        )
        for stage in (1, 2, 3)
    },
}
"""Registered name -> class in `lightning_par.strategies`, description, and options of the class."""

_REGISTRY_MODULE = "lightning.pytorch.strategies"


def register_strategies() -> None:
    """Register every name of `STRATEGIES`: now, or when Lightning's registry is imported."""
    module = sys.modules.get(_REGISTRY_MODULE)
    if module is not None:
        _fill(module)
    elif not any(isinstance(finder, _RegistryFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegistryFinder())


def _fill(module: ModuleType) -> None:
    registry = module.StrategyRegistry
    for name, (kind, description, options) in STRATEGIES.items():
        # A second import of the package in one process, as in a notebook, changes nothing.
        if name not in registry:
            registry.register(name, partial(_make, kind), description=description, **options)


def _make(kind: str, **options: Any) -> Any:
    # Imported at the call: Lightning may be half imported when names are registered.
    return getattr(import_module("lightning_par.strategies"), kind)(**options)


class _RegistryFinder(MetaPathFinder):
    """Finds Lightning's registry as the other finders do, and fills it once it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        # The module is found as always; only its loader is wrapped.
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((found for found in specs if found is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _FillingLoader(spec.loader, self)
        return spec


class _FillingLoader(Loader):
    """Runs a module with its own loader, then fills the registry and removes the finder."""

    def __init__(self, loader: Loader, finder: _RegistryFinder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader, which also reads its source for tracebacks.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _fill(module)
        sys.meta_path.remove(self._finder)
