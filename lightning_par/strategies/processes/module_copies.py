"""A copy of a pipelined module inside of the module, and the error that code for it runs into."""

from collections import defaultdict
from collections.abc import Iterable

from lightning_par.errors import ConfigurationError, LightningParError

__all__ = ["explain_copy", "find_copy"]

_DEPTHS = (1, 2)
"""Components of a name that may be those of the copy: ``ema.`` and ``average.module.``."""


def find_copy(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the FQNs of two modules whose parameters have the same names inside, or None.

    Such as a model and the average of its weights. Modules with one parameter do not count.

    Args:
        names: Of all parameters.
    """
    inside: dict[str, set[str]] = defaultdict(set)
    for name in names:
        # Under each prefix of one or two parts, what is below it.
        parts = name.split(".")
        for depth in _DEPTHS:
            if len(parts) > depth + 1:
                inside[".".join(parts[:depth])].add(".".join(parts[depth:]))
    owners: dict[frozenset[str], str] = {}
    for owner, found in inside.items():
        # The first module with these names below it.
        other = owners.setdefault(frozenset(found), owner)
        is_nested = owner.startswith(other + ".")
        # Blocks of a list are alike, too: their names differ in a number only.
        if other != owner and not is_nested and len(found) > 1 and not _is_numbered(owner):
            return other, owner
    return None


def _is_numbered(owner: str) -> bool:
    return owner.rpartition(".")[2].isdigit()


def explain_copy(error: BaseException, copy: tuple[str, str]) -> ConfigurationError | None:
    """Return what to say of an exception that a hook raised on a stage of a pipeline.

    Args:
        error: What was raised between two steps.
        copy: The module of which this rank holds a stage, and its copy.

    Returns:
        None if the error is of another kind.
    """
    kinds = (KeyError, IndexError, ValueError, RuntimeError)
    # What code raises that pairs parameters by name, by place, or by shape.
    if not isinstance(error, kinds) or isinstance(error, LightningParError):
        return None
    one, other = copy
    return ConfigurationError(
        "LP412",
        f"a hook that runs after the step raised {type(error).__name__}: {error}.\nWhy: the hook "
        f"loops over {one!r} and its copy {other!r} together, for example to average weights. "
        "Each rank of a pipeline holds only the parameters of its own stage, so the names of the "
        "parameters of the two differ.\nWhat to write: use Lightning's callback "
        "EMAWeightAveraging or WeightAveraging, which works on every rank, or use "
        "pipeline_parallel_size=1.",
    )
