"""Rows of T tokens that hold several documents, none of which sees another.

Shapes: T tokens of a row, K boundaries in it.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_par.models.data.token_windows import WindowDataset

__all__ = ["PackedDataset"]

_IGNORE_INDEX = -100


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Windows of a corpus, with the boundaries of the documents in them.

    A document that does not fit into what is left of a row goes on in the next one, as a document
    of its own. All rows have the same K, as batches of one shape are faster under a pipeline.

    Args:
        windows: The rows.
        ends: One past the last token of every document of the corpus, ascending.
    """

    def __init__(self, windows: WindowDataset, ends: NDArray[np.int64]) -> None:
        self._windows, self._ends = windows, ends
        starts = windows.starts()
        inside = np.searchsorted(ends, starts + windows.length) - np.searchsorted(
            ends, starts, side="right"
        )
        self._most = int(inside.max(initial=0)) + 2  # with 0 and T

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row.

        Args:
            index: 0 .. len - 1, or `PADDING`.

        Returns:
            ``input_ids``, ``labels`` and ``position_ids`` [T], and ``cu_seqlens`` [K], int64.
            Labels are shifted already; those of a document's last token are ignored. Positions
            begin anew in each document. Boundaries are 0, the starts of further documents, and T,
            as often as there is room.

        Raises:
            IndexError: `index` is out of range.
        """
        row: dict[str, Any] = self._windows[index]
        length = self._windows.length
        start = int(self._windows.starts(max(index, 0)))
        # The label of the last token may be the first one of the next document.
        first, stop = np.searchsorted(self._ends, (start, start + length), side="right")
        bounds = torch.from_numpy(self._ends[first:stop] - start)
        row["labels"][bounds - 1] = _IGNORE_INDEX
        bounds = bounds[bounds < length]
        places = torch.arange(length)
        begins = torch.cat((torch.zeros(1, dtype=torch.int64), bounds))
        row["position_ids"] = places - begins[torch.searchsorted(bounds, places, right=True)]
        row["cu_seqlens"] = torch.nn.functional.pad(
            begins, (0, self._most - len(begins)), value=length
        )
        return row
