"""Tests; importing this package turns on the checks of shapes in the engine's annotations.

It is imported by pytest, by the process that forks the ranks, and so by every rank.
"""

from pathlib import Path

from jaxtyping import install_import_hook

_ROOT = Path(__file__).resolve().parents[1]
_COMPILED: set[str] = set()


def _modules_with_shapes() -> list[str]:
    """Give every module of the engine that annotates shapes, less what runs in compiled blocks."""
    paths = sorted((_ROOT / "lightning_par" / "engine").rglob("*.py"))
    shaped = [p for p in paths if "lightning_par.engine.annotations import" in p.read_text()]
    names = {".".join(p.relative_to(_ROOT).with_suffix("").parts) for p in shaped}
    return sorted(names - _COMPILED)


install_import_hook(_modules_with_shapes(), "beartype.beartype")
