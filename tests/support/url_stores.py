"""Stores behind URLs: one of this project on the disk, and S3 as `moto` serves it on a port of this
machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

__all__ = ["DiskStore", "StoreOptions", "serve_s3"]


class DiskStore(LocalFileSystem):  # type: ignore[misc]
    """``disk:///a/b``: what every process of a machine sees, and no path of pathlib."""

    protocol = "disk"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("disk://"))

    def pipe_file(self, path: Any, value: bytes, **options: Any) -> None:
        """Replace a file at once, as object stores do."""
        made = Path(f"{self._strip_protocol(path)}.made")
        made.write_bytes(value)
        made.rename(made.with_suffix(""))


@dataclass(frozen=True)
class StoreOptions:
    """What a process needs to reach a store.

    Attributes:
        root: URL below which tests write.
        options: Of the file system, by name.
    """

    root: str
    options: dict[str, Any] = field(default_factory=dict)

    def use(self) -> None:
        """Let fsspec find it in this process, as a user does by its files of settings."""
        protocol = self.root.partition("://")[0]
        fsspec.register_implementation("disk", DiskStore, clobber=True)
        fsspec.config.conf[protocol] = self.options


def serve_s3() -> tuple[StoreOptions, Callable[[], None]]:
    """Start a server of S3, and make a bucket; return how to reach it, and what stops it."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "a", "secret": "b", "endpoint_url": f"http://{host}:{port}"}
    store = StoreOptions("s3://bucket", options)
    store.use()
    fsspec.filesystem("s3").mkdir("bucket")
    return store, server.stop
