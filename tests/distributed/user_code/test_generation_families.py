"""Families of models write on a mesh what they write on one process, wherever they are asked to.

The prompts of a batch are padded at the left, with an attention mask, and its texts end at other
lengths. The weights of every family are random.
"""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par.models import GPT, GPTConfig
from tests.support.models.huggingface import ATTENTIONS, FAMILIES, VOCAB
from tests.support.models.plain_language_model import PlainModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of, world_of

PROMPT, NEW, ENDS = 5, 4, [2, *range(20, 27)]
"""Tokens of a prompt, of what is written, and those that end a text."""


def gpt() -> GPT:
    sizes = {"num_layers": 3, "model_dim": 24, "num_heads": 4, "init_std": 0.2}
    return GPT(GPTConfig(vocab_size=VOCAB, max_length=PROMPT + NEW, **sizes))


def bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=VOCAB,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=20,
        decoder_ffn_dim=20,
        max_position_embeddings=16,
        init_std=0.2,
        dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        forced_eos_token_id=None,
        decoder_start_token_id=1,
    )
    return transformers.BartForConditionalGeneration(config)


MODELS: dict[str, Any] = {
    "bart": bart,
    "gemma3": ATTENTIONS["gemma3"],
    "gpt": gpt,
    "gpt2": FAMILIES["gpt2"],
    "mistral window": ATTENTIONS["mistral window"],
    "mixtral": FAMILIES["mixtral"],
    "qwen3": FAMILIES["qwen3"],
}


class Writing(PlainModule):
    """Writes in validation and in prediction, and in a hook."""

    parallel_plan = None  # type: ignore[assignment]

    def __init__(self, family: str) -> None:
        super().__init__(torch.nn.Module())
        self.model = MODELS[family]()
        self.texts: list[list[int]] = []
        self.in_hook: list[list[int]] = []

    def loss(self, batch: Any) -> Tensor:
        if isinstance(self.model, GPT):
            logits = self.model(batch["input_ids"])
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return self.model(**batch).loss

    def write(self, batch: Any, is_drawn: bool = False) -> list[list[int]]:
        if isinstance(self.model, GPT):
            options: dict[str, Any] = {"top_k": 9} if is_drawn else {"temperature": 0.0}
            found = self.model.generate(batch["input_ids"], NEW, **options)
        else:
            found = self.model.generate(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=NEW,
                do_sample=is_drawn,
                eos_token_id=ENDS,
                pad_token_id=0,
                use_cache=True,
            )
        return [[token for token in row if token] for row in found.tolist()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.texts += self.write(batch) + self.write(batch, is_drawn=True)
        # Replicas whose first text has ended earlier have drawn less.
        torch.manual_seed(batch_idx)
        self.texts += self.write(batch, is_drawn=True)

    def predict_step(self, batch: Any) -> list[list[int]]:
        return self.write(batch)

    def on_train_epoch_end(self) -> None:
        seed_everything(7, verbose=False)
        for is_drawn in (False, True):
            self.in_hook += self.write(collate(prompts()[:3]), is_drawn)


def prompts() -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 20, (8, PROMPT), generator=torch.Generator().manual_seed(5))
    seen = [torch.arange(PROMPT) >= number % 3 for number in range(8)]
    return [
        {"input_ids": row * mask, "attention_mask": mask.long(), "labels": row}
        for row, mask in zip(ids, seen, strict=True)
    ]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def generate(rank: int, world: int, family: str, layout: str | None) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    module = Writing(family)
    replicas = 2 if (layout or "").startswith("zero") else 1
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy_of(layout, verify=False),
        precision="64-true",
        max_epochs=1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(prompts(), 4 // replicas), DataLoader(prompts(), 4 // replicas))
    after = module.write(collate(prompts()[:3]))
    predicted = trainer.predict(module, DataLoader(prompts()[:4], 2))
    return {
        "validation_step": module.texts,
        "on_train_epoch_end": module.in_hook,
        "after the fit": after,
        "predict_step": [row for rows in predicted for row in rows],
    }


@cache
def alone(family: str) -> dict[str, Any]:
    (found,) = run_ranks(generate, 1, family, None, timeout=90)
    return found


# Windows of attention: gemma3 where sequences are divided, mistral with stages and shards.
USUAL = {
    ("bart", "tp2"),
    ("gemma3", "cp2"),
    ("gpt", "cp2"),
    ("gpt", "zero3"),
    ("gpt2", "pp2"),
    ("mistral window", "tp2pp2"),
    ("mixtral", "zero3"),
    ("qwen3", "tp2"),
}
LAYOUTS = ("tp2", "pp2", "zero1", "zero3", "cp2", "tp2pp2")
CELLS = [
    pytest.param(
        family, layout, marks=[] if (family, layout) in USUAL else [pytest.mark.exhaustive]
    )
    for family in MODELS
    for layout in LAYOUTS
    if (family, layout) != ("bart", "cp2")  # which is refused: its encoder has other tokens
]


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_texts_are_those_of_one_process(family: str, layout: str) -> None:
    """In steps, in a hook and after the fit; greedy and drawn."""
    wanted = alone(family)
    if family != "gpt":  # which knows no token that ends a text
        assert len({len(text) for text in wanted["on_train_epoch_end"]}) > 1
    found = run_ranks(generate, world_of(layout), family, layout, timeout=180)
    for place, texts in wanted.items():
        if place == "validation_step" and layout.startswith("zero"):  # each replica has its own
            assert sorted(text for rank in found for text in rank[place]) == sorted(texts)
        else:
            assert [rank[place] for rank in found] == [texts] * len(found), place
