"""Steps and modules of models without a plan that do more than forward and loss."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn, Tensor
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.models.structures import LanguageModel, Planless
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import RankError, run_ranks
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)


def vectors() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(32, 16, generator=generator).unbind()
    return [(row, torch.tensor(i % 4)) for i, row in enumerate(made)]


def layers(first: nn.Module | None = None) -> nn.Module:
    hidden = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(first or nn.Linear(16, 32), nn.ReLU(), *hidden, nn.Linear(32, 4))


class Classifier(Planless):
    """A classifier of vectors; cases change its loss."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or layers())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(equal="pp2 zero1pp2", trainer={"check_val_every_n_epoch": None, "val_check_interval": 2})
def validation_without_the_model() -> Any:
    class Module(Classifier):
        def val_dataloader(self) -> Any:
            return DataLoader(vectors(), 4)  # type: ignore[arg-type]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mean", batch[0].mean(), sync_dist=True)

    return Module(), vectors()


@CASES.add(equal="tp2 pp2", large="zero3")
def a_generator_that_the_module_keeps() -> Any:
    class Module(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            scale = torch.rand(len(x), 1, generator=self.generator, dtype=x.dtype)
            return F.mse_loss(self.net(x * scale.to(x.device)), x[:, :4])

    return Module(), vectors()


@CASES.add(equal="tp2 pp2", trainer={"max_steps": -1, "max_epochs": 3})
def an_end_that_the_step_brings_forward() -> Any:
    class Module(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.global_step >= 2:
                self.trainer.fit_loop.max_epochs = 1
            return loss

    return Module(), vectors()


class Count(Callback):
    steps = 0


@CASES.add(equal="tp2 zero1", trainer=lambda: {"callbacks": [Count()]})
def a_step_that_leaves_marks_around_the_module() -> Any:
    """In a generator, hyperparameters, and a callback: those of a look are put back."""

    class Module(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"steps": 0})
            self.scales = (0.5**n for n in range(100))

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.hparams["steps"] += 1
            count: Any = next(c for c in self.trainer.callbacks if isinstance(c, Count))
            count.steps += 1
            steps = self.hparams["steps"] + count.steps
            return steps * next(self.scales) * super().loss(x, y)

    return Module(), vectors()


@CASES.add(equal="zero1 pp2", large="tp2")
def a_stop_that_the_step_asks_for() -> Any:
    """The look at the step as in the last one of the run does not stop the run."""

    class Module(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.global_step >= 2:
                self.trainer.should_stop = True
            return loss

    return Module(), vectors()


@CASES.add(equal="tp2 pp2", large="zero3")
def a_norm_that_iterates_when_the_weight_is_read() -> Any:
    return Classifier(layers(spectral_norm(nn.Linear(16, 32)))), vectors()


@CASES.add(equal="zero1 zero3")
def sharpness_by_hand_in_manual_optimization() -> Any:
    """It takes norms of the gradients that are there, also where the step is looked at."""

    class Module(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            members = [p for p in self.parameters() if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in members]).norm() + 1e-12
            with torch.no_grad():
                climbed = [p.grad * (0.05 / norm) for p in members]
                for p, step in zip(members, climbed, strict=True):
                    p.add_(step)
            optimizer.zero_grad()
            self.manual_backward(self.loss(*batch))
            with torch.no_grad():
                for p, step in zip(members, climbed, strict=True):
                    p.sub_(step)
            optimizer.step()
            optimizer.zero_grad()

    return Module(), vectors()


@CASES.add(
    equal="zero3", large="tp2", refused={"pp2": r"asks for gradients by itself.* explain LP411\]"}
)
def penalty_on_the_gradient_of_the_input() -> Any:
    class Module(Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            out = self.net(x)
            (slope,) = torch.autograd.grad(out.logsumexp(-1).sum(), x, create_graph=True)
            return F.cross_entropy(out, y) + 0.1 * slope.square().sum(1).mean()

    return Module(), vectors()


@CASES.add(equal="tp2 zero3")
def penalty_on_the_gradient_of_one_score() -> Any:
    class Module(Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            score = self.net(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            return score.square().mean() + (slope.norm(dim=1) - 1).square().mean()

    return Module(nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))), vectors()


@CASES.add(
    equal="zero3", refused={"tp2_whole_sequence": "gradient of a gradient.*'colwise_gather_output'"}
)
def penalty_on_the_gradient_of_a_divided_cross_entropy() -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            hidden: list[Tensor] = []
            hook = self.net.head.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
            logits = self.net(batch[0])
            hook.remove()
            losses = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="none")
            (slope,) = torch.autograd.grad(losses.sum(), hidden[0], create_graph=True)
            return losses.mean() + slope.square().mean()

    return Module(), token_pairs()


@CASES.add(equal="tp2", refused={"pp2": "fails when it gets 1 of the 8 samples"})
def the_hardest_samples_of_a_batch() -> Any:
    class Module(Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y, reduction="none").topk(2).values.mean()

    return Module(), vectors()


_EIGHT = {"num_microbatches": 8}


@CASES.add(refused={"pp2": "neither the mean.*calls sort.*num_microbatches=1"}, strategy=_EIGHT)
def a_trimmed_mean_of_losses() -> Any:
    """Of one sample it is NaN; of four the halves may leave out the same as the whole."""

    class Module(Classifier):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            losses = F.cross_entropy(self.net(x), y, reduction="none")
            cut = max(1, len(losses) // 4)
            return losses.sort().values[cut:-cut].mean()

    return Module(), vectors()


def _fails(rank: int, world: int, has_plan: bool) -> None:
    module = PlainModule() if has_plan else Classifier()
    module.loss = lambda *_: {}["mask"]  # type: ignore[assignment, index]
    if has_plan:
        module.loss = lambda batch: module.net(batch[0]).mean() * {}["mask"]  # type: ignore[assignment, index]
    trainer = quiet_trainer(devices=world, strategy=Hybrid3DStrategy(**LAYOUTS["pp2"]), max_steps=1)
    trainer.fit(module, DataLoader(token_pairs() if has_plan else vectors(), 8))


@pytest.mark.parametrize("has_plan", [True, False])
def test_an_error_of_the_step_itself_is_raised_and_not_one_of_parts(has_plan: bool) -> None:
    with pytest.raises(RankError, match="KeyError: 'mask'") as told:
        run_ranks(_fails, 2, has_plan, timeout=180)
    assert "LP303" not in str(told.value)


@CASES.add(
    equal="pp2",
    refused={
        "tp2": "net.tokens .Embedding. changes its weight in place",
        "zero0 zero1 zero3": "net.tokens writes to its parameter .* (is sharded|has a copy on)",
    },
)
def an_embedding_of_limited_norm() -> Any:
    net = LanguageModel()
    net.tokens = nn.Embedding(64, 32, max_norm=1.0)
    return Planless(net), token_pairs()


@CASES.add(equal="tp2 pp2", large="zero1 zero3")
def an_average_that_the_module_keeps() -> Any:
    class Module(Planless):
        def __init__(self, net: nn.Module) -> None:
            super().__init__(net)
            self.average = copy.deepcopy(net).requires_grad_(False)

        def on_train_batch_end(self, *_: Any) -> None:
            weights = dict(self.net.named_parameters())
            for name, average in self.average.named_parameters():
                average.data.lerp_(weights[name].data, 0.1)

    return Module(LanguageModel()), token_pairs()


@CASES.add(equal="zero1 zero3", large="tp2")
def a_step_without_a_loss_on_all_replicas() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            bad = torch.tensor(batch_idx == 2)
            if self.all_gather(bad).any():
                return torch.zeros((), requires_grad=True)  # as None, of which Lightning warns
            return super().training_step(batch, batch_idx)

    return Module(), token_pairs()


@CASES.add(refused={"zero1": "returned no loss on a replica.*all_gather"})
def a_step_without_a_loss_on_one_replica() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return torch.zeros((), requires_grad=True) if batch_idx == 2 else loss

    return Module(), token_pairs()


class Checkpointed(nn.Module):
    """A block that recomputes a part of itself, and changes what it is given in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def _compute(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu_(x)
        return x + checkpoint(self._compute, x, use_reentrant=False)


def checkpointed() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net.blocks = nn.ModuleList(Checkpointed() for _ in range(4))

        def parallel_plan(self) -> ParallelPlan:
            return ParallelPlan(blocks="net.blocks", batch=self.batch)

    return Module(), token_pairs()


@CASES.add(equal="pp2", strategy={"schedule": "zb-h1"})
def checkpoint_inside_of_a_block() -> Any:
    return checkpointed()


@CASES.add(large="pp2", strategy={"schedule": "zbv"})
def checkpoint_inside_of_a_block_of_two_stages() -> Any:
    return checkpointed()


@CASES.add(equal="pp2 zero1", large="tp2")
def objects_of_a_class_of_a_function() -> Any:
    class Pair:
        def __init__(self, tokens: Tensor, labels: Tensor) -> None:
            self.tokens, self.labels = tokens, labels

        def to(self, device: Any) -> "Pair":
            return Pair(self.tokens.to(device), self.labels.to(device))

    class Module(PlainModule):
        def unpack(self, batch: Any) -> tuple[Tensor, Tensor]:
            return batch.tokens, batch.labels

    def collate(rows: Any) -> Pair:
        return Pair(*map(torch.stack, zip(*rows, strict=True)))

    return Module(), token_pairs(), collate


class Carrying(PlainModule):
    """Adds what the last step has left to its embeddings: the mean of its last hidden states."""

    kept: Any = 0.0

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net.emb(batch[0]) + self.kept
        for block in self.net.blocks:
            hidden = block(hidden)
        self.kept = hidden.detach().mean((0, 1))
        return F.cross_entropy(self.net.head(hidden).flatten(0, 1), batch[1].flatten())


@CASES.add(
    equal="pp2 pp2_interleaved",
    large="pp2_one_microbatch",
    refused={"zero1pp2": r"(?s)depends on values that an earlier .*kept.*data_parallel_size=1"},
    strategy={"verify": False},
)
def a_state_that_the_first_stage_reads_and_the_last_one_leaves() -> Any:
    return Carrying(), token_pairs()


class CarryingRows(PlainModule):
    """Adds what the last step has left of each row to its embeddings: its last hidden states."""

    kept: Any = 0.0

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net.emb(batch[0]) + self.kept
        for block in self.net.blocks:
            hidden = block(hidden)
        self.kept = hidden.detach()
        return F.cross_entropy(self.net.head(hidden).flatten(0, 1), batch[1].flatten())


@CASES.add(
    equal="pp2_one_microbatch",
    refused={"pp2": r"(?s)depends on values that an earlier .*self\.kept.*num_microbatches=1"},
    strategy={"verify": False},
)
def a_state_of_each_row() -> Any:
    return CarryingRows(), token_pairs()


class SetsRate(PlainModule):
    """Sets the learning rate at the end of its step, which the last stage alone reaches."""

    by_loss = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rate = float(loss.detach()) if self.by_loss else self.global_step + 1
        self.optimizers().param_groups[0]["lr"] = 0.1 * rate
        return loss


@CASES.add(equal="pp2 zero1", large="tp2 pp2_interleaved", strategy={"verify": False})
def a_rate_that_the_step_sets_by_its_number() -> Any:
    return SetsRate(), token_pairs()


class StepsSchedule(PlainModule):
    """Moves a schedule on in its step, which a look at the step must not do."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.schedule.step()
        return loss


@CASES.add(
    equal="tp2 pp2_one_microbatch",
    large="zero1",
    refused={"pp2": r"(?s)sets .*'lr'\] to a different value.*num_microbatches=1"},
    strategy={"verify": False},
)
def a_schedule_that_the_step_moves_on() -> Any:
    return StepsSchedule(), token_pairs()


@CASES.add(
    equal="tp2 pp2_one_microbatch",
    refused={"pp2 zero1": r"(?s)sets .*'lr'\] to a different value.*in on_train_batch_end"},
    strategy={"verify": False},
)
def a_rate_that_the_step_sets_by_its_loss() -> Any:
    module = SetsRate()
    module.by_loss = True
    return module, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)


class LeavesOut(PlainModule):
    """May give None, by a method of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.checked(batch, batch_idx)

    def checked(self, batch: Any, batch_idx: int) -> Any:
        if not batch[0].any():
            return None
        return super().training_step(batch, batch_idx)


class LeavesOutTogether(LeavesOut):
    """Asks the other replicas."""

    def checked(self, batch: Any, batch_idx: int) -> Any:
        if self.all_gather(~batch[0].any()).any():
            return None
        return PlainModule.training_step(self, batch, batch_idx)


def _decided(rank: int, world: int, layout: str, kind: type[PlainModule]) -> str:
    strategy = Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=1)
    trainer.fit(kind(), DataLoader(token_pairs(), 4))
    return str(strategy.processes.decisions)


@pytest.mark.parametrize(
    ("layout", "kind", "code"),
    [
        ("zero1", LeavesOut, "LP318"),
        ("pp2", LeavesOut, "LP406"),
        ("tp2", LeavesOut, None),
        ("zero1", LeavesOutTogether, None),
        ("zero1", PlainModule, None),
    ],
)
def test_a_run_says_before_its_first_step_what_none_would_do(
    layout: str, kind: type[PlainModule], code: str | None
) -> None:
    told = f"a step that returns None for its part of a batch ends the run ({code})"
    for decided in run_ranks(_decided, 2, layout, kind, timeout=120):
        assert ("batches left out" in decided) == (code is not None)
        assert code is None or told in decided
