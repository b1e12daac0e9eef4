"""Sequences as steps treat them: shifted, cut, generated, of any length, on divided tokens."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import ActivationCheckpointing
from tests.support.models.plain_language_model import PlainModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)
_FLOAT32 = 1e-4  # rotary embeddings and losses of transformers are computed in float32


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=19,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"max_position_embeddings": 32, **options},
    )
    return transformers.LlamaForCausalLM(config)


def texts(count: int = 32, tokens: int = 12) -> list[dict[str, Tensor]]:
    """Samples with unequal numbers of labels."""
    ids = torch.randint(3, 19, (count, tokens), generator=torch.Generator().manual_seed(5))
    labels = [torch.where(torch.arange(tokens) < i % 7, -100, row) for i, row in enumerate(ids)]
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


class Causal(PlainModule):
    """A model of transformers, which finds its plan by itself."""

    parallel_plan = None  # type: ignore[assignment]

    def __init__(self, **options: Any) -> None:
        super().__init__(torch.nn.Module())
        self.model = llama(**options)

    def loss(self, batch: Any) -> Tensor:
        return self.model(**batch).loss


def of_growing_length(samples: Any) -> dict[str, Tensor]:
    """Batches that are shorter, then longer than 8 tokens."""
    tokens = 6 + 6 * (int(samples[0]["number"]) // 8 % 2)
    return {k: torch.stack([s[k][:tokens] for s in samples]) for k in ("input_ids", "labels")}


def scaled(kind: str, **more: Any) -> Any:
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 100.0, **more}
    longest = 16 if kind == "longrope" else 8
    samples = [{**s, "number": torch.tensor(i)} for i, s in enumerate(texts())]
    module = Causal(rope_parameters=rope, max_position_embeddings=longest)
    return module, samples, of_growing_length


@CASES.add(refused={"cp2": "a term of the loss is .* on divided sequences, .* on undivided"})
def a_small_term_over_all_tokens() -> Any:
    class Module(Causal):
        def loss(self, batch: Any) -> Tensor:
            given = self.model(**batch)
            return given.loss + 1e-6 * given.logits.square().mean()

    return Module(), texts()


@CASES.add(equal="cp2", tolerance=_FLOAT32, strategy={"verify": False})
def rotary_scaled_by_length() -> Any:
    return scaled("dynamic")


@CASES.add(equal="cp2", tolerance=_FLOAT32, strategy={"verify": False})
def rotary_with_long_factors() -> Any:
    factors = {"short_factor": [1.0, 1.0, 1.0], "long_factor": [1.0, 2.0, 3.0]}
    return scaled("longrope", original_max_position_embeddings=8, **factors)


class ShiftsByItself(Causal):
    def loss(self, batch: Any) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@CASES.add(
    refused={"cp2": "the loss is .* on divided sequences, .* batch entry 'shift_labels'"},
    strategy={"verify": False},
)
def training_that_shifts_labels() -> Any:
    return ShiftsByItself(), texts()


@CASES.add(equal="cp2", tolerance=_FLOAT32, strategy={"verify": False})
def training_on_labels_shifted_in_the_data() -> Any:
    """What the refusal above says."""

    class Module(Causal):
        def loss(self, batch: Any) -> Tensor:
            out = self.model(**batch)
            own = F.cross_entropy(out.logits.flatten(0, 1), batch["shift_labels"].flatten())
            return 0.5 * out.loss + 0.5 * own

    moved = lambda y: torch.cat([y[1:], y.new_full((1,), -100)])  # noqa: E731
    return Module(), [{**s, "shift_labels": moved(s["labels"])} for s in texts()]


class LogsWhereItHasLabels(Causal):
    """Logs one more number where all labels of a sample are valid on a rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if bool((batch["labels"][1] != -100).all()):
            self.log("complete", 1.0)
        self.log("loss", loss)
        return loss


@CASES.add(
    refused={"cp2": r"make the same calls of self\.log \(.*'complete'.*\)"},
    strategy={"verify": False},
)
def training_that_logs_other_names_on_each_rank() -> Any:
    return LogsWhereItHasLabels(), texts()


class WeighsWhereItHasLabels(Causal):
    """Logs the same name on every rank, with a weight on one of them alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, labels = self.loss(batch), batch["labels"]
        weight = {} if bool((labels[1] != -100).all()) else {"batch_size": labels.numel()}
        self.log("loss", loss, **weight)
        return loss


@CASES.add(
    refused={"cp2": r"make the same calls of self\.log \(.*'loss'.*\)"}, strategy={"verify": False}
)
def training_that_logs_with_weights_on_one_rank() -> Any:
    return WeighsWhereItHasLabels(), texts()


def odd(tokens: int) -> Any:
    ids = torch.randint(64, (32, tokens + 1), generator=torch.Generator().manual_seed(3))
    return [(row[:-1], row[1:]) for row in ids]


@CASES.add(equal="tp2 tp2pp2 zero1tp2")
def tokens_that_do_not_divide() -> Any:
    return PlainModule(), odd(7)


def of_four_lengths(samples: Any) -> tuple[Tensor, Tensor]:
    tokens = (7, 8, 5, 1)[int(samples[0][2]) // 8 % 4]
    x, y = (torch.stack([s[n][:tokens] for s in samples]) for n in (0, 1))
    return x, y


def recomputation() -> dict[str, Any]:
    return {"callbacks": [ActivationCheckpointing(mode="full")]}


@CASES.add(equal="tp2pp2", large="tp2", trainer=recomputation)
def lengths_that_change() -> Any:
    """A rank has no token of the last; later stages learn T from the one before."""
    samples = [(*pair, torch.tensor(i)) for i, pair in enumerate(odd(8))]
    return PlainModule(), samples, of_four_lengths


@CASES.add(equal="tp2")
def step_that_drops_a_token() -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            first = F.cross_entropy(self.net(x[:, :1]).flatten(0, 1), y[:, :1].flatten())
            return first + super().loss((x[:, :-1], y[:, :-1]))

    return Module(), odd(8)


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    CASES.check(case, layout, refusal)


KINDS = (
    "loss of the model",
    "accuracy that shifts labels",
    "metric that shifts labels",
    "list of outputs",
    "loss with a batch size",
    "generation",
    "own sampling",
)


class Evaluated(Causal):
    """Every data loader is evaluated in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.hits, self.count = MeanMetric(), SumMetric()
        self.outputs: list[tuple[float, float]] = []
        self.divided: dict[str, bool] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        kind, ids = KINDS[dataloader_idx], batch["input_ids"]
        with torch.no_grad():
            if kind in ("generation", "own sampling"):
                self.log("length", self.lengths(kind, ids[:, :3]), sync_dist=True)
                return
            out = self.model(**batch)
        if kind.startswith("loss"):
            size = {"batch_size": len(ids)} if "size" in kind else {}
            self.log("loss of evaluation", out.loss, sync_dist=True, **size)
            return
        labels = batch["labels"][:, 1:]
        hits = (out.logits[:, :-1].argmax(-1) == labels)[labels != -100]
        if kind == "accuracy that shifts labels":
            self.log("accuracy", hits.double().mean(), sync_dist=True)
        elif kind == "metric that shifts labels":
            self.hits.update(hits)
            self.count.update(len(hits))
            self.log_dict({"hits": self.hits, "count": self.count})
        else:
            self.outputs.append((float(hits.sum()), len(hits)))

    def lengths(self, kind: str, prompt: Tensor) -> Tensor:
        """Mean place of what was generated."""
        if kind == "generation":
            text = self.model.generate(prompt, max_new_tokens=6, do_sample=False)
        else:
            text = prompt
            for _ in range(6):
                text = torch.cat([text, self.model(text).logits[:, -1:].argmax(-1)], 1)
        return (text * torch.arange(text.shape[1])).double().mean()

    def on_validation_batch_end(
        self, out: Any, batch: Any, batch_idx: int, dataloader_idx: int
    ) -> None:
        """Note of the second batch, which is not looked at, whether attention was divided."""
        steps = getattr(self.trainer.strategy, "parallel_model", None)
        if steps is not None and steps.steps.sequence is not None:
            calls = steps.steps.sequence.shard.calls
            self.divided[KINDS[dataloader_idx]] = batch_idx == 1 and calls > self.calls
            self.calls = calls

    def on_validation_epoch_end(self) -> None:
        right, count = map(sum, zip(*self.outputs, strict=True))
        self.outputs.clear()
        self.log("share", right / count)


def evaluate(rank: int, world: int, layout: str | None) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    module, data = Evaluated(), texts()
    strategy = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", num_sanity_val_steps=0, max_steps=2
    )
    held_out = [DataLoader(data[4 * i : 4 * i + 8], 4) for i in range(len(KINDS))]
    trainer.fit(module, DataLoader(data[:16], 8), held_out)
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"values": values, "divided": module.divided}


@cache
def evaluated_alone() -> dict[str, Any]:
    try:
        return evaluate(0, 1, None)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("layout", ["cp2", "tp2"])
def test_evaluation_equals_one_process(layout: str) -> None:
    """Only what sees tokens one by one is divided over the context ranks."""
    wanted = evaluated_alone()["values"]
    for found in run_ranks(evaluate, 2, layout, timeout=180):
        assert found["values"].keys() == wanted.keys()
        for name, value in wanted.items():
            assert found["values"][name] == pytest.approx(value, abs=_FLOAT32), name
        if layout == "cp2":
            assert found["divided"] == {kind: kind.startswith("loss") for kind in KINDS}


class Writing(Causal):
    """Writes texts in validation, which end at other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.texts = list[list[int]]()

    def on_validation_epoch_start(self) -> None:
        self.texts.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        prompt = batch["input_ids"][:, :3]
        text = self.model.generate(prompt, max_new_tokens=12, do_sample=False)
        self.log("length", float(text.shape[1]), sync_dist=True)
        self.texts += [[token for token in row if token] for row in text.tolist()]


def write(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(0, verbose=False)
    module, data = Writing(), texts()
    strategy: Any = "auto"
    if layout is not None:
        strategy = Hybrid3DStrategy(**{**LAYOUTS[layout], "verify": False})
    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_steps=2, val_check_interval=2
    )
    held_out = [data[i] for i in (13, 0, 20, 1, *range(2, 13))]  # both first ones are short
    trainer.fit(module, DataLoader(data[:16], 8 // world), DataLoader(held_out, 4 // world))
    return [len(text) for text in module.texts], module.texts


def test_texts_of_replicas_end_at_other_lengths() -> None:
    """Replicas that gather weights for each token wait for the longest text, also in the look."""
    ((lengths, wanted),) = run_ranks(write, 1, None, timeout=90)
    found = run_ranks(write, 2, "zero3", timeout=120)
    assert max(found[0][0][:2]) < max(found[1][0][:2])
    assert len({*lengths}) > 2
    assert sorted(text for _, held in found for text in held) == sorted(wanted)
