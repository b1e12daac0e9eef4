"""Entry point of ``lightning-par``: Lightning's fit, validate, test, predict, and our commands."""

# ruff: noqa: E402 - the imports are below what makes them quicker

import gc
import sys
from pathlib import Path

_collects = gc.isenabled()
gc.disable()  # among the classes of Lightning and torch it finds nothing, and takes long

from lightning_par.checkpoint.progress import showing
from lightning_par.commands import COMMANDS, find_command
from lightning_par.commands.parallel_cli import make_cli, ParallelCLI
from lightning_par.errors import CheckpointError, LightningParError
from lightning_par.strategies.components.progress_bar import progress_of_command
from lightning_par.version import __version__

if _collects:
    gc.enable()

__all__ = ["ParallelCLI", "main", "make_cli"]


def main() -> None:
    """Run the command that the arguments of this process name.

    Raises:
        SystemExit: With status 2 if an argument is wrong, and 1 if the configuration cannot run.
    """
    if not gc.get_freeze_count():  # in a script that calls this again, what is rubbish by then goes
        gc.freeze()  # and else neither a later collection nor the end looks at all these classes
    here = str(Path.cwd())
    if here not in sys.path:  # the user's modules, as for a script that lies there
        sys.path.append(here)
    try:
        # Before Lightning's parser is built, which does not know these and takes seconds.
        if sys.argv[1:] and sys.argv[1] in COMMANDS:
            with showing(progress_of_command):
                sys.exit(find_command(sys.argv[1])(sys.argv[2:]))
        if sys.argv[1:] == ["--version"]:
            print(f"lightning-par {__version__}")
            return
        if sys.argv[1:2] == ["fit"] and any(a.split("=")[0] == "--islands" for a in sys.argv):
            sys.exit(find_command("fit_islands")(sys.argv[2:]))
        make_cli()
    except (ValueError, CheckpointError) as error:
        # One line for a mistake in the configuration; a failure of the run keeps its traceback.
        own = _find_own_error(error)
        if own is None:
            raise
        print(f"lightning-par: error: {own}", file=sys.stderr)
        sys.exit(1)


def _find_own_error(error: BaseException | None) -> LightningParError | None:
    """Return the error of this package that `error` is, or that jsonargparse has wrapped in it."""
    while error is not None and not isinstance(error, LightningParError):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
