"""The command that says why a run died."""

from pathlib import Path

from lightning_par.commands import PathName
from lightning_par.profiling.post_mortem import read_post_mortems

__all__ = ["why"]


def why(run: PathName, *, steps: bool = False) -> None:
    """Say why the ranks of a run have died: what held the memory when it ran out, how that compares
    with the forecast, and which changes fit; or which other rank was missing, and what it did.

    Args:
        run: Directory of the run.
        steps: Print the memory held after some of the last steps as well.

    Raises:
        ConfigurationError: No rank has left anything, or none of it can be read.
    """
    for found in read_post_mortems(Path(run), refuse=print):
        print(f"{found.name}, {found.when}: ", end="")
        print(*found.lines(), *(found.last_steps() if steps else ()), sep="\n")
