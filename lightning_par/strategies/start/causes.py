"""What a first step that differs from one process shows, and what tells more.

Note [No guesses]: a difference shows which part of the step is another one, seldom why. So the text
says what was equal and what was not, and names runs whose outcome tells causes apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_par.observe.compare import Difference
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes

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
        optimizers: Classes of the optimizers that are not known to update entry by entry.
        callbacks: The user's own callbacks, by class.
        step: Of the run, as in a sentence.
    """

    module: pl.LightningModule
    sizes: ParallelSizes
    resolved: ResolvedPlan
    zero_stage: int
    draws: bool
    optimizers: Sequence[type]
    callbacks: Sequence[str]
    step: str = "the first step"


def explain(difference: Difference, found: Findings) -> str:
    """Return the text of the error: what was compared and differs, and what to try.

    Args:
        difference: What differs most.
        found: What else is known.
    """
    is_late = difference.kind in ("weight", "closure")
    tries = _of_update(found) if is_late else _of_backward(difference, found)
    lines = [
        f"{found.step} on {found.sizes} differs from the same step on one process: {difference}.",
        f"Compared: {_COMPARED[difference.kind]}",
        *(f"Seen: {fact}" for fact in _facts(difference, found)),
        *(f"To try: {text}" for text in tries),
        "The run ends after this step, and nothing of it was saved. verify=False trains on in "
        "spite of the difference; `lightning-par verify` compares more steps in float64, and block "
        "by block.",
    ]
    return "\n".join(lines)


_COMPARED = {
    "loss": "the loss of the forward, which comes before gradients and the update.",
    "gradient": (
        "the losses, which are equal, and then the gradients before hooks and clipping; that of "
        "this parameter differs most for its size."
    ),
    "weight": (
        "the losses and the gradients, which are equal, and then the weights that the optimizer, "
        "hooks and callbacks make of the same gradients; this one differs most for its update."
    ),
    "closure": "the losses and the gradients, which are equal, and how often there are some.",
}


def _facts(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what was seen in the step."""
    kind, name = difference.kind, difference.name
    if found.draws:
        yield (
            "the step draws random numbers besides dropout, and one process draws others. Draw "
            "them where the data is made (in the dataset or collate_fn), or from a generator that "
            "is seeded by the sample."
        )
    if difference.factor is not None and kind in ("gradient", "weight"):
        what = "gradient" if kind == "gradient" else "update"
        yield f"the {what} is {difference.factor:.4g} times that of one process."
    if kind == "gradient" and found.sizes.tensor > 1:
        styles, module = found.resolved.styles, name.rpartition(".")[0]
        style = f"the style {styles[module]!r}" if module in styles else "no style"
        yield f"the plan gives {module or 'the module'} {style} for tensor parallelism."


def _of_backward(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what tells causes of another loss or gradient apart."""
    sizes = found.sizes
    if sizes.data > 1 or sizes.pipeline > 1:
        cures = ["num_microbatches=1"] * (sizes.pipeline > 1)
        cures += ["data_parallel_size=1"] * (sizes.data > 1)
        yield (
            f"{' and '.join(cures)}. If the step is equal then, the loss is no mean over the "
            "samples or labels of the batch: say how it weighs (BatchLayout(labels=...), "
            "BatchLayout(loss_weight=...)); a loss between samples, entries without a batch dim "
            "and values that blocks leave on attributes or in hooks stay equal in this way only."
        )
    if sizes.context > 1:
        yield (
            "context_parallel_size=1. If the step is equal then, something needs tokens of other "
            "ranks: positions that the plan does not name (ParallelPlan(positions=...)), masks "
            "made in the blocks, mixers that are no attention (convolutions, state spaces)."
        )
    if sizes.tensor > 1:
        yield (
            "sequence_parallel=False. If the step is equal then, something pools over tokens of "
            "which a rank holds a part; if not, a style of tensor parallelism takes a shard for "
            "the whole, or leaves out or repeats a sum over ranks: `lightning-par plan` prints "
            "the styles."
        )
    if difference.kind == "gradient":
        yield (
            "without hooks on weights and modules (register_hook, "
            "register_full_backward_hook), if there are some: a rank calls them with a part."
        )


def _of_update(found: Findings) -> Iterator[str]:
    """Yield what tells causes of other weights after equal gradients apart."""
    hooks = [name for name in _HOOKS if is_overridden(name, found.module, pl.LightningModule)]
    by = [*(f"{type(found.module).__name__}.{name}" for name in hooks), *found.callbacks]
    if found.optimizers:
        names = ", ".join(kind.__name__ for kind in found.optimizers)
        yield (
            f"torch.optim.SGD in place of {names}. If the step is equal then, what {names} does to "
            "one weight depends on others (a norm over all parameters, a whole matrix, a line "
            "search), of which a rank holds a part: use an optimizer that works entry by entry."
        )
    if by:
        yield (
            f"without {', '.join(by)}. If the step is equal then, that reads or changes gradients "
            "or weights, of which a rank holds a part; clip with Trainer(gradient_clip_val=...)."
        )
    yield (
        f"to print the learning rate and other options of the optimizer: one that depends on the "
        f"number of processes (here {found.sizes.world_size}) has to be that of one process, as "
        "all ranks together train one model on one batch."
    )
