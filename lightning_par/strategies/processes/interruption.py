"""What ranks may still do together while the Trainer handles an exception.

Note [Exceptions]: `save_on_exception` saves from the handler of an exception, and every rank has to
take part. But then it is not known whether the other ranks stopped, too, or are waiting somewhere
in a step. Each says so in the store of the process group, where asking cannot hang. Unless all do,
ranks no longer communicate and nothing is saved.
"""

from contextlib import suppress
from datetime import timedelta

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_par.upstream.distributed import default_store
from lightning_par.upstream.lightning import trainer_of

__all__ = ["Interruption"]

_GRACE = timedelta(seconds=30)
"""How long a rank that handles an exception waits for the others to do so; half of the timeout, if
that is less.
"""


class Interruption:
    """Whether an exception has stopped this rank, and all others with it.

    Args:
        timeout: Timeout of collectives; None: the one of torch.

    Attributes:
        module: The LightningModule whose Trainer is asked; None before there is one.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._limit = _GRACE if timeout is None else min(_GRACE, timeout / 2)
        self.module: pl.LightningModule | None = None
        self._count = 0
        self._together: bool | None = None
        self._torn = False

    def tear(self) -> None:
        """Let ranks be apart from now on: they fail to reach each other.

        The store may be as far away as they are, and whoever asks it may wait for ever.
        """
        self._torn = True

    @property
    def is_handled(self) -> bool:
        """Whether the Trainer handles an exception."""
        trainer = trainer_of(self.module)
        return trainer is not None and trainer.interrupted

    def ranks_are_together(self) -> bool:
        """Return whether ranks may communicate; see Note [Exceptions]."""
        # Nobody to be apart from.
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return True
        # In a run ranks are together by construction; a new exception is asked about anew.
        if not self.is_handled:
            self._together = None
            return True
        # Once per exception: all ranks ask in the same order, and the first answer holds.
        if self._together is None:
            self._together = not self._torn and self._agree_on_stopping()
        return self._together

    def _agree_on_stopping(self) -> bool:
        """Wait until all ranks handle an exception; the first to know or to give up decides."""
        self._count += 1
        prefix = f"lightning_par/stopped/{self._count}"
        store = default_store()
        keys = [f"{prefix}/{rank}" for rank in range(dist.get_world_size())]
        verdict = "apart"
        with suppress(RuntimeError):  # others do not come, or whoever served the store is gone
            # No collective: a store answers also while the others hang.
            store.set(keys[dist.get_rank()], "")
            store.wait(keys, self._limit)
            verdict = "together"
        with suppress(RuntimeError):
            # The verdict of one is that of all, or some would communicate and others not.
            decided = store.compare_set(f"{prefix}/verdict", "", verdict)
            return bool(decided == b"together")
        return False
