"""The numbers of the calculator of layouts, from the package: models, devices, bytes, limits."""

from dataclasses import asdict
from typing import Any

from lightning_par.commands.prediction.planned_run import implementation
from lightning_par.models import GPTConfig, MixtralConfig
from lightning_par.models.gpt.config import PRESETS
from lightning_par.models.mixtral.config import MIXTRAL_PRESETS
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import device_names, load_profile, reached
from lightning_par.planner.search import Planner

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")
_LIMITS = ("largest_micro_batch", "shortest_context", "most_gathering_nodes")


def data() -> dict[str, Any]:
    """Return what the calculator reads, as JSON can hold it."""
    configs: dict[str, Any] = {name: GPTConfig.preset(name) for name in PRESETS}
    configs |= {f"mixtral {n}": MixtralConfig.preset(n) for n in MIXTRAL_PRESETS}
    shapes = {name: asdict(read_shape(config)) for name, config in configs.items()}
    profiles = {name: load_profile(name) for name in device_names()}
    limits = {n: LayoutSpace.__dataclass_fields__[n].default for n in _LIMITS}
    a100 = profiles["a100-80"]
    return {
        "models": shapes,
        "devices": {name: machine(profile) for name, profile in profiles.items()},
        "code": {p: asdict(implementation(p, a100)) for p in PRECISIONS},
        "limits": limits | {"margin": Planner.__dataclass_fields__["margin"].default},
    }


def machine(profile: Any) -> dict[str, float]:
    """Return what the calculator needs of a device."""
    names = ("flops", "memory", "link", "network", "node")
    fitted = reached(profile)
    rates = {n: getattr(fitted, n) for n in ("product", "host", "link_start")}
    return {n: getattr(profile, n) for n in names} | rates
