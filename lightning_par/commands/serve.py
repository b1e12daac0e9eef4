"""The command that serves islands."""

import logging
import os
import signal
import ssl
import threading
from pathlib import Path

from lightning_par.commands import PathName, quick_imports
from lightning_par.engine.data.islands.environment import KEY_VARIABLE, read_key
from lightning_par.errors import ConfigurationError

__all__ = ["serve"]


def serve(
    *,
    host: str = "127.0.0.1",
    port: int = 29600,
    state: PathName | None = None,
    key_file: PathName | None = None,
    certificate: PathName | None = None,
    certificate_key: PathName | None = None,
) -> None:
    """Hold the weights that islands share, merge what they learn, and send them the result, until
    SIGTERM or SIGINT. The shared key is in LIGHTNING_PAR_KEY or in ``--key-file``; all other
    options of the exchange are those of the islands.

    Args:
        host: Address to listen on; 0.0.0.0: all.
        port: TCP port; 0: any that is free.
        state: Folder to save to, and to go on from.
        key_file: File that holds the shared key.
        certificate: PEM file; it encrypts the connections.
        certificate_key: PEM file of its key, if that is not in the certificate's file.

    Raises:
        ConfigurationError: There is no key, or the address or the certificate is of no use.
    """
    key = read_key(key_file, os.environ.get(KEY_VARIABLE))
    with quick_imports():
        from lightning_par.engine.data.islands.server import IslandServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    try:
        tls = None
        if certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(certificate, certificate_key)
        server = IslandServer(host, port, key, state=Path(state) if state else None, tls=tls)
    except OSError as error:
        raise ConfigurationError(
            "LP709",
            f"the server cannot listen on {host}:{port}: {error}. Pass another --port, or an "
            "address of this machine as --host.",
        ) from error
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    print(f"serving on {host}:{server.port}", flush=True)
    ended.wait()
    server.close()
