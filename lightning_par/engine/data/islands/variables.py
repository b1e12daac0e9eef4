"""Variables of the environment that say where an island is, and what it shares with the others."""

__all__ = ["ISLAND_VARIABLE", "KEY_VARIABLE", "SERVER_VARIABLE"]

ISLAND_VARIABLE = "LIGHTNING_PAR_ISLAND"
"""Which of how many islands this process belongs to, as ``0/4``."""
KEY_VARIABLE = "LIGHTNING_PAR_KEY"
"""The key that the server and all islands share, where no file holds it."""
SERVER_VARIABLE = "LIGHTNING_PAR_SERVER"
"""Address of the server, as ``host:port``; several are separated by commas."""
