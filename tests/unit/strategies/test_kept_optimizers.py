"""Optimizers that an island finds on its disk: their states come back, or are refused."""

from pathlib import Path

import torch
from torch.nn import Linear

from lightning_par.strategies.components.islands import KeptOptimizers


def trained(features: int, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    layer = Linear(features, 2)
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(steps):
        layer(torch.ones(1, features)).sum().backward()
        optimizer.step()
    return optimizer


def test_states_of_the_same_run_and_parameters_come_back(tmp_path: Path) -> None:
    path, before = tmp_path / "kept" / "island.pt", trained(3, 2)
    assert KeptOptimizers(path, "run", [before]).read() is None
    KeptOptimizers(path, "run", [before]).save("step 2")
    assert KeptOptimizers(path, "other", [trained(3, 0)]).read() is None
    assert KeptOptimizers(path, "run", [trained(5, 0)]).read() is None
    assert KeptOptimizers(path, "run", [trained(3, 0)] * 2).read() is None
    after = trained(3, 0)
    kept = KeptOptimizers(path, "run", [after])
    assert kept.read() == "step 2"
    kept.load()
    torch.testing.assert_close(after.state_dict(), before.state_dict(), rtol=0, atol=0)
    path.write_bytes(path.read_bytes()[:100])
    assert kept.read() is None
    kept.forget()
    assert not path.exists()


def test_a_file_that_is_none_of_ours_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kept.pt"
    for found in ({"state_dict": {}}, {"era": "run", "states": []}, [1], torch.ones(2)):
        torch.save(found, path)
        assert KeptOptimizers(path, "run", [trained(3, 0)]).read() is None
