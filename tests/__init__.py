"""Tests; importing this package turns on the checks of shapes in the engine's annotations.

It is imported by pytest, by the process that forks the ranks, and so by every rank.
"""

from jaxtyping import install_import_hook

# Not of what runs inside compiled blocks: the compiler would trace the checks.
install_import_hook(
    [f"lightning_par.engine.{name}" for name in ("batch", "gradients", "vocabulary")],
    "beartype.beartype",
)
