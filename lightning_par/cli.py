"""Entry point of ``lightning-par``: Lightning's fit, validate, test, predict, and our commands."""

import sys
from pathlib import Path
from typing import Any, TYPE_CHECKING

from lightning_par.checkpoint.progress import showing
from lightning_par.commands import (
    COMMANDS,
    find_command,
    LIGHTNING_COMMANDS,
    overview,
    quick_imports,
)
from lightning_par.errors import CheckpointError, LightningParError
from lightning_par.observe.terminal_bar import progress_of_command
from lightning_par.version import __version__

__all__ = ["ParallelCLI", "main", "make_cli"]

if TYPE_CHECKING:
    from lightning_par.commands.parallel_cli import make_cli, ParallelCLI
else:

    def __getattr__(name: str) -> Any:
        # Only fit and the like need the parser of Lightning; see Note [Late imports].
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from lightning_par.commands import parallel_cli

        return getattr(parallel_cli, name)


def main() -> None:
    """Run the command that the arguments of this process name.

    Raises:
        SystemExit: With status 2 if an argument is wrong, and 1 if the configuration cannot run.
    """
    here = str(Path.cwd())
    if here not in sys.path:  # the user's modules, as for a script that lies there
        sys.path.append(here)
    try:
        _run(sys.argv[1:])
    except (ValueError, CheckpointError) as error:
        # One line for a mistake in the configuration; a failure of the run keeps its traceback.
        own = _find_own_error(error)
        if own is None:
            raise
        print(f"lightning-par: error: {own}", file=sys.stderr)
        sys.exit(1)


def _run(words: list[str]) -> None:
    if words and words[0] in COMMANDS:
        with showing(progress_of_command):
            sys.exit(find_command(words[0])(words[1:]))
    if words == ["--version"]:
        print(f"lightning-par {__version__}")
    elif {"-h", "--help"} & {*words} and not LIGHTNING_COMMANDS.keys() & {*words}:
        print(overview())
    elif words[:1] == ["fit"] and any(word.split("=")[0] == "--islands" for word in words):
        sys.exit(find_command("fit_islands")(words[1:]))
    else:
        with quick_imports():
            from lightning_par.commands.parallel_cli import make_cli
        make_cli()


def _find_own_error(error: BaseException | None) -> LightningParError | None:
    """Return the error of this package that `error` is, or that jsonargparse has wrapped in it."""
    while error is not None and not isinstance(error, LightningParError):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
