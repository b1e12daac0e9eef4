"""Opens a page in a headless Chromium, over the DevTools protocol on a pipe: no port needed."""

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
HEARD = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
FREE = 10
"""The first descriptor that is none of those that the protocol fixes."""


class Page:
    """A page that is open.

    Attributes:
        messages: What it wrote to the console, and every error.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer, self._rest, self._count = reader, writer, b"", 0
        self._session: str | None = None
        self.messages: list[Any] = []

    def start(self) -> None:
        """Make the page, empty."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def show_as(self, width: int, scheme: str = "light") -> None:
        """Set the width in pixels, and the color scheme that the user prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        prefers = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=prefers)

    def open(self, address: str) -> None:
        """Load a page, and wait until its scripts have run."""
        self.call("Page.navigate", url=address)
        while self._receive().get("method") != "Page.loadEventFired":
            pass
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked for has been drawn."""
        self.await_("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def await_(self, promise: str) -> None:
        """Wait for a promise of JavaScript."""
        self.call("Runtime.evaluate", expression=promise, awaitPromise=True)

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **options: Any) -> None:
        """Move, press, release or turn the wheel of the mouse."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **options)
        self.settle()

    def save_screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._reader, 2**16)
            assert part, "Chromium has gone"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in HEARD:
            self.messages.append(message["params"])
        return message


def find_browser() -> str | None:
    """Return the path of a Chromium, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def open_page(path: Path, folder: Path) -> Iterator[Page]:
    """Open a file in a browser of its own, 1280 pixels wide; skip the test where there is none.

    Args:
        path: Absolute.
        folder: For the browser's profile.
    """
    program = find_browser()
    if program is None:
        import pytest

        pytest.skip(f"needs one of {', '.join(NAMES)}; on Debian: apt-get install chromium")
    with start_browser(program, folder) as page:
        page.show_as(1280)
        page.open(path.as_uri())
        yield page


@contextlib.contextmanager
def start_browser(program: str, folder: Path) -> Iterator[Page]:
    """Start a browser with an empty page.

    Args:
        program: Of `find_browser`.
        folder: For the browser's profile.
    """
    to_read, to_write = _high_pipe(), _high_pipe()

    def place() -> None:
        os.dup2(to_read[0], 3)  # Chromium reads from 3 and writes to 4
        os.dup2(to_write[1], 4)

    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    options += ["--remote-debugging-pipe", f"--user-data-dir={folder / 'browser'}"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            [program, *options], stdout=log, stderr=log, close_fds=False, preexec_fn=place
        )
    os.close(to_read[0])
    os.close(to_write[1])
    try:
        page = Page(to_write[0], to_read[1])
        page.start()
        yield page
        page._session = None
        page.call("Browser.close")
        process.wait(10)
    finally:
        process.kill()
        process.wait()
        os.close(to_read[1])
        os.close(to_write[0])


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends do not stand where the child needs its own."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FREE) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]
