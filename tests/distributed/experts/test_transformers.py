"""Mixtures of experts of transformers, which need no plan: divided, and equal to one process."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, DistributedSampler

import lightning_par
from lightning_par.callbacks import CommunicationProfiler
from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError
from lightning_par.verification.rehearse import rehearse_apart
from tests.distributed.user_code.test_families import Family, tokens
from tests.support.models.mixture import layout
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)
EXPERTS, LAYERS, DIM, FF, LENGTH, CHOSEN = 4, 2, 32, 16, 8, 2
_SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": FF,
    "moe_intermediate_size": FF,
    "num_experts_per_tok": CHOSEN,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_LATENTS = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 12),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 4,
}


def model(family: str, **options: Any) -> Any:
    count = options.pop("experts", EXPERTS)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    config = transformers.CONFIG_MAPPING[family](
        **{**_SIZES, **dict.fromkeys(names, count), **options}
    )
    return transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")


def case(
    name: str,
    family: str,
    *,
    sizes: dict[str, Any] | None = None,
    tolerance: float = 1e-6,
    **cells: Any,
) -> None:
    def make() -> Any:
        return Family(model(family, **(sizes or {}))), tokens()

    make.__name__ = name
    CASES.add(tolerance=tolerance, **cells)(make)


case(
    "clipped_by_the_norm_of_all",
    "qwen3_moe",
    equal="zero1ep2",
    large="zero1ep2tp2 zero1ep2pp2 zero3ep2",
    trainer={"gradient_clip_val": 0.1},
)
case("biases", "gpt_oss", equal="zero3ep2", large="zero1ep2 zero1ep2tp2")
case(
    "shared_experts_after_a_dense_layer",
    "deepseek_v3",
    sizes=_LATENTS,
    equal="zero1ep2tp2",
    large="zero1ep2 zero1ep2pp2",
)
case(
    "bfloat16",
    "qwen3_moe",
    equal="zero1ep2",
    large="zero1ep2tp2 zero3ep2",
    trainer={"precision": "bf16-mixed"},
    tolerance=1e-3,
)
case(
    "parts_of_one_size",
    "qwen3_moe",
    equal="zero1ep2",
    large="zero1ep2tp2",
    strategy={"expert_max_rows": 64 * CHOSEN},
)
_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
case(
    "loss_that_balances_experts",
    "mixtral",
    sizes=_BALANCED,
    equal="zero1ep2",
    large="zero3ep2 zero1ep2tp2",
    refused={"zero1ep2pp2": r"auxiliary loss of its routers.*Use num_microbatches=1"},
)
case(
    "loss_that_balances_experts_in_one_microbatch",
    "qwen3_moe",
    sizes=_BALANCED,
    large="zero1ep2pp2",
    strategy={"num_microbatches": 1},
)


@CASES.add(equal="zero0", large="zero3 zero1ep2", tolerance=1e-6)
def loss_that_balances_experts_without_padding() -> Any:
    rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in tokens()]
    for index, row in enumerate(rows):
        row["attention_mask"][LENGTH - index % 5 :] = 0
        row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    return Family(model("mixtral", **_BALANCED)), rows


@CASES.add(refused={"zero0 zero1ep2": "all labels in the batch of one replica have the ignored"})
def loss_that_balances_experts_of_a_replica_without_labels() -> Any:
    rows = tokens()
    for row in rows[1::2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    return Family(model("mixtral", **_BALANCED)), rows


class Summed(Family):
    def loss(self, batch: Any) -> Any:
        logits = self.net(input_ids=batch["input_ids"])
        summed = torch.nn.functional.cross_entropy(
            logits.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )
        return summed + logits.aux_loss


@CASES.add(refused={"zero0": "a sum over the samples"})
def loss_that_balances_experts_beside_a_sum() -> Any:
    return Summed(model("mixtral", **_BALANCED)), tokens()


def _unequal_rows() -> list[Any]:
    rows = tokens()
    return [
        {name: value[: LENGTH - index % 2 - 4 * (index // 2 % 2)] for name, value in row.items()}
        for index, row in enumerate(rows)
    ]


def _padded(rows: list[Any]) -> Any:
    length = max(len(row["labels"]) for row in rows)

    def pad(name: str, value: int) -> Any:
        return torch.stack(
            [
                torch.nn.functional.pad(r[name], (0, length - len(r[name])), value=value)
                for r in rows
            ]
        )

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


@CASES.add(refused={"zero0": "padding changes the loss"})
def loss_that_balances_experts_with_padding() -> Any:
    """Without a mask padding counts, and each replica pads to its own longest row."""
    return Family(model("mixtral", **_BALANCED)), _unequal_rows(), _padded


case(
    "experts_that_do_not_divide",
    "qwen3_moe",
    sizes={"experts": 3},
    refused={"zero1ep2": r"has 3 experts in dim 0, not divisible by 2. Use .*size=1 or 3"},
)
case(
    "no_experts",
    "qwen3",
    refused={"zero1ep2": r"experts. If it has none, use expert_parallel_size=1"},
)


@pytest.mark.parametrize(("name", "place", "refusal"), CASES.cells())
def test_equal_or_refused(name: str, place: str, refusal: str | None) -> None:
    """Check one cell of the table; the first step is proved, too."""
    CASES.check(name, place, refusal)


class Balanced(Family):
    """Logs the loss of evaluations, and predicts it from batches with labels."""

    def __init__(self) -> None:
        super().__init__(model("mixtral", **_BALANCED))
        self.losses: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch).expand(len(batch["labels"]))


def fit_uneven(rank: int, world: int, place: str | None) -> Any:
    """Train, evaluate and predict on 7 samples, two in a batch, of which the last has one."""
    torch.manual_seed(5)
    module, loader = Balanced(), DataLoader(tokens(7), 2 // world)
    strategy = "auto" if place is None else lightning_par.Hybrid3DStrategy(**LAYOUTS[place])
    trainer = quiet_trainer(devices=world, strategy=strategy, max_epochs=2, proves=True)
    trainer.fit(module, loader, loader)
    validated = float(trainer.callback_metrics["val_loss"])
    refusal = pytest.raises(ConfigurationError, match="a multiple of 2 batches")
    with refusal if place == "zero1ep2" else nullcontext():
        assert len(torch.cat(trainer.predict(module, loader))) == 7
    if place == "zero1ep2":  # the cures
        trainer.limit_predict_batches = 3
        assert len(torch.cat(trainer.predict(module, loader))) == 6
        trainer.limit_predict_batches = 1.0
        assert len(torch.cat(trainer.predict(module, DataLoader(tokens(8), 2)))) == 8
    return module.losses, validated


@pytest.mark.parametrize("place", ["zero0", "zero1ep2"])
def test_balance_of_a_batch_that_is_not_full(place: str) -> None:
    """A replica repeats a sample, which counts nowhere; predictions are of a replica's batch."""
    losses, validated = fit_uneven(0, 1, None)
    for found in run_ranks(fit_uneven, 2, place, timeout=120):
        assert found[0] == pytest.approx(losses, abs=1e-5)
        assert found[1] == pytest.approx(validated, abs=1e-5)


class Sent(CommunicationProfiler):
    """Keeps what a step sent, as (calls, bytes that left this rank), and bytes of parameters."""

    found: Any = None
    held: Any = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        entries = self.recording.steps.last().entries
        # Of two ranks, the axes of data and experts have one group.
        self.found = {e.operation: (e.calls, e.sent) for e in entries}
        self.held = {n: local_part(p).nbytes for n, p in own_parameters(pl_module).items()}
        self.recording.stop()


def train(
    rank: int, world: int, options: dict[str, Any] | None, source: Path | None, target: Path
) -> Any:
    """Train an epoch, or a second one from a checkpoint; save at the end."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    module, samples = Family(model("qwen3_moe")), tokens(12)
    kind = {"checkpoint_format": "folder", **(options or {})}
    strategy = "auto" if options is None else lightning_par.Hybrid3DStrategy(**kind)
    sent = [Sent(folder=target.parent)] if options is not None else []
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_epochs=1 if source is None else 2,
        precision="64-true",
        callbacks=sent,
        use_distributed_sampler=False,
    )
    replicas = 1 if options is None else options["data_parallel_size"]
    order = DistributedSampler(samples, replicas, rank * replicas // world, shuffle=False)
    trainer.fit(module, DataLoader(samples, 4 // replicas, sampler=order), ckpt_path=source)
    trainer.save_checkpoint(target)
    if options is None:
        return {k: v.clone() for k, v in module.state_dict().items()}
    assert not any("compute" in vars(part) for part in module.modules()), "left behind"
    return trainer.strategy.gather_state_dict(), sent[0].held, sent[0].found


def one_process(source: Path | None, target: Path) -> Any:
    try:
        return train(0, 1, None, source, target)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_rank_holds_its_experts_and_tokens_travel(tmp_path: Path) -> None:
    whole = {name: p.numel() * 8 for name, p in Family(model("qwen3_moe")).named_parameters()}
    options = layout(dp=2, ep=2, zero=0)
    for _, held, sent in run_ranks(train, 2, options, None, tmp_path / "a.ckpt", timeout=120):
        for name, size in whole.items():
            assert held[name] == (size // 2 if ".experts." in name else size), name
        calls, left = sent["all_to_all"]
        assert calls == 5 * LAYERS  # how many rows; rows and answers, and their gradients
        assert left > LAYERS * DIM * 8


def rehearsed(observer: Any, environment: Any) -> Any:
    """A mixture that is too large to have memory."""
    wide = {"hidden_size": 2048, "moe_intermediate_size": 1024, "vocab_size": 5000}
    given = {"plugins": [environment], "callbacks": [observer]}
    strategy = lightning_par.Hybrid3DStrategy(**layout(dp=2, ep=2, zero=1))
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=1, max_epochs=1, **given)
    return trainer, Family(model("qwen3_moe", **wide)), DataLoader(tokens(16), 4)


def test_a_rehearsed_rank_sends_tokens() -> None:
    found = rehearse_apart(rehearsed, num_nodes=1, devices=2, rank=1)
    calls = {e.operation: e.calls for e in found.volume if e.axis == "dp_shard"}
    assert calls["all_to_all"] == 5 * LAYERS
    assert found.memory["activations"] > 0


@pytest.mark.parametrize("form", ["folder", pytest.param("file", marks=pytest.mark.exhaustive)])
def test_training_goes_on_in_another_layout(form: str, tmp_path: Path) -> None:
    first, second, back = (tmp_path / f"{n}.ckpt" for n in ("first", "second", "back"))
    middle = one_process(None, first)
    wanted = one_process(first, second)
    close = {"rtol": 0, "atol": 1e-6}
    options = {**layout(tp=2, dp=2, ep=2), "checkpoint_format": form}
    divided = run_ranks(train, 4, options, first, tmp_path / "on.ckpt", timeout=120)[0][0]
    torch.testing.assert_close(divided, wanted, **close)
    halfway = run_ranks(train, 4, options, None, back, timeout=120)[0][0]
    torch.testing.assert_close(halfway, middle, **close)
    options = {**layout(dp=2), "checkpoint_format": form}
    again = run_ranks(train, 2, options, back, tmp_path / "end.ckpt", timeout=120)[0][0]
    torch.testing.assert_close(again, wanted, **close)
