"""The numbers and the rule of the calculator of layouts, from the package."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_par.commands.prediction.planned_run import implementation
from lightning_par.models import GPTConfig, MixtralConfig
from lightning_par.models.gpt.config import PRESETS
from lightning_par.models.mixtral.config import MIXTRAL_PRESETS
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.plain_layout import RULE, ZERO_STAGES
from lightning_par.planner.profiles import device_names, load_profile
from lightning_par.planner.search import Planner

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")
ANSWERS = Path(__file__).with_name("answers.json")
"""Common questions with their answers, as answers.py writes them."""
_LIMITS = ("largest_micro_batch", "shortest_context", "most_gathering_nodes")


def data() -> dict[str, Any]:
    """Return what the calculator reads, as JSON can hold it."""
    shapes = {name: asdict(read_shape(config)) for name, config in configurations().items()}
    profiles = {name: load_profile(name) for name in device_names()}
    limits = {n: LayoutSpace.__dataclass_fields__[n].default for n in _LIMITS}
    a100 = profiles["a100-80"]
    return {
        "models": shapes,
        "devices": {name: machine(profile) for name, profile in profiles.items()},
        "code": {p: asdict(implementation(p, a100)) for p in PRECISIONS},
        "limits": limits
        | {"margin": Planner.__dataclass_fields__["margin"].default, "zero_stages": ZERO_STAGES},
        "rule": RULE,
        "answers": json.loads(ANSWERS.read_text()),
    }


def configurations() -> dict[str, Any]:
    """Return every model that the calculator starts from."""
    configs: dict[str, Any] = {name: GPTConfig.preset(name) for name in PRESETS}
    return configs | {f"mixtral {n}": MixtralConfig.preset(n) for n in MIXTRAL_PRESETS}


def machine(profile: Any) -> dict[str, float]:
    """Return what the calculator needs of a device."""
    return {name: getattr(profile, name) for name in ("memory", "node")}
