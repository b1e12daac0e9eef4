"""Likely causes of a first step that differs from one process, each with its cure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.proof.comparison import Difference

__all__ = ["Findings", "explain"]

_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_step",
    "on_train_batch_start",
    "on_train_batch_end",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Findings:
    """What is known of a step that differs.

    Attributes:
        module: The user's LightningModule, whole; parameters may be on meta.
        sizes: Sizes of the mesh.
        resolved: Its resolved plan.
        zero_stage: What the replicas shard.
        draws: Whether the step draws random numbers that no rehearsal could leave out.
        optimizers: Class of every optimizer.
        callbacks: The user's own callbacks, by class.
    """

    module: pl.LightningModule
    sizes: ParallelSizes
    resolved: ResolvedPlan
    zero_stage: int
    draws: bool
    optimizers: Sequence[type]
    callbacks: Sequence[str]


def explain(difference: Difference, found: Findings) -> str:
    """Return the text of the error: what differs, the likely causes, and what to do.

    Args:
        difference: What differs most.
        found: What else is known.
    """
    causes = {"weight": _of_update, "closure": _of_update}.get(difference.kind, _of_backward)
    likely = list(causes(difference, found))
    lines = [
        f"the first step on {found.sizes} differs from the same step on one process: {difference}.",
        *(f"Likely cause: {cause}" for cause in likely[:3]),
        "The run ends after this step, and nothing of it was saved. verify=False trains on in "
        "spite of the difference; `lightning-par verify` compares more steps in float64.",
    ]
    return "\n".join(lines)


def _of_backward(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what may explain a loss or a gradient."""
    sizes = found.sizes
    cuts = sizes.data > 1 or sizes.pipeline > 1
    if found.draws:
        yield (
            "random numbers: the step draws some besides dropout, and one process draws others. "
            "Draw them where the data is made (in the dataset or collate_fn), or from a generator "
            "that is seeded by the sample."
        )
    if difference.factor is not None and difference.kind == "gradient":
        yield (
            f"a factor: the gradient is {difference.factor:.4g} times that of one process, as if a "
            "sum over ranks were missing or were counted twice. Look at the style that the plan "
            "gives to this module ('replicated_with_grad_allreduce', 'sequence_parallel')."
        )
    yield from _of_shards(found)
    if cuts:
        parts = "micro-batches" if sizes.data == 1 else "replicas or micro-batches"
        yield (
            f"a loss that is no mean over the samples or labels of the batch: {parts} are "
            "averaged. Say where the labels are (BatchLayout(labels=...)); a sum, a class-weighted "
            "mean, a loss between samples (contrastive), entries without a batch dim, and values "
            "that blocks leave on attributes or hooks need num_microbatches=1, or no such axis."
        )


def _of_shards(found: Findings) -> Iterator[str]:
    """Yield what may go wrong where ranks see a part of the tokens, or of a layer."""
    sizes, module = found.sizes, found.module
    if sizes.context > 1:
        yield (
            "context parallelism: a rank sees its tokens only. Positions that the plan does not "
            "name (ParallelPlan(positions=...)), masks made in the blocks, and mixers that are no "
            "attention (convolutions, state spaces) need their neighbors."
        )
    if sizes.tensor > 1:
        missing = [
            name
            for name, _ in module.named_parameters()
            if name.rpartition(".")[0] not in found.resolved.styles
        ]
        named = f"no style matches {missing[0]}, among others; " if missing else ""
        yield (
            f"tensor parallelism: {named}a module takes a shard for the whole, or pools over "
            "tokens of which a rank holds a part. Mend the plan (`lightning-par plan` prints "
            "it), or use sequence_parallel=False."
        )


def _of_update(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what may explain weights that differ after equal gradients."""
    hooks = [name for name in _HOOKS if is_overridden(name, found.module, pl.LightningModule)]
    by = [*(f"{type(found.module).__name__}.{name}" for name in hooks), *found.callbacks]
    if difference.factor is not None and difference.kind == "weight":
        yield (
            f"the update is {difference.factor:.4g} times that of one process: a learning rate "
            f"that depends on the number of processes (here {found.sizes.world_size}), or a norm "
            "over a part of the model. All ranks together train one model on one batch."
        )
    names = ", ".join(kind.__name__ for kind in found.optimizers)
    yield (
        f"the optimizer ({names}): all gradients were equal, so what it does to one weight depends "
        "on others (a norm over all parameters, a whole matrix, a line search), of which a rank "
        "holds a part. Use an optimizer that works entry by entry, such as AdamW."
    )
    if by:
        yield (
            f"a hook that reads or changes gradients or weights: {', '.join(by)}. A rank holds a "
            "part of them only; clip with Trainer(gradient_clip_val=...)."
        )
