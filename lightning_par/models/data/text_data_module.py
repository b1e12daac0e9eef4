"""Data module of causal language models: batches of token windows from text or token files."""

from functools import cached_property
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.models.data.resumable_loader import ReplicaSampler, ResumableLoader
from lightning_par.models.data.token_windows import (
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


class TextDataModule(L.LightningDataModule):
    """Data module of batches ``{"input_ids": [B, T], "labels": [B, T]}``, int64.

    Labels are already shifted: ``labels[:, t]`` is the token after ``input_ids[:, t]``. Every model
    replica gets its own samples, the same on all its ranks. A run that is resumed in the middle of
    an epoch goes on with the next batch.

    Args:
        paths: Text files, folders (every ``*.txt`` below), glob patterns, or one token file
            ``*.bin`` (see `write_token_file`). None: the sources of Python's standard library.
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
        self._splits: dict[Split, Any] = {}
        self._train_loader: ResumableLoader[dict[str, Tensor]] | None = None
        self._position: dict[str, int] = {}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer by the name that was given."""
        return load_tokenizer(self.tokenizer_name)

    @cached_property
    def _corpus(self) -> tuple[Tokens, int]:
        """Tokens [S] and the size V of their vocabulary."""
        if self.paths and any(path.endswith(".bin") for path in self.paths):
            if len(self.paths) > 1:
                raise ConfigurationError(
                    "LP910",
                    f"paths={self.paths}: give one token file, or text files only; "
                    "write_token_file() joins several into one.",
                )
            tokens, vocab_size = read_token_file(self.paths[0])
            return tokens, vocab_size or self.tokenizer.vocab_size
        files = find_files(self.paths) if self.paths else standard_library_files()
        text = encode_files(files, self.tokenizer, max_bytes=self.max_bytes)
        return text, self.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """V: tokens are 0 .. V - 1."""
        return self._corpus[1]

    def setup(self, stage: str) -> None:
        """Read and split the corpus; at the first call only.

        Args:
            stage: Not used: all splits are made at once.
        """
        if self._splits:  # the Trainer calls it for every stage
            return
        tokens, _ = self._corpus
        ranges = split_ranges(
            len(tokens), validation=self.fractions["validation"], test=self.fractions["test"]
        )
        self._splits = {
            name: WindowDataset(tokens, runs, self.max_length) for name, runs in ranges.items()
        }

    def train_dataloader(self) -> ResumableLoader[dict[str, Tensor]]:
        """Return the loader of this replica's training batches, without a last incomplete one.

        Raises:
            ConfigurationError: The split has not one batch for every replica.
        """
        sampler = self._sampler("train", shuffle=self.shuffle, drop_last=True)
        if sampler.num_samples < self.batch_size:
            raise ConfigurationError(
                "LP911",
                f"the training split has {len(self._splits['train'])} samples of {self.max_length} "
                f"tokens, too few for batch_size={self.batch_size} on {sampler.num_replicas} "
                "replicas; use more text, or a smaller batch_size or length.",
            )
        loader: ResumableLoader[dict[str, Tensor]] = ResumableLoader(
            self._splits["train"],
            batch_size=self.batch_size,
            sampler=sampler,
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
                f"the {split} split has no sample of {self.max_length} tokens; use more text, a "
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
