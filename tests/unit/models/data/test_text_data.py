import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_par.errors import ConfigurationError
from lightning_par.models import GPTModule, TextDataModule, write_token_file
from lightning_par.models.data.resumable_loader import ReplicaSampler, ResumableLoader
from lightning_par.models.data.token_windows import (
    PADDING,
    read_token_file,
    split_ranges,
    WindowDataset,
)
from lightning_par.models.data.tokenizers import (
    ByteTokenizer,
    encode_files,
    find_files,
    load_tokenizer,
    standard_library_files,
)
from tests.support.parity import quiet_trainer


def dataset(tokens: int = 101, length: int = 5) -> WindowDataset:
    return WindowDataset(np.arange(tokens, dtype=np.uint16), [(0, tokens)], length)


def test_bytes_go_there_and_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("Grüße, 世界\n")) == "Grüße, 世界\n"
    assert max(tokenizer.encode("ÿ\U0001f600")) < tokenizer.vocab_size


def test_standard_library_is_found_in_a_fixed_order_without_tests():
    files = standard_library_files()
    assert files == standard_library_files()
    assert "ast.py" in {file.name for file in files}
    assert not {"test", "site-packages"} & {part for file in files for part in file.parts[-3:]}


def test_files_folders_and_patterns_each_count_once(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/c.txt", "deep/er/d.md"):
        (tmp_path / name).write_text(name)
    found = find_files([str(tmp_path / "b.txt"), str(tmp_path), str(tmp_path / "**" / "*.md")])
    assert [file.name for file in found] == ["b.txt", "a.txt", "c.txt", "d.md"]
    parts = encode_files(found, ByteTokenizer(), max_bytes=8)
    text = b"".join(bytes(part.astype(np.uint8)) for part in parts)
    assert text == b"b.txt\na.t\n"
    with pytest.raises(ConfigurationError, match=re.escape("nothing*.py' matches no text file")):
        find_files([str(tmp_path / "nothing*.py")])


def test_token_file_reads_back_what_was_written_without_loading_it(tmp_path: Path):
    path = tmp_path / "corpus.bin"
    parts = [np.arange(10), [65_535], np.zeros(0, np.int64)]
    assert write_token_file(path, parts, vocab_size=65_536) == 11
    tokens, vocab_size = read_token_file(path)
    assert isinstance(tokens, np.memmap)
    assert (tokens.dtype, vocab_size) == (np.uint16, 65_536)
    assert tokens.tolist() == [*range(10), 65_535]
    write_token_file(path, parts, vocab_size=65_537)
    assert read_token_file(path)[0].dtype == np.uint32
    np.arange(7, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    assert read_token_file(tmp_path / "bare.bin")[0].tolist() == list(range(7))


def test_token_file_refuses_what_does_not_fit(tmp_path: Path):
    path = tmp_path / "corpus.bin"
    with pytest.raises(ConfigurationError, match=r"tokens from 3 to 10, .* from 0 to 9"):
        write_token_file(path, [[3, 10]], vocab_size=10)
    with pytest.raises(ConfigurationError, match=r"65536, but .* from 0 to 65535"):
        write_token_file(path, [[0, 65_536]], dtype="uint16")
    write_token_file(path, [[1, 2, 3]], vocab_size=10)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ConfigurationError, match="has 5 bytes, but should hold 3 tokens of 2 bytes"
    ):
        read_token_file(path)
    with pytest.raises(ConfigurationError, match=r"'none\.bin' in paths= does not exist"):
        read_token_file("none.bin")


def test_split_covers_every_token_once_and_repeats():
    splits = split_ranges(100_003, validation=0.1, test=0.05)
    assert splits == split_ranges(100_003, validation=0.1, test=0.05)
    runs = sorted(run for runs in splits.values() for run in runs)
    assert runs[0][0] == 0
    assert runs[-1][1] == 100_003
    assert all(one[1] == two[0] for one, two in pairwise(runs))
    share = {name: sum(hi - lo for lo, hi in runs) / 100_003 for name, runs in splits.items()}
    assert share["val"] == pytest.approx(0.1, abs=0.02)
    assert share["test"] == pytest.approx(0.05, abs=0.02)
    assert split_ranges(50, validation=0.0, test=0.0) == {"train": [(0, 50)], "val": [], "test": []}


def test_split_refuses_shares_that_leave_nothing():
    with pytest.raises(ConfigurationError, match=r"validation_fraction=1\.5 must be between"):
        split_ranges(100, validation=1.5, test=0.0)
    with pytest.raises(ConfigurationError, match=r"0\.6 and .*0\.5 leave none of the 100 tokens"):
        split_ranges(100, validation=0.6, test=0.5)


def test_windows_follow_each_other_inside_runs_and_labels_are_the_next_tokens():
    data = WindowDataset(np.arange(40, dtype=np.uint16), [(0, 8), (10, 12), (20, 31)], 3)
    firsts = [data[i]["input_ids"].tolist() for i in range(len(data))]
    assert firsts == [[0, 1, 2], [3, 4, 5], [20, 21, 22], [23, 24, 25], [26, 27, 28]]
    assert data[1]["labels"].tolist() == [4, 5, 6]
    assert {t.dtype for t in data[0].values()} == {torch.int64}
    assert set(data[PADDING]["labels"].tolist()) == {-100}
    with pytest.raises(IndexError, match="sample 5 of a dataset of 5"):
        data[5]


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_replicas_see_every_sample_once_and_equally_many(replicas: int, drop_last: bool):
    data = dataset()  # 20 samples
    samplers = [
        ReplicaSampler(data, num_replicas=replicas, rank=rank, drop_last=drop_last, seed=5)
        for rank in range(replicas)
    ]
    seen = [list(sampler) for sampler in samplers]
    assert {len(s) for s in seen} == {len(samplers[0])}
    flat = sorted(i for s in seen for i in s if i != PADDING)
    left_out = 20 % replicas if drop_last else 0
    assert len(set(flat)) == len(flat) == 20 - left_out
    assert sum(s.count(PADDING) for s in seen) == (0 if drop_last else -20 % replicas)


def test_order_changes_with_the_epoch_and_repeats_with_the_seed():
    one, two = (ReplicaSampler(dataset(), seed=5) for _ in range(2))
    assert list(one) == list(two)
    two.set_epoch(1)
    assert list(one) != list(two)
    assert sorted(one) == sorted(two) == list(range(20))
    assert list(ReplicaSampler(dataset(), shuffle=False)) == list(range(20))


def test_global_batches_do_not_depend_on_the_number_of_replicas():
    def global_batches(replicas: int) -> list[set[int]]:
        loaders = [
            ResumableLoader(
                dataset(),
                batch_size=6 // replicas,
                sampler=ReplicaSampler(dataset(), num_replicas=replicas, rank=r, drop_last=True),
                drop_last=True,
            )
            for r in range(replicas)
        ]
        rounds = zip(*loaders, strict=True)
        return [{int(t) for b in batch for t in b["input_ids"][:, 0]} for batch in rounds]

    assert global_batches(1) == global_batches(2) == global_batches(3)
    assert len(global_batches(1)) == 3


def loader(replicas: int = 1, batch_size: int = 3, workers: int = 0) -> ResumableLoader:
    sampler = ReplicaSampler(dataset(), num_replicas=replicas, drop_last=True)
    return ResumableLoader(
        dataset(), batch_size=batch_size, sampler=sampler, num_workers=workers, drop_last=True
    )


def firsts(batches: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_continues_after_the_last_batch_it_handed_out(workers: int):
    whole, stopped, resumed = loader(), loader(workers=workers), loader(workers=workers)
    taken = iter(stopped)
    [next(taken) for _ in range(2)]
    state = stopped.state_dict()
    assert state == {"epoch": 0, "samples": 6, "global_batch_size": 3}
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    expected = firsts(list(whole))
    assert len(resumed) == len(expected) == 6
    assert firsts(list(resumed)) == expected[2:]
    assert resumed.state_dict()["epoch"] == 1
    assert firsts(list(resumed)) == firsts(list(whole))  # the place counts once; next epoch


def test_loader_gives_up_the_rest_of_an_epoch_that_is_started_again():
    whole, broken = loader(), loader()
    next(iter(broken))
    iter(broken)  # asks for nothing
    assert broken.state_dict()["samples"] == 3
    epochs = [firsts(list(whole)) for _ in range(2)]
    assert firsts(list(broken)) == epochs[1] != epochs[0]


def test_new_loader_begins_with_the_epoch_that_its_sampler_is_told():
    told, whole = loader(), loader()
    told.sampler.set_epoch(2)
    assert firsts(list(told)) == [firsts(list(whole)) for _ in range(3)][2]


def test_place_at_the_end_of_a_shortened_epoch_is_the_beginning_of_the_next():
    short = loader()
    short.batches_per_epoch = 2
    taken = iter(short)
    [next(taken) for _ in range(2)]
    assert short.state_dict() == {"epoch": 1, "samples": 0, "global_batch_size": 3}


def test_loader_warns_if_the_global_batch_has_changed_and_refuses_what_it_cannot_share(
    caplog: pytest.LogCaptureFixture,
):
    loader(replicas=2).load_state_dict({"epoch": 0, "samples": 6, "global_batch_size": 3})
    assert "had 3 samples when the checkpoint was written and has 6 now" in caplog.text
    with pytest.raises(
        ConfigurationError, match=r"had trained on 5 samples of its epoch .* which 2"
    ):
        loader(replicas=2).load_state_dict({"epoch": 0, "samples": 5, "global_batch_size": 5})


def test_token_file_of_a_hugging_face_tokenizer_feeds_the_data_module(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(
        ["the cat sat on the mat " * 50],
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, initial_alphabet=alphabet, show_progress=False
        ),
    )
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode("the cat sat\n" * 300)
    assert tokenizer.decode(tokens) == "the cat sat\n" * 300
    assert len(tokens) < 12 * 300
    write_token_file(tmp_path / "a.bin", [tokens], vocab_size=tokenizer.vocab_size)
    data = TextDataModule(
        [str(tmp_path / "a.bin")],
        length=7,
        batch_size=2,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )
    data.setup("fit")
    assert data.vocab_size == tokenizer.vocab_size > 256
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 7)
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    write_token_file(tmp_path / "b.bin", [tokens], vocab_size=tokenizer.vocab_size + 1)
    with pytest.raises(ConfigurationError, match="Encode all of them with one tokenizer"):
        TextDataModule([str(tmp_path / "a.bin"), str(tmp_path / "b.bin")]).setup("fit")


def test_missing_tokenizer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(
        ConfigurationError, match=r"broken\.json' is neither a tokenizer\.json file"
    ):
        load_tokenizer(str(broken))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigurationError, match="pip install tokenizers"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"length": 0, "batch_size": -1}, "2 problems"),
        ({"num_workers": -1}, "num_workers=-1 must be 0 or more"),
        (
            {"length": 2000},
            "has 0 samples of 2000 tokens, which are too few for batch_size=8 on 1 replicas",
        ),
    ],
)
def test_bad_options_are_refused_with_their_numbers(tmp_path: Path, options: dict, text: str):
    (tmp_path / "a.txt").write_text("a" * 6400)

    def load() -> None:
        data = TextDataModule([str(tmp_path / "a.txt")], **options)
        data.setup("fit")
        data.train_dataloader()

    with pytest.raises(ConfigurationError, match=text):
        load()


def test_split_without_a_sample_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a" * 6400)
    data = TextDataModule([str(tmp_path / "a.txt")], length=1000)
    data.setup("validate")
    with pytest.raises(ConfigurationError, match="val split has no sample of 1000 tokens"):
        data.val_dataloader()


def test_too_few_samples_are_refused_before_the_model_is_built(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a" * 6400)
    data, module = TextDataModule([str(tmp_path / "a.txt")], length=1000), GPTModule()
    with pytest.raises(ConfigurationError, match="samples of 1000 tokens, which are too few for"):
        quiet_trainer(max_steps=1).fit(module, data)
    assert not hasattr(module, "model")
    data.setup("test")  # which needs no training samples
