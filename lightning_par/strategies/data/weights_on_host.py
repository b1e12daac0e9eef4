"""What the host has to know of the weights in a batch, found before the batch goes to the device.

That is which parts have weight 0, see Note [Zero-weight loss] in `engine/data/zero_weight_loss.py`,
and whether rules that the loss may follow differ, see Note [Finding the rule] in
`start/loss_rule.py`.
Asked of the device, the answer would come after all work that the device was given before, which is
the step before this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_par.engine.tensor_tree import tensors_of, TreeBroadcast
from lightning_par.strategies.data.batch_copies import BATCH_HOOKS, has_hook
from lightning_par.strategies.step.batch_weights import BatchWeigher
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["KnownWeights", "WeightsOnHost"]

Parts = Callable[[Any], tuple[Sequence[Any], Sequence[int]]]
"""Batch -> its micro-batches, and their numbers of samples."""


@dataclass(frozen=True)
class KnownWeights:
    """What the host knows of the weights in a batch.

    Attributes:
        zero: Numbers of the parts with weight 0.
        compared: How the rules that the loss may follow weigh it, see
            `BatchWeigher.compare_rules`.
    """

    zero: frozenset[int]
    compared: tuple[float, ...]


class WeightsOnHost:
    """Finds the `KnownWeights` of every batch of a fit whose device is not the host.

    Args:
        module: The user's LightningModule; where it, or its data module, has hooks that may change
            a batch on its way, nothing is known of it before.
        weigher: Weighs micro-batches.
        parts: Cuts a batch.
    """

    def __init__(self, module: pl.LightningModule, weigher: BatchWeigher, parts: Parts) -> None:
        self._module, self._weigher, self._parts = module, weigher, parts
        self._batch: Any = None
        self._changes: list[int] = []
        self._found: KnownWeights | None = None

    def broadcast(self, send: TreeBroadcast, batch: Any, given: Any) -> Any:
        """Return the batch of the first rank of the replica, and note what is known of its weights.

        Args:
            send: Gives every rank the tree of the first one.
            batch: This rank's batch, on the device.
            given: The same as the data loader gave it.

        **Communicates**: the batch, over the replica.
        """
        # What is known travels with the batch, as only the first rank's loader is asked.
        batch, found = send.broadcast((batch, self._find(given)))
        self._batch = self._found = None
        if found is not None:
            zero, compared = found
            self._batch, self._found = batch, KnownWeights(frozenset(zero), compared)
            # A hook or the step may write into the batch in place: then what is known is no
            # longer true.
            self._changes = [count_of_changes(tensor) for tensor in tensors_of(batch)]
        return batch

    def _find(self, batch: Any) -> tuple[tuple[int, ...], tuple[float, ...]] | None:
        """Return what `KnownWeights` holds; None: the device has to be asked."""
        trainer, weigher = trainer_of(self._module), self._weigher
        trains = trainer is not None and trainer.training
        # All weigh the same, so there is nothing to know.
        if not trains or (weigher.rule.counts_all and not weigher.alternatives):
            return None
        if any(has_hook(self._module, hook) for hook in BATCH_HOOKS):
            return None
        tensors = list(tensors_of(batch))
        # On the device the answer would be waited for.
        if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
            return None
        parts, sizes = self._parts(batch)
        weights = []
        if not weigher.rule.counts_all:
            pairs = zip(parts, sizes, strict=True)
            weights = [weigher.rule.weigh(part, samples) for part, samples in pairs]
        zero = tuple(index for index, weight in enumerate(weights) if weight == 0)
        return zero, weigher.compare_rules(batch, sum(sizes))

    def known(self, batch: Any) -> KnownWeights | None:
        """Return what is known of a batch; None if it is another one, or was changed since."""
        is_same = self._found is not None and batch is self._batch
        is_same = is_same and self._changes == [
            count_of_changes(tensor) for tensor in tensors_of(batch)
        ]
        found = self._found if is_same else None
        # Once: the batch is not to be kept alive for it.
        self._batch, self._found = None, None
        return found
