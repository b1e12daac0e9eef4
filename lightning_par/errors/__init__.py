"""The exceptions that lightning_par raises.

Each one also is the built-in exception that a caller would expect, so ``except ValueError`` keeps
working::

    LightningParError
    |-- PlanError         (ValueError)    a ParallelPlan does not fit the model or the mesh
    |-- MeshError         (ValueError)    sizes do not fit the devices
    |-- ScheduleError     (ValueError)    a pipeline schedule cannot run
    |-- ConfigurationError (ValueError)   an option, alone or with the Trainer, is not supported
    |   `-- UnknownOptionError (TypeError)  there is no option of that name
    |-- PipelineError     (RuntimeError)  a pipeline stage failed while it ran
    |-- NonFiniteError    (RuntimeError)  the loss or the gradient is NaN or infinite
    |-- OffloadError      (RuntimeError)  the host cannot hold or step the optimizer
    |-- OutOfMemoryError  (RuntimeError, MemoryError)  a rank ran out of memory
    |-- UpstreamError     (RuntimeError)  torch or Lightning lacks a private name that is needed
    |-- VerificationError (RuntimeError)  a run differs from the same run on one process
    |-- IslandError       (RuntimeError)  an island does not reach its server, or is refused
    `-- CheckpointError   (RuntimeError)  a checkpoint does not fit the model
        `-- MissingCheckpointError (FileNotFoundError)  there is none at a path

Each is raised with a code such as ``LP203``: ``lightning-par explain LP203``, and the page of error
codes, tell its cause, an example and the cure. What a code means never changes. A message ends with
a link to that page, if the package's metadata say where its site is.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import metadata, PackageNotFoundError

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "IslandError",
    "LightningParError",
    "MeshError",
    "MissingCheckpointError",
    "NonFiniteError",
    "OffloadError",
    "OutOfMemoryError",
    "PipelineError",
    "PlanError",
    "Problem",
    "ScheduleError",
    "UnknownOptionError",
    "UpstreamError",
    "VerificationError",
    "describe",
    "either",
    "nearest",
    "raise_problems",
    "where_explained",
]

Problem = str | tuple[str, str]
"""A sentence for `raise_problems`: alone, or after the code of its cause."""


@cache
def _site() -> str | None:
    """The address of the documentation, as the package's metadata have it."""
    try:
        urls = metadata("lightning_par").get_all("Project-URL") or ()
    except PackageNotFoundError:  # run from a checkout that is not installed
        return None
    named = dict(url.split(", ", 1) for url in urls)
    return named["Documentation"].rstrip("/") if "Documentation" in named else None


def where_explained(code: str) -> str:
    """Return the link to an error's page on the site; the command that prints it if there is none.

    Args:
        code: Of the catalogue; of several the link is to the first.
    """
    site = _site()
    if site is None:
        return f"lightning-par explain {code}"
    return f"{code}: {site}/reference/error_codes/#{code.split()[0].lower()}"


class LightningParError(Exception):
    """Base class of every exception that lightning_par raises on purpose.

    Args:
        code: Of the catalogue (`lightning_par.errors.catalogue`); several with blanks between.
        message: What is wrong here, and what to do.

    Examples:
        >>> error = MeshError("LP101", "tensor_parallel_size=3 does not divide 8 devices.")
        >>> isinstance(error, ValueError), error.code
        (True, 'LP101')
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both, so that a copy or a pickle has both

    @property
    def code(self) -> str:
        """The code of the cause."""
        return str(self.args[0])

    @property
    def message(self) -> str:
        """The text without the code, to be part of another text."""
        return str(self.args[1])

    def __str__(self) -> str:
        return f"{self.message} [{where_explained(self.code)}]"


class PlanError(LightningParError, ValueError):
    """A `ParallelPlan` does not fit the model, or cannot be applied at the requested sizes."""


class MeshError(LightningParError, ValueError):
    """The parallel sizes do not fit each other or the number of devices."""


class ScheduleError(LightningParError, ValueError):
    """A pipeline schedule is not valid: it would deadlock, or leaves work undone."""


class ConfigurationError(LightningParError, ValueError):
    """An option is not supported, alone or together with the Trainer's settings."""


class UnknownOptionError(ConfigurationError, TypeError):
    """There is no option of that name."""


class PipelineError(LightningParError, RuntimeError):
    """A pipeline stage failed while it ran; the text names the stage and the action."""


class NonFiniteError(LightningParError, RuntimeError):
    """The loss is NaN or infinite although it counts valid entries."""


class OffloadError(LightningParError, RuntimeError):
    """The host cannot do its part of an offloaded optimizer: its kernel, memory or disk."""


class OutOfMemoryError(LightningParError, RuntimeError, MemoryError):
    """A rank ran out of memory; on a GPU this also is torch's error of that name."""


class UpstreamError(LightningParError, RuntimeError):
    """The installed torch, Lightning, torchmetrics or transformers lacks a private name."""


class VerificationError(LightningParError, RuntimeError):
    """A step on the mesh differs from the same step on one process.

    Attributes:
        hosts: Those of the devices one of which has made an error, if they are known.
    """

    hosts: tuple[str, ...] = ()


class IslandError(LightningParError, RuntimeError):
    """An island does not reach the server of its run, or is refused by it."""


class CheckpointError(LightningParError, RuntimeError):
    """A checkpoint does not fit the model or the optimizer."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""


def raise_problems(error: type[LightningParError], code: str, problems: Sequence[Problem]) -> None:
    """Raise `error` with every problem in one message; do nothing if there is none.

    Args:
        error: The class to raise.
        code: The code of problems that are given without one.
        problems: One sentence each, complete in itself; alone, or after a code.

    Raises:
        LightningParError: `error`, if `problems` is not empty.
    """
    if not problems:
        return
    pairs = [(code, p) if isinstance(p, str) else p for p in problems]
    codes = " ".join(dict.fromkeys(code for code, _ in pairs))
    texts = [text for _, text in pairs]
    if len(texts) == 1:
        raise error(codes, texts[0])
    raise error(codes, f"{len(texts)} problems:\n" + "\n".join(f"  - {text}" for text in texts))


def describe(error: BaseException) -> str:
    """Return what an exception says, to be part of another text: of ours, the message alone."""
    if isinstance(error, LightningParError):
        return error.message
    return f"{type(error).__name__}: {error}"


def either(values: Sequence[object]) -> str:
    """Return ``1, 2 or 4``, for a message that says what would work.

    Args:
        values: At least one.
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(
    name: object,
    names: Iterable[str],
    *,
    cutoff: float = 0.3,
    form: str = "; did you mean {!r}?",
    otherwise: str = ".",
) -> str:
    """Return the end of a message that suggests the name nearest to a wrong one.

    Args:
        name: What the user gave.
        names: What exists.
        cutoff: How alike the two must be: 0 suggests any name, 1 only the name itself.
        form: How the suggestion is put; ``{!r}`` stands for the name.
        otherwise: What to return if no name is near.

    Examples:
        >>> nearest("colwize", ["colwise", "rowwise"])
        "; did you mean 'colwise'?"
    """
    near = get_close_matches(str(name), list(names), n=1, cutoff=cutoff)
    return form.format(near[0]) if near else otherwise
