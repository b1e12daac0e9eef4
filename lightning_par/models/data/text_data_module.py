"""Data module of causal language models: batches of token windows from text or token files, of
packed documents, and of several corpora.
"""

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.errors import ConfigurationError, MeshError, raise_problems
from lightning_par.models.data.blended_corpora import BlendedCorpora
from lightning_par.models.data.packed_documents import PackedDataset
from lightning_par.models.data.resumable_loader import ReplicaSampler, ResumableLoader
from lightning_par.models.data.token_windows import (
    read_documents,
    read_token_file,
    split_ranges,
    Tokens,
    WindowDataset,
)
from lightning_par.models.data.tokenizers import (
    encode_files,
    find_files,
    load_tokenizer,
    standard_library_files,
    Tokenizer,
)

__all__ = ["TextDataModule"]

Split = Literal["train", "val", "test"]


class _Corpus(NamedTuple):
    """Tokens [S], the size V of their vocabulary, and where documents end, if that is asked."""

    tokens: Tokens
    vocab_size: int
    ends: NDArray[np.int64] | None


class TextDataModule(L.LightningDataModule):
    """Data module of batches ``{"input_ids": [B, T], "labels": [B, T]}``, int64.

    Labels are already shifted: ``labels[:, t]`` is the token after ``input_ids[:, t]``. With
    `documents`, batches have ``position_ids`` and ``cu_seqlens`` too, see `PackedDataset`. Every
    model replica gets its own samples, the same on all its ranks. A run that is resumed in the
    middle of an epoch goes on with the next batch.

    Args:
        paths: Text files (or JSON Lines), folders (every ``*.txt`` below), glob patterns, and token
            files ``*.bin`` (see `write_token_file`). None: the sources of Python's standard
            library. All text is one corpus, and every token file is one.
        length: T.
        batch_size: B, per replica.
        tokenizer: ``"bytes"``, a ``tokenizer.json`` file, or the name of a Hugging Face model. With
            a token file it is used only to decode.
        max_bytes: Maximum number of bytes of text to read; None: no limit.
        validation_fraction: Fraction of the corpus held out for validation, 0 <= f < 1.
        test_fraction: Fraction of the corpus held out for test and predict, 0 <= f < 1.
        shuffle: Whether every training epoch has another order.
        seed: Seed of that order; the same on all ranks.
        num_workers: Number of worker processes of a loader; 0: the training process loads.
        documents: Whether rows are packed documents, none of which sees another. Documents are
            files of text, lines of JSON Lines, and what a token file has kept as such.
        weights: One for each of `paths`, which are a corpus each then: their shares of the training
            samples, see `BlendedCorpora`. None: every sample of all corpora once.

    Raises:
        ConfigurationError: A value is out of range, a path names no file, or a split is too short
            for one batch.

    Examples:
        >>> data = TextDataModule(length=128, batch_size=8, max_bytes=100_000)
    """

    def __init__(
        self,
        paths: list[str] | None = None,
        length: int = 128,
        batch_size: int = 8,
        tokenizer: str = "bytes",
        max_bytes: int | None = 4_000_000,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.05,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        documents: bool = False,
        weights: list[float] | None = None,
    ) -> None:
        super().__init__()
        counts = {"length": length, "batch_size": batch_size, "max_bytes": max_bytes}
        problems = [
            f"{name}={value} must be 1 or more."
            for name, value in counts.items()
            if value is not None and value < 1
        ]
        if num_workers < 0:
            problems.append(f"num_workers={num_workers} must be 0 or more.")
        if weights is not None and len(weights) != len(paths or ()):
            problems.append(f"weights={weights} must have one entry for each of paths={paths}.")
        raise_problems(ConfigurationError, "LP902", problems)
        self.save_hyperparameters()
        self.paths = paths
        self.max_length = length
        self.batch_size = batch_size
        self.tokenizer_name = tokenizer
        self.max_bytes = max_bytes
        self.fractions = {"validation": validation_fraction, "test": test_fraction}
        self.shuffle = shuffle
        self.seed = seed
        self.num_workers = num_workers
        self.documents = documents
        self.weights = weights
        self._splits: dict[Split, Any] = {}
        self._train_loader: ResumableLoader[dict[str, Tensor]] | None = None
        self._position: dict[str, int] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer by the name that was given."""
        return load_tokenizer(self.tokenizer_name)

    @cached_property
    def _corpora(self) -> list[_Corpus]:
        found = self._read_all()
        sizes = [corpus.vocab_size for corpus in found]
        if len({*sizes}) > 1:
            raise ConfigurationError(
                "LP910",
                f"paths={self.paths} were encoded with vocabularies of different sizes, {sizes} "
                "tokens. Encode all of them with one tokenizer: `lightning-par tokenize "
                "--tokenizer ...`.",
            )
        return found

    def _read_all(self) -> list[_Corpus]:
        if not self.paths:
            return [self._read_text(standard_library_files())]
        if self.weights is not None:
            return [self._read(path) for path in self.paths]
        texts = [path for path in self.paths if not path.endswith(".bin")]
        found = [self._read(path) for path in self.paths if path.endswith(".bin")]
        return [*found, self._read_text(find_files(texts))] if texts else found

    def _read(self, path: str) -> _Corpus:
        if not path.endswith(".bin"):
            return self._read_text(find_files([path]))
        tokens, vocab_size = read_token_file(path)
        ends = read_documents(path) if self.documents else None
        return _Corpus(tokens, vocab_size or self.tokenizer.vocab_size, ends)

    def _read_text(self, files: Iterable[Path]) -> _Corpus:
        parts = list(encode_files(files, self.tokenizer, max_bytes=self.max_bytes))
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        return _Corpus(tokens, self.tokenizer.vocab_size, ends)

    @property
    def vocab_size(self) -> int:
        """V: tokens are 0 .. V - 1."""
        return self._corpora[0].vocab_size

    def setup(self, stage: str) -> None:
        """Read and split the corpora at the first call; of each call, check that fit can begin.

        Args:
            stage: "fit", or any other; all splits are made at once.

        Raises:
            ConfigurationError: The training split has not one batch for every replica.
        """
        if not self._splits:  # the Trainer calls it for every stage
            self._split()
        if stage != "fit":
            return
        # Before the model is set up, which takes long; sizes chosen from it are not known yet.
        with suppress(MeshError):
            self._train_sampler()

    def _train_sampler(self) -> ReplicaSampler:
        """Return the sampler of the training split.

        Raises:
            ConfigurationError: A replica has less than a batch.
        """
        sampler = self._sampler("train", shuffle=self.shuffle, drop_last=True)
        if sampler.num_samples < self.batch_size:
            raise ConfigurationError(
                "LP911",
                f"the training split has {len(self._splits['train'])} samples of "
                f"{self.max_length} tokens, which are too few for batch_size={self.batch_size} on "
                f"{sampler.num_replicas} replicas. Use more text, or a smaller batch_size or "
                "length.",
            )
        return sampler

    def _split(self) -> None:
        """Fill `_splits`."""
        parts: dict[Split, list[Any]] = {"train": [], "val": [], "test": []}
        for corpus in self._corpora:
            ranges = split_ranges(
                len(corpus.tokens),
                validation=self.fractions["validation"],
                test=self.fractions["test"],
            )
            for name, runs in ranges.items():
                rows: Any = WindowDataset(corpus.tokens, runs, self.max_length)
                if self.documents:
                    assert corpus.ends is not None
                    rows = PackedDataset(rows, corpus.ends)
                parts[name].append(rows)
        for name, held in parts.items():
            weights = self.weights if name == "train" else None
            self._splits[name] = held[0] if len(held) == 1 else BlendedCorpora(held, weights)

    def train_dataloader(self) -> ResumableLoader[dict[str, Tensor]]:
        """Return the loader of this replica's training batches, without a last incomplete one."""
        loader: ResumableLoader[dict[str, Tensor]] = ResumableLoader(
            self._splits["train"],
            batch_size=self.batch_size,
            sampler=self._train_sampler(),
            drop_last=True,
            num_workers=self.num_workers,
        )
        # The loader has to know where the Trainer ends an epoch; see ResumableLoader.
        limit = 1.0 if self.trainer is None else self.trainer.limit_train_batches
        loader.batches_per_epoch = limit if isinstance(limit, int) else int(limit * len(loader))
        self._train_loader, position = loader, self._position
        self._position = {}
        loader.load_state_dict(position)
        return loader

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the loader of this replica's validation batches."""
        return self._eval_loader("val")

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the loader of this replica's test batches."""
        return self._eval_loader("test")

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return the loader of this replica's test batches."""
        return self._eval_loader("test")

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data.

        The Trainer stores the loader's own state, too, but does not restore it if
        `configure_optimizers` has asked for ``trainer.estimated_stepping_batches`` (Lightning 2.6:
        the loader then exists before the state is read).
        """
        return {} if self._train_loader is None else self._train_loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a stored position in the training data.

        Args:
            state_dict: What `state_dict` returned.
        """
        # Checkpoints may be read before or after the loader is made.
        if self._train_loader is None:
            self._position = state_dict
        else:
            self._train_loader.load_state_dict(state_dict)

    def _eval_loader(self, split: Split) -> DataLoader[dict[str, Tensor]]:
        if not len(self._splits[split]):
            raise ConfigurationError(
                "LP911",
                f"the {split} split has no sample of {self.max_length} tokens. Use more text, a "
                "smaller length, or a larger validation_fraction and test_fraction.",
            )
        return DataLoader(
            self._splits[split],
            batch_size=self.batch_size,
            sampler=self._sampler(split, shuffle=False, drop_last=False),
            num_workers=self.num_workers,
        )

    def _sampler(self, split: Split, *, shuffle: bool, drop_last: bool) -> ReplicaSampler:
        """Return the sampler of this rank's replica."""
        # The strategy knows the replicas: the world size counts ranks that share one.
        trainer = self.trainer
        given = None if trainer is None else trainer.distributed_sampler_kwargs
        replicas = {"num_replicas": 1, "rank": 0, **(given or {})}
        return ReplicaSampler(
            self._splits[split],
            num_replicas=replicas["num_replicas"],
            rank=replicas["rank"],
            shuffle=shuffle,
            seed=self.seed,
            drop_last=drop_last,
        )
