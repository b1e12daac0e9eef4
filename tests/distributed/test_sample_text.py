"""`SampleText` writes on a mesh what it writes on one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par.callbacks import SampleText
from lightning_par.errors import ConfigurationError
from lightning_par.models import GPT, GPTConfig
from tests.support.models.plain_language_model import PlainModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of, world_of

PROMPTS = [[1, 2, 3], [4, 5]]


class Letters:
    """Letters from a on are tokens from 0 on."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, tokens: Any) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


class Module(PlainModule):
    parallel_plan = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(GPT(GPTConfig(vocab_size=19, num_layers=2, model_dim=24, num_heads=4)))

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(
            self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class TextLogger(CSVLogger):
    """Keeps the texts that it is given."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.rows: list[Any] = []

    def log_text(self, key: str, columns: list[str], data: list[list[str]], step: int) -> None:
        assert (key, columns) == ("samples", ["prompt", "text"])
        self.rows.append((step, data))


class Noting(SampleText):
    """Keeps all texts."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.found: list[tuple[int, list[str]]] = []

    def _sample(self, trainer: Any, module: Any) -> None:
        states = torch.get_rng_state()
        modes = [part.training for part in module.modules()]
        super()._sample(trainer, module)
        assert torch.equal(states, torch.get_rng_state())
        assert modes == [part.training for part in module.modules()]
        self.found.append((trainer.global_step, self.texts))


def fit(layout: str | None, callback: Any, world: int = 1, **options: Any) -> Any:
    seed_everything(0, verbose=False)
    ids = torch.randint(19, (16, 7), generator=torch.Generator().manual_seed(5))
    samples = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]
    replicas = 2 if (layout or "").startswith("zero") else 1
    strategy = strategy_of(layout, verify=False)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=2,
        callbacks=[callback],
        **options,
    )
    loader = DataLoader(samples, 4 // replicas)
    trainer.fit(Module(), loader, loader)
    return trainer


def write(rank: int, world: int, layout: str | None, times: dict[str, int]) -> Any:
    callback = Noting(PROMPTS, max_new_tokens=6, options={"top_k": 5}, **times)
    fit(layout, callback, world)
    return callback.found


@pytest.mark.parametrize(
    ("layout", "times"),
    [
        ("pp2", {}),
        ("tp2", {"every_n_steps": 3}),
        ("zero3", {"every_n_epochs": 2}),
        ("pp2", {"every_n_steps": 3}),
    ],
)
def test_texts_are_those_of_one_process(layout: str, times: dict[str, int]) -> None:
    (wanted,) = run_ranks(write, 1, None, times, timeout=90)
    steps = [3, 6] if "every_n_steps" in times else [8] if times else [4, 8]
    assert [step for step, _ in wanted] == steps
    assert {tuple(len(text.split()) for text in texts) for _, texts in wanted} == {(9, 8)}
    found = run_ranks(write, world_of(layout), layout, times, timeout=120)
    assert found == [wanted] * len(found)


def test_a_logger_of_texts_gets_them(tmp_path: Any, capsys: Any) -> None:
    logger = TextLogger(str(tmp_path))
    callback = SampleText(["abc"], Letters(), every_n_steps=4, max_new_tokens=5)
    fit(None, callback, logger=logger)
    torch.set_default_dtype(torch.float32)
    assert [step for step, _ in logger.rows] == [4, 8]
    ((prompt, text),) = logger.rows[-1][1]
    assert prompt == "abc"
    assert [text] == callback.texts
    assert text.startswith("abc")
    assert len(text) == 8
    assert "Texts at step" not in capsys.readouterr().out


def test_without_such_a_logger_texts_are_printed(capsys: Any) -> None:
    callback = SampleText([[1]], every_n_steps=8, max_new_tokens=2)
    fit(None, callback)
    torch.set_default_dtype(torch.float32)
    assert f"Texts at step 8:\n{callback.texts[0]}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (([[1]], None, {"every_n_epochs": 0}), "every_n_epochs=0"),
        (([[1]], None, {"every_n_steps": 0}), "every_n_steps=0"),
        ((["a"], None, {}), "needs a tokenizer"),
    ],
)
def test_what_cannot_be_sampled_is_refused(given: Any, text: str) -> None:
    prompts, tokenizer, options = given
    with pytest.raises(ConfigurationError, match=text):
        SampleText(prompts, tokenizer, **options)


def test_a_module_that_does_not_generate_is_refused_at_the_start() -> None:
    trainer = quiet_trainer(devices=1, max_steps=1, callbacks=[SampleText([[1]])])
    with pytest.raises(ConfigurationError, match="neither PlainModule nor a submodule"):
        trainer.fit(PlainModule(), DataLoader([0]))


def test_an_empty_prompt_is_refused_at_the_start() -> None:
    trainer = quiet_trainer(devices=1, max_steps=1, callbacks=[SampleText([[]])])
    with pytest.raises(ConfigurationError, match="a prompt without tokens"):
        trainer.fit(Module(), DataLoader([0]), DataLoader([0]))
