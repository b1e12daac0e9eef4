"""Token files, their split into training, validation and test, and the windows that are samples.

Shapes: S tokens of the corpus, T tokens of a sample.
"""

import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_par.errors import ConfigurationError, raise_problems

__all__ = [
    "PADDING",
    "Tokens",
    "WindowDataset",
    "read_token_file",
    "split_ranges",
    "write_token_file",
]

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Ranges = Sequence[tuple[int, int]]

PADDING = -1
"""Index of a sample that counts for nothing; it fills up the last batch of a replica."""

_BLOCK = 16_384
_IGNORE_INDEX = -100


def write_token_file(
    path: str | Path,
    parts: Iterable[ArrayLike],
    *,
    vocab_size: int | None = None,
    dtype: Literal["uint16", "uint32"] | None = None,
) -> int:
    """Write tokens as a plain array of numbers, and beside it a ``.json`` file on how to read it.

    Args:
        path: Where to write; conventionally ends in ``.bin``.
        parts: Token arrays, [*] each, written one after another, so that a corpus need not fit in
            memory.
        vocab_size: Every token is less than this; None: as far as `dtype` reaches.
        dtype: Of the numbers in the file, little-endian; None: the smaller one that holds
            `vocab_size`.

    Returns:
        How many tokens were written.

    Raises:
        ConfigurationError: A token does not fit.
    """
    if dtype is None:
        dtype = "uint16" if vocab_size is not None and vocab_size <= 2**16 else "uint32"
    limit = min(int(np.iinfo(dtype).max) + 1, vocab_size or 2**32)
    path, count = Path(path), 0
    with path.open("wb") as file:
        for part in parts:
            tokens = np.asarray(part).ravel()
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < limit:
                raise ConfigurationError(
                    f"{path.name}: tokens {tokens.min()} .. {tokens.max()} do not fit 0 .. "
                    f"{limit - 1} (dtype={dtype}, vocab_size={vocab_size})."
                )
            file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            count += tokens.size
    described = {"dtype": dtype, "num_tokens": count, "vocab_size": vocab_size}
    path.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")
    return count


def read_token_file(path: str | Path) -> tuple[Tokens, int | None]:
    """Map a token file into memory; nothing is read yet.

    Args:
        path: Written by `write_token_file`; a file without a ``.json`` beside it is read as uint16.

    Returns:
        The tokens [S], and the size of the vocabulary where it is known.

    Raises:
        ConfigurationError: The file does not exist, or its size is not what its ``.json`` says.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(f"paths: token file {str(path)!r} does not exist.")
    beside = path.with_suffix(".json")
    described = json.loads(beside.read_text()) if beside.is_file() else {}
    dtype = np.dtype(described.get("dtype", "uint16")).newbyteorder("<")
    size = path.stat().st_size
    count = described.get("num_tokens", size // dtype.itemsize)
    if size != count * dtype.itemsize or not count:
        raise ConfigurationError(
            f"{path.name} has {size} bytes, but {count} tokens of {dtype.itemsize} bytes each "
            "were expected; write it again with write_token_file()."
        )
    tokens = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    return cast(Tokens, tokens), described.get("vocab_size")


def split_ranges(
    num_tokens: int, *, validation: float, test: float, seed: int = 0
) -> dict[Literal["train", "val", "test"], list[tuple[int, int]]]:
    """Divide a corpus into contiguous runs of tokens for training, validation and test.

    The corpus is cut into blocks of 16384 tokens (smaller ones if it is short), and blocks are
    drawn at random. The split does not depend on T: what one run held out, a run with another T
    holds out, too.

    Args:
        num_tokens: S.
        validation: Share of the blocks, 0 .. 1; at least one block if it is not 0.
        test: Likewise.
        seed: Of the draw.

    Returns:
        For each split, first and one-past-last token of every run, in order.

    Raises:
        ConfigurationError: A share is out of range, or they leave nothing to train on.
    """
    shares = {"validation": validation, "test": test}
    problems = [
        f"{name}_fraction={share} must be between 0 and 1."
        for name, share in shares.items()
        if not 0 <= share < 1
    ]
    raise_problems(ConfigurationError, problems)
    block = max(1, min(_BLOCK, num_tokens // 64))
    count = -(-num_tokens // block)
    counts = [max(1, round(share * count)) if share else 0 for share in shares.values()]
    if sum(counts) >= count:
        raise ConfigurationError(
            f"validation_fraction={validation} and test_fraction={test} leave nothing of "
            f"{num_tokens} tokens to train on."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = (order[sum(counts) :], order[: counts[0]], order[counts[0] : sum(counts)])
    return {
        "train": _merge(chosen[0], block, num_tokens),
        "val": _merge(chosen[1], block, num_tokens),
        "test": _merge(chosen[2], block, num_tokens),
    }


def _merge(blocks: Iterable[int], block: int, num_tokens: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in sorted(blocks):
        low, high = index * block, min((index + 1) * block, num_tokens)
        if runs and runs[-1][1] == low:
            low = runs.pop()[0]
        runs.append((low, high))
    return runs


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Samples of T tokens and, as labels, the T tokens that follow each of them.

    Windows do not overlap and never leave their run; what is left at its end is not used. Index
    `PADDING` gives a sample whose labels are all ignored.

    Args:
        tokens: [S]; may be mapped from a file.
        ranges: First and one-past-last token of every run.
        length: T.
    """

    def __init__(self, tokens: Tokens, ranges: Ranges, length: int) -> None:
        self.tokens = tokens
        self.length = length
        self._starts = [low for low, _ in ranges]
        per_run = [max(0, high - low - 1) // length for low, high in ranges]
        self._ends = list(accumulate(per_run))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"input_ids": [T], "labels": [T]}``, int64.

        Args:
            index: 0 .. len - 1, or `PADDING`.

        Raises:
            IndexError: `index` is out of range.
        """
        place = 0 if index == PADDING else index
        if not 0 <= place < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        run = bisect_right(self._ends, place)
        inside = place - (self._ends[run - 1] if run else 0)
        low = self._starts[run] + inside * self.length
        window = torch.from_numpy(self.tokens[low : low + self.length + 1].astype(np.int64))
        labels = window[1:].clone()
        if index == PADDING:
            labels.fill_(_IGNORE_INDEX)
        return {"input_ids": window[:-1].clone(), "labels": labels}
