"""What ranks have left is read as far as it can be, and nothing is left behind a URL."""

import json
from pathlib import Path

import pytest

from lightning_par.commands.why import why
from lightning_par.errors import ConfigurationError
from lightning_par.profiling.post_mortem import (
    Change,
    PostMortem,
    read_post_mortems,
    write_post_mortem,
)
from lightning_par.strategies.post_mortem.memory_death import MemoryWatch


def left(rank: int = 0) -> PostMortem:
    change = Change(write="zero_stage=3", less=2.0**30)
    told = {"name": f"rank {rank}", "when": "then", "summary": "out of memory"}
    return PostMortem(rank=rank, **told, changes=[change], steps=[(1, 0.5, 2**20)])


def test_files_are_read_in_the_order_of_ranks_and_nothing_else_is_left(tmp_path: Path) -> None:
    for rank in (10, 9, 10):
        write_post_mortem(left(rank), tmp_path)
    first, second = read_post_mortems(tmp_path)
    assert (first.rank, second.rank) == (9, 10)
    assert list(second.lines()) == list(left(10).lines())
    assert list(second.last_steps()) == list(left(10).last_steps())
    assert len(list(tmp_path.iterdir())) == 2


def text_of(**changes: object) -> str:
    return json.dumps({"format": 1, **vars(left()), "changes": [], **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (text_of()[:100], "JSONDecodeError"),
        ('{"rank": 0}', "KeyError: 'format'"),
        ("[]", "TypeError"),
        (text_of(rank="first"), "ValueError"),
        (text_of(counted=3), "AttributeError"),
        (text_of(format=2), "its format is 2, not 1"),
    ],
    ids=["truncated", "foreign", "a list", "a rank in words", "no sizes", "of another format"],
)
def test_a_bad_file_hides_no_other(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "post_mortem.rank0.json"
    bad.write_text(text)
    with pytest.raises(ConfigurationError, match="read as the post-mortem of a rank") as told:
        read_post_mortems(tmp_path)
    assert reason in str(told.value)
    write_post_mortem(left(1), tmp_path)
    why(str(tmp_path))
    said = capsys.readouterr().out
    assert "rank 1, then: out of memory" in said
    assert f"{bad} cannot be read" in said


def test_a_rank_in_quotes_is_a_number(tmp_path: Path) -> None:
    (tmp_path / "post_mortem.rank0.json").write_text(text_of(rank="0"))
    write_post_mortem(left(1), tmp_path)
    assert [each.rank for each in read_post_mortems(tmp_path)] == [0, 1]


def test_nothing_is_left_behind_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not MemoryWatch(folder="s3://bucket/run").leave(left())
    assert not list(tmp_path.iterdir())
    assert MemoryWatch(folder="run").leave(left())
    with pytest.raises(ConfigurationError, match="or whose folder is a URL, writes no such file"):
        read_post_mortems(Path("s3://bucket/run"))
