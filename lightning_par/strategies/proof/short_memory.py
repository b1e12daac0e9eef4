"""Names the proof where it is what runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_par.engine.memory.measured import lacks_memory

__all__ = ["names_the_proof"]

_NOTE = (
    "The comparison of this step with one process (verify=) used this memory: rank 0 keeps copies "
    "of the whole model on the CPU, and all ranks gather one parameter after the other for them. "
    "verify=False trains without the comparison. verify='auto' compares models with more than 1 "
    "GiB of parameters block by block, which needs much less memory."
)


@contextmanager
def names_the_proof() -> Iterator[None]:
    """Add to an error of missing memory that the proof took it, and how to train without."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            error.add_note(_NOTE)
        raise
