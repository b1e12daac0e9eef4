"""Texts that a model writes on a mesh are those of one process, in steps and in hooks."""

from functools import cache, partial
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par.errors import PipelineError
from lightning_par.models import GPT, GPTConfig
from tests.support.models.plain_language_model import PlainModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import strategy_of, world_of

_TOKENS = {"vocab_size": 19, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llama(layers: int = 2) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        max_position_embeddings=32,
        **_TOKENS,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=24,
        d_kv=6,
        d_ff=20,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        initializer_factor=3.0,
        decoder_start_token_id=0,
        **{**_TOKENS, "bos_token_id": None},
    )
    return transformers.T5ForConditionalGeneration(config)


def gpt() -> Any:
    return GPT(GPTConfig(vocab_size=19, max_length=7, num_layers=2, model_dim=24, num_heads=4))


FAMILIES = {"llama": llama, "t5": t5, "gpt": gpt, "deep": partial(llama, 4)}
OF_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "use_cache": True},
    "greedy without a cache": {"do_sample": False, "use_cache": False},
    "sampled": {"do_sample": True, "use_cache": True},
    "beams": {"do_sample": False, "num_beams": 3, "use_cache": True},
}
OF_GPT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy without a cache": {"temperature": 0.0, "use_cache": False},
    "sampled": {"top_k": 9},
}


class Writing(PlainModule):
    """Writes texts in steps of evaluation, and in a hook."""

    parallel_plan = None  # type: ignore[assignment]

    def __init__(self, family: str) -> None:
        super().__init__(torch.nn.Module())
        self.model = FAMILIES[family]()
        self.kinds = OF_GPT if family == "gpt" else OF_TRANSFORMERS
        self.texts: dict[str, list[list[int]]] = {kind: [] for kind in self.kinds}

    def loss(self, batch: Any) -> Tensor:
        if isinstance(self.model, GPT):
            logits = self.model(batch["input_ids"][:, :7])
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, :7].flatten())
        return self.model(**batch).loss

    def write(self, prompt: Tensor, kind: str) -> list[list[int]]:
        rows = self.model.generate(prompt, max_new_tokens=4, **self.kinds[kind]).tolist()
        return [[token for token in row if token] for row in rows]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        for kind, texts in self.texts.items():
            texts += self.write(batch["input_ids"][:, :3], kind)

    def predict_step(self, batch: Any) -> list[list[int]]:
        return self.write(batch["input_ids"][:, :4], "greedy")


class InHook(Callback):
    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        for kind in pl_module.kinds:
            torch.manual_seed(7)
            self.texts += pl_module.write(torch.tensor([[3, 4, 5], [6, 7, 8]]), kind)


def texts(count: int = 32, tokens: int = 12) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, 19, (count, tokens), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def fit(module: Any, rank: int, world: int, layout: str | None, *callbacks: Any) -> Any:
    """Train two steps, then validate on eight samples; return the Trainer and these."""
    replicas = 2 if (layout or "").startswith("zero") else 1
    strategy = strategy_of(layout, verify=False)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        callbacks=list(callbacks),
        precision="64-true",
        max_steps=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
    )
    data = texts()
    held_out = DataLoader(data[16:24], 4 // replicas)
    trainer.fit(module, DataLoader(data[:16], 8 // replicas), held_out)
    return trainer, held_out


def generate(rank: int, world: int, family: str, layout: str | None) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    module, hook = Writing(family), InHook()
    trainer, held_out = fit(module, rank, world, layout, hook)
    loss = float(trainer.callback_metrics["val_loss"])
    predicted = trainer.predict(module, held_out)
    return {
        "loss": loss,
        "texts": module.texts,
        "hook": hook.texts,
        "predicted": [row for rows in predicted for row in rows],
    }


@cache
def alone(family: str) -> dict[str, Any]:
    (found,) = run_ranks(generate, 1, family, None, timeout=90)
    return found


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *((family, layout) for family in ("t5", "gpt") for layout in ("tp2", "pp2")),
        *(("llama", layout) for layout in ("cp2", "zero3", "tp2pp2")),
        # Replicas as in zero3, stages as in tp2pp2.
        pytest.param("llama", "zero1pp2", marks=pytest.mark.exhaustive),
        # The parts of tp2pp2.
        *(pytest.param("llama", layout, marks=pytest.mark.exhaustive) for layout in ("tp2", "pp2")),
        pytest.param("llama", "zero1", marks=pytest.mark.exhaustive),  # zero3, without the gathers
        *(
            pytest.param(family, layout, marks=pytest.mark.exhaustive)
            for family in ("t5", "gpt")
            for layout in ("zero0", "zero2", "zero3", "tp2pp2", "zero1tp2", "zero1pp2")
        ),
    ],
)
def test_texts_are_those_of_one_process(family: str, layout: str) -> None:
    """In steps, in predictions, and in hooks; greedy, drawn, of beams, with a cache and without."""
    wanted = alone(family)
    if family == "llama":
        assert len({len(text) for text in wanted["texts"]["greedy"]}) > 1
    assert wanted["texts"]["greedy"] == wanted["texts"]["greedy without a cache"]
    found = run_ranks(generate, world_of(layout), family, layout, timeout=180)
    for rank in found:
        assert rank["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
        assert rank["hook"] == wanted["hook"]
        assert rank["predicted"] == wanted["predicted"]
    for kind, written in wanted["texts"].items():
        if not layout.startswith("zero"):
            assert [rank["texts"][kind] for rank in found] == [written] * len(found), kind
        else:  # a rank has those of its replica
            every = [text for rank in found for text in rank["texts"][kind]]
            assert sorted(every) == sorted(written * (len(found) // 2)), kind


class OwnLoop(Writing):
    """Samples by itself; nothing but its calls tells."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        text = batch["input_ids"][:, :3]
        for _ in range(5):
            text = torch.cat([text, self.model(text).logits[:, -1:].argmax(-1)], 1)
        self.texts["greedy"] += text.tolist()
        self.log("mean", text.double().mean())


class OwnLoopWithCache(OwnLoop):
    """The model makes the cache in its first call."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        text, past = batch["input_ids"][:, :3], None
        for _ in range(5):
            given = text if past is None else text[:, -1:]
            out = self.model(input_ids=given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            assert past.get_seq_length() == text.shape[1]
            text = torch.cat([text, out.logits[:, -1:].argmax(-1)], 1)
        self.texts["greedy"] += text.tolist()
        self.log("mean", text.double().mean())


def sample(rank: int, world: int, layout: str | None, kind: type[OwnLoop]) -> Any:
    seed_everything(0, verbose=False)
    module = kind("llama")
    trainer, _ = fit(module, rank, world, layout)
    return module.texts["greedy"], float(trainer.callback_metrics["mean"])


@pytest.mark.parametrize("kind", [OwnLoop, OwnLoopWithCache])
def test_a_step_may_sample_by_itself(kind: type[OwnLoop]) -> None:
    wanted = run_ranks(sample, 1, None, kind, timeout=90)
    assert run_ranks(sample, 2, "pp2", kind, timeout=120) == wanted * 2


class Misnamed(Writing):
    """Has `generate` of its own, and a step that no call of the model alone can run."""

    def generate(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.model.model(input_ids=batch["input_ids"]).last_hidden_state
        self.texts["greedy"] += self.generate(self.model.lm_head(hidden)).tolist()


def use(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(0, verbose=False)
    module = Misnamed("llama")
    fit(module, rank, world, layout)
    return module.texts["greedy"]


def test_a_step_that_writes_no_text_goes_through_the_stages_once() -> None:
    wanted = run_ranks(use, 1, None, timeout=90)
    assert run_ranks(use, 2, "pp2", timeout=120) == wanted * 2


@pytest.mark.parametrize("uses_cache", [True, False])
def test_ranks_with_several_stages_generate_without_a_cache(uses_cache: bool) -> None:
    found = run_ranks(generate_interleaved, 2, uses_cache, timeout=120)
    if uses_cache:
        assert all("Pass use_cache=False" in text for text in found)
    else:
        assert found == run_ranks(generate_interleaved, 1, False, timeout=90) * 2


class InHookAlone(Writing):
    def __init__(self, kind: str) -> None:
        super().__init__("deep")
        self.kind, self.written = kind, list[list[int]]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        self.written += self.write(torch.tensor([[3, 4, 5]]), self.kind)


def generate_interleaved(rank: int, world: int, uses_cache: bool) -> Any:
    seed_everything(0, verbose=False)
    module = InHookAlone("greedy" if uses_cache else "greedy without a cache")
    try:
        fit(module, rank, world, "pp2_interleaved" if world > 1 else None)
    except PipelineError as error:
        return str(error)
    return module.written
