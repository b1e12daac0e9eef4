"""A look at the training step as it will be in the last step of the run.

A term of the loss may begin after a warm-up, or an epoch may add noise. If the step asks how far
the run is, it is looked at once more, and is told the last step. So a loss that the mesh cannot
train then is refused before the first step, not in the middle of the run; and random numbers that
are drawn later only are known.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.start.first_look import FirstLook
from lightning_par.strategies.step.batch_weights import BatchWeigher, BatchWeights
from lightning_par.upstream.functions import replaced

__all__ = ["EndOfRun"]

_LOG = logging.getLogger(__name__)
_PROGRESS = ("global_step", "current_epoch")


class EndOfRun:
    """Notices whether a step asks how far the run is, and lets it see the end.

    Args:
        module: The user's LightningModule.
        weigher: Has the rule of the loss.
        first_look: Gives it the rule.
    """

    def __init__(
        self, module: pl.LightningModule, weigher: BatchWeigher, first_look: FirstLook
    ) -> None:
        self._module, self._weigher, self._first_look = module, weigher, first_look
        self._is_asked = False
        self._last: tuple[int, int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Surround a look at the step, and notice whether it reads the Trainer's step or epoch.

        Inside `look`, it reads the last ones of the run.
        """
        with ExitStack() as stack:
            for place, name in enumerate(_PROGRESS):
                own = vars(pl.Trainer)[name]
                # On the class, as `Trainer.global_step` is a property, which no instance can
                # hide.
                stack.enter_context(replaced(pl.Trainer, name, property(self._teller(own, place))))
            yield

    def _teller(self, own: property, place: int) -> Callable[[pl.Trainer], int]:
        def tell(trainer: pl.Trainer) -> int:
            self._is_asked = True
            if self._last is not None:
                return self._last[place]
            return int(own.__get__(trainer, type(trainer)))

        return tell

    def look(self, look: Callable[[], None], weigh: Callable[[], BatchWeights]) -> None:
        """Look at the step in the last step of the run, if it asks for that on any rank.

        Args:
            look: Looks at the step on some samples, and gives the weigher its rule.
            weigh: Weighs the batch by that rule.

        Raises:
            ConfigurationError: The mesh cannot train then what one process trains.

        **Communicates**: a number over all ranks; then as `look` and `weigh` do.
        """
        # Whether the step asks may depend on the samples of a rank: one is enough for all of
        # them.
        asked = torch.tensor(float(self._is_asked), device=self._module.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        trainer, self._is_asked = self._module.trainer, False
        last = _last_step(trainer) if asked else None
        if last is None or last == (trainer.global_step, trainer.current_epoch):
            return
        weigher, was_told = self._weigher, self._first_look.is_told
        first, others, before = weigher.rule, weigher.alternatives, weigh()
        self._last = last
        # `look` gives the weigher the rule of the last step, which must not stay.
        try:
            look()
            found, now = weigher.rule, weigh()
        except ConfigurationError as error:
            if error.code == "LP303":
                # On some samples, or with this step, it fails: that tells nothing of the run.
                _LOG.info(
                    "training_step was tried with the step number of the end of the run, but "
                    "failed: %s",
                    error,
                )
                return
            error.add_note(
                f"This happens in step {last[0]}, the last step of this run, but not in the first "
                "step. If the run should end before that step, set max_steps= or max_epochs=."
            )
            raise
        finally:
            self._last = None
            weigher.rule, weigher.alternatives = first, others
        # By what they weigh in this batch, and not by their names: two rules may be the same one
        # here.
        is_same = before.is_sum == now.is_sum and torch.allclose(before.shares, now.shares)
        differs = torch.tensor(float(not is_same), device=self._module.device)
        dist.all_reduce(differs, dist.ReduceOp.MAX)
        if differs and was_told and self._first_look.is_told:
            raise ConfigurationError(
                "LP309",
                f"{type(self._module).__name__}.training_step: in the first step the loss is "
                f"{first.name}, but in step {last[0]}, the last step of this run, it is "
                f"{found.name}. Use one formula of the loss in all steps, or num_microbatches=1 "
                "and data_parallel_size=1. If the run should end before that step, set max_steps= "
                "or max_epochs=. No weight was changed.",
            )


def _last_step(trainer: pl.Trainer) -> tuple[int, int] | None:
    """Return the last global step and epoch of a fit; None where the run has no end."""
    most, epochs, batches = trainer.max_steps, trainer.max_epochs, trainer.num_training_batches
    accumulated = trainer.accumulate_grad_batches
    # Steps of the optimizer, not batches: `accumulate_grad_batches` of them make one.
    steps = math.ceil(batches / accumulated) if math.isfinite(batches) else None
    ends = [] if most < 0 else [most]
    ends += [] if steps is None or epochs is None or epochs < 0 else [steps * epochs]
    if not ends:
        return None
    # A run ends at whichever limit comes first; steps are counted from 0.
    last = max(0, min(ends) - 1)
    epoch = last // steps if steps else max(0, (epochs or 1) - 1)
    return last, epoch
