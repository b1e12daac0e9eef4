"""Which island of a run this process belongs to, from options or from the environment."""

import os
import re
import secrets

from lightning_par.engine.data.islands.client import Place
from lightning_par.engine.data.islands.environment import (
    ISLAND_VARIABLE,
    KEY_VARIABLE,
    read_key,
    SERVER_VARIABLE,
)
from lightning_par.engine.data.islands.options import Outer
from lightning_par.errors import ConfigurationError

__all__ = ["find_island", "find_place"]


def find_island(outer: Outer | None) -> tuple[int, int]:
    """Return the number of this island, and that of all; (0, 1) without islands.

    Raises:
        ConfigurationError: Nothing says it.
    """
    if outer is None:
        return 0, 1
    if outer.island is not None:
        assert outer.islands is not None
        return outer.island, outer.islands
    given = os.environ.get(ISLAND_VARIABLE, "")
    found = re.fullmatch(r"(\d+)/(\d+)", given)
    if found is None or int(found[1]) >= int(found[2]):
        raise ConfigurationError(
            "LP705",
            f"outer= needs the number of this island, but {ISLAND_VARIABLE} is {_told(given)}. Set "
            f"{ISLAND_VARIABLE}=0/4 for the first of four islands, or pass island= and islands= "
            "in outer=.",
        )
    return int(found[1]), int(found[2])


def _told(value: str) -> str:
    return repr(value) if value else "not set"


def find_place(outer: Outer, rank: int, world: int) -> Place:
    """Return where a rank is; its `incarnation` is that of this rank alone.

    Raises:
        ConfigurationError: There is no server or no key.
    """
    server = outer.server or os.environ.get(SERVER_VARIABLE, "")
    if not all(re.fullmatch(r"[^\s,]+:\d{1,5}", each) for each in server.split(",")):
        raise ConfigurationError(
            "LP705",
            "outer= needs the address of a server (started by lightning-par serve), but the "
            f"address is {_told(server)}. Set {SERVER_VARIABLE}=host:port, or pass "
            "server='host:port' in outer=. Separate several addresses by commas.",
        )
    return Place(
        server=server,
        key=read_key(outer.key_file, os.environ.get(KEY_VARIABLE)),
        island=find_island(outer)[0],
        rank=rank,
        world=world,
        incarnation=secrets.token_hex(8),
    )
