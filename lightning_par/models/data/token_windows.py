"""Token files, train/validation/test splits, and a dataset of token windows.

Shapes: S tokens of the corpus, T tokens of a sample.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
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
    "read_documents",
    "read_token_file",
    "split_ranges",
    "write_token_file",
]

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Ranges = Sequence[tuple[int, int]]

PADDING = -1
"""Index of a padding sample, whose labels are all ignored; it fills a replica's last batch."""

_SPLIT_BLOCK = 16_384
_IGNORE_INDEX = -100


def write_token_file(
    path: str | Path,
    parts: Iterable[ArrayLike],
    *,
    vocab_size: int | None = None,
    dtype: Literal["uint16", "uint32"] | None = None,
    documents: bool = False,
) -> int:
    """Write a token file: a flat binary array, and a ``.json`` file of its metadata next to it.

    Args:
        path: File to write; conventionally ends in ``.bin``.
        parts: Token arrays of any shape, written one after another, so that the corpus need not
            fit in memory.
        vocab_size: V; None: the range of `dtype`.
        dtype: Dtype in the file, little-endian; None: the smaller one that holds V.
        documents: Whether each part is a document; where these end is then kept in a ``.npy`` file
            next to it (int64, one past the last token of each).

    Returns:
        Number of tokens written.

    Raises:
        ConfigurationError: A token is outside 0 .. V - 1.
    """
    if dtype is None:
        dtype = "uint16" if vocab_size is not None and vocab_size <= 2**16 else "uint32"
    limit = min(int(np.iinfo(dtype).max) + 1, vocab_size or 2**32)
    path, count, ends = Path(path), 0, array("q")
    with path.open("wb") as file:
        for part in parts:
            tokens = np.asarray(part).ravel()
            if tokens.size and not 0 <= tokens.min() <= tokens.max() < limit:
                raise ConfigurationError(
                    "LP910",
                    f"{path.name} would hold tokens from {tokens.min()} to {tokens.max()}, but "
                    f"they must be from 0 to {limit - 1} (dtype={dtype}, vocab_size={vocab_size}). "
                    "For larger tokens use a larger vocab_size, and a larger dtype if needed.",
                )
            file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            count += tokens.size
            if tokens.size:
                ends.append(count)
    if documents:
        np.save(path.with_suffix(".npy"), np.frombuffer(ends, dtype=np.int64))
    else:
        path.with_suffix(".npy").unlink(missing_ok=True)  # of a file of that name before
    described = {"dtype": dtype, "num_tokens": count, "vocab_size": vocab_size}
    path.with_suffix(".json").write_text(json.dumps(described, indent=2) + "\n")
    return count


def read_token_file(path: str | Path) -> tuple[Tokens, int | None]:
    """Memory-map a token file.

    Args:
        path: File of `write_token_file`; without a ``.json`` next to it, it is read as uint16.

    Returns:
        The tokens [S], and V, or None if the ``.json`` does not say.

    Raises:
        ConfigurationError: The file does not exist, or its size is not what its ``.json`` says.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(
            "LP910",
            f"the token file {str(path)!r} in paths= does not exist. Make it with `lightning-par "
            "tokenize TEXT --out FILE`.",
        )
    beside = path.with_suffix(".json")
    described = json.loads(beside.read_text()) if beside.is_file() else {}
    dtype = np.dtype(described.get("dtype", "uint16")).newbyteorder("<")
    size = path.stat().st_size
    count = described.get("num_tokens", size // dtype.itemsize)
    if size != count * dtype.itemsize or not count:
        raise ConfigurationError(
            "LP910",
            f"the token file {path.name} has {size} bytes, but should hold {count} tokens of "
            f"{dtype.itemsize} bytes each. Write the file again with write_token_file().",
        )
    tokens = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    return cast(Tokens, tokens), described.get("vocab_size")


def read_documents(path: str | Path) -> NDArray[np.int64]:
    """Memory-map where the documents of a token file end.

    Args:
        path: The token file.

    Returns:
        One past the last token of each.

    Raises:
        ConfigurationError: The file was written without.
    """
    beside = Path(path).with_suffix(".npy")
    if not beside.is_file():
        raise ConfigurationError(
            "LP910",
            f"the token file {Path(path).name} does not store where its documents end. Write it "
            "with `lightning-par tokenize`, or with write_token_file(..., documents=True).",
        )
    ends: NDArray[np.int64] = np.load(beside, mmap_mode="r")
    return ends


def split_ranges(
    num_tokens: int, *, validation: float, test: float, seed: int = 0
) -> dict[Literal["train", "val", "test"], list[tuple[int, int]]]:
    """Split a corpus into contiguous ranges of tokens for training, validation and test.

    The corpus is divided into blocks of 16384 tokens (smaller ones if it is short), which are
    assigned to splits at random. The split does not depend on T, so that runs with different T
    hold out the same tokens.

    Args:
        num_tokens: S.
        validation: Fraction of the blocks, 0 <= f < 1; at least one block if it is not 0.
        test: Fraction of the blocks, likewise.
        seed: Seed of the assignment.

    Returns:
        For each split, first and one-past-last token of every range, in order.

    Raises:
        ConfigurationError: A fraction is out of range, or no block is left for training.
    """
    shares = {"validation": validation, "test": test}
    problems = [
        f"{name}_fraction={share} must be between 0 and 1."
        for name, share in shares.items()
        if not 0 <= share < 1
    ]
    raise_problems(ConfigurationError, "LP902", problems)
    # A short corpus still has 64 blocks: with fewer, small fractions could not be met.
    block = max(1, min(_SPLIT_BLOCK, num_tokens // 64))
    count = -(-num_tokens // block)
    counts = [max(1, round(share * count)) if share else 0 for share in shares.values()]
    if sum(counts) >= count:
        raise ConfigurationError(
            "LP911",
            f"validation_fraction={validation} and test_fraction={test} leave none of the "
            f"{num_tokens} tokens for training. Use smaller fractions.",
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = (order[sum(counts) :], order[: counts[0]], order[counts[0] : sum(counts)])
    return {
        "train": _merge(chosen[0], block, num_tokens),
        "val": _merge(chosen[1], block, num_tokens),
        "test": _merge(chosen[2], block, num_tokens),
    }


def _merge(blocks: Iterable[int], block: int, num_tokens: int) -> list[tuple[int, int]]:
    """Return the token ranges of blocks; adjacent blocks become one range."""
    runs: list[tuple[int, int]] = []
    for index in sorted(blocks):
        low, high = index * block, min((index + 1) * block, num_tokens)
        if runs and runs[-1][1] == low:
            low = runs.pop()[0]
        runs.append((low, high))
    return runs


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Dataset of windows of T tokens, with the tokens shifted by one as labels.

    Windows do not overlap and never cross the end of a range; the rest of a range is not used.
    Index `PADDING` gives a sample whose labels are all ignored.

    Args:
        tokens: [S]; may be memory-mapped.
        ranges: First and one-past-last token of every range.
        length: T.
    """

    def __init__(self, tokens: Tokens, ranges: Ranges, length: int) -> None:
        self.tokens = tokens
        self.length = length
        self._firsts = np.array([low for low, _ in ranges], dtype=np.int64)
        # One token less: the last label of a window must be in the range, too.
        per_run = [max(0, high - low - 1) // length for low, high in ranges]
        self._ends = np.cumsum(per_run, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def starts(self, index: int | None = None) -> NDArray[np.int64]:
        """Return the first token of a window, or of all [len].

        Args:
            index: 0 .. len - 1; None: all.
        """
        asked = np.arange(len(self)) if index is None else np.array(index)
        run = np.searchsorted(self._ends, asked, side="right")
        before = np.where(run > 0, self._ends[run - 1], 0)
        first: NDArray[np.int64] = self._firsts[run] + (asked - before) * self.length
        return first

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"input_ids": [T], "labels": [T]}``, int64.

        Args:
            index: 0 .. len - 1, or `PADDING`.

        Raises:
            IndexError: `index` is out of range.
        """
        position = 0 if index == PADDING else index
        if not 0 <= position < len(self):
            raise IndexError(f"sample {index} of a dataset of {len(self)}")
        low = int(self.starts(position))
        window = torch.from_numpy(self.tokens[low : low + self.length + 1].astype(np.int64))
        # Clones: both are views of the same memory, and the padding is written in place.
        labels = window[1:].clone()
        if index == PADDING:
            labels.fill_(_IGNORE_INDEX)
        return {"input_ids": window[:-1].clone(), "labels": labels}
