"""Token files with documents, rows of packed documents, and blends of corpora."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_par.commands import find_command
from lightning_par.errors import ConfigurationError
from lightning_par.models import TextDataModule, write_token_file
from lightning_par.models.data.blended_corpora import BlendedCorpora
from lightning_par.models.data.packed_documents import PackedDataset
from lightning_par.models.data.token_windows import PADDING, read_token_file, WindowDataset


def packed(sizes: list[int], length: int, *ranges: tuple[int, int]) -> PackedDataset:
    tokens = np.arange(sum(sizes), dtype=np.uint32)
    windows = WindowDataset(tokens, ranges or [(0, len(tokens))], length)
    return PackedDataset(windows, np.cumsum(sizes))


def test_a_row_knows_its_documents() -> None:
    rows = packed([3, 5, 1, 20, 7], 8)
    first, second = rows[0], rows[1]
    assert first["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert first["labels"].tolist() == [1, 2, -100, 4, 5, 6, 7, -100]  # 8 is of the next document
    assert first["cu_seqlens"].tolist() == [0, 3, 8]
    assert second["position_ids"].tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert second["labels"].tolist() == [-100, 10, 11, 12, 13, 14, 15, 16]
    assert second["cu_seqlens"].tolist() == [0, 1, 8]
    assert rows[2]["cu_seqlens"].tolist() == [0, 8, 8]  # one document goes on; as many as others
    assert (rows[PADDING]["labels"] == -100).all()
    with pytest.raises(IndexError):
        rows[len(rows)]


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_ranges_agree_with_a_plain_count(seed: int) -> None:
    draws = np.random.default_rng(seed)
    sizes = draws.integers(1, 15, 40).tolist()
    low, high = 11, sum(sizes) - 5
    rows = packed(sizes, 16, (0, low), (low, high))
    owner = np.repeat(np.arange(40), sizes)
    most = 0
    for row in (rows[i] for i in range(len(rows))):
        held = row["input_ids"].numpy()
        mine, following = owner[held], owner[held + 1]
        begins = [i for i in range(16) if i == 0 or mine[i] != mine[i - 1]]
        places = [i - max(b for b in begins if b <= i) for i in range(16)]
        assert row["position_ids"].tolist() == places
        bounds = row["cu_seqlens"].tolist()
        assert bounds[: len(begins)] == begins
        assert {*bounds[len(begins) :]} == {16}
        labels = np.where(mine == following, held + 1, -100)
        assert row["labels"].tolist() == labels.tolist()
        most = max(most, len(begins))
    assert len(rows[0]["cu_seqlens"]) == most + 1


def test_a_blend_has_each_share_in_every_stretch() -> None:
    corpora: list[Any] = [[(name, i) for i in range(n)] for name, n in (("a", 10), ("b", 40))]
    blend: Any = BlendedCorpora(corpora, [3, 1])
    samples = [blend[i] for i in range(len(blend))]
    assert len(samples) == 50
    assert Counter(name for name, _ in samples) == {"a": 38, "b": 12}  # 37.5 and 12.5
    for stop in range(1, 51):
        share = sum(name == "a" for name, _ in samples[:stop])
        assert abs(share - 0.76 * stop) <= 1
    assert [i for name, i in samples if name == "a"][:12] == [*range(10), 0, 1]  # begins again
    whole: Any = BlendedCorpora(corpora)
    assert Counter(whole[i] for i in range(50)) == Counter([*corpora[0], *corpora[1]])
    with pytest.raises(ConfigurationError, match="one weight of 0 or more for each"):
        BlendedCorpora([*corpora, []], [1, 1, 1])


def test_json_lines_and_text_become_a_token_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"body": text}) for text in ("one", "and two")]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "", ""]))
    (tmp_path / "b.txt").write_text("plain")
    out = str(tmp_path / "c.bin")
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    find_command("tokenize")([*sources, "--out", out, "--key", "body", "--end", "256"])
    assert "18 tokens of 2 files, 257 in the vocabulary" in capsys.readouterr().out
    tokens, size = read_token_file(out)
    assert size == 257
    assert tokens.tolist() == [*b"one", 256, *b"and two", 256, *b"plain", 256]
    data = TextDataModule(
        [out], 4, 1, validation_fraction=0, test_fraction=0, documents=True, shuffle=False
    )
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].tolist() == [[*b"ne", 256, -100]]
    with pytest.raises(ConfigurationError, match=r"a\.jsonl, line 1 is not a JSON object"):
        find_command("tokenize")([*sources, "--out", out])


def test_corpora_are_blended_by_weights(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{name}.bin") for name in "ab"]
    write_token_file(paths[0], [[1] * 650], vocab_size=9)
    write_token_file(paths[1], [[2] * 650], vocab_size=9)

    def tokens_of(weights: list[float] | None) -> Counter[int]:
        data = TextDataModule(
            paths, 4, 1, validation_fraction=0.1, test_fraction=0, weights=weights
        )
        data.setup("fit")
        found = Counter(int(b["input_ids"][0, 0]) for b in data.train_dataloader())
        held: Any = data.val_dataloader()
        assert {int(b["input_ids"][0, 0]) for b in held} == {1, 2}
        return found

    even, skewed = tokens_of(None), tokens_of([0.9, 0.1])
    assert even[1] == even[2]
    assert skewed.total() == even.total()
    assert skewed[1] == round(0.9 * skewed.total())
    with pytest.raises(ConfigurationError, match="must have one entry for each of paths"):
        TextDataModule(paths, weights=[1.0])
    with pytest.raises(ConfigurationError, match="does not store where its documents end"):
        TextDataModule(paths[:1], documents=True).setup("fit")


def test_documents_of_a_file_written_again_are_not_those_before(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_token_file(path, [[1, 2], [3]], documents=True)
    assert torch.from_numpy(np.load(tmp_path / "a.npy")).tolist() == [2, 3]
    write_token_file(path, [[1, 2, 3, 4]])
    assert not (tmp_path / "a.npy").exists()
