"""What is raised where a private name of another package is gone."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType, TracebackType

from lightning_par.errors import UpstreamError

__all__ = ["SEEN", "names_of"]

SEEN: Mapping[str, str] = MappingProxyType(
    {
        "lightning": "2.6.6",
        "torch": "2.11 and 2.13",
        "torchmetrics": "1.9.0",
        "transformers": "5.23.0",
    }
)
"""Package -> versions on which all names in this folder were seen."""


class names_of:  # noqa: N801  # reads as a statement: with names_of("torch"):
    """Looks up private names inside; a missing one is reported as such.

    Only look names up inside. An AttributeError of a call would be taken for a missing name.

    Args:
        package: Whose names, a key of `SEEN`.

    Raises:
        UpstreamError: A name is missing.
    """

    def __init__(self, package: str) -> None:
        self.package = package

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, AttributeError | ImportError):
            # Anything else that is raised passes through.
            raise UpstreamError(
                "LP803",
                f"a private name that lightning_par uses is missing from {self.package} "
                f"{_installed(self.package)}: {error}. lightning_par was tested "
                f"with {self.package} {SEEN[self.package]}. Install such a version, or a newer "
                "lightning_par.",
            ) from error


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
