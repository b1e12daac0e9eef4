"""The server as a process: it ends cleanly, and goes on after it was killed."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_par.commands import find_command
from lightning_par.engine.data.islands.options import Outer
from lightning_par.errors import ConfigurationError
from tests.support.islands import Island, KEY, SHAPES

ROOT = Path(__file__).resolve().parents[3]
main = find_command("serve")


@contextmanager
def process(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the command; it is killed at the end if it still runs."""
    code = (
        "import sys; from lightning_par.commands import find_command; "
        "sys.exit(find_command('serve')(sys.argv[1:]))"
    )
    options = [f"--port={port}", f"--state={folder / 'state'}"]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "LIGHTNING_PAR_KEY": KEY.decode()}
    with subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=subprocess.PIPE, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            found = re.fullmatch(r"serving on 127\.0\.0\.1:(\d+)\n", server.stdout.readline())
            assert found is not None
            yield server, int(found[1])
        finally:
            server.kill()


def test_server_is_killed_goes_on_and_ends_at_sigterm(tmp_path: Path) -> None:
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    outer = Outer(every=1, optimizer="average", quantize="none", timeout=120)
    with process(tmp_path) as (server, port):
        island = Island(port, 0, outer, weights)
        island.join()
        island.step(lambda name: torch.ones(SHAPES[name]))
        server.send_signal(signal.SIGKILL)
        assert server.wait(60) == -signal.SIGKILL
    with process(tmp_path, port) as (server, _):
        island.step(lambda name: torch.ones(SHAPES[name]))
        late = Island(port, 1, outer, {n: torch.zeros(s) for n, s in SHAPES.items()})
        late.join()
        assert late.ranks[0].step == 2
        for name, value in late.weights().items():
            torch.testing.assert_close(value, weights[name] - 2)
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    for each in (island, late):
        each.close(finished=False)
    assert [file.name for file in (tmp_path / "state").iterdir()] == ["fragment-0-of-1.safetensors"]


def test_server_needs_a_key_and_a_free_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIGHTNING_PAR_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="has 0 bytes, but needs 16 or more"):
        main(["--port=0"])
    (tmp_path / "key").write_text("a short key\n")
    with pytest.raises(ConfigurationError, match="has 11 bytes"):
        main([f"--key-file={tmp_path / 'key'}"])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        main([f"--key-file={tmp_path / 'no such file'}"])
    monkeypatch.setenv("LIGHTNING_PAR_KEY", KEY.decode())
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1:0"):
        main(["--port=0", f"--certificate={tmp_path / 'none'}"])
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
