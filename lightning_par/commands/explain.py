"""Explain the code at the end of an error: its cause, an example and the cure."""

import argparse
import textwrap

from lightning_par.errors import ConfigurationError, nearest
from lightning_par.errors.catalogue import entries, families

__all__ = ["main", "make_parser"]

_WIDTH = 100


def main(arguments: list[str]) -> int:
    """Print what codes mean; without one, the list of all.

    Args:
        arguments: What follows ``lightning-par explain``.

    Returns:
        The exit status, 0.

    Raises:
        ConfigurationError: A code does not exist.
    """
    codes, known = [c.upper() for c in make_parser().parse_args(arguments).codes], entries()
    unknown = [code for code in codes if code not in known]
    if unknown:
        hint = nearest(unknown[0], known)
        raise ConfigurationError("LP905", f"{', '.join(unknown)} is no code{hint}")
    if codes:
        print("\n\n".join(_fill(str(known[code])) for code in codes))
        return 0
    for family, title in families().items():
        print(f"{title}\n")
        for code, entry in known.items():
            if code.startswith(family):
                print(f"{code}  {entry.title}")
        print()
    return 0


def _fill(text: str) -> str:
    """Return paragraphs in lines; words, such as paths, stay whole."""
    return "\n\n".join(
        textwrap.fill(part, _WIDTH, break_long_words=False, break_on_hyphens=False)
        for part in text.split("\n\n")
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(prog="lightning-par explain", description=__doc__)
    parser.add_argument("codes", nargs="*", metavar="CODE", help="as LP203; none: list all codes")
    return parser
