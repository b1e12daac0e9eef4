"""Opens the pages of a built site in a headless Chromium, wide and light, then narrow and dark.

Checks what only a browser knows: errors of scripts, pictures that are missing, pages that are wider
than the window, contrast.
"""

import argparse
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.browser import find_browser, Page, start_browser

VIEWS = (("light", 1400), ("dark", 390))
"""Color scheme that the user prefers, and the width of the window in pixels."""
THEME = {"light": "default", "dark": "slate"}
"""What the theme calls them."""
MEASURE = (Path(__file__).parent / "measure.js").read_text()


class _Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder to this machine, at any free port; give its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pages_of(site: Path) -> list[str]:
    """Return the paths of the pages, without those that only show a file of the repository."""
    found = sorted(file.relative_to(site).as_posix() for file in site.rglob("*.html"))
    return [path for path in found if not path.startswith("source/") and path != "404.html"]


def problems(site: Path, program: str, shots: Path | None = None) -> Iterator[str]:
    """Yield a line for everything that is wrong with how a page looks.

    Args:
        site: Folder of the built site.
        program: The browser.
        shots: Folder for pictures of every page; None: none are taken.
    """
    for scheme, width in VIEWS:  # each with a profile of its own: the theme remembers a scheme
        with TemporaryDirectory() as folder, start_browser(program, Path(folder)) as page:
            page.show_as(width, scheme)
            for name, said in visit(site, page, shots, scheme, width):
                yield from (f"{name}, {scheme}, {width} pixels: {one}" for one in said)


def visit(
    site: Path, page: Page, shots: Path | None, scheme: str, width: int
) -> Iterator[tuple[str, Sequence[str]]]:
    """Open every page; yield its path and what is wrong with it."""
    with served(site.parent) as address:  # where the list of versions is
        for path in pages_of(site):
            page.open(f"{address}/{site.name}/{path}")
            found = [str(message) for message in page.messages] + page.ask(MEASURE)
            if page.ask("document.body.dataset.mdColorScheme ?? null") not in (THEME[scheme], None):
                found.append("it is not in the scheme that the user prefers")
            yield path, found
            page.messages.clear()
            if shots is not None:
                name = path.removesuffix("index.html").strip("/").replace("/", "_")
                page.save_screenshot(shots / f"{name or 'home'}_{scheme}_{width}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of every page")
    options = parser.parse_args()
    program = find_browser()
    if program is None:
        print("not checked in a browser: there is no Chromium")
        sys.exit()
    if options.screenshots:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    found = list(problems(options.site.resolve(), program, options.screenshots))
    print("\n".join(found) or "every page looks right in a browser")
    sys.exit(bool(found))
