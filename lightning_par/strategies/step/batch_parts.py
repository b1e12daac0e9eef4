"""Which entries of the batches of a run have a batch dim: told from loaders and earlier batches."""

from typing import Any

from torch.utils.data import DataLoader

from lightning_par.engine.batch import BatchDims, find_batch_dims
from lightning_par.errors import PlanError
from lightning_par.plan.parallel_plan import BatchLayout

__all__ = ["BatchDimsFinder"]


class BatchDimsFinder:
    """Tells which entries of a batch have a batch dim.

    Args:
        layout: What is declared.
        microbatches: Into how many a batch is cut.
        replicas: Among how many a batch is divided.
    """

    def __init__(self, layout: BatchLayout, microbatches: int, replicas: int) -> None:
        kinds = [f"{microbatches} micro-batches"] * (microbatches > 1)
        kinds += [f"{replicas} replicas"] * (replicas > 1)
        self._layout, self._divided = layout, " and ".join(kinds)
        self._sizes: set[int] = set()
        self._known: set[str] = set()

    def add_loader(self, dataloader: object) -> None:
        """Take note of the batch size of a data loader, if it tells one."""
        if not isinstance(dataloader, DataLoader):
            return
        size = dataloader.batch_size
        if size is None:
            size = getattr(dataloader.batch_sampler, "batch_size", None)
        if isinstance(size, int):
            self._sizes.add(size)

    def find(self, batch: Any, *, must_know: bool) -> BatchDims:
        """Return which entries of a batch have a batch dim.

        Args:
            batch: That of this replica.
            must_know: Whether to refuse a batch whose size is not known for sure.

        Raises:
            PlanError: See `must_know`; or declared entries have different numbers of samples.
        """
        dims = find_batch_dims(batch, self._layout, self._sizes, self._known)
        if not dims.unsure:
            self._known.update(dims.dims)
        elif must_know:
            raise PlanError(
                f"which entries of the batch have a batch dim cannot be told from their shapes: "
                f"{dims.unsure}. It has to be known for {self._divided}. Declare the entries that "
                "have one in ParallelPlan(batch=BatchLayout(batch_dims={entry: dim})), or those "
                "that have none in BatchLayout(whole=(entry, ...)); a batch that cannot be cut "
                "needs num_microbatches=1."
            )
        return dims
