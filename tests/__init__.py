"""Tests; importing this package turns on the checks of shapes in the engine's annotations.

It is imported by pytest, by the process that forks the ranks, and so by every rank.
"""

import random
from pathlib import Path
from unittest.mock import patch

# beartype draws which item of a list it looks at; a step that uses Python's generator is run in
# another way than one that draws nothing, which the checks must not change.
with patch("random.getrandbits", random.Random(0).getrandbits):
    from beartype import beartype, BeartypeConf
from jaxtyping import install_import_hook

_ROOT = Path(__file__).resolve().parents[1]

# An int where a float is annotated is right, as for mypy.
check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))


def _modules_with_shapes() -> list[str]:
    """Give every module of the engine that annotates the shape of a tensor.

    The others have nothing that jaxtyping could add to mypy, and some may not be checked: blocks
    that are compiled run code of them (`engine.tensor.apply`), and torch.compile would trace the
    checks; options and schedules check what a user gives them, and say so better than beartype.
    """
    paths = sorted((_ROOT / "lightning_par" / "engine").rglob("*.py"))
    shaped = [p for p in paths if "lightning_par.engine.annotations import" in p.read_text()]
    return [".".join(p.relative_to(_ROOT).with_suffix("").parts) for p in shaped]


install_import_hook(_modules_with_shapes(), "tests.check_types")
