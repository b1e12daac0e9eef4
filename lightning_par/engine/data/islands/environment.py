"""What the environment says of an island: which it is, its server, and the key that all share."""

from pathlib import Path

from lightning_par.errors import ConfigurationError

__all__ = ["ISLAND_VARIABLE", "KEY_VARIABLE", "SERVER_VARIABLE", "read_key"]

ISLAND_VARIABLE = "LIGHTNING_PAR_ISLAND"
"""Which of how many islands this process belongs to, as ``0/4``."""
KEY_VARIABLE = "LIGHTNING_PAR_KEY"
"""The key that the server and all islands share, where no file holds it."""
SERVER_VARIABLE = "LIGHTNING_PAR_SERVER"
"""Address of the server, as ``host:port``; several are separated by commas."""

_SHORTEST = 16


def read_key(file: str | Path | None, variable: str | None) -> bytes:
    """Return the key, without the space around it.

    Args:
        file: File that holds it, if any.
        variable: Value of `KEY_VARIABLE`, if it is set.

    Raises:
        ConfigurationError: There is none, or one that could be guessed.
    """
    try:
        key = Path(file).read_bytes().strip() if file is not None else (variable or "").encode()
    except OSError as error:
        raise ConfigurationError(
            "LP704",
            f"the key of the islands cannot be read: {error}. Create a key with `openssl rand "
            "-hex 32 > FILE`, copy FILE to the server and all islands, and give its path there: "
            "--key-file of lightning-par serve, and key_file= in outer= of the islands.",
        ) from error
    if len(key) < _SHORTEST:
        raise ConfigurationError(
            "LP704",
            f"the key of the islands has {len(key)} bytes, but needs {_SHORTEST} or more. Create "
            f"a key with `openssl rand -hex 32`, and set it in {KEY_VARIABLE} or key_file= for "
            "the server and all islands.",
        )
    return key
