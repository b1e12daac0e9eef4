"""What ranks may still do together while the Trainer handles an exception.

Note [Exceptions]: `save_on_exception` saves from the handler of an exception, and every rank has to
take part. But then it is not known whether the other ranks stopped, too, or are waiting somewhere
in a step. Each says so in the store of the process group, where asking cannot hang. Unless all do,
ranks no longer communicate and nothing is saved.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.upstream.distributed import default_store
from lightning_par.upstream.lightning import trainer_of

__all__ = ["InterruptibleProcesses"]

_GRACE = timedelta(seconds=30)
"""How long a rank that handles an exception waits for the others to do so; half of the timeout, if
that is less.
"""


class InterruptibleProcesses(MeshProcesses):
    """Processes of a run that know whether an exception has stopped all of them.

    Args:
        **options: Those of `MeshProcesses`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._interruptions = 0
        self._together: bool | None = None

    @property
    def _is_interrupted(self) -> bool:
        """Whether the Trainer handles an exception."""
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and trainer.interrupted

    def _ranks_are_together(self) -> bool:
        """Return whether ranks may communicate; see Note [Exceptions]."""
        if self.world_size == 1 or not dist.is_initialized():
            return True
        if not self._is_interrupted:
            self._together = None
            return True
        if self._together is None:
            self._together = self._agree_on_stopping()
        return self._together

    def _agree_on_stopping(self) -> bool:
        """Wait until all ranks handle an exception; the first to know or to give up decides."""
        self._interruptions += 1
        prefix = f"lightning_par/stopped/{self._interruptions}"
        store = default_store()
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.global_rank], "")
        limit = _GRACE if self._timeout is None else min(_GRACE, self._timeout / 2)
        try:
            store.wait(keys, limit)
            verdict = "together"
        except RuntimeError:
            verdict = "apart"
        return bool(store.compare_set(f"{prefix}/verdict", "", verdict) == b"together")

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._ranks_are_together():
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src) if self._ranks_are_together() else obj

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._ranks_are_together():
            return decision
        return super().reduce_boolean_decision(decision, all)
