"""BERT in one process: its hidden tokens, its data, its numbers against transformers."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_par.errors import ConfigurationError
from lightning_par.models import Bert, BertConfig, BertModule, from_hugging_face_bert
from lightning_par.models.bert.masking import hash_uniform, IGNORED, mask_tokens
from lightning_par.models.data.sentence_pairs import (
    pack_pairs,
    prose_of,
    SentenceDataModule,
    split_sentences,
)
from lightning_par.models.data.token_windows import PADDING
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes

transformers = pytest.importorskip("transformers")


def test_hash_gives_uniform_numbers_that_depend_on_everything():
    tokens = torch.arange(64 * 50).view(64, 50) % 97
    draws = hash_uniform(tokens, 3, 0)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(float(draws.mean()) - 0.5) < 0.02
    assert abs(float(draws.var()) - 1 / 12) < 0.005
    assert draws.unique().numel() == draws.numel()
    for other in (hash_uniform(tokens, 4, 0), hash_uniform(tokens, 3, 1)):
        assert abs(float(torch.corrcoef(torch.stack([draws.ravel(), other.ravel()]))[0, 1])) < 0.05
    changed = tokens.clone()
    changed[:, 7] += 1
    assert not (hash_uniform(changed, 3, 0) == draws).any()


def test_masking_hides_the_right_share_of_maskable_tokens():
    tokens = torch.randint(0, 90, (200, 60), generator=torch.Generator().manual_seed(1))
    maskable = torch.arange(60)[None] < torch.randint(1, 60, (200, 1))
    maskable[7] = False
    shown, labels = mask_tokens(tokens, maskable, step=5, mask_id=99, vocab_size=100)
    chosen = labels != IGNORED
    assert not (chosen & ~maskable).any()
    assert torch.equal(shown[~chosen], tokens[~chosen])
    assert torch.equal(labels[chosen], tokens[chosen])
    room = maskable.sum(1)
    wanted = torch.where(room > 0, (room * 0.15).round().clamp(min=1), 0)
    assert torch.equal(chosen.sum(1), wanted.long())
    masked = (shown == 99)[chosen].float().mean()
    kept = (shown == tokens)[chosen].float().mean()
    assert abs(float(masked) - 0.8) < 0.05
    assert abs(float(kept) - 0.1) < 0.04


def test_masking_does_not_depend_on_how_the_batch_is_cut_but_on_the_step():
    tokens = torch.randint(0, 90, (6, 40))
    maskable = torch.ones(6, 40, dtype=torch.bool)

    def hide(rows: torch.Tensor, step: int) -> torch.Tensor:
        return mask_tokens(tokens[rows], maskable[rows], step=step, mask_id=99, vocab_size=100)[0]

    whole = hide(torch.arange(6), 2)
    parts = [hide(torch.tensor(r), 2) for r in ([5, 0], [1], [2, 3, 4])]
    assert torch.equal(torch.cat(parts)[[1, 2, 3, 4, 5, 0]], whole)
    assert not torch.equal(hide(torch.arange(6), 3), whole)


def test_bert_gives_the_logits_of_transformers():
    sizes = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3}
    other = {"intermediate_size": 40, "max_position_embeddings": 20, "pad_token_id": 0}
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**sizes, **other)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    config = BertConfig(
        vocab_size=61, max_length=20, num_layers=3, model_dim=24, num_heads=3, ff_dim=40
    )
    ours = Bert(config).eval()
    ours.load_state_dict(from_hugging_face_bert(theirs.state_dict()), strict=True)
    ids, segments = torch.randint(0, 61, (4, 17)), torch.randint(0, 2, (4, 17))
    mask = (torch.arange(17)[None] < torch.tensor([[17], [5], [1], [11]])).long()
    with torch.no_grad():
        logits, order = ours(ids, segments, mask)
        want = theirs(ids, token_type_ids=segments, attention_mask=mask)
    seen = mask.bool()
    torch.testing.assert_close(logits[seen], want.prediction_logits[seen], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(order, want.seq_relationship_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("preset", ["tiny", "base", "large"])
def test_presets_have_the_published_sizes_and_a_whole_plan(preset):
    config = BertConfig.preset(preset)
    with torch.device("meta"):
        model = Bert(config)
    assert sum(p.numel() for p in model.parameters()) == config.num_parameters
    published = {"base": 110_106_428, "large": 336_226_108}
    assert config.num_parameters == published.get(preset, config.num_parameters)
    check_plan(model, model.parallel_plan(), ParallelSizes(tensor=2, pipeline=4))


def test_sentences_of_docstrings_are_packed_and_padded(tmp_path: Path):
    source = (
        '"""One sentence. Two of them!\n\nA new paragraph."""\ndef f():\n    "Says f. No more."\n'
    )
    (tmp_path / "a.py").write_text(source)
    text = prose_of(tmp_path / "a.py")
    sentences = split_sentences(text)
    assert sentences == [
        "One sentence.",
        "Two of them!",
        "A new paragraph.",
        "Says f.",
        "No more.",
    ]
    pairs = list(pack_pairs([s.encode() for s in sentences], 40, seed=1))
    joined = [bytes(pair.first + pair.second) for pair in pairs]
    assert joined == [b"One sentence.Two of them!", b"A new paragraph.Says f.No more."]
    assert all(pair.first and pair.second for pair in pairs)


def test_data_module_gives_pairs_of_real_prose_in_and_out_of_order():
    data = SentenceDataModule(length=64, batch_size=4, max_bytes=60_000)
    data.setup("fit")
    assert data.vocab_size == 260
    samples = data._splits["train"]
    assert len(samples) > 300
    swapped = [int(samples[i]["sentence_order"]) for i in range(300)]
    assert 100 < sum(swapped) < 200
    for index in (0, 5, PADDING):
        sample = samples[index]
        real = sample["attention_mask"].bool()
        assert (sample["input_ids"][~real] == 256).all()
        assert int(sample["input_ids"][0]) == 257
        assert int((sample["input_ids"] == 258).sum()) == 2
        letters = sample["input_ids"][real & (sample["input_ids"] < 256)]
        assert bytes(letters.tolist()).decode()
        counts = index != PADDING
        assert torch.equal(sample["maskable"], (sample["input_ids"] < 256) & counts)
        assert (int(sample["sentence_order"]) == IGNORED) == (not counts)
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (4, 64)


def test_validation_reports_accuracy_and_perplexity_of_hidden_tokens():
    module = BertModule()
    module.configure_model()
    logged = {}
    module.log = lambda name, value, **_: logged.update({name: value})
    data = SentenceDataModule(length=64, batch_size=4, max_bytes=60_000)
    data.setup("fit")
    with torch.no_grad():
        for batch in itertools.islice(data.train_dataloader(), 2):
            module.validation_step(batch, 0)
    values = {k: float(v.compute() if hasattr(v, "compute") else v) for k, v in logged.items()}
    assert 200 < values["val_perplexity"] < 340  # 260 tokens, untrained
    assert 0 <= values["val_accuracy"] < 0.1
    assert 0 <= values["val_order_accuracy"] <= 1
    assert 5.5 < values["val_loss"] < 7.0  # ln 260 + ln 2 = 6.25


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_heads": 5}, r"num_heads=5 does not divide model_dim=64; use one of \[1, 2, 4"),
        ({"mask_id": 260}, r"mask_id=260 must be 0 .. 259"),
        ({"dropout": 1.0, "num_layers": 0}, r"(?s)num_layers=0 must be 1.*dropout=1.0 must be"),
        ({"norm_eps": 0}, r"norm_eps=0 must be greater than 0"),
        ({"widht": 3}, r"'widht' is not a field of BertConfig"),
    ],
)
def test_bad_sizes_are_refused(values, says):
    with pytest.raises(ConfigurationError, match=says):
        BertConfig.preset("tiny", **values)
    with pytest.raises(ConfigurationError, match=r"'huge' is none of tiny, base, large"):
        BertConfig.preset("huge")


def test_data_with_more_tokens_than_the_model_is_refused():
    module = BertModule(overrides={"vocab_size": 100, "max_length": 32})
    module._trainer = SimpleNamespace(datamodule=SentenceDataModule(length=64))
    with pytest.raises(
        ConfigurationError, match=r"vocab_size=260.*vocab_size=100(?s:.*)max_length=64"
    ):
        module.setup("fit")
