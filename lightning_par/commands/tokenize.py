"""The command that makes token files."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from lightning_par.commands import PathName, quick_imports
from lightning_par.errors import ConfigurationError

__all__ = ["tokenize"]


def tokenize(
    paths: list[PathName],
    *,
    out: PathName,
    tokenizer: str = "bytes",
    key: str = "text",
    end: int | None = None,
) -> None:
    """Encode text files or JSON Lines, and write a token file that keeps where documents end.

    Args:
        paths: Text files, folders with *.txt files, patterns, and *.jsonl files
        out: Token file to write, as corpus.bin; its description and the ends of its documents are
            written next to it
        tokenizer: "bytes", a tokenizer.json file, or the name of a Hugging Face model
        key: Of the text in each line of a *.jsonl file
        end: Token that ends every document; otherwise a newline ends a file, and nothing a line
    """
    with quick_imports():
        from lightning_par.models.data.token_windows import write_token_file
        from lightning_par.models.data.tokenizers import encode_files, find_files, load_tokenizer

    encoder, files = load_tokenizer(tokenizer), find_files(paths)
    size = max(encoder.vocab_size, 0 if end is None else end + 1)
    with tqdm(total=sum(file.stat().st_size for file in files), unit="B", unit_scale=True) as bar:
        parts = encode_files(_shown(files, bar), encoder, key=key, end=end)
        count = write_token_file(out, parts, vocab_size=size, documents=True)
    if not count:
        raise ConfigurationError("LP910", f"{paths} contain no text. Pass files with text.")
    print(f"{out}: {count:,} tokens of {len(files)} files, {size:,} in the vocabulary")


def _shown(files: Iterable[Path], bar: "tqdm[None]") -> Iterator[Path]:
    """Iterate, and tell a bar what is read."""
    for file in files:
        yield file
        bar.update(file.stat().st_size)
