"""The refusal of a loss that does not follow from those of its parts; the likely cure is first."""

import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import lightning.pytorch as pl

from lightning_par.engine.batch import BatchDims
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.strategies.step.batch_weights import LossRule

__all__ = ["refusal_of_loss", "refusal_of_uncounted"]

_DRAWS = {"bernoulli", "default_rng", "generator", "Generator", "multinomial", "rand", "rand_like"}
_COMPARES = {"all_gather", "cdist", "cosine_similarity", "mT", "roll", "T"}
_CUTS = {"chunk", "split", "tensor_split"}
_RANKS = {"argsort", "kthvalue", "median", "quantile", "sort", "topk"}
"""Names in the code of a step that point to a cause, and so to the cure that comes first."""


def refusal_of_loss(
    module: pl.LightningModule, rule: LossRule, dims: BatchDims, microbatches: int, replicas: int
) -> str:
    """Return what to say of a loss that is not made of those of its parts by any rule.

    The cure comes first to which the code of the step points.

    Args:
        module: The user's LightningModule.
        rule: The likeliest rule.
        dims: Which entries of the batch have a batch dim.
        microbatches: Into how many a batch is cut.
        replicas: Among how many the global batch is divided.
    """
    kind = type(module)
    step = inspect.unwrap(kind.training_step)
    code = getattr(step, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    divided = [f"{microbatches} micro-batches"] * (microbatches > 1)
    divided += [f"{replicas} replicas"] * (replicas > 1)
    whole = ["num_microbatches=1"] * (microbatches > 1)
    whole += ["data_parallel_size=1"] * (replicas > 1)
    cures = _cures(set(_names(step, kind, set())), dims, " and ".join(whole))
    lines = [
        f"{kind.__name__}.training_step{where} on {' and '.join(divided)}: the loss of a batch "
        "cannot be computed from the losses of its parts.",
        "Why: the loss of a batch was compared with the losses of its parts. It is neither "
        f"{rule.name}, nor their sum, nor a mean over labels, so the gradients would differ from "
        "those of a run on one process.",
        "What to write:",
        *(f"  - {cure}" for cure in cures),
        "No weight was changed.",
    ]
    return "\n".join(lines)


def refusal_of_uncounted(layout: BatchLayout) -> str:
    """Return what to say of batches of which nothing tells what they weigh in the loss."""
    return (
        f"BatchLayout(whole={layout.whole!r}) declares that no entry of the batch has a batch dim, "
        "so how to weight the losses of the replicas is not known. Declare this in BatchLayout, "
        "too: loss_weight='samples' if all batches have the same weight, loss_weight='sum' if the "
        "losses are added, or loss_weight=lambda batch: ... with a function that returns the "
        "number of samples or labels over which the loss of a batch is averaged. No weight was "
        "changed."
    )


def _cures(names: set[str], dims: BatchDims, whole: str) -> list[str]:
    """Return the cures, the one first to which names in the step point."""
    cut = [repr(path) for path in dims.dims if path]
    cures = [
        (
            False,
            "If the loss is a weighted mean, declare "
            "ParallelPlan(batch=BatchLayout(loss_weight=...)): 'samples', 'labels', 'sum', the "
            "name of the batch entry that holds the weights, or a function of the batch that "
            "returns its weight.",
        ),
        (
            "grad" in names,
            "If the step takes gradients by torch.autograd.grad, average them over the replicas "
            "by self.all_gather(gradient).mean(0), declare loss_weight='samples', and use one "
            "micro-batch.",
        ),
        (
            not names.isdisjoint(_COMPARES),
            "If samples are compared with each other (in-batch negatives), gather them with "
            "self.all_gather(..., sync_grads=True), declare loss_weight='samples', and use one "
            "micro-batch.",
        ),
        (
            not names.isdisjoint(_DRAWS),
            "If the step draws random numbers that choose which labels or samples enter the loss, "
            "or draws from its own generator, draw them in the dataset or collate_fn instead.",
        ),
        (
            not names.isdisjoint(_CUTS),
            "If the step cuts its batch and accumulates the gradients of the parts, let the data "
            "loader give such parts as batches, and use Trainer(accumulate_grad_batches=...), or, "
            "in manual optimization, call optimizer.step() after every n-th batch.",
        ),
    ]
    if len(cut) > 1:
        text = (
            f"If one of the entries {', '.join(cut)} has no batch dim, declare "
            "BatchLayout(whole=(entry,))."
        )
        cures.insert(1, (False, text))
    if ranks := sorted(names & _RANKS):
        seen = (
            f"The step calls {', '.join(ranks)}, which may need all samples of the batch. Use "
            f"{whole}."
        )
        cures.insert(0, (True, seen))
    else:
        cures.append((False, f"Otherwise use {whole}."))
    # sorted is stable: the others keep their order.
    return [text for _, text in sorted(cures, key=lambda cure: not cure[0])]


def _names(function: Callable[..., Any], kind: type, seen: set[Any]) -> Iterator[str]:
    """Yield the names in the code of a function of a user, and in those that it calls.

    Args:
        function: Methods of `kind` and functions of its closure are followed.
        kind: The type of the user's module.
        seen: Functions that were looked at.
    """
    code = getattr(function, "__code__", None)
    if code is None or function in seen or _is_of_library(function):
        return
    seen.add(function)
    names = set(_names_of(code))
    yield from names
    called = [getattr(kind, name, None) for name in names]
    called += [c.cell_contents for c in function.__closure__ or () if _is_filled(c)]
    for other in called:
        if inspect.isfunction(other):
            yield from _names(inspect.unwrap(other), kind, seen)


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield names of variables, attributes and keyword arguments, also in nested functions."""
    yield from (*code.co_names, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)
        elif isinstance(constant, tuple):  # names of keyword arguments are such a constant
            yield from (name for name in constant if isinstance(name, str))


def _is_of_library(function: Callable[..., Any]) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("lightning", "torch")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False
