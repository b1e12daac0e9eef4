"""A run that stops in the middle of an epoch and resumes in the same layout is the uninterrupted
run, bit for bit: batches, losses, weights, optimizer states, rates.
"""

from pathlib import Path

import pytest

from tests.support.resharding import differences, run_layout

STOP, STEPS, EPOCH = 3, 6, 53
RANDOM = {"dropout": 0.3}


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ("dp2 zero 1", 2),
        pytest.param("tp2", 1, marks=pytest.mark.exhaustive),
        pytest.param("pp2", 0, marks=pytest.mark.exhaustive),
        ("zbv", 0),
        ("tp2 dp2", 0),
        ("one", 1),
        ("dp2 offload", 0),
    ],
)
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    layout: str, workers: int, tmp_path: Path
) -> None:
    options = {**RANDOM, "workers": workers, "layers": 5 if layout in ("pp2", "zbv") else 2}
    saved = tmp_path / "a.ckpt"
    whole = run_layout(layout, tmp_path, steps=STEPS, save_at=STOP, save_to=saved, **options)
    # Another seed: whatever is random has to come from the checkpoint.
    resumed = run_layout(layout, tmp_path, steps=STEPS, source=saved, seed=99, **options)
    for got, wanted in zip(resumed, whole, strict=True):
        assert len(got["losses"]) == STEPS - STOP
        assert got["losses"] == wanted["losses"][STOP:]
        assert differences(got["batches"], wanted["batches"][STOP:]) == []
        assert differences(got["end"], wanted["end"]) == []
    seen = [batch for result in whole for batch in result["batches"]]
    assert 0 < whole[0]["end"]["data"]["samples"] < 4 * EPOCH
    assert any(differences(seen[0], other) for other in seen[1:])
    # The layers that drop activations are at work: another seed gives other losses.
    if layout == "pp2":
        other = run_layout(layout, tmp_path, steps=1, seed=99, **options)
        assert other[0]["losses"] != whole[0]["losses"][:1]
