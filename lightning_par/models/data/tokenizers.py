"""Tokenizers, and finding and encoding text files."""

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_par.errors import ConfigurationError

__all__ = [
    "ByteTokenizer",
    "HuggingFaceTokenizer",
    "Tokenizer",
    "encode_files",
    "find_files",
    "load_tokenizer",
    "standard_library_files",
]

_SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "site-packages", "test", "tests"}


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """V: tokens are 0 .. V - 1."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""


class ByteTokenizer:
    """Byte-level tokenizer: one token per byte of UTF-8.

    Examples:
        >>> list(ByteTokenizer().encode("né"))
        [110, 195, 169]
    """

    vocab_size = 256

    def encode(self, text: str) -> Sequence[int]:
        """Return the bytes of `text`, 0 .. 255."""
        return text.encode("utf-8", errors="replace")

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of bytes; invalid UTF-8 becomes U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """Tokenizer of the Hugging Face `tokenizers` library.

    Args:
        name: A ``tokenizer.json`` file, or the name of a model, whose tokenizer is downloaded.

    Raises:
        ConfigurationError: The `tokenizers` library is not installed, or cannot load `name`.
    """

    def __init__(self, name: str) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigurationError(
                "LP909",
                f"tokenizer={name!r} needs the package tokenizers. Install it with pip install "
                "tokenizers, or use tokenizer='bytes', which needs no package.",
            ) from error
        is_file = Path(name).is_file()
        load = tokenizers.Tokenizer.from_file if is_file else tokenizers.Tokenizer.from_pretrained
        try:
            self._tokenizer = load(name)
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigurationError(
                "LP910",
                f"tokenizer={name!r} is neither a tokenizer.json file nor the name of a model "
                f"that could be loaded ({error}). Use 'bytes', the path of a file, or the name of "
                "a model.",
            ) from error

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of `text`, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))


def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer by name.

    Args:
        name: ``"bytes"``, a ``tokenizer.json`` file, or the name of a Hugging Face model.
    """
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def standard_library_files() -> list[Path]:
    """Return Python's own sources, without its tests, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for folder, inside, names in os.walk(root):
        # In place: os.walk then does not enter them, and they hold most of the files.
        inside[:] = (name for name in inside if name not in _SKIPPED_FOLDERS)
        place = Path(folder).relative_to(root)
        found += ((place / name).as_posix() for name in names if name.endswith(".py"))
    return [root / path for path in sorted(found)]


def find_files(paths: Sequence[str]) -> list[Path]:
    """Return the files that `paths` name, each once, in a fixed order.

    Args:
        paths: Files, folders (every ``*.txt`` below them) and glob patterns such as
            ``"corpus/**/*.md"``.

    Raises:
        ConfigurationError: An entry names no file.
    """
    found: dict[Path, None] = {}
    for entry in paths:
        hits = sorted(_expand(entry))
        if not hits:
            raise ConfigurationError(
                "LP910",
                f"paths={entry!r} matches no text file. Pass a file, a folder with *.txt files or "
                "a pattern such as 'folder/**/*.py'.",
            )
        found.update(dict.fromkeys(hits))
    return list(found)


def _expand(entry: str) -> Iterator[Path]:
    path = Path(entry).expanduser()
    if path.is_dir():
        return path.rglob("*.txt")
    if path.is_file():
        return iter([path])
    fixed = Path(*_leading_parts(path))
    pattern = path.relative_to(fixed).as_posix()
    return (hit for hit in fixed.glob(pattern) if hit.is_file())


def _leading_parts(path: Path) -> Iterator[str]:
    """Yield the components before the first one with a wildcard, never the last one."""
    for part in path.parts[:-1]:
        if any(sign in part for sign in "*?["):
            return
        yield part


def encode_files(
    files: Iterable[Path],
    tokenizer: Tokenizer,
    *,
    max_bytes: int | None = None,
    key: str = "text",
    end: int | None = None,
) -> Iterator[NDArray[np.uint32]]:
    """Encode the documents of text files: a file, or a line of one in JSON Lines.

    Args:
        files: Files in UTF-8; invalid bytes are replaced. Those that end in ``.jsonl`` have an
            object in every line.
        tokenizer: Tokenizer, applied to each document by itself.
        max_bytes: Maximum number of bytes of text to read; None: no limit.
        key: Of the text in such an object.
        end: Token that ends every document; None: a newline ends a file, and nothing a line.

    Yields:
        The tokens of one document.

    Raises:
        ConfigurationError: A line of a ``.jsonl`` file is no object with a text under `key`.
    """
    left = max_bytes
    for raw, last in chain.from_iterable(_documents(file, key) for file in files):
        raw = raw[:left]  # may end inside a character, which becomes U+FFFD
        text = raw.decode("utf-8", errors="replace")
        tokens = tokenizer.encode(text + last if end is None else text)
        found = np.fromiter(tokens, np.uint32, count=len(tokens))
        yield found if end is None else np.append(found, np.uint32(end))
        if left is not None:
            left -= len(raw)
            if left <= 0:
                return


def _documents(file: Path, key: str) -> Iterator[tuple[bytes, str]]:
    """Yield the texts of a file, and what ends each."""
    if file.suffix != ".jsonl":
        yield file.read_bytes(), "\n"
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ConfigurationError(
                    "LP910",
                    f"{file}, line {number} is not a JSON object with a text in its field "
                    f"{key!r}. Pass the name of the right field as key= (--key), or remove the "
                    "line.",
                )
            yield text.encode(), ""
