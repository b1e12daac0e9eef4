"""Finds the plan of a model: its own `parallel_plan()`, or one derived for Hugging Face models."""

from torch import nn

from lightning_par.errors import PlanError
from lightning_par.huggingface.plans import find_huggingface_plan
from lightning_par.plan.parallel_plan import ParallelPlan

__all__ = ["declares_plan", "find_plan"]


def declares_plan(module: nn.Module) -> bool:
    """Return whether `module` or one of its submodules has a `parallel_plan()`."""
    return any(callable(getattr(child, "parallel_plan", None)) for child in module.modules())


def find_plan(module: nn.Module) -> ParallelPlan | None:
    """Return the plan that `module` or one of its submodules offers through `parallel_plan()`.

    The outermost offer wins; its FQNs are given as seen from `module`. Without an offer, the plan
    of a Hugging Face model inside is derived from the model.

    Args:
        module: A LightningModule or any other module.

    Returns:
        The plan, or None if nobody offers one.

    Raises:
        PlanError: Two submodules, neither inside the other, each offer a plan, or an offer is
            something else.
    """
    found: dict[str, ParallelPlan] = {}
    for name, child in module.named_modules():
        # named_modules gives outer ones first: the outermost offer wins.
        inside = any(name.startswith(outer + ".") or outer == "" for outer in found)
        if not inside and callable(getattr(child, "parallel_plan", None)):
            plan = child.parallel_plan()
            if not isinstance(plan, ParallelPlan):
                raise PlanError(
                    "LP201",
                    f"{type(child).__name__}.parallel_plan() returned {plan!r}, which is no "
                    "ParallelPlan. Return a ParallelPlan, or remove the method: the plan is then "
                    "inferred from the model.",
                )
            found[name] = plan.under(name)
    if len(found) > 1:
        raise PlanError(
            "LP201",
            f"{len(found)} submodules define parallel_plan(): {', '.join(found)}. Which plan "
            "applies to the whole model is not known. Define parallel_plan() on the whole model, "
            f"{type(module).__name__}, or pass plan= to the strategy.",
        )
    return next(iter(found.values())) if found else find_huggingface_plan(module)
