"""Tensors in files are read when they are used, and not before."""

from pathlib import Path

from lightning_par.checkpoint.reader import CheckpointReader
from tests.support.checkpoints import write_folder


def test_asking_for_a_name_reads_nothing(tmp_path: Path) -> None:
    reader = CheckpointReader(write_folder(tmp_path / "a.ckpt", 1))
    weights = reader.weights()
    assert "table" in weights
    assert "chair" not in weights
    assert reader.files.bytes_read == 0
    assert weights["table"].shape == (7, 5)
    assert reader.files.bytes_read == 7 * 5 * 4
