"""Where checkpoints are: paths, and URLs of stores; and which form a file system holds well.

Note [Saves to a store]: an object store renames nothing, but replaces one object at once. So a save
to a URL is a folder of a name of its own below that URL, and the object `CURRENT` beside it, which
is written last, says which of them counts: until then the one before is whole.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Any

from lightning_par.errors import CheckpointError

__all__ = ["CURRENT", "Place", "UrlPath", "current_of", "holds_one_file", "place_of"]

_log = getLogger(__name__)

CURRENT = "current.txt"
"""Name of the object that holds the name of the folder of the newest complete save."""

_SHARED_WRITERS = (
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "wekafs",
    "panfs",
    "orangefs",
    "gfs2",
    "ocfs2",
)
"""File systems on which several nodes may write to one file, each its own bytes."""
_WHOLE_WRITERS = ("s3", "gcs", "goofys", "rclone", "blobfuse", "oss", "cos", "hdfs", "webhdfs")
"""Parts of the names of FUSE file systems over object stores: a file is written once, in order."""


@dataclass(frozen=True)
class UrlPath:
    """A file or folder of a store that fsspec reaches, with what checkpoints use of `pathlib.Path`.

    Whatever the store's client raises comes out as an OSError, as of a disk.

    Attributes:
        url: Its URL.
        files: The file system of fsspec.
        key: Its name in that file system.
    """

    url: str
    files: Any
    key: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url}/{name}", self.files, f"{self.key}/{name}")

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def is_of_one_process(self) -> bool:
        """Whether other processes see nothing of it: ``memory://``."""
        return self.url.partition("://")[0].rpartition("::")[2] == "memory"

    @property
    def is_page(self) -> bool:
        """Whether it is a file behind http, whose address may be signed: no other is asked for."""
        return self.url.startswith(("http://", "https://"))

    def exists(self) -> bool:
        """Return whether there is such a file or folder that this process may read."""
        with self._asked(), contextlib.suppress(PermissionError):
            return bool(self.files.exists(self.key))
        return False

    def is_dir(self) -> bool:
        """Return whether it is a folder: names that begin with it, in an object store."""
        with self._asked():
            return not self.is_page and bool(self.files.isdir(self.key))

    def size(self) -> int:
        """Return the length of a file."""
        with self._asked():
            return int(self.files.info(self.key)["size"])

    def names(self) -> set[str]:
        """Return the names in a folder; none if there is no such folder."""
        with self._asked(), contextlib.suppress(FileNotFoundError):
            found = self.files.ls(self.key, detail=False)
            return {str(name).rstrip("/").rpartition("/")[2] for name in found} - {""}
        return set()

    def written_at(self) -> Any:
        """Return the time of a complete save, or of a file; None if it is neither."""
        for key in (f"{self.key}/{CURRENT}", self.key):
            with self._asked(), contextlib.suppress(FileNotFoundError):
                if self.files.isfile(key):
                    return self.files.modified(key)
        return None

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Make a folder, where the store has any."""
        with self._asked():
            self.files.makedirs(self.key, exist_ok=exist_ok)

    def create(self) -> Any:
        """Open it to write it, from start to end; what writing raises is the client's own."""
        with self._asked():
            return self.files.open(self.key, "wb")

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return its content, or a part of it."""
        with self._asked():
            return bytes(self.files.cat_file(self.key, start=start, end=end))

    def write_bytes(self, data: bytes) -> None:
        """Replace it."""
        with self._asked():
            self.files.pipe_file(self.key, data)

    def remove(self) -> None:
        """Remove a file, or a folder with all that is in it, if it is there."""
        # First what makes it complete: it must not name a save of which files are missing.
        for key in (f"{self.key}/{CURRENT}", self.key):
            # Who may not list keys is refused one that is not there.
            hidden = () if key == self.key else (PermissionError,)
            with self._asked(), contextlib.suppress(FileNotFoundError, NotADirectoryError, *hidden):
                self.files.rm(key, recursive=True)

    def remove_saves(self) -> None:
        """Remove what is below it: a file of that name has been saved instead."""
        if (self / CURRENT).exists():
            for name in (CURRENT, *self.names()):
                (self / name).remove()

    def commit(self, name: str) -> None:
        """Let the save in one folder of it count; what is of earlier ones is removed."""
        (self / CURRENT).write_bytes(name.encode())
        try:
            for other in self.names() - {name, CURRENT}:
                (self / other).remove()
            # In an object store a file may have the name of a folder, as one of Lightning.
            with self._asked():
                if self.files.isfile(self.key):
                    self.files.rm_file(self.key)
        # The new one counts already; the next save tries again.
        except OSError as error:
            _log.warning(
                "An earlier save to %s could not be removed (%s). The next save tries to "
                "remove it again.",
                self,
                error,
            )

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        # What fsspec remembers of a folder is older than what other ranks have written there.
        self.files.invalidate_cache()
        try:
            yield
        except OSError:
            raise
        # Of clients each has its own: of botocore, aiohttp, Google's and so on.
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error


Place = Path | UrlPath
"""Where a checkpoint is."""


def place_of(path: Any, options: Mapping[str, Any] | None = None) -> Place:
    """Return a path, or what stands for one behind a URL.

    Args:
        path: A path or URL.
        options: For the file system of fsspec.

    Raises:
        CheckpointError: fsspec knows no such protocol, or lacks a package for it.
    """
    if "://" not in str(path):
        return Path(path)
    from fsspec.core import url_to_fs  # late: no run on a disk needs it

    url = str(path).rstrip("/")
    try:
        files, key = url_to_fs(url, **(options or {}))
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            "LP501",
            f"{url} cannot be reached: {error}. Correct the protocol "
            "of the URL, or install the package that fsspec needs for "
            "it.",
        ) from error
    return UrlPath(url, files, key)


def current_of(path: Place) -> Place:
    """Return the folder that a checkpoint is in; see Note [Saves to a store].

    Args:
        path: A checkpoint; also a copy on a disk of one from a store.

    Raises:
        CheckpointError: The object that names the folder is damaged, or nothing can be read.
    """
    try:
        name = (path / CURRENT).read_bytes().decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        # Of a key that is not there, a store says so only to those who may list its keys.
        if isinstance(path, UrlPath) and isinstance(error, PermissionError):
            return path
        raise CheckpointError(
            "LP501",
            f"{path} cannot be reached ({error}). Check the path, and that this process may read "
            "it. For a URL, set the access keys and the endpoint in the settings of fsspec.",
        ) from error
    if not name or Path(name).name != name:
        raise CheckpointError(
            "LP502",
            f"{path / CURRENT} is damaged: it does not contain the name of a folder. Use "
            "another checkpoint.",
        )
    return path / name


def holds_one_file(folder: Path, num_nodes: int) -> bool:
    """Return whether all ranks may write their slices into one file of a folder.

    On one node they may, unless the folder is an object store that is mounted as a file system. On
    several nodes they may if the file system keeps writes of several nodes apart, byte by byte;
    NFS writes whole pages.

    Args:
        folder: The folder, or the path that it will have.
        num_nodes: Number of nodes of the run.
    """
    kind = _type_of(folder)
    if kind.startswith("fuse.") and any(name in kind for name in _WHOLE_WRITERS):
        return False
    # Linux puts the backend behind "fuse.": `fuse.ceph` is CephFS, which keeps bytes apart.
    return num_nodes == 1 or kind.removeprefix("fuse.").startswith(_SHARED_WRITERS)


def _type_of(folder: Path) -> str:
    """Return the type of the file system that a path is on; empty where the system tells none."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    # The mount point that is deepest on the path is the one that holds it. `resolve`, since a
    # link may lead to another file system.
    path, found, longest = folder.resolve(), "", -1
    for line in lines:
        # See proc(5): ID, parent, device, root, mount point, options ... - type source options.
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].encode().decode("unicode_escape")  # a space is \\040
        # Of several on one point the last one is seen.
        if path.is_relative_to(point) and len(point) >= longest:
            found, longest = after.split(" ")[0], len(point)
    return found
