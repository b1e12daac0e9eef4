"""Names the proof where it is what runs out of memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["names_the_proof"]

_SAID = ("can't allocate memory", "not enough memory")
"""What torch says of the host's memory, in a plain RuntimeError."""
_NOTE = (
    "The proof of this step took that memory: rank 0 keeps copies of the whole model on the CPU, "
    "for which all ranks gather one parameter after the other. verify=False trains without it. "
    "verify='auto' compares models above 1 GiB of parameters by blocks, with much less memory."
)


@contextmanager
def names_the_proof() -> Iterator[None]:
    """Add to an error of missing memory that the proof took it, and how to train without."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        kinds = MemoryError, torch.OutOfMemoryError
        if isinstance(error, kinds) or any(said in str(error) for said in _SAID):
            error.add_note(_NOTE)
        raise
