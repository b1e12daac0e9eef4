"""What a run that differs from one process shows, what may explain that, and what tells more.

Note [No guesses]: the proof of a step sees which part of it is another one, seldom why. So its text
says what was equal and what was not, and names runs whose outcome tells causes apart. `verify` has
what every rank computed, in float64 and without dropout: it names likely causes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_par.observe.compare import Difference
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.proof.on_difference import ENDS

__all__ = [
    "Elsewhere",
    "Findings",
    "StepReport",
    "causes_elsewhere",
    "causes_of_dropout",
    "explain",
    "find_causes",
    "missed_patterns",
]

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
    """What is known of a run that differs.

    Attributes:
        sizes: Sizes of the mesh.
        draws: Whether a step draws random numbers that nothing could leave out.
        styles: FQN of a module -> its style for tensor parallelism.
        module: The user's LightningModule, whole; parameters may be on meta.
        optimizers: Classes of the optimizers that are not known to update entry by entry.
        callbacks: The user's own callbacks, by class.
        step: Of the run, as in a sentence.
        positions: What the plan says of positions.
        unstyled: FQNs of parameters that no tensor style matches.
        copies: FQNs of the unsharded parameters whose gradients differ among tensor-parallel ranks.
        unsummed: FQNs of those whose gradients sum up to that of one process.
        again: What the same forward and backward has shown once more.
    """

    sizes: ParallelSizes
    draws: bool = False
    styles: Mapping[str, str] = field(default_factory=dict)
    module: pl.LightningModule | None = None
    optimizers: Sequence[type] = ()
    callbacks: Sequence[str] = ()
    step: str = "the first step"
    positions: Mapping[str, str] | None = None
    unstyled: Sequence[str] = ()
    copies: Sequence[str] = ()
    unsummed: Sequence[str] = ()
    again: str = ""


_COMPARED = {
    "start": "the weights at the start of the step with the weights that were saved before it.",
    "loss": (
        "the loss of the forward. Gradients and the update, which come later, were not compared."
    ),
    "gradient": (
        "first the losses, which are equal; then the gradients before hooks and clipping. The "
        "gradient of this parameter has the largest relative difference."
    ),
    "handed": (
        "first the losses and the gradients, which are equal; then the gradients after hooks and "
        "clipping, computed from the same gradients. The gradient of this parameter has the "
        "largest relative difference."
    ),
    "weight": (
        "first the losses and the gradients, which are equal; then the weights after the "
        "optimizer step, hooks and callbacks, computed from the same gradients. This weight has "
        "the largest difference relative to its update."
    ),
    **dict.fromkeys(
        ("log", "metric", "output"),
        "the values that the step logs, its metrics for this batch, and the values that it "
        "returns, in this order.",
    ),
    "closure": (
        "first the losses and the gradients, which are equal; then how many times the optimizer "
        "called its closure."
    ),
}


def explain(difference: Difference, found: Findings) -> str:
    """Return the text of the proof's error: what was compared and differs, and what to try.

    Args:
        difference: What differs most.
        found: What else is known.
    """
    is_late = difference.kind in ("handed", "weight", "closure")
    tries = _of_update(difference, found) if is_late else _of_backward(difference, found)
    lines = [
        f"{found.step} on {found.sizes} differs from the same step on one process: {difference}.",
        f"Compared: {_COMPARED[difference.kind]}",
        *(f"Seen: {fact}" for fact in _facts(difference, found)),
        *(f"To try: {text}" for text in tries),
        f"{ENDS} To train in spite of the difference, use verify=False. The command "
        "`lightning-par verify` compares more steps, in float64 and block by block.",
    ]
    return "\n".join(lines)


def _facts(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what was seen in the step."""
    kind, name = difference.kind, difference.name
    if found.again:
        yield found.again
    if found.draws:
        yield (
            "the step draws random numbers besides dropout, and one process draws different "
            "numbers. Draw them in the dataset or collate_fn, or from a generator that is seeded "
            "by the sample."
        )
    if difference.factor is not None and kind in ("gradient", "handed", "weight"):
        what = "update" if kind == "weight" else "gradient"
        yield f"the {what} is {difference.factor:.4g} times the {what} on one process."
    if kind == "gradient" and found.sizes.tensor > 1:
        styles, module = found.styles, name.rpartition(".")[0]
        style = f"the style {styles[module]!r}" if module in styles else "no style"
        yield f"the plan gives {module or 'the module'} {style} for tensor parallelism."


def _of_backward(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what tells causes of another loss or gradient apart."""
    sizes = found.sizes
    if sizes.data > 1 or sizes.pipeline > 1:
        cures = ["num_microbatches=1"] * (sizes.pipeline > 1)
        cures += ["data_parallel_size=1"] * (sizes.data > 1)
        one_part = " and ".join(cures)
        yield (
            f"{one_part}. If this removes the difference, the losses of the parts of a batch are "
            "weighted wrongly. Declare what the loss is a mean over: BatchLayout(labels=...) or "
            "BatchLayout(loss_weight=...). If the step still differs with this declaration, keep "
            f"{one_part}: the loss compares samples with each other, a batch entry has no batch "
            f"dim, or blocks store values in attributes or hooks. If {one_part} does not remove "
            "the difference, the parts of a batch are weighted correctly."
        )
    if sizes.context > 1:
        yield (
            "context_parallel_size=1. If this removes the difference, some code needs tokens of "
            "other ranks. Such code computes positions that the plan does not name "
            "(ParallelPlan(positions=...)), computes a mask in a block, or combines tokens without "
            "attention (a convolution, a state-space layer)."
        )
    if sizes.tensor > 1:
        yield (
            "sequence_parallel=False. If this removes the difference, some module pools over "
            "tokens, but a rank holds only some tokens. If the difference stays, a tensor-parallel "
            "style uses a shard as if it were the whole tensor, or omits or repeats a sum over "
            "ranks. `lightning-par plan` prints the styles."
        )
    if difference.kind == "gradient":
        yield (
            "remove hooks on weights and modules (register_hook, register_full_backward_hook). "
            "Each rank calls them with its part of a tensor only."
        )


def _of_update(difference: Difference, found: Findings) -> Iterator[str]:
    """Yield what tells causes of other weights after equal gradients apart."""
    hooks = [name for name in _HOOKS if is_overridden(name, found.module, pl.LightningModule)]
    by = [*(f"{type(found.module).__name__}.{name}" for name in hooks), *found.callbacks]
    if found.optimizers and difference.kind != "handed":
        names = ", ".join(kind.__name__ for kind in found.optimizers)
        yield (
            f"torch.optim.SGD instead of {names}. If this removes the difference, {names} updates "
            "an entry of a weight from other entries (a norm over all parameters, a whole matrix, "
            "a line search), but a rank holds only some entries. Use an optimizer that updates "
            "each entry from its own gradient and states."
        )
    if by:
        yield (
            f"remove {', '.join(by)}. If this removes the difference, this code reads or changes "
            "gradients or weights, but a rank holds only a part of them. To clip gradients, use "
            "Trainer(gradient_clip_val=...)."
        )
    if difference.kind == "handed":
        return
    yield (
        "print the learning rate and the other options of the optimizer. None of them may depend "
        f"on the number of processes (here {found.sizes.world_size}), since all ranks together "
        "train one model on one global batch."
    )


def find_causes(first: Difference | None, found: Findings) -> list[str]:
    """Return what `verify` names as likely causes, most likely first.

    Args:
        first: First difference of all steps and ranks; None if there is none.
        found: What else is known.
    """
    if first is None:
        return []
    if found.draws:
        return [
            "random numbers: the loss of one process depends on the seed although dropout is off, "
            "so the module draws random numbers that no layout can repeat. Remove them while you "
            "verify"
        ]
    # Step 0 starts from equal weights, so there the kind of the difference points at its source.
    # Later steps show only that something went wrong before.
    if first.kind == "loss" and first.step == 0:
        return list(_causes_of_loss(found))
    if first.kind == "gradient" and first.step == 0:
        return list(_causes_of_gradient(first, found))
    if found.copies:
        return [f"copies of {found.copies[0]} differ between tensor-parallel ranks"]
    if first.kind == "weight":
        return [
            "the optimizer: all gradients are equal, so the optimizer step depends on the layout"
        ]
    return ["a value that the first step changes, such as a buffer or a state of the optimizer"]


def _causes_of_loss(found: Findings) -> Iterator[str]:
    """Yield what may explain a wrong loss of the first step."""
    sizes = found.sizes
    if sizes.context > 1:
        named = ", ".join(repr(keyword) for keyword in (found.positions or {}).values())
        if named:
            yield f"masks: the plan passes positions as {named}, so check the mask of the attention"
        else:
            yield (
                "local positions: ParallelPlan(positions={}) says that the model needs no "
                "positions, so every context-parallel rank counts its tokens from 0. Name the "
                "argument that takes positions: ParallelPlan(positions={'': 'position_ids'})"
            )
    if sizes.tensor > 1:
        yield from missed_patterns(found)
        yield (
            "a wrong tensor style: some module uses a shard as if it were the whole tensor, or "
            "the reverse. `lightning-par plan` prints the styles; compare them with the order of "
            "the modules in the forward"
        )
    if sizes.data > 1 or sizes.pipeline > 1:
        yield (
            "a loss that is no mean over labels or samples (a product, an auxiliary loss over the "
            "batch), so it cannot be computed from the losses of parts of the batch"
        )


def _causes_of_gradient(first: Difference, found: Findings) -> Iterator[str]:
    """Yield what may explain a wrong gradient after a right loss."""
    name, unsummed = first.name, found.unsummed
    if name in unsummed:
        rest = f" ({len(unsummed) - 1} more like it)" if len(unsummed) > 1 else ""
        style = found.styles.get(name.rpartition(".")[0])
        yield (
            f"a gradient that is not summed: {name}{rest} has the style {style!r}, but every "
            "tensor-parallel rank computes a part of its gradient. Use the style "
            "'replicated_with_grad_allreduce', or 'sequence_parallel' if the module computes each "
            "token separately"
        )
        return
    if found.copies:
        yield f"copies of {found.copies[0]} get different gradients on tensor-parallel ranks"
    yield from missed_patterns(found)
    if first.factor is not None:
        yield f"a factor: the gradient of {name} is {first.factor:g} times that on one process"


def missed_patterns(found: Findings) -> list[str]:
    """Return the cause "a missed plan pattern" if a parameter matches no tensor style.

    Args:
        found: What is known.

    Returns:
        At most one cause; none without tensor parallelism.
    """
    names = found.unstyled if found.sizes.tensor > 1 else ()
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"a missed plan pattern: no pattern in ParallelPlan(tensor=...) matches {names[0]}{more}. "
        "Give its module a tensor style there"
    ]


def causes_of_dropout(copies: Sequence[str]) -> list[str]:
    """Return the cause "dropout drawn differently per rank" if copies of a parameter differ.

    Args:
        copies: Parameters whose copies differ with dropout, and are equal without it.
    """
    return [
        "dropout drawn differently per rank: everything is equal without dropout, but with it the "
        f"copies of {name} get different gradients on the tensor-parallel ranks. Ranks that "
        "compute the same have to draw the same random numbers. Do not seed by rank, and give the "
        "module the tensor style that fits its input"
        for name in copies[:1]
    ]


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """What is known of a step that a strategy of Lightning's or of the user's took.

    Attributes:
        strategy: What took it, as in a sentence.
        replicas: Number of parts of the batch.
        draws: Whether the step draws random numbers besides dropout.
        are_parts: Whether it equals the mean over the parts of the batch, each on one process.
        is_own: Whether its gradients on rank 0 are those of the part of rank 0 alone.
        norms: Names of the BatchNorm layers that take statistics of a part.
        counts: What is counted in the parts -> how many each has, where that is unequal.
        copies: Names of the parameters whose gradients differ between ranks that hold copies.
        clips: Whether gradients are clipped by their norm.
    """

    strategy: str
    replicas: int
    draws: bool = False
    are_parts: bool = False
    is_own: bool = False
    norms: Sequence[str] = ()
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    copies: Sequence[str] = ()
    clips: bool = False


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What came out of the proof of a step; `str` says it.

    Attributes:
        strategy: What took the step.
        difference: What differs most; None: nothing, or it is not known.
        causes: Likely causes with their cures, most likely first.
        unknown: Why it is not known whether the step equals that of one process; empty: it is.
        notes: What else was seen, or is not compared.
    """

    strategy: str
    difference: Difference | None = None
    causes: tuple[str, ...] = ()
    unknown: str = ""
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether it is known that the step differs from that of one process."""
        return self.difference is not None or bool(self.causes)

    @property
    def equal(self) -> bool:
        """Whether it is known that the step equals that of one process."""
        return not self.differs and not self.unknown

    def __str__(self) -> str:
        of = f"the first step of {self.strategy}"
        if self.unknown:
            lines = [f"{of} is not proved to equal that of one process: {self.unknown}."]
        elif self.equal:
            lines = [f"{of} equals that of one process."]
        else:
            what = self.difference or "the ranks have different copies of a gradient"
            lines = [f"{of} differs from the same step on one process: {what}."]
        if self.difference is not None:
            lines.append(f"Compared: {_COMPARED[self.difference.kind]}")
        lines += [f"Likely cause: {cause}" for cause in self.causes]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def causes_elsewhere(difference: Difference | None, found: Elsewhere) -> Iterator[str]:
    """Yield what may explain a step of another strategy that differs, and what it has to do.

    Args:
        difference: What differs most; None: only copies do.
        found: What else is known.
    """
    kind = "gradient" if difference is None else difference.kind
    if kind == "start":
        yield (
            "wrong weights at the start of the step: a rank got a wrong shard, ranks have drawn "
            "their copies of a weight separately, or a part of a checkpoint was not loaded."
        )
    elif found.is_own or found.copies:
        named = f" ({', '.join(found.copies[:3])})" if found.copies else ""
        whose = ", and the gradient of rank 0 is that of its own samples" if found.is_own else ""
        yield (
            f"a missing all-reduce: gradients differ between ranks{named}{whose}. The strategy "
            "has to average the gradients of all parameters, and the last backward before an "
            "update has to run outside of no_sync() (require_backward_grad_sync=True)."
        )
    elif kind in ("loss", "gradient") and found.draws:
        yield (
            "random numbers besides dropout: one process draws different numbers. Draw them in "
            "the dataset or collate_fn, or from a generator that is seeded by the sample."
        )
    elif found.are_parts:
        yield from _causes_of_parts(difference, found)
    elif kind in ("loss", "gradient"):
        by = f" by the factor {difference.factor:.4g}" if difference and difference.factor else ""
        yield (
            f"the result of the strategy differs from that of the module{by}, and it is not the "
            f"mean over the parts of the batch of its {found.replicas} replicas either. A "
            "tensor-parallel style uses a shard as if it were the whole tensor, or omits or "
            "repeats a sum over ranks; or gradients are summed where their mean is needed."
        )
    elif kind == "handed" and found.clips:
        yield (
            "clipping by the norm of a shard: each rank divides by the norm of its own gradients. "
            "Sum the squares of the norms over the ranks first."
        )
    else:
        yield (
            "an optimizer or a hook that uses the number of ranks, or that computes a norm or a "
            "sum over entries of one or of all weights, of which each rank holds only a part. Use "
            "an optimizer that updates each entry from its own gradient and states, or gather "
            "whole tensors first."
        )


def _causes_of_parts(difference: Difference | None, found: Elsewhere) -> Iterator[str]:
    """Yield why the mean over the parts of a batch is not what the whole batch gives."""
    got, wanted = (difference.got, difference.wanted) if difference else (0.0, 0.0)
    if found.norms:
        more = f" and {len(found.norms) - 1} more" if found.norms[1:] else ""
        yield (
            f"BatchNorm: {found.norms[0]}{more} normalizes over the samples of one rank; on one "
            "process it normalizes over the whole batch. Use Trainer(sync_batchnorm=True) or "
            "SyncBatchNorm."
        )
    elif math.isclose(got * found.replicas, wanted, rel_tol=1e-4):
        yield (
            "a loss that is a sum over the samples, while the strategy averages it over the "
            f"ranks. Multiply the loss by the number of ranks, {found.replicas}, or compute a "
            "mean over the samples."
        )
    else:
        for what, counts in found.counts.items():
            yield (
                f"a mean of means: the ranks have {', '.join(map(str, counts))} {what}, but the "
                "strategy averages their losses with equal weights. On each rank divide the sum "
                f"of its losses by the mean number of {what} of all ranks (by an all-reduce)."
            )
        if not found.counts:
            yield (
                "a loss that is not a mean with equal weights over the samples: it compares "
                "samples with each other, uses statistics or products over the batch, or class "
                "weights. Gather these values over the ranks (all_gather with gradients) before "
                "the loss is computed."
            )
