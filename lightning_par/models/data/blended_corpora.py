"""One data set of several, each with its share of the samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from lightning_par.errors import ConfigurationError
from lightning_par.models.data.token_windows import PADDING

__all__ = ["BlendedCorpora"]


class BlendedCorpora(Dataset[dict[str, Tensor]]):
    """Blends data sets by weights: in every stretch of samples each has its share, up to one.

    There are as many samples as in all data sets together. Those of a data set come in order; what
    gets a larger share than it has samples begins again, and of another some are left out. Which
    samples these are depends on nothing but the sizes and the weights.

    Args:
        corpora: The data sets, each with a length.
        weights: One for each, 0 or more, in any unit; None: their sizes, so that each sample comes
            once.

    Raises:
        ConfigurationError: The weights are no shares, or a data set with a share has no sample.
    """

    def __init__(self, corpora: Sequence[Any], weights: Sequence[float] | None = None) -> None:
        sizes = np.array([len(corpus) for corpus in corpora])
        shares = np.array(sizes if weights is None else weights, dtype=np.float64)
        if shares.shape != sizes.shape or (shares < 0).any() or (sizes[shares > 0] == 0).any():
            raise ConfigurationError(
                "LP910",
                f"weights={list(shares)} do not fit corpora of {sizes.tolist()} samples. Pass one "
                "weight of 0 or more for each corpus, and the weight 0 for a corpus without "
                "samples.",
            )
        self._corpora, self._sizes = tuple(corpora), sizes
        exact = shares / max(shares.sum(), 1e-300) * sizes.sum()
        counts = np.floor(exact).astype(np.int64)
        # The largest remainders get what is left; the first ones among equals.
        left = round(exact.sum()) - int(counts.sum())
        counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
        # Sample j of n lies at (j + 1/2) / n of the whole.
        places = np.concatenate([(np.arange(n) + 0.5) / n for n in counts])
        order = np.argsort(places, kind="stable")
        self._corpus = np.repeat(np.arange(len(counts)), counts)[order].astype(np.int32)
        self._sample = np.concatenate([np.arange(n) for n in counts])[order]

    def __len__(self) -> int:
        return len(self._corpus)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample of one of the data sets.

        Args:
            index: 0 .. len - 1, or `PADDING`.

        Raises:
            IndexError: `index` is out of range.
        """
        found: dict[str, Tensor]
        if index == PADDING:
            found = self._corpora[int(self._sizes.argmax())][PADDING]
            return found
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        corpus = int(self._corpus[index])
        sample = int(self._sample[index] % self._sizes[corpus])
        found = self._corpora[corpus][sample]
        return found
