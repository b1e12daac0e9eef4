"""Subcommands of ``lightning-par``: each is a function whose signature is its command line.

The module of a command has a function of the same name. Its parameters are the options, with their
types and defaults; its docstring is what ``--help`` says. It returns the exit status (None: 0). It
may print.

Note [Late imports]: ``--help`` and a mistake in the options need the signature alone, which takes
milliseconds to import; torch takes a second, and Lightning three. So the module of a command
imports nothing of either: the function does, inside of `quick_imports`, and Lightning only if it
has to build a user's model.
"""

import argparse
import gc
import importlib
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partial
from inspect import get_annotations, Parameter, signature  # `inspect` is a command
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, Literal, TYPE_CHECKING, Union

import lightning_par

if TYPE_CHECKING:
    from docstring_parser import Docstring

__all__ = [
    "COMMANDS",
    "ISLANDS_SUMMARY",
    "LIGHTNING_COMMANDS",
    "FitArguments",
    "PathName",
    "fill",
    "find_command",
    "find_parser",
    "overview",
    "quick_imports",
    "takes_file",
]

COMMANDS: dict[str, str] = {
    "backends": "list the attention kernels, and say why a kernel cannot be used here",
    "calibrate": "measure this machine, and write a device profile for search and forecast",
    "certificate": "print and check the certificate of a run, or compare two runs",
    "completion": "print a script that lets your shell complete commands and options",
    "explain": "print the cause, an example and the cure of an error code such as LP102",
    "export": "convert a checkpoint to files for programs without lightning_par",
    "forecast": "predict time and memory of a run on a machine that you need not have",
    "inspect": "print what a checkpoint contains, and verify its files",
    "memory": "print the memory of weights, gradients and optimizer states of a run",
    "plan": "print which part of every parameter a rank would hold",
    "rehearse": "run one step of one rank of a run of any size on this machine",
    "schedule": "print and draw a pipeline schedule, without a run",
    "search": "find the layout with the shortest predicted step",
    "serve": "start the server of islands, which holds and averages their weights",
    "tokenize": "make a token file from text files or JSON Lines files",
    "verify": "compare a few steps of a run with the same steps on one process",
    "why": "print why a run ended: what held its memory, or which rank was missing",
}
"""Name of a command, which is also that of its module -> what it does, in one line."""

LIGHTNING_COMMANDS: dict[str, str] = {
    "fit": "train a model",
    "predict": "run a trained model on data, and store its predictions",
    "test": "evaluate a model on the test data",
    "validate": "evaluate a model on the validation data",
}
"""Name of a command that is a method of Lightning's Trainer -> what it does, in one line."""
ISLANDS_SUMMARY = "train on several islands of this machine"
"""What ``fit --islands`` does."""

PathName = Annotated[str, "path"]
"""Type of an option that is the name of a file or folder; shells complete it."""
FitArguments = Annotated[Sequence[str], "fit"]
"""Type of the parameter that gets what is no option of the command: arguments for ``fit``."""

_METAVARS = {int: "N", float: "X", PathName: "PATH"}
_MORE = "All other arguments are those of lightning-par fit, whose --help lists them."
_WIDTH = 100


@contextmanager
def quick_imports() -> Iterator[None]:
    """Surrounds imports of torch or Lightning, which take two thirds of the time without the
    garbage collector: among their classes it finds nothing. Neither a later collection nor the end
    of the process looks at them.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # in a process that has more to do, later garbage is freed
            gc.freeze()
        if collects:
            gc.enable()


def overview() -> str:
    """Return what ``lightning-par --help`` prints: all commands, each in a line."""
    rows = {**COMMANDS, **LIGHTNING_COMMANDS, "fit --islands": ISLANDS_SUMMARY}
    width = max(map(len, rows))
    about = (lightning_par.__doc__ or "").replace("``", "").strip()
    return "\n".join(
        [
            "usage: lightning-par [--help | --version] COMMAND ...",
            f"\n{fill(about)}\n",
            "commands:",
            *(f"  {name:{width}}  {does}" for name, does in sorted(rows.items())),
            "\nlightning-par COMMAND --help lists the options of a command.",
        ]
    )


def find_command(name: str) -> Callable[[list[str]], int]:
    """Return what runs a command on the words that follow its name, and gives the exit status.

    Args:
        name: A key of `COMMANDS`, or ``"fit_islands"``, which is ``fit --islands``.
    """
    return partial(_run, name)


def _run(name: str, words: list[str]) -> int:
    command, parser = _function(name), find_parser(name)
    if {"-h", "--help"} & {*words}:
        words = ["--help"]  # also where the value of an option is missing
    given, rest = parser.parse_known_args(words)
    values = vars(given)
    for parameter in signature(command).parameters.values():
        group = parameter.annotation
        if group == FitArguments:
            values[parameter.name], rest = rest, []
        elif _is_group(group):
            own = signature(group).parameters
            values[parameter.name] = group(**{field: values.pop(field) for field in own})
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return command(**values) or 0


def _function(name: str) -> Callable[..., int | None]:
    # Imported by name, so that one command does not pay for the imports of all.
    module = importlib.import_module(f"lightning_par.commands.{name}")
    command: Callable[..., int | None] = getattr(module, name)
    return command


def find_parser(name: str) -> argparse.ArgumentParser:
    """Import the module of a command, and make the parser of its options from its signature.

    Not jsonargparse: it changes flags, the spelling of names and the texts of mistakes, and knows
    no arguments that are handed on.

    Args:
        name: A key of `COMMANDS`, or ``"fit_islands"``.
    """
    command = _function(name)
    said = _docstring(command).description or ""
    hands_on = FitArguments in get_annotations(command).values()
    parser = argparse.ArgumentParser(
        prog=f"lightning-par {name.replace('fit_islands', 'fit --islands')}",
        description=fill(said.replace("``", "")),
        epilog=_MORE if hands_on else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=name != "fit_islands",  # its options stand among all those of fit
    )
    for parameter, meaning in _options(command):
        _add(parser, parameter, meaning)
    if hands_on:
        parser.usage = f"{parser.format_usage().removeprefix('usage: ').rstrip()} ..."
    return parser


def _docstring(source: Callable[..., Any]) -> "Docstring":
    # Comes with jsonargparse, without which a script may use the functions of the commands.
    from docstring_parser import parse

    return parse(source.__doc__ or "")


def _is_group(form: Any) -> bool:
    return is_dataclass(form)


def _options(source: Callable[..., Any]) -> Iterator[tuple[Parameter, str]]:
    """Yield the parameters of a function, and the fields of those that are dataclasses."""
    said = {p.arg_name: " ".join((p.description or "").split()) for p in _docstring(source).params}
    for parameter in signature(source).parameters.values():
        if _is_group(parameter.annotation):
            yield from _options(parameter.annotation)
        elif parameter.annotation != FitArguments:
            yield parameter, said.get(parameter.name, "").replace("``", "").rstrip(".")


def _add(parser: argparse.ArgumentParser, parameter: Parameter, meaning: str) -> None:
    """Add an option; a parameter that is not keyword-only is a positional argument."""
    name, form, default = parameter.name, parameter.annotation, parameter.default
    if get_origin(form) in (Union, UnionType):
        form = get_args(form)[0]  # of X | None
    settings: dict[str, Any] = {"help": meaning.replace("%", "%%")}
    if get_origin(form) is list:
        (form,), settings["nargs"] = get_args(form), "*"
    if form is bool:
        settings["action"] = "store_true"
    elif get_origin(form) is Literal:
        settings["choices"] = get_args(form)
    else:
        settings |= {"type": form, "metavar": name.rstrip("_").upper()}
    if parameter.kind is not parameter.KEYWORD_ONLY:
        if default is not parameter.empty:
            settings |= {"nargs": "?", "default": default}
        action = parser.add_argument(name, **settings)
    else:
        settings |= {"required": True} if default is parameter.empty else {"default": default}
        if default not in (None, "", parameter.empty) and form is not bool:
            shown = f"{default:g}" if form is float else default
            settings["help"] += f" (default: {shown})"
        if form in _METAVARS:
            settings["metavar"] = _METAVARS[form]
        flag = name.rstrip("_").replace("_", "-")
        action = parser.add_argument(f"--{flag}", dest=name, **settings)
    if form == PathName:
        takes_file(action)


def takes_file(action: argparse.Action) -> None:
    """Let shells complete the value of an option as the name of a file, through shtab.

    Args:
        action: What `add_argument` returned.
    """
    vars(action)["complete"] = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


def fill(text: str) -> str:
    """Return paragraphs in lines as wide as the terminal; words, such as paths, stay whole."""
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    return "\n\n".join(
        textwrap.fill(part, width, break_long_words=False, break_on_hyphens=False)
        for part in text.split("\n\n")
    )
