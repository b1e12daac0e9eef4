"""What a step did on some batches, as a value, and what watches it meanwhile."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from lightning_par.observe.cross_entropies import SeenLoss, SeenWeight
from lightning_par.strategies.step.step_traces import LogCall

__all__ = ["StepReport", "StepWatch"]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What running the step on some batches gave.

    Attributes:
        losses: Its losses, for each batch one of every backward.
        logs: The calls that logged numbers, for each batch.
        metrics: FQN -> value of the torchmetrics that it updates, for the first batch, and for the
            others together.
        states: FQN -> what these metrics have gathered, likewise. Some that are the same number for
            one batch are not for several, as a mean is that counts updates.
        calls: For each batch, the cross-entropies that it computed.
        weights: For each batch, what else may weigh it in its loss.
        leaves: Names of attributes of the LightningModule that it changes.
        follows: Whether its loss follows from what the samples of an earlier step have left there,
            in a way that micro-batches or replicas cannot share.
        terms: For each batch, the terms of which each of its losses is the sum.
        writes: Whether it writes by itself: to loggers, the terminal or files.
        sets: Names of hyperparameters of optimizers that it sets to different values for them.
    """

    losses: list[tuple[float, ...]]
    logs: list[list[LogCall]]
    metrics: tuple[dict[str, Any], dict[str, Any]]
    states: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    calls: list[list[SeenLoss]] = field(default_factory=list)
    weights: list[list[SeenWeight]] = field(default_factory=list)
    leaves: tuple[str, ...] = ()
    follows: bool = False
    terms: list[list[tuple[float, ...]]] = field(default_factory=list)
    writes: bool = False
    sets: tuple[str, ...] = ()

    @property
    def has_zero_term(self) -> bool:
        """Whether a loss has a term that is 0 for the batch and all its parts, as the distance to a
        copy of the model in its first step: how that term adds up shows only when it is not 0.
        """
        of_losses = ([*zip(*terms, strict=False)] for terms in zip(*self.terms, strict=False))
        return any(len(found) > 1 and not all(map(any, found)) for found in of_losses)


class StepWatch(Protocol):
    """Watches a step that runs on some batches, one after the other."""

    def followed(self, index: int) -> AbstractContextManager[Any]:
        """Surrounds the step on the batch with this number."""

    def report(self, *, losses: list[tuple[float, ...]], **seen: Any) -> StepReport:
        """Return a report of what was watched, and of what else was seen."""
