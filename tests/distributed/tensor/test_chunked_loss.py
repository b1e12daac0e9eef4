"""Logits in chunks: on every layout the loss and the gradients of whole logits on one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.data import Dataset

import lightning_par
from lightning_par.engine.collectives import split_sizes
from lightning_par.engine.tensor.chunked_logits import ChunkedLogits, LossOptions
from lightning_par.errors import ConfigurationError
from lightning_par.huggingface import chunk_loss
from lightning_par.models import BertModule, GPTModule, MixtralModule
from lightning_par.models.gpt.model import GPT
from lightning_par.observe.modes import DoublePrecision
from lightning_par.plan.parallel_plan import ParallelPlan
from tests.distributed.models.test_bert import SgdBert, TwelvePairs
from tests.distributed.tensor.test_vocab_parallel import Squares
from tests.support.module_parity import assert_model_parity, Made
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.samples import byte_loader

T, V = 12, 37
IGNORED = -100


class Sentences(Dataset[dict[str, Tensor]]):
    """Twelve samples, each with another number of ignored labels."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.ids = torch.randint(0, V, (12, T + 1), generator=draw)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.ids[index, 1:].clone()
        labels[: index % 7] = IGNORED
        return {"input_ids": self.ids[index, :-1], "labels": labels}


class SgdGPT(GPTModule):
    """Shows errors of scale, which AdamW hides, logs the loss of all replicas, and cuts few tokens
    into several chunks.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("global_loss", loss, sync_dist=True)
        return loss

    def _token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert isinstance(logits, ChunkedLogits) == self.config.chunked_loss
        if isinstance(logits, ChunkedLogits):
            logits.options = LossOptions(chunk_size=5)
        return super()._token_loss(logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class SgdMixtral(SgdGPT, MixtralModule):
    """A mixture of experts, likewise."""


def on_mesh(kind: type[Any], sizes: dict[str, Any]) -> Any:
    """A module with logits in chunks on a mesh, and with whole ones on one process."""
    module = kind(overrides={**sizes, "chunked_loss": dist.is_initialized()})
    module.configure_model()
    return module


def make_gpt(tied: bool = True, kind: type[Any] = SgdGPT) -> Made:
    sizes = {"num_layers": 4, "model_dim": 12, "num_heads": 6, "num_kv_heads": 2, "ff_dim": 20}
    return on_mesh(kind, {**sizes, "vocab_size": V, "tied_head": tied}), Sentences()


def make_mixtral() -> Made:
    return make_gpt(tied=False, kind=SgdMixtral)


def make_bert() -> Made:
    sizes: dict[str, Any] = {"num_layers": 3, "model_dim": 12, "num_heads": 6, "ff_dim": 20}
    sizes |= {"vocab_size": 34, "max_length": 32, "order_head": False}
    assert issubclass(SgdBert, BertModule)
    return on_mesh(SgdBert, sizes), TwelvePairs()


def layout(tp: int = 1, pp: int = 1, dp: int = 1, **other: Any) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return {**sizes, **other}


LAYOUTS = {
    "tp2": layout(tp=2),
    "tp2 whole sequences": layout(tp=2, sequence_parallel=False),
    "pp2": layout(pp=2, num_microbatches=4),
    "cp2": layout(context_parallel_size=2),
    "dp2 zero3": layout(dp=2, zero_stage=3),
    "tp2 pp2": layout(tp=2, pp=2),
    "zb-h1": layout(pp=2, schedule="zb-h1"),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cell", LAYOUTS.values(), ids=LAYOUTS)
def test_gpt_trains_as_with_whole_logits_on_one_process(cell: dict[str, Any], tied: bool) -> None:
    assert_model_parity(make_gpt, {"tied": tied}, cell, batch_size=4)


@pytest.mark.parametrize("cell", [layout(tp=2), layout(context_parallel_size=2, pp=2)])
def test_bert_trains_and_counts_hits_as_with_whole_logits(cell: dict[str, Any]) -> None:
    assert_model_parity(make_bert, {}, cell, batch_size=4)


def test_a_mixture_of_experts_trains_as_with_whole_logits() -> None:
    assert_model_parity(make_mixtral, {}, layout(tp=2), batch_size=4)


def head_and_tokens(rank: int, world: int) -> tuple[ChunkedLogits, list[Tensor], Tensor, Tensor]:
    """Logits with a shard of the vocabulary, what made them, the whole weight, and the labels."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(23, 5, dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn(V, 5, dtype=torch.float64, generator=draw)
    labels = torch.randint(0, V, (23,), generator=draw)
    labels[3] = labels[22] = IGNORED
    own = weight.split(split_sizes(V, world))[rank].clone().requires_grad_()
    options = LossOptions(chunk_size=7, z_loss=1e-3)
    logits = ChunkedLogits.make(hidden, own, None, options, V, dist.group.WORLD)
    return logits, [hidden, own], weight, labels


CASES: dict[str, dict[str, Any]] = {
    "mean": {},
    "none": {"reduction": "none"},
    "smoothing": {"label_smoothing": 0.1},
    "class weights": {"weight": torch.linspace(0, 2, V, dtype=torch.float64)},
}


@ranks(3)
@pytest.mark.parametrize("case", list(CASES))
def test_a_sharded_vocabulary_gives_the_loss_of_the_whole(rank: int, world: int, case: str) -> None:
    """3 ranks hold 13, 13 and 11 of 37 columns."""
    logits, given, weight, labels = head_and_tokens(rank, world)
    weight.requires_grad_()
    whole = ChunkedLogits.make(given[0], weight, None, LossOptions(z_loss=1e-3), V)
    want = F.cross_entropy(whole, labels, **CASES[case])
    with CommDebugMode() as mode:
        got = F.cross_entropy(logits, labels, **CASES[case])
        of_hidden, of_weight = torch.autograd.grad(got.sum(), given)
    assert mode.get_total_counts() == 4  # one for each chunk, and none in the backward
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    dist.all_reduce(of_hidden)  # which the entry of the head does
    wanted = torch.autograd.grad(want.sum(), [given[0], weight])
    own = wanted[1].split(split_sizes(V, world))[rank]
    torch.testing.assert_close((of_hidden, of_weight), (wanted[0], own), rtol=0, atol=1e-12)


@ranks(3)
def test_a_function_of_autograd_takes_them_as_the_whole_logits(rank: int, world: int) -> None:
    logits, given, weight, _ = head_and_tokens(rank, world)
    weight.requires_grad_()
    wanted = torch.autograd.grad((given[0] @ weight.T).square().sum(), [given[0], weight])
    of_hidden, of_weight = torch.autograd.grad(Squares.apply(logits).sum(), given)
    dist.all_reduce(of_hidden)  # which the entry of the head does
    own = wanted[1].split(split_sizes(V, world))[rank]
    torch.testing.assert_close((of_hidden, of_weight), (wanted[0], own), rtol=0, atol=1e-12)


@ranks(3)
def test_predictions_of_a_sharded_vocabulary_are_those_of_the_whole(rank: int, world: int) -> None:
    logits, (hidden, _), weight, _ = head_and_tokens(rank, world)
    weight[30] = weight[2]  # equals on two ranks: the first counts
    logits.weight = weight.split(split_sizes(V, world))[rank]
    want = (hidden @ weight.t()).argmax(-1)
    assert torch.equal(logits.argmax(-1), want)
    torch.testing.assert_close(logits * 1, hidden @ weight.t())


class UserGPT(SgdGPT):
    """A user's step: the head outside of the model's forward, and a plan found by inference."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._user_loss(batch)
        self.log("global_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._user_loss(batch), sync_dist=True)

    def _user_loss(self, batch: Any) -> Tensor:
        hidden = self.model.embed(batch["input_ids"])
        rotary = self.model.rotary(torch.arange(T)[None])
        for block in self.model.blocks:
            hidden = block(hidden, rotary)
        hidden = self.model.norm(hidden)
        if not dist.is_initialized():
            logits = self.model.head(hidden)
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        given = hidden, self.model.head, batch["labels"]
        found: Tensor = lightning_par.linear_cross_entropy(*given, chunk_size=5)
        return found


class Undeclared(GPT):
    """A model without a plan."""

    parallel_plan = None  # type: ignore[assignment]


def make_user() -> Made:
    sizes = {"num_layers": 4, "model_dim": 12, "num_heads": 6, "num_kv_heads": 2, "ff_dim": 20}
    module = UserGPT(overrides={**sizes, "vocab_size": V, "tied_head": False})
    module.model = Undeclared(module.config)
    return module, Sentences()


class GatheredHead(GPT):
    """A head whose output is gathered, as where a plan is inferred and ids are computed."""

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, tensor={**plan.tensor, "head": "colwise_gather_output"})


def make_gathered() -> Made:
    module, samples = make_gpt(tied=False)
    module.model = GatheredHead(module.config)
    return module, samples


def test_a_head_whose_output_would_be_gathered_computes_chunks_of_its_columns() -> None:
    (first, *_) = assert_model_parity(make_gathered, {}, layout(tp=2), batch_size=4)
    assert first["shapes"]["model.head.weight"] == (19, 12)


USER = {
    "tp2": layout(tp=2),
    "pp2": layout(pp=2, num_microbatches=4),
    "dp2 zero3": layout(dp=2, zero_stage=3),
}


@pytest.mark.parametrize("cell", USER.values(), ids=USER)
def test_a_users_step_without_a_plan_trains_as_on_one_process(cell: dict[str, Any]) -> None:
    """Samples have unequal numbers of labels: a loss taken for a mean over samples would differ."""
    (first, *_) = assert_model_parity(make_user, {}, cell, batch_size=4)
    if cell["tensor_parallel_size"] == 2:
        assert first["shapes"]["model.head.weight"] == (19, 12)


class Llama(SgdGPT):
    """A model of transformers, whose own loss function takes the logits."""

    def configure_model(self) -> None:
        sizes = {"num_hidden_layers": 4, "hidden_size": 12, "intermediate_size": 20}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False}
        if not hasattr(self, "model"):
            config = transformers.LlamaConfig(vocab_size=V, **sizes, **heads)
            self.model: Any = transformers.AutoModelForCausalLM.from_config(config)
            if dist.is_initialized():
                chunk_loss(self.model, chunk_size=5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with DoublePrecision():  # transformers computes norms and losses in float32
            out = self.model(**batch)
        assert isinstance(out.logits, ChunkedLogits) == dist.is_initialized()
        self.log("global_loss", out.loss, sync_dist=True)
        return out.loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with DoublePrecision():
            self.log("val_loss", self.model(**batch).loss, sync_dist=True)


def make_llama() -> Made:
    module = Llama()
    module.configure_model()
    return module, Sentences()


LLAMA = {
    "tp2": layout(tp=2),
    "pp2": layout(pp=2),
    "cp2": layout(context_parallel_size=2),
    "dp2 zero3": layout(dp=2, zero_stage=3),
}


@pytest.mark.parametrize("cell", LLAMA.values(), ids=LLAMA)
def test_a_model_of_transformers_trains_as_with_whole_logits(cell: dict[str, Any]) -> None:
    assert_model_parity(make_llama, {}, cell, batch_size=4)


def test_a_model_without_a_linear_head_is_refused() -> None:
    config = transformers.LlamaConfig(vocab_size=V, hidden_size=12, num_attention_heads=6)
    config.num_hidden_layers, config.intermediate_size = 1, 20
    with pytest.raises(ConfigurationError, match="the head of LlamaModel is NoneType"):
        chunk_loss(transformers.AutoModel.from_config(config))


def prove(rank: int, world: int, cell: dict[str, Any]) -> str:
    strategy = lightning_par.Hybrid3DStrategy(**cell, verify=True)
    module = GPTModule(overrides={"chunked_loss": True})
    trainer = quiet_trainer(strategy=strategy, devices=world, max_steps=2, proves=True)
    trainer.fit(module, byte_loader())
    return str(strategy.start.proof.outcome)


@pytest.mark.parametrize("cell", [layout(tp=2), layout(pp=2), layout(dp=2, zero_stage=3)])
def test_the_first_step_is_proved_to_equal_one_process(cell: dict[str, Any]) -> None:
    assert run_ranks(prove, 2, cell, timeout=180)[0] == "equal"
