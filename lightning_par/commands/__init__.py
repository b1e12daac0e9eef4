"""Subcommands of ``lightning-par``: one module each, and `parallel_cli` for Lightning's own.

The module of a command has ``main(arguments: list[str]) -> int``, which returns the exit status,
and ``make_parser() -> argparse.ArgumentParser`` for its arguments; its docstring is the summary of
its ``--help``. It may print, and imports Lightning only if it has to build a user's model.
"""

import argparse
import importlib
from collections.abc import Callable

__all__ = ["COMMANDS", "find_command", "find_parser", "takes_file"]

COMMANDS: dict[str, str] = {
    "backends": "list the attention kernels, and why one cannot be used here",
    "calibrate": "measure this machine, and write a device profile for search and forecast",
    "completion": "print a script with which a shell completes commands and options",
    "explain": "say the cause, an example and the cure of the code at the end of an error",
    "export": "write a checkpoint folder as files for programs that do not know this package",
    "forecast": "predict time and memory of a configured run on a machine that need not be here",
    "inspect": "say what a checkpoint folder holds, and verify it",
    "memory": "say what a run holds on every device and host, and whether that fits",
    "plan": "say what every rank would hold of a model, before anything runs",
    "rehearse": "set one rank of a run of any size up on this machine, and run one step of it",
    "schedule": "print and draw a pipeline schedule before anything runs it",
    "search": "find the layout with the shortest predicted step on such a machine",
    "serve": "hold the weights that islands share, and merge what they learn",
    "verify": "compare a few steps of the configured layout with one process, number by number",
}
"""Name of a command, which is also that of its module -> what it does, in one line."""


def find_command(name: str) -> Callable[[list[str]], int]:
    """Import the module of a command and return its ``main``.

    Args:
        name: A key of `COMMANDS`.
    """
    # Imported by name, so that one command does not pay for the imports of all.
    module = importlib.import_module(f"lightning_par.commands.{name}")
    command: Callable[[list[str]], int] = module.main
    return command


def find_parser(name: str) -> argparse.ArgumentParser:
    """Import the module of a command and return the parser of its options.

    Args:
        name: A key of `COMMANDS`, or ``"fit_islands"``, which is ``fit --islands``.
    """
    module = importlib.import_module(f"lightning_par.commands.{name}")
    parser: argparse.ArgumentParser = module.make_parser()
    return parser


def takes_file(action: argparse.Action) -> None:
    """Let shells complete the value of an option as the name of a file, through shtab.

    Args:
        action: What `add_argument` returned.
    """
    vars(action)["complete"] = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
