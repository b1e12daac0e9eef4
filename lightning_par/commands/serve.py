"""Hold the weights that islands share, merge what they learn, and send them the result."""

import argparse
import logging
import os
import signal
import ssl
import threading
from pathlib import Path

from lightning_par.commands import takes_file
from lightning_par.engine.data.islands.key import KEY_VARIABLE, read_key
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.errors import ConfigurationError

__all__ = ["main", "make_parser"]


def main(arguments: list[str]) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        arguments: What follows ``lightning-par serve``.

    Returns:
        The exit status: 0.

    Raises:
        ConfigurationError: There is no key, or the address or the certificate is of no use.
    """
    options = make_parser().parse_args(arguments)
    key = read_key(options.key_file, os.environ.get(KEY_VARIABLE))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    try:
        tls = None
        if options.certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(options.certificate, options.certificate_key)
        server = IslandServer(options.host, options.port, key, state=options.state, tls=tls)
    except OSError as error:
        place = f"{options.host}:{options.port}"
        raise ConfigurationError("LP709", f"cannot serve on {place}: {error}") from error
    print(f"serving on {options.host}:{server.port}", flush=True)
    ended.wait()
    server.close()
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = argparse.ArgumentParser(
        prog="lightning-par serve",
        description=f"{__doc__} The shared key is in {KEY_VARIABLE} or in --key-file; all other "
        "options are those of the islands.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    parser.add_argument("--port", type=int, default=29600, help="0: any that is free")
    takes_file(
        parser.add_argument("--state", type=Path, help="folder to save to, and to go on from")
    )
    takes_file(parser.add_argument("--key-file", help="file that holds the shared key"))
    takes_file(parser.add_argument("--certificate", help="PEM; encrypts the connections"))
    takes_file(
        parser.add_argument("--certificate-key", help="PEM, if it is not in the certificate's file")
    )
    return parser
