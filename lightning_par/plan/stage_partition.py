"""Which pipeline stage holds which part of a model: embedding, blocks and head."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import nn

from lightning_par.plan.parallel_plan import ParallelPlan

__all__ = ["Place", "classify_units", "edge_weights", "role_problems"]

Place = Literal["first", "last", "every"]
_ROLES: Mapping[str, Place] = {"first": "first", "last": "last", "replicated": "every"}


def role_problems(plan: ParallelPlan, block_names: Sequence[str]) -> Iterator[str]:
    """Find modules with two of the roles `first`, `last` and `replicated`, or inside a block.

    Args:
        plan: Its names exist in the model.
        block_names: FQN of every block.
    """
    roles: dict[str, str] = {}
    for role in _ROLES:
        for fqn in getattr(plan, role):
            if roles.setdefault(fqn, role) != role:
                yield (
                    f"ParallelPlan names {fqn} both in {roles[fqn]}= and in {role}=. Name it in "
                    "one of the two."
                )
            block = next((b for b in block_names if f"{fqn}.".startswith(b + ".")), None)
            if block is not None:
                yield (
                    f"ParallelPlan({role}=...) names {fqn!r}, which is a part of the block "
                    f"{block}. A block is placed on one stage with all of its parts. Remove "
                    f"{fqn!r} from {role}."
                )


def classify_units(model: nn.Module, plan: ParallelPlan) -> dict[str, Place]:
    """Assign every module and parameter outside the blocks to the first, the last or every stage.

    Modules defined before the blocks go to the first stage, those after them to the last, and those
    between two containers, or without parameters, to every stage. A role in the plan overrides
    this, also for a module nested in one that stands beside the blocks.

    Args:
        model: Parameters may be on meta.
        plan: Its names exist in the model.

    Returns:
        FQN of a module or direct parameter -> the stages that hold it; none lies inside another.
    """
    units: dict[str, Place] = {}
    if plan.blocks is not None:
        _place_around(model, "", set(plan.containers), plan, units)
    return units


def _place_around(
    module: nn.Module, prefix: str, ahead: set[str], plan: ParallelPlan, units: dict[str, Place]
) -> None:
    """Place what a module on the way to the containers holds; take those passed out of `ahead`."""

    def place() -> Place:
        # None of the containers was passed yet; then some; then all.
        if len(ahead) == len(plan.containers):
            return "first"
        return "every" if ahead else "last"

    for name, _ in module.named_parameters(recurse=False):
        units[prefix + name] = _declared(plan, prefix + name) or place()
    for name, child in module.named_children():
        fqn = prefix + name
        if fqn in ahead:
            ahead.discard(fqn)
        # On the way to a container: what stands in it, before or after, is placed by itself.
        elif any(container.startswith(fqn + ".") for container in ahead):
            _place_around(child, fqn + ".", ahead, plan, units)
        else:
            _place(child, fqn, place(), plan, units)


def edge_weights(model: nn.Module, units: Mapping[str, Place]) -> tuple[int, int]:
    """Count the parameters that compute before the blocks and after them.

    Args:
        model: Parameters may be on meta.
        units: From `classify_units`. Embedding tables are looked up, not multiplied, and count as
            nothing.
    """
    weights = {"first": 0, "last": 0}
    modules = dict(model.named_modules())
    for fqn, place in units.items():
        if fqn in modules and place in weights:
            tables = (m for m in modules[fqn].modules() if isinstance(m, nn.Embedding))
            looked_up = {id(p) for table in tables for p in table.parameters()}
            counted = (p for p in modules[fqn].parameters() if id(p) not in looked_up)
            weights[place] += sum(p.numel() for p in counted)
    return weights["first"], weights["last"]


def _place(
    module: nn.Module, fqn: str, place: Place, plan: ParallelPlan, units: dict[str, Place]
) -> None:
    declared = _declared(plan, fqn)
    names = (name for role in _ROLES for name in getattr(plan, role))
    is_taken_apart = declared is None and any(name.startswith(fqn + ".") for name in names)
    # Code looks into a list or dict of modules, which stays: its modules are placed one by one.
    if not is_taken_apart and not _is_only_a_list(module):
        # Without parameters it costs nothing, and may be needed anywhere.
        free = next(module.parameters(), None) is None
        units[fqn] = declared or ("every" if free else place)
        return
    place = declared or place
    for name, _ in module.named_parameters(recurse=False):
        units[f"{fqn}.{name}"] = _declared(plan, f"{fqn}.{name}") or place
    for name, child in module.named_children():
        _place(child, f"{fqn}.{name}", place, plan, units)


def _is_only_a_list(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return False
    # One that computes by itself needs a stub; a module with two names has one place.
    computes = type(module).forward not in (nn.Module.forward, nn.Sequential.forward)
    holds_more = any(True for _ in (*module.parameters(recurse=False), *module.buffers(False)))
    return not computes and not holds_more and len(module) == len({*module.children()})


def _declared(plan: ParallelPlan, fqn: str) -> Place | None:
    return next((p for role, p in _ROLES.items() if fqn in getattr(plan, role)), None)
