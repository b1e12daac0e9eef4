"""Where one file that all ranks write is the form of checkpoints."""

from pathlib import Path

import pytest

from lightning_par.checkpoint import file_system


@pytest.mark.parametrize(
    ("kind", "one_node", "more_nodes"),
    [
        ("ext4", True, False),
        ("tmpfs", True, False),
        ("nfs4", True, False),
        ("lustre", True, True),
        ("gpfs", True, True),
        ("fuse.sshfs", True, False),
        ("fuse.beegfs", True, True),
        ("fuse.s3fs", False, False),
        ("fuse.gcsfuse", False, False),
        ("fuse.mount-s3", False, False),
        ("", True, False),
    ],
)
def test_form_follows_the_file_system(
    kind: str, one_node: bool, more_nodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system, "_type_of", lambda folder: kind)
    assert file_system.holds_one_file(Path("x"), 1) == one_node
    assert file_system.holds_one_file(Path("x"), 2) == more_nodes


def test_type_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    assert file_system._type_of(Path("/proc/self")) == "proc"
    assert file_system._type_of(tmp_path / "not there yet") not in ("", "proc")
