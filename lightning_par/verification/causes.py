"""Diagnosis of a difference between a parallel run and one process.

Each cause has its own symptom: in the losses of the parts of a batch, in the gradients summed over
the tensor-parallel ranks, or in the copies of a parameter that two ranks hold whole.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.comparison import Difference
from lightning_par.verification.run_trace import Trace

__all__ = ["differing_copies", "find_causes", "missed_patterns"]


def find_causes(
    first: Difference | None,
    one: Trace,
    ranks: Sequence[Trace],
    sizes: ParallelSizes,
    plan: ParallelPlan,
) -> list[str]:
    """Return the likely causes of the first difference, most likely first.

    Args:
        first: First difference between `one` and `ranks`; None if there is none.
        one: Trace of the run on one process.
        ranks: Traces of the parallel run, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.
        plan: Parallel plan of the model.
    """
    if first is None:
        return []
    copies = differing_copies(ranks, sizes)
    if one.draws:
        return [
            "random numbers: the loss of one process depends on the seed although dropout is off, "
            "so the module draws numbers that no layout can repeat; while verifying, leave them out"
        ]
    # Step 0 starts from equal weights, so there the kind of the difference points at its source.
    # Later steps show only that something went wrong before.
    if first.kind == "loss" and first.step == 0:
        return list(_causes_of_loss(ranks, sizes, plan))
    if first.kind == "gradient" and first.step == 0:
        return list(_causes_of_gradient(first, one, ranks, sizes, copies))
    if copies:
        return [f"copies of {copies[0]} differ between tensor-parallel ranks"]
    if first.kind == "weight":
        return ["the optimizer: all gradients are equal, so its step depends on the layout"]
    return ["something that the first step changes, such as a buffer or the optimizer's state"]


def _causes_of_loss(
    ranks: Sequence[Trace], sizes: ParallelSizes, plan: ParallelPlan
) -> Iterator[str]:
    """Yield what may explain a wrong loss of the first step."""
    if sizes.context > 1:
        named = ", ".join(repr(keyword) for keyword in (plan.positions or {}).values())
        if named:
            yield f"masks: positions are given as {named}, so look at the mask of the attention"
        else:
            yield (
                "local positions: the plan's positions={} says that the model needs none, but "
                "then every context-parallel rank counts its tokens from 0. Name the keyword that "
                "takes them: ParallelPlan(positions={'': 'position_ids'})"
            )
    if sizes.tensor > 1:
        yield from missed_patterns(ranks, sizes)
        yield (
            "a plan pattern: some module takes a shard for the whole or the whole for a shard; "
            "compare lightning-par plan with how its modules follow each other"
        )
    if sizes.data > 1 or sizes.pipeline > 1:
        yield (
            "a loss that is no mean over labels or samples (a product, an auxiliary loss over the "
            "batch): parts of the batch cannot be added up"
        )


def _causes_of_gradient(
    first: Difference,
    one: Trace,
    ranks: Sequence[Trace],
    sizes: ParallelSizes,
    copies: Sequence[str],
) -> Iterator[str]:
    """Yield what may explain a wrong gradient after a right loss."""
    name, owner = first.name, first.name.rpartition(".")[0]
    unsummed = [n for n in _whole_names(ranks) if _sums_up(n, one, ranks, sizes)]
    if name in unsummed:
        rest = f" ({len(unsummed) - 1} more like it)" if len(unsummed) > 1 else ""
        style = ranks[first.rank].styles.get(owner)
        yield (
            f"a gradient that is not summed: {name}{rest} has the style {style!r}, but every "
            "tensor-parallel rank computes a part of its gradient. Use "
            "'replicated_with_grad_allreduce', or 'sequence_parallel' if it works on tokens"
        )
        return
    if copies:
        yield f"copies of {copies[0]} get different gradients on tensor-parallel ranks"
    if sizes.tensor > 1:
        yield from missed_patterns(ranks, sizes)
    got = ranks[first.rank].gradients[0].get(name)
    want = one.gradients[0].get(one.ties.get(name, name))
    if got is not None and want is not None and (factor := _factor(got, want)) is not None:
        yield f"a factor: the gradient of {name} is {factor:g} times that of one process"


def missed_patterns(ranks: Sequence[Trace], sizes: ParallelSizes) -> list[str]:
    """Return the cause "a missed plan pattern" if a parameter matches no tensor style.

    Args:
        ranks: Traces of the parallel run, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.

    Returns:
        At most one cause; none without tensor parallelism.
    """
    names = sorted({n for trace in ranks for n in trace.unstyled}) if sizes.tensor > 1 else []
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"a missed plan pattern: no tensor style matches {names[0]}{more}. Give its module one in "
        "ParallelPlan(tensor=...)"
    ]


def _whole_names(ranks: Sequence[Trace]) -> list[str]:
    return sorted({name for trace in ranks for name in trace.whole})


def _tp_groups(sizes: ParallelSizes) -> list[list[int]]:
    return sizes.groups(("tp",)) if sizes.tensor > 1 else []


def _sums_up(name: str, one: Trace, ranks: Sequence[Trace], sizes: ParallelSizes) -> bool:
    """Return whether the gradients of the tensor-parallel ranks sum up to that of one process."""
    want = one.gradients[0].get(one.ties.get(name, name))
    for group in _tp_groups(sizes):
        parts = [ranks[rank].gradients[0].get(name) for rank in group]
        held = [part for part in parts if part is not None]
        if want is None or len(held) < len(group):
            continue
        # A zero gradient is both a part and the whole: not a symptom.
        return _close(sum(held[1:], held[0]), want) and not _close(held[0], want)
    return False


def differing_copies(ranks: Sequence[Trace], sizes: ParallelSizes) -> list[str]:
    """Return the unsharded parameters whose gradients differ between tensor-parallel ranks.

    Args:
        ranks: Traces of the parallel run, in the order of the ranks.
        sizes: Mesh sizes of the parallel run.

    Returns:
        FQNs of the parameters, each once.
    """
    found = []
    for name in _whole_names(ranks):
        for group in _tp_groups(sizes):
            steps = zip(*(ranks[rank].gradients for rank in group), strict=False)
            for step in steps:
                held = [grads[name] for grads in step if grads.get(name) is not None]
                if any(not _close(other, held[0]) for other in held[1:]):
                    found.append(name)
    return list(dict.fromkeys(found))


def _close(a: Tensor, b: Tensor) -> bool:
    scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
    return torch.allclose(a, b, rtol=0, atol=1e-9 * scale)


def _factor(got: Tensor, want: Tensor) -> float | None:
    """Return c if `got` is c times `want`, else None."""
    # Least squares: the only c that can fit.
    norm = float((want * want).sum())
    if not norm:
        return None
    factor = float((got * want).sum()) / norm
    return factor if _close(got, want * factor) and abs(factor) > 1e-6 else None
