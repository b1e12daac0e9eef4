"""Which form of a checkpoint a file system holds well."""

from pathlib import Path

__all__ = ["holds_one_file"]

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
