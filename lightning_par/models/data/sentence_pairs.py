"""Sentence-pair data for encoders: prose split into sentences, packed into segment pairs, padded.

Shapes: B samples, T tokens.
"""

import ast
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_par.models.bert.masking import IGNORED
from lightning_par.models.data.text_data_module import TextDataModule
from lightning_par.models.data.token_windows import PADDING, split_ranges
from lightning_par.models.data.tokenizers import find_files, standard_library_files, Tokenizer

__all__ = ["SentenceDataModule", "SentencePairs", "pack_pairs", "prose_of", "split_sentences"]

_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
_NUM_SPECIAL = 3  # per sample: one [CLS], two [SEP]


@dataclass(frozen=True)
class Pair:
    """Two consecutive segments (runs of tokens) of a text."""

    first: tuple[int, ...]
    second: tuple[int, ...]


def prose_of(path: Path) -> str:
    """Return the docstrings of a Python file, or the whole text of any other.

    Args:
        path: File in UTF-8; invalid bytes are replaced. A .py file that this Python cannot parse
            gives an empty text.
    """
    text = path.read_bytes().decode("utf-8", errors="replace")
    if path.suffix != ".py":
        return text
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # invalid escapes in somebody else's code
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return ""
    found = (ast.get_docstring(n) for n in ast.walk(tree) if isinstance(n, documented))
    return "\n\n".join(text for text in found if text)


def split_sentences(text: str) -> list[str]:
    """Split a text at the ends of sentences and at blank lines, and normalize white space.

    Examples:
        >>> split_sentences("One is here.   Two is, too.")
        ['One is here.', 'Two is, too.']
    """
    parts = (" ".join(part.split()) for part in _END.split(text))
    return [part for part in parts if part]


def pack_pairs(sentences: Iterable[Sequence[int]], length: int, seed: int) -> Iterator[Pair]:
    """Pack the sentences of one text into samples, each split into two segments at a sentence end.

    Args:
        sentences: Tokens of every sentence, in order; truncated to the length of a sample.
        length: T; 5 or more.
        seed: Seed of the choice of the boundaries.
    """
    room, generator = length - _NUM_SPECIAL, random.Random(seed)
    held: list[Sequence[int]] = []
    for sentence in sentences:
        sentence = sentence[:room]
        if held and sum(map(len, held)) + len(sentence) > room:
            yield from _split_pair(held, generator)
            held = []
        held.append(sentence)
    yield from _split_pair(held, generator)


def _split_pair(held: Sequence[Sequence[int]], generator: random.Random) -> Iterator[Pair]:
    """Yield the sentences split between two of them, or a single sentence split in its middle."""
    if len(held) == 1:
        half = len(held[0]) // 2
        held = [held[0][:half], held[0][half:]]
    if len(held) < 2 or not held[0]:
        return
    place = generator.randrange(1, len(held))
    first, second = ([t for s in part for t in s] for part in (held[:place], held[place:]))
    yield Pair(tuple(first), tuple(second))


class SentencePairs(Dataset[dict[str, Tensor]]):
    """Samples ``[CLS] first [SEP] second [SEP]``, padded to T; in half of them the two are swapped.

    Index `PADDING` gives a sample with weight 0 in the loss.

    Args:
        pairs: Segment pairs of at most T - 3 tokens each.
        length: T.
        first_special: Token id of [PAD]; [CLS], [SEP] and [MASK] follow.
        seed: Seed of the choice which samples are swapped.
    """

    def __init__(
        self, pairs: Sequence[Pair], length: int, *, first_special: int, seed: int
    ) -> None:
        self.pairs, self.length, self.seed = pairs, length, seed
        self.pad, self.cls, self.sep = range(first_special, first_special + 3)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample: the entries of a batch of `SentenceDataModule` without the dim B.

        Args:
            index: 0 .. len - 1, or `PADDING`.
        """
        position = 0 if index == PADDING else index
        pair = self.pairs[position]
        # A function of the index alone: the same in every epoch and for any number of workers.
        swapped = random.Random(f"{self.seed} {position}").random() < 0.5
        first, second = (pair.second, pair.first) if swapped else (pair.first, pair.second)
        tokens = [self.cls, *first, self.sep, *second, self.sep]
        missing = self.length - len(tokens)
        segments = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        maskable = [False, *[True] * len(first), False, *[True] * len(second), False]
        counts = index != PADDING
        return {
            "input_ids": torch.tensor(tokens + [self.pad] * missing),
            "segment_ids": torch.tensor(segments + [0] * missing),
            "attention_mask": torch.tensor([1] * len(tokens) + [0] * missing),
            "maskable": torch.tensor(maskable + [False] * missing) & counts,
            "sentence_order": torch.tensor(int(swapped) if counts else IGNORED),
        }


class SentenceDataModule(TextDataModule):
    """Data module of sentence pairs for `BertModule`.

    A batch has ``input_ids``, ``segment_ids`` and ``attention_mask`` (0 for padding), all [B, T]
    int64; ``maskable`` [B, T] bool (neither padding nor special); and ``sentence_order`` [B] int64:
    0 as in the text, 1 swapped, -100 for a sample that pads the batch. The ids of the four special
    tokens follow those of the tokenizer; [MASK] is the last one.

    The arguments are those of `TextDataModule`, but `paths` names text only, and without it the
    docstrings of Python's standard library are read. `max_bytes` limits the prose.

    Examples:
        >>> data = SentenceDataModule(length=64, batch_size=8, max_bytes=100_000)
    """

    @property
    def vocab_size(self) -> int:
        """V: tokens are 0 .. V - 1, special ones included."""
        return self.tokenizer.vocab_size + len(_SPECIAL)

    @override
    def _split(self) -> None:
        files = find_files(self.paths) if self.paths else standard_library_files()
        pairs = list(self._pack(files, self.tokenizer))
        ranges = split_ranges(
            len(pairs), validation=self.fractions["validation"], test=self.fractions["test"]
        )
        for name, runs in ranges.items():
            chosen = [pair for low, high in runs for pair in pairs[low:high]]
            self._splits[name] = SentencePairs(
                chosen, self.max_length, first_special=self.tokenizer.vocab_size, seed=self.seed
            )

    def _pack(self, files: Iterable[Path], tokenizer: Tokenizer) -> Iterator[Pair]:
        left = float("inf") if self.max_bytes is None else self.max_bytes
        for number, file in enumerate(files):
            # min(): infinity is no end of a slice.
            text = prose_of(file)[: int(min(left, 2**40))]
            left -= len(text)
            sentences = [tokenizer.encode(s) for s in split_sentences(text)]
            yield from pack_pairs(sentences, self.max_length, self.seed + number)
            if left <= 0:
                return
