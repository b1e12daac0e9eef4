"""Modules of known structures that declare no plan: it is inferred, and equals one process."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par import BatchLayout, ParallelPlan
from tests.support.models import structures
from tests.support.models.plain_language_model import token_pairs
from tests.support.models.structures import images, Planless
from tests.support.user_code import Cases

CASES = Cases(__name__)


def padded_pairs() -> list[tuple[Tensor, Tensor]]:
    """Samples with unequal numbers of labels that count."""
    pairs = [(tokens, labels.clone()) for tokens, labels in token_pairs()]
    for number, (_, labels) in enumerate(pairs):
        labels[: number % 9] = -100
    return pairs


@CASES.add(equal="tp2 pp2")
def heads_of_their_own() -> Any:
    net = structures.LanguageModel(structures.grouped_heads)
    return Planless(net), padded_pairs()


@CASES.add(equal="tp2pp2")
def fused_heads_and_a_tied_table() -> Any:
    net = structures.LanguageModel(structures.fused_whole_width, tied=True)
    return Planless(net), padded_pairs()


@CASES.add(equal="tp2", refused={"pp2": "no list of blocks"})
def one_block_many_times() -> Any:
    net = structures.LanguageModel()
    net.layers = nn.ModuleList([net.layers[0]] * 4)
    return Planless(net), token_pairs()


class _Scaled(nn.Module):
    """A layer whose output is scaled by a parameter of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.inner, self.scale = inner, nn.Parameter(torch.linspace(0.5, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.inner(x))))


# Without the proof of the first step, which would refuse another gradient.
@CASES.add(equal="tp2", strategy={"verify": False})
def scales_of_blocks_and_of_their_layers() -> Any:
    net = structures.LanguageModel()
    for layer in net.layers:
        layer.mlp = _Scaled(nn.Identity())
    net.layers = nn.ModuleList(_Scaled(layer) for layer in net.layers)
    return Planless(net), token_pairs()


class _Predicts(Planless):
    """Has a layer after its head that gives as many numbers, as a predictor of BYOL does."""

    def __init__(self) -> None:
        super().__init__(structures.LanguageModel())
        self.predictor = nn.Linear(64, 64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.predictor(self.net(x)).flatten(0, -2), y.flatten())
        self.log("loss", loss, sync_dist=True)
        return loss


# Without the proof of the first step, which would refuse the gradients of nothing.
@CASES.add(equal="tp2 tp2_whole_sequence", strategy={"verify": False})
def layer_after_the_head() -> Any:
    return _Predicts(), token_pairs()


@CASES.add(equal="tp2")
def odd_number_of_tokens() -> Any:
    net = structures.LanguageModel(structures.fused_by_head)
    return Planless(net), token_pairs(length=11)


@CASES.add(equal="tp2")
def encoder_of_torch() -> Any:
    return Planless(structures.EncoderOfTorch()), token_pairs()


@CASES.add(equal="tp2 pp2")
def image_transformer() -> Any:
    return Planless(structures.ImageTransformer()), images()


@CASES.add(equal="tp2 pp2")
def stages_of_windows() -> Any:
    return Planless(structures.StagesOfWindows()), images()


@CASES.add(equal="tp2", large="pp2 tp2pp2")
def mixer() -> Any:
    return Planless(structures.Mixer()), images()


@CASES.add(refused={"pp2": "BatchNorm2d.* computes statistics over the batch"})
def batch_norm() -> Any:
    return Planless(structures.Convolutions()), images()


@CASES.add(equal="pp2", large="tp2 tp2pp2")
def skips_over_blocks() -> Any:
    return Planless(structures.Skips()), token_pairs()


@CASES.add(equal="pp2", large="zero3 tp2pp2")
def both_halves_of_a_u_net() -> Any:
    return Planless(structures.UNet()), images()


@CASES.add(equal="tp2", large="zero3")
def two_optimizers_in_manual_optimization() -> Any:
    class Module(Planless):
        def __init__(self) -> None:
            super().__init__(structures.LanguageModel())
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = super().training_step(batch, batch_idx)
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
            assert norm.isfinite()
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            head = torch.optim.Adam(self.net.head.parameters(), lr=1e-3)
            rest = [p for n, p in self.named_parameters() if ".head." not in n]
            return [{"optimizer": head}, {"optimizer": torch.optim.SGD(rest, lr=0.1)}]

    return Module(), token_pairs()


@CASES.add(refused={"pp2": r"a parameter of net\.layers\.0 is used after the blocks"})
def penalty_on_weights() -> Any:
    class Module(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            penalty = sum(p.square().sum() for p in self.net.layers.parameters())
            return super().training_step(batch, batch_idx) + 0.01 * penalty

    return Module(structures.LanguageModel()), token_pairs()


@CASES.add(large="pp2")
def convolutions_with_group_norm() -> Any:
    return Planless(structures.Convolutions(lambda size: nn.GroupNorm(2, size))), images()


@CASES.add(large="tp2 pp2 tp2pp2")
def interleaved_heads() -> Any:
    return Planless(structures.LanguageModel(structures.fused_by_head)), padded_pairs()


@CASES.add(large="tp2 pp2")
def everything_in_one_sequential() -> Any:
    layers = [nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(4)]
    net = nn.Sequential(nn.Embedding(64, 32), *layers, nn.LayerNorm(32), nn.Linear(32, 64))
    return Planless(net), token_pairs()


@CASES.add(large="tp2 pp2", refused={"pp2": "has no list of blocks"})
def recurrent() -> Any:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
            self.rnn = nn.LSTM(32, 32, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.rnn(self.tokens(x))[0])
            return out

    return Planless(Net()), token_pairs()


@CASES.add(equal="pp2")
def student_of_a_larger_teacher() -> Any:
    class Module(Planless):
        def __init__(self) -> None:
            super().__init__(structures.LanguageModel())
            self.teacher = structures.LanguageModel()
            self.teacher.layers.extend(structures.LanguageModel().layers)
            self.teacher.requires_grad_(False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            with torch.no_grad():
                wanted = self.teacher(batch[0]).softmax(-1)
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="pp2")
def condition_that_is_used_after_the_blocks() -> Any:
    class Net(structures.LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Embedding(64, 32)
            del self.places

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale(x[:, :1])
            hidden = self.tokens(x)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(self.norm(hidden) * (1 + scale))

    return Planless(Net()), token_pairs()


@CASES.add(equal="tp2 pp2")
def parameters_of_the_step_itself() -> Any:
    """Latents before the blocks, weights of two losses after them."""

    class Module(Planless):
        def __init__(self) -> None:
            super().__init__(structures.LanguageModel())
            self.latents = nn.Parameter(torch.linspace(-1, 1, 4 * 32).view(4, 32))
            self.scales = nn.Parameter(torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            hidden = torch.cat([self.latents.expand(len(batch[0]), -1, -1)] * 3, 1)
            for layer in self.net.layers:
                hidden = layer(hidden + self.net.tokens(batch[0]))
            logits = self.net.head(self.net.norm(hidden))
            losses = (
                F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()),
                logits.square().mean(),
            )
            loss = (torch.stack(losses) * (-self.scales).exp() + self.scales).sum()
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


def experts_by_hand(*, keeps_loss: bool = False, capacity: int | None = None) -> nn.Module:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.router = nn.LayerNorm(32), nn.Linear(32, 2)
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(2)
            )

        def forward(self, x: Tensor) -> Tensor:
            rows = self.norm(x).flatten(0, 1)
            shares = self.router(rows).softmax(-1)
            out = torch.zeros_like(rows)
            for number, expert in enumerate(self.experts):
                (own,) = (shares.argmax(-1) == number).nonzero(as_tuple=True)
                own = own[:capacity]
                out = out.index_add(0, own, expert(rows[own]) * shares[own, number, None])
            if keeps_loss:
                self.loss = shares.square().mean()
            return x + out.view_as(x)

    net = structures.LanguageModel()
    net.layers = nn.ModuleList(Experts() for _ in range(4))
    return net


@CASES.add(equal="pp2", large="tp2")
def experts_whose_rows_are_chosen() -> Any:
    return Planless(experts_by_hand()), token_pairs()


@CASES.add(
    refused={"pp2": r"net\.layers cannot .*computes and does not return is used after the blocks"}
)
def losses_that_experts_keep() -> Any:
    class Module(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.01 * sum(layer.loss for layer in self.net.layers)

    return Module(experts_by_hand(keeps_loss=True)), token_pairs()


@CASES.add(refused={"pp2": r"net\.layers cannot be cut"}, strategy={"num_microbatches": 1})
def losses_that_experts_of_a_capacity_keep() -> Any:
    """Their experts get as many rows as there is room for: these are no blocks, either."""

    class Module(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss + 0.01 * sum(layer.loss for layer in self.net.layers)

    return Module(experts_by_hand(keeps_loss=True, capacity=4)), token_pairs()


class _WithHeads(nn.Module):
    """Adds up what heads say of the outputs of several blocks; takes dicts and lists apart."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        tables = {"tokens": nn.Embedding(64, 32), "positions": nn.Embedding(16, 32)}
        self.tables: Any = nn.ModuleList(tables.values()) if listed else nn.ModuleDict(tables)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4)
        )
        self.names = ["0", "1", "3"]
        heads = {name: nn.Linear(32, 64) for name in self.names}
        self.heads: Any = nn.ModuleList(heads.values()) if listed else nn.ModuleDict(heads)

    def forward(self, x: Tensor) -> Tensor:
        is_dict = isinstance(self.tables, nn.ModuleDict)
        tokens, positions = self.tables.values() if is_dict else self.tables
        h, out = tokens(x) + positions(torch.arange(x.shape[1])), 0
        for number, layer in enumerate(self.layers):
            h = h + layer(h)
            if str(number) in (self.heads if is_dict else self.names):
                head = self.heads[str(number) if is_dict else self.names.index(str(number))]
                out = out + head(h)
        return out  # type: ignore[return-value]


@CASES.add(equal="pp2", large="tp2 tp2pp2 pp2_interleaved")
def heads_of_several_blocks_in_a_dict() -> Any:
    return Planless(_WithHeads(listed=False)), token_pairs()


@CASES.add(equal="pp2", large="tp2 tp2pp2")
def heads_of_several_blocks_in_a_list() -> Any:
    return Planless(_WithHeads(listed=True)), token_pairs()


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x + self.linear(x) * gate


class _ToldApart(nn.Module):
    """Calls layers as their classes want it, and knows no others."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        both = [(_Gated(), _Residual(nn.LayerNorm(32), nn.Linear(32, 32))) for _ in range(2)]
        self.layers = nn.ModuleList(layer for pair in both for layer in pair)
        self.head = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        gate = torch.full((32,), 0.5)
        for layer in self.layers:
            if isinstance(layer, _Gated):
                h = layer(h, gate)
            elif isinstance(layer, nn.Sequential):
                h = layer(h)
        return self.head(h)  # type: ignore[no-any-return]


@CASES.add(equal="pp2", large="tp2 tp2pp2 pp2_interleaved")
def layers_told_apart_by_their_class() -> Any:
    return Planless(_ToldApart()), token_pairs()


@CASES.add(equal="tp2pp2", large="tp2 pp2")
def plan_that_declares_the_batch_only() -> Any:
    class Module(Planless):
        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(batch=BatchLayout(labels="1"))

    return Module(structures.LanguageModel()), padded_pairs()


@CASES.add(equal="tp2pp2", large="tp2 pp2")
def step_that_logs_its_learning_rate() -> Any:
    class Module(Planless):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("same", self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
            self.log("next", self.lr_schedulers().get_last_lr()[0])  # type: ignore[union-attr]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    return Module(structures.LanguageModel()), token_pairs()


class _Dropping(structures.LanguageModel):
    """Leaves layers out: at random, as with LayerDrop, or by a test."""

    keeps: Any = staticmethod(lambda: random.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for layer in self.layers:
            hidden = layer(hidden) if self.keeps() else hidden
        return self.head(self.norm(hidden))


@CASES.add(equal="tp2", refused={"pp2": "is not called in a step"}, strategy={"verify": False})
def layers_left_out_at_random() -> Any:
    return Planless(_Dropping()), token_pairs()


@CASES.add(refused={"tp2": "ranks have different plans"}, strategy={"verify": False})
def layers_left_out_by_rank() -> Any:
    module = Planless(_Dropping())
    module.net.keeps = lambda: module.trainer.global_rank == 0
    return module, token_pairs()


class _Averaged(Planless):
    """Averages its weights, and validates with the averages, which the training step never reads;
    what that gives is a part of later losses.
    """

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__(structures.LanguageModel())
        self.average, self.factor = copy.deepcopy(self.net).requires_grad_(not is_frozen), 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.factor

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.net.parameters(), strict=True):
                mean.mul_(0.5).add_(p, alpha=0.5)

    def val_dataloader(self) -> Any:
        return DataLoader(token_pairs()[:16], 8)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.average(batch[0]).flatten(0, 1), batch[1].flatten()))

    def on_validation_epoch_end(self) -> None:
        self.factor = float(self.trainer.callback_metrics["val"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.3)


@CASES.add(equal="pp2", large="pp2_interleaved", trainer={"val_check_interval": 2})
def averages_of_weights_in_evaluation() -> Any:
    return _Averaged(is_frozen=True), token_pairs()


@CASES.add(equal="pp2", trainer={"val_check_interval": 2})
def declared_part_of_an_inferred_plan() -> Any:
    class Module(_Averaged):
        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(batch=BatchLayout(labels="1"), replicated=("average",))

    return Module(is_frozen=False), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
