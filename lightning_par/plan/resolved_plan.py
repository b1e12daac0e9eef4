"""A `ParallelPlan` resolved against a model: the style and the pipeline stage of every module.

Everything here reads shapes and names only, so it works on a model whose parameters are on the meta
device.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeVar

from torch import nn

from lightning_par.errors import either, nearest, PlanError, Problem, raise_problems
from lightning_par.plan.block_partition import partition_blocks
from lightning_par.plan.parallel_plan import match_pattern, ParallelPlan
from lightning_par.plan.stage_partition import (
    classify_units,
    edge_weights,
    Place,
    role_problems,
)
from lightning_par.plan.tensor_styles import TENSOR_STYLES, TensorStyle
from lightning_par.sizes import ParallelSizes

__all__ = ["ResolvedPlan", "balance_blocks", "check_plan", "resolve_plan"]

_T = TypeVar("_T")

_MOST_DEGREES = 64  # of those that a message lists


@dataclass(frozen=True, kw_only=True, eq=False)
class ResolvedPlan:
    """Where every part of one model belongs.

    Attributes:
        plan: The plan that was resolved, FQNs as seen from the model.
        block_names: FQN of every block in order; empty if the model cannot be cut.
        block_weights: Number of parameters of every block.
        edge_weights: Number of parameters that compute before the blocks and after them; embedding
            tables, which are looked up and not multiplied, count as nothing.
        units: FQN of a module or direct parameter outside the blocks -> the stages that hold it.
        canonical: FQN of every parameter -> the first FQN under which the same parameter appears.
        styles: FQN of a module -> its tensor-parallel style.
        divided: FQN of a module -> attributes to divide by the tensor-parallel degree.
    """

    plan: ParallelPlan
    block_names: tuple[str, ...]
    block_weights: tuple[int, ...]
    edge_weights: tuple[int, int]
    units: Mapping[str, Place]
    canonical: Mapping[str, str]
    styles: Mapping[str, TensorStyle]
    divided: Mapping[str, tuple[str, ...]]

    @cached_property
    def kept(self) -> frozenset[int]:
        """Numbers of the blocks whose output later code reads, besides the next block."""
        # The last number of each container, as later entries overwrite earlier ones.
        ends = {f.rpartition(".")[0]: number for number, f in enumerate(self.block_names)}
        named = (self.block_names.index(f) for f in self.plan.kept)
        return frozenset((*ends.values(), *named)) - {len(self.block_names) - 1}

    @cached_property
    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of parameter FQNs that are one parameter; the canonical name comes first."""
        groups: dict[str, list[str]] = {}
        for name, canonical in self.canonical.items():
            groups.setdefault(canonical, []).append(name)
        return tuple(tuple(group) for group in groups.values() if len(group) > 1)

    def stages_of(self, fqn: str, bounds: Sequence[tuple[int, int]]) -> frozenset[int]:
        """Return the pipeline stages that hold the parameter or module `fqn`.

        Args:
            fqn: As seen from the model.
            bounds: First and one-past-last block of every stage.
        """
        for index, block in enumerate(self.block_names):
            if fqn == block or fqn.startswith(block + "."):
                return frozenset(s for s, (lo, hi) in enumerate(bounds) if lo <= index < hi)
        for unit, place in self.units.items():
            if fqn == unit or fqn.startswith(unit + "."):
                last = len(bounds) - 1
                return frozenset({"first": {0}, "last": {last}}.get(place, range(last + 1)))
        # What is in no unit has no parameters of its own, and is everywhere.
        return frozenset(range(len(bounds)))


def resolve_plan(model: nn.Module, plan: ParallelPlan) -> ResolvedPlan:
    """Match every name and pattern of `plan` against `model`.

    Args:
        model: Its parameters may be on the meta device.
        plan: FQNs as seen from `model`.

    Raises:
        PlanError: With every name that does not exist, pattern that matches nothing or twice,
            attribute that is missing and tie that is none, each with the nearest real name.
    """
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    problems: list[str] = []
    blocks = _find_blocks(plan, modules, problems)
    for role in ("first", "last", "replicated", "kept"):
        problems += [
            _missing(f"{role} names {fqn!r}", fqn, [*modules, *parameters])
            for fqn in getattr(plan, role)
            if fqn not in modules and fqn not in parameters
        ]
    problems += role_problems(plan, blocks)
    styles = _match_patterns(plan.tensor, list(modules), "tensor", problems)
    # named_modules gives a shared module once, under its first name.
    named = {id(module): name for name, module in modules.items()}
    for alias, module in model.named_modules(remove_duplicate=False):
        if named[id(module)] in styles:  # a stage may know a shared module by any of its names
            styles.setdefault(alias, styles[named[id(module)]])
    divided = _match_patterns(plan.divided, list(modules), "divided", problems)
    for kind in ("experts", "replica_sums", "checkpointable"):
        _match_patterns(dict.fromkeys(getattr(plan, kind), kind), list(modules), kind, problems)
    for fqn, names in divided.items():
        problems += [
            f"ParallelPlan(divided=...): {fqn} has no attribute {name!r} that is a whole number"
            + _nearest(name, [n for n, v in vars(modules[fqn]).items() if isinstance(v, int)])
            for name in names
            if not isinstance(getattr(modules[fqn], name, None), int)
        ]
    canonical = canonical_names(model)
    for group in plan.tied:
        unknown = [fqn for fqn in group if fqn not in parameters]
        problems += [_missing(f"tied= names {fqn!r}", fqn, list(parameters)) for fqn in unknown]
        if not unknown and len({canonical[fqn] for fqn in group}) > 1:
            first, *others = group
            problems.append(
                f"ParallelPlan(tied=...): {' and '.join(group)} are different parameters of this "
                f"model. Tie them ({others[-1]} = {first}), or remove them from tied=."
            )
    raise_problems(PlanError, "LP203", problems)
    units = classify_units(model, plan)
    return ResolvedPlan(
        plan=plan,
        block_names=tuple(blocks),
        block_weights=tuple(_num_parameters(modules[name]) for name in blocks),
        edge_weights=edge_weights(model, units),
        units=units,
        canonical=canonical,
        styles=styles,
        divided=divided,
    )


def check_plan(
    model: nn.Module,
    plan: ParallelPlan,
    sizes: ParallelSizes | None = None,
    *,
    sequence_parallel: bool = True,
    stage_blocks: Sequence[int] | None = None,
    stages_per_rank: int = 1,
) -> ResolvedPlan:
    """Check that `plan` fits `model` and, where given, that both fit the sizes.

    Args:
        model: Its parameters may be on the meta device; nothing is changed.
        plan: FQNs as seen from `model`.
        sizes: The parallel sizes to check; None checks names only.
        sequence_parallel: Whether activations between the blocks are sharded along T.
        stage_blocks: Number of blocks per stage; None balances them.
        stages_per_rank: How many stages the schedule places on a pipeline rank.

    Returns:
        The plan resolved against the model.

    Raises:
        PlanError: With every problem in one message.
    """
    resolved = resolve_plan(model, plan)
    # All problems of both kinds in one message: the user mends them together.
    if sizes is not None:
        stages = sizes.pipeline * (stages_per_rank if sizes.pipeline > 1 else 1)
        of_stages = _check_pipeline(model, resolved, stages, sizes.pipeline, stage_blocks)
        of_tensors = _check_tensor(model, resolved, sizes.tensor, sequence_parallel)
        raise_problems(PlanError, "LP204", [*of_stages, *of_tensors])
    return resolved


def balance_blocks(
    resolved: ResolvedPlan, num_stages: int, stage_blocks: Sequence[int] | None = None
) -> tuple[tuple[int, int], ...]:
    """Return first and one-past-last block of every stage.

    Without `stage_blocks`, the stages are contiguous, none is empty, and the largest number of
    parameters of a stage is as small as it can be (what runs before and after the blocks counts for
    the first and last stage).

    Args:
        resolved: The resolved plan.
        num_stages: 1 .. number of blocks; 1 if there are none.
        stage_blocks: Number of blocks of every stage, by hand.
    """
    # Exact: a greedy cut may leave the last stage too large.
    if stage_blocks is None:
        stage_blocks = partition_blocks(resolved.block_weights, resolved.edge_weights, num_stages)
    ends = list(accumulate(stage_blocks))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _find_blocks(
    plan: ParallelPlan, modules: Mapping[str, nn.Module], problems: list[str]
) -> list[str]:
    found: list[str] = []
    for fqn in plan.containers:
        container = modules.get(fqn)
        if container is None:
            problems.append(_missing(f"ParallelPlan(blocks=...) names {fqn!r}", fqn, list(modules)))
            continue
        if not isinstance(container, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            problems.append(
                f"ParallelPlan(blocks=...) names {fqn}, which is a {type(container).__name__}. "
                "Name the nn.ModuleList that holds the blocks."
            )
        found += [f"{fqn}.{name}" for name, _ in container.named_children()]
    return found


def _match_patterns(
    patterns: Mapping[str, _T], names: Sequence[str], kind: str, problems: list[str]
) -> dict[str, _T]:
    found: dict[str, _T] = {}
    source: dict[str, str] = {}
    for pattern, value in patterns.items():
        # The empty name is the model, which only the empty pattern means.
        hits = [n for n in names if (n or not pattern) and match_pattern(pattern, n)]
        if not hits:
            problems.append(
                f"ParallelPlan({kind}=...): {pattern!r} matches no module{_nearest(pattern, names)}"
            )
        for name in hits:
            if name in found:
                problems.append(
                    f"ParallelPlan({kind}=...): both {source[name]!r} and {pattern!r} match "
                    f"{name}. Change one of the two patterns, so that only one matches it."
                )
            found[name], source[name] = value, pattern
    return found


def _missing(what: str, name: str, names: Sequence[str]) -> str:
    return f"{what}, but the model has no module or parameter of that name{_nearest(name, names)}"


def _nearest(name: str, names: Sequence[str]) -> str:
    if "*" in name:
        names = [_as_pattern(n) for n in names]
    return nearest(name, filter(None, names))


def _as_pattern(fqn: str) -> str:
    return re.sub(r"\b\d+\b", "*", fqn)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Return FQN of every parameter -> the first FQN under which the same parameter appears."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    # By identity: a tie has the name under which its parameter comes first.
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _check_pipeline(
    model: nn.Module,
    resolved: ResolvedPlan,
    num_stages: int,
    num_ranks: int,
    stage_blocks: Sequence[int] | None,
) -> Sequence[Problem]:
    count = len(resolved.block_names)
    asked = f"pipeline_parallel_size={num_ranks}"
    each = "" if num_stages == num_ranks else f" with {num_stages // num_ranks} stages per rank"
    if num_stages == 1:
        return []
    if "pipeline" in resolved.plan.refusals:
        return [("LP211", f"{asked}: {resolved.plan.refusals['pipeline']}")]
    if not count:
        lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
        near = f'ParallelPlan(blocks="{lists[0]}")' if lists else "ParallelPlan(blocks=...)"
        return [
            f"{asked}: the plan of {type(model).__name__} does not say which modules are its "
            f"blocks. Return {near} from parallel_plan() of the model, or pass plan= to the "
            "strategy."
        ]
    if stage_blocks is not None:
        fits = len(stage_blocks) == num_stages and sum(stage_blocks) == count
        if fits and min(stage_blocks) >= 1:
            return []
        return [
            f"stage_blocks={list(stage_blocks)} has {len(stage_blocks)} entries with the sum "
            f"{sum(stage_blocks)}; {asked}{each} needs {num_stages} entries of 1 or more whose "
            f"sum is {count}, the number of blocks in {', '.join(resolved.plan.containers)}. "
            "Change stage_blocks, or leave it out."
        ]
    if num_stages > count:
        return [
            f"{asked}{each}: {', '.join(resolved.plan.containers)} has {count} blocks, but every "
            "stage needs at least one block. Use "
            f"pipeline_parallel_size={count * num_ranks // num_stages} or less."
        ]
    return []


def _check_tensor(
    model: nn.Module, resolved: ResolvedPlan, degree: int, sequence_parallel: bool
) -> Sequence[Problem]:
    if degree == 1:
        return []
    if "tensor" in resolved.plan.refusals:
        text = f"tensor_parallel_size={degree}: {resolved.plan.refusals['tensor']}"
        return [("LP211", text)]
    if not resolved.styles:
        return [
            f"tensor_parallel_size={degree}: the plan of {type(model).__name__} gives no layer a "
            'tensor style. Return ParallelPlan(tensor={"blocks.*.query": "colwise", ...}) from '
            "parallel_plan() of the model, or use tensor_parallel_size=1."
        ]
    modules = dict(model.named_modules(remove_duplicate=False))
    counts = [
        (fqn, f" has {name}={getattr(modules[fqn], name)}", getattr(modules[fqn], name))
        for fqn, names in resolved.divided.items()
        for name in names
    ]
    problems: list[str] = []
    numbers = _match_patterns(resolved.plan.counts, list(modules), "counts", problems)
    counts += [(f, f" has {n}={v}", v) for f, named in numbers.items() for n, v in named.items()]
    for fqn, style in resolved.styles.items():
        counts += _sharded_sizes(fqn, modules[fqn], style, degree, problems)
    problems += [*_colwise_alone(resolved), *_ties_in_two_styles(resolved, modules)]
    # Degrees that divide all sizes at once.
    fit = _fitting_degrees([size for *_, size in counts])
    misfits = [(f, t) for f, t, size in counts if size % degree]
    asked = f"tensor_parallel_size={degree}"
    problems += [
        f"{asked}: {p}, not divisible by {degree}. Use tensor_parallel_size={fit}, or change this "
        f"number in the model to a multiple of {degree}."
        for p in _alike(misfits)
    ]
    if sequence_parallel and resolved.plan.sequence_region != "none":
        # Under sequence parallelism a module without a style computes on T/tp tokens, and nobody
        # sums the gradients of its parameters.
        owners = dict.fromkeys(n.rpartition(".")[0] for n, _ in model.named_parameters())
        itself = f"{type(model).__name__} itself"
        bare = [(owner or itself, "") for owner in owners if owner not in resolved.styles]
        if bare:
            problems.append(
                f"{asked} with sequence_parallel=True: these modules hold parameters, but have no "
                f"tensor style: {', '.join(_alike(bare))}. Give each a style, such as "
                "'sequence_parallel' or 'replicated', which do not shard it; or use "
                "sequence_parallel=False."
            )
    return problems


def _colwise_alone(resolved: ResolvedPlan) -> list[str]:
    """Find colwise layers outside of a container, whose input would get a part of its gradient."""
    specs = {fqn: TENSOR_STYLES[style] for fqn, style in resolved.styles.items()}
    inside = tuple(f"{fqn}." for fqn, spec in specs.items() if spec.inside == "shards")
    alone = [
        (fqn, f" is {style!r}")
        for fqn, style in resolved.styles.items()
        if specs[fqn].needs_container and not fqn.startswith(inside)
    ]
    return [
        f"ParallelPlan(tensor=...): {text}, but no module that contains it has the style "
        "'gather_sequence', which gathers the input of the layer and sums the gradient of that "
        "input. Give the containing module the style 'gather_sequence', or give the layer the "
        "style 'colwise_gather_output'."
        for text in _alike(alone)
    ]


def _ties_in_two_styles(resolved: ResolvedPlan, modules: Mapping[str, nn.Module]) -> list[str]:
    """Find layers with one weight of which one would compute with a shard that is another's."""
    problems: list[str] = []
    for group in resolved.tied:
        found: dict[int | None, tuple[str, str]] = {}
        for name in group:
            owner, _, own = name.rpartition(".")
            # Other modules may hold a parameter that their forward does not read.
            if owner in resolved.styles and isinstance(modules[owner], nn.Linear | nn.Embedding):
                dim = TENSOR_STYLES[resolved.styles[owner]].sharded_dim(own)
                found.setdefault(dim, (name, f"{owner} is {resolved.styles[owner]!r}"))
        if len(found) > 1:
            (one, how), (other, otherwise) = [*found.values()][:2]
            problems.append(
                f"ParallelPlan(tensor=...): {one} and {other} are one parameter, but {how} and "
                f"{otherwise}. Give both layers styles that divide the parameter alike, as a "
                "table and its head ('vocab_embedding' and 'vocab_head'), or that both keep it "
                "whole ('replicated')."
            )
    return problems


def _sharded_sizes(
    fqn: str, module: nn.Module, style: TensorStyle, degree: int, problems: list[str]
) -> list[tuple[str, str, int]]:
    """Return what must divide by the degree: the FQN, the words about it and the size."""
    spec = TENSOR_STYLES[style]
    dim, ndim = spec.weight_dim, spec.weight_ndim
    # Not getattr: a parametrization would compute the weight, and spectral norms count how often.
    weight = module._parameters.get("weight")
    # Three weights side by side: each of them has to divide.
    if style == "fused_qkv_transposed" and isinstance(weight, nn.Parameter):
        third, rest = divmod(weight.shape[-1], 3)
        words = f" has {weight.shape[-1]} columns, {third} each of query, key and value"
        return [(f"{fqn}.weight", words, 1 if rest else third)]
    if dim is None or ndim is None:
        return []
    if not isinstance(weight, nn.Parameter) or weight.ndim != ndim:
        problems.append(
            f"ParallelPlan(tensor=...) gives {fqn} the style {style!r}, which needs a module with "
            f"a weight of {ndim} dims, but {fqn} is a {type(module).__name__}. Name the Linear or "
            f"Embedding inside {fqn}; or use 'gather_sequence' if {fqn} contains such layers."
        )
        return []
    # Vocabulary layers may hold unequal parts, but every rank needs a row.
    if spec.uneven:
        rows = weight.shape[0]
        if rows < degree:
            problems.append(
                f"{fqn}.weight has {rows} rows, so tensor_parallel_size={degree} would leave a "
                f"rank without a row. Use tensor_parallel_size={rows} or less."
            )
        return []
    return [(f"{fqn}.weight", f" has size {weight.shape[dim]} in dim {dim}", weight.shape[dim])]


def _fitting_degrees(sizes: Sequence[int]) -> str:
    common = math.gcd(*sizes) or 1
    return either([n for n in range(1, min(common, _MOST_DEGREES) + 1) if common % n == 0])


def _alike(found: Sequence[tuple[str, str]]) -> list[str]:
    """Join FQN and text, once for all blocks that say the same."""
    groups: dict[tuple[str, str], list[str]] = {}
    for fqn, text in found:
        groups.setdefault((_as_pattern(fqn), text), []).append(fqn)
    return [
        names[0] + (f" (and {len(names) - 1} others)" if len(names) > 1 else "") + text
        for (_, text), names in groups.items()
    ]
