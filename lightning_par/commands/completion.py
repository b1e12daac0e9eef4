"""The command that prints a script for the completion of a shell."""

import argparse
import importlib
import inspect
from typing import Literal

from lightning_par.commands import (
    COMMANDS,
    find_parser,
    LIGHTNING_COMMANDS,
    quick_imports,
    takes_file,
)
from lightning_par.errors import ConfigurationError
from lightning_par.registration import STRATEGIES

__all__ = ["completion", "whole_parser"]


def completion(shell: Literal["bash", "zsh", "tcsh"]) -> None:
    """Print a script with which a shell completes the commands and options of lightning-par.

    For bash, write it to ~/.local/share/bash-completion/completions/lightning-par

    Args:
        shell: The shell that is to complete them.

    Raises:
        ConfigurationError: shtab is not installed.
    """
    try:
        shtab = importlib.import_module("shtab")
    except ImportError as error:
        raise ConfigurationError(
            "LP909",
            "completion scripts need the package shtab, which is not installed. Install it "
            "with: pip install shtab",
        ) from error
    print(shtab.complete(whole_parser(), shell=shell))


def whole_parser() -> argparse.ArgumentParser:
    """Return one parser with every command and its options.

    Of ``fit`` and the like, whose parser is Lightning's, it has the options of the Trainer and none
    below them: with those of every class that may be named, a script takes tens of megabytes.
    """
    with quick_imports():
        from lightning.pytorch import Trainer

    parser = argparse.ArgumentParser(prog="lightning-par")
    parser.add_argument("--version", action="store_true", help="print the version")
    found = parser.add_subparsers()
    for name, summary in LIGHTNING_COMMANDS.items():
        command = found.add_parser(name, help=summary)
        for option in ("config", "ckpt_path"):
            takes_file(command.add_argument(f"--{option}"))
        for option in ("print_config", "seed_everything", "model", "data"):
            command.add_argument(f"--{option}")
        for option in inspect.signature(Trainer).parameters:
            known = STRATEGIES if option == "strategy" else None
            command.add_argument(f"--trainer.{option}", choices=known)
    for name, summary in COMMANDS.items():
        one = find_parser(name)
        found.add_parser(name, help=summary, parents=[one], conflict_handler="resolve")
    return parser
