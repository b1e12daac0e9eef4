"""The catalogue of error codes: what each one means, its cause, an example and its cure."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

__all__ = ["Entry", "entries", "families"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a code means.

    Attributes:
        code: As ``LP203``; the first digit is that of its family.
        title: The meaning, in a line.
        cause: What leads to it.
        example: A message that has this code.
        cure: What to do.
        retired: Whether nothing raises it any more.
    """

    code: str
    title: str
    cause: str
    example: str
    cure: str
    retired: bool = False

    def __str__(self) -> str:
        said = f"Cause: {self.cause}\n\nExample: {self.example}\n\nCure: {self.cure}"
        return f"{self.code}: {self.title}\n\n{said}"


def families() -> dict[str, str]:
    """Return the beginning of the codes of each family -> what they are about."""
    return dict(_read()["families"])


@cache
def entries() -> dict[str, Entry]:
    """Return code -> what it means, in the order of the codes."""
    found = {code: given for code, given in _read().items() if code != "families"}
    return {code: Entry(code=code, **_folded(found[code])) for code in sorted(found)}


def _folded(given: dict[str, Any]) -> dict[str, Any]:
    return {k: " ".join(v.split()) if isinstance(v, str) else v for k, v in given.items()}


@cache
def _read() -> dict[str, dict[str, Any]]:
    # Read where it is asked for: importing the package does not pay for it.
    return tomllib.loads((files(__package__) / "catalogue.toml").read_text(encoding="utf-8"))
