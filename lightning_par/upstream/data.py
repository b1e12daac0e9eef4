"""Iterators of torch's data loaders.

`WorkerIterator` is that of a `DataLoader` with workers, the only one whose batches lie in a queue;
torch has no public name to tell it by.
"""

from queue import Queue
from typing import Any

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

__all__ = ["WorkerIterator", "pinned_batches"]

WorkerIterator = _MultiProcessingDataLoaderIter


def pinned_batches(iterator: Any) -> list[Any] | None:
    """Return the batches that a loader's thread has pinned and the loop has not fetched, in order.

    Only looks. A loader with ``pin_memory=True`` has such a thread, which keeps batches in a queue
    until their turn comes; torch has no public way to see them.

    Args:
        iterator: A `WorkerIterator`.

    Returns:
        Batches, or what torch puts in their place where a worker raised or ended; None if there is
        no such thread.
    """
    with names_of("torch"):
        queue: object = iterator._data_queue
    if not isinstance(queue, Queue):  # without such a thread it is one between processes
        return None
    # The thread of the loader goes on putting batches in.
    with queue.mutex:
        waiting = list(queue.queue)
    return [batch for _, batch in sorted(waiting, key=lambda entry: entry[0])]
