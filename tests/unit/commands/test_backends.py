"""`lightning-par backends` says what works here, and why the rest does not."""

import pytest
import torch

from lightning_par.commands import find_command
from lightning_par.engine.context.kernels.select import KERNELS


def test_every_backend_has_a_line_with_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert find_command("backends")([]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == ["backend", *KERNELS]
    assert "yes" in lines["aten_cpu"]
    assert "float64, float32, bfloat16, float16; padded keys" in lines["eager"]
    for name in ("flash_attn", "flash_attn_3", "flash_attn_4"):
        assert "cuda: bfloat16, float16; no padded keys" in lines[name]
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in lines["aten_flash"]


def test_help_says_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        find_command("backends")(["--help"])
    assert "attention kernels" in capsys.readouterr().out
