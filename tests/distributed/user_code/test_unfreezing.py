"""Parameters that a callback, a hook or a step freezes and unfreezes while the run goes on, and
modules whose mode it changes.
"""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn, Tensor
from torch.utils.data import DataLoader

from tests.distributed.user_code.test_optimizers import optimized, TwoKinds
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__, blocks=4)


class Unfreezing(BaseFinetuning):
    """Trains the blocks from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=0.1)


@CASES.add(
    equal="pp2 zero3",
    large="tp2 tp2pp2",
    trainer=lambda: {"callbacks": [Unfreezing()], "limit_train_batches": 2},
)
def blocks_that_are_unfrozen_later() -> Any:
    return optimized(lambda m: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 0.3))


@CASES.add(
    equal="tp2 zero3",
    large="tp2pp2",
    trainer=lambda: {"callbacks": [Unfreezing()], "limit_train_batches": 2},
)
def matrices_that_are_unfrozen_later() -> Any:
    return optimized(lambda m: TwoKinds([p for p in m.parameters() if p.requires_grad], lr=0.05))


class LastNorm(BaseFinetuning):
    """Trains the last norm alone in the first epoch, whose vectors no rank shards under tp."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.emb, pl_module.net.blocks, pl_module.net.head])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=0.05)


@CASES.add(
    equal="tp2 zero3",
    large="tp2pp2",
    trainer=lambda: {"callbacks": [LastNorm()], "limit_train_batches": 2},
)
def matrices_that_follow_vectors() -> Any:
    return optimized(lambda m: TwoKinds([p for p in m.parameters() if p.requires_grad], lr=0.05))


class Backbone(BaseFinetuning):
    """Trains the head alone in the first epoch; no output of a first stage needs a gradient."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.emb, pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            modules = [pl_module.net.emb, pl_module.net.blocks]
            self.unfreeze_and_add_param_group(modules, optimizer, lr=0.1)


class Refrozen(PlainModule):
    """Trains the embedding and the blocks in every second epoch, in one optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.3)

    def on_train_epoch_start(self) -> None:
        for part in (self.net.emb, self.net.blocks):
            part.requires_grad_(self.current_epoch % 2 == 1)


@CASES.add(
    equal="tp2 pp2",
    large="zero3 tp2pp2 pp2_interleaved zero1 zero2 zero1pp2",
    trainer=lambda: {
        "callbacks": [Backbone()],
        "limit_train_batches": 2,
        "limit_val_batches": 1,
    },
)
def a_backbone_that_is_unfrozen_later() -> Any:
    class Module(PlainModule):
        """Validates right before, so that shards may still be gathered."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def val_dataloader(self) -> Any:
            return DataLoader(token_pairs(), batch_size=4)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.3)

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 zero3 tp2pp2", trainer={"limit_train_batches": 1})
def a_backbone_that_is_frozen_and_unfrozen() -> Any:
    return Refrozen(), token_pairs()


class FrozenInTurns(PlainModule):
    """Trains every second block and the head, or the other blocks and the embedding, in turns."""

    def set_flag(self, part: Any, flag: bool) -> None:
        for parameter in part.parameters():
            parameter.requires_grad = flag

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        turn = self.global_step % 2 == 0
        for number, block in enumerate(self.net.blocks):
            self.set_flag(block, (number % 2 == 0) == turn)
        self.net.head.requires_grad_(turn)
        return super().training_step(batch, batch_idx)


class LikeAdapters(FrozenInTurns):
    """Passes tensors over that are no leaves."""

    def set_flag(self, part: Any, flag: bool) -> None:
        for parameter in part.parameters():
            if parameter.is_leaf:
                parameter.requires_grad_(flag)


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2 zero1 pp2_interleaved")
def blocks_that_a_step_freezes_in_turns() -> Any:
    return FrozenInTurns(), token_pairs()


@CASES.add(equal="tp2 zero3", large="pp2 zero2")
def leaves_that_a_step_freezes_in_turns() -> Any:
    return LikeAdapters(), token_pairs()


class FrozenFromThen(PlainModule):
    """Freezes its head in one step, and says nothing of it in those that follow."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 1:
            self.net.head.requires_grad_(False)
        return super().training_step(batch, batch_idx)


@CASES.add(equal="tp2 pp2", large="zero3 zero1 tp2pp2")
def a_head_that_a_step_freezes_for_good() -> Any:
    return FrozenFromThen(), token_pairs()


class FrozenBehind(PlainModule):
    """Freezes its embedding behind the call of the model for two steps, and a norm for good."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.net.emb.requires_grad_(self.global_step not in (1, 2))
        if self.global_step == 1:
            for parameter in self.net.norm.parameters():
                parameter.requires_grad = False
        return loss


@CASES.add(equal="pp2 zero3", large="tp2 tp2pp2 pp2_interleaved zero1pp2")
def an_embedding_that_a_step_freezes_behind_the_model() -> Any:
    return FrozenBehind(), token_pairs()


def _scale(block: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * (1.2 if block.training else 1.0)


class Moody(PlainModule):
    """Its blocks compute otherwise in evaluation, as with dropout."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.net.blocks:
            block.register_forward_hook(_scale)


@CASES.add(equal="pp2", large="tp2 pp2_interleaved zero3")
def blocks_in_evaluation_from_the_next_step_on() -> Any:
    class Module(Moody):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.net.blocks.train(batch_idx % 2 == 1)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 pp2_interleaved zero3")
def a_net_in_evaluation_around_its_call() -> Any:
    class Module(Moody):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx % 2 == 0:  # the next one finds what this one has left
                self.net.eval()
            loss = super().training_step(batch, batch_idx)
            self.net.train()
            return loss

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2pp2 pp2_interleaved")
def a_net_in_evaluation_from_the_start() -> Any:
    """As `from_pretrained` leaves it; `fit` does not change modes."""
    warnings.filterwarnings("ignore", ".* in eval mode at the start of training")
    module = Moody()
    module.net.eval()
    return module, token_pairs()


class Counting(PlainModule):
    """Trains on a loss that depends on which parameters are trained."""

    def trained(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        before = self.trained()
        loss = self.loss(batch)
        loss = loss * (1 + before / 10000 + self.trained() / 5000)
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(equal="tp2 pp2", large="zero3 pp2_interleaved tp2pp2")
def counts_what_is_trained() -> Any:
    module = Counting()
    module.net.head.requires_grad_(False)
    module.net.blocks[0].requires_grad_(False)
    return module, token_pairs()


@CASES.add(
    equal="pp2",
    large="tp2 zero3 pp2_interleaved",
    trainer=lambda: {"callbacks": [Unfreezing()], "limit_train_batches": 2},
)
def counts_what_a_callback_unfreezes() -> Any:
    class Module(Counting):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.3)

    return Module(), token_pairs()


@CASES.add(equal="pp2", large="tp2 pp2_interleaved", trainer={"limit_train_batches": 1})
def counts_what_hooks_freeze() -> Any:
    class Module(Counting):
        def on_train_epoch_start(self) -> None:
            self.factor = self.trained() / 10000
            for part in (self.net.emb, self.net.blocks, self.net.norm):
                part.requires_grad_(self.current_epoch % 2 == 1)
            self.factor += self.trained() / 10000

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.net.head.bias.requires_grad = self.global_step < 2

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.factor

    return Module(), token_pairs()


class CountingInTurns(Counting):
    """Freezes before the call of the model, and behind it."""

    def loss(self, batch: Any) -> Tensor:
        turn = self.global_step % 2 == 0
        for number, block in enumerate(self.net.blocks):
            block.requires_grad_((number % 2 == 0) == turn)
        self.net.head.requires_grad_(not self.net.head.weight.requires_grad)
        self.net.emb.requires_grad_(False)
        loss = super().loss(batch) * (1 + self.trained() / 10000)
        self.net.emb.requires_grad_(self.global_step > 0)
        self.net.norm.requires_grad_(turn)
        return loss


@CASES.add(equal="pp2", large="tp2")
def counts_what_a_step_freezes() -> Any:
    return CountingInTurns(), token_pairs()


@CASES.add(equal="pp2", large="pp2_interleaved")
def asks_for_flags_of_what_is_made_of_weights() -> Any:
    class Module(Counting):
        def trained(self) -> int:
            held = [p for n, p in self.named_parameters() if "blocks" not in n]
            kinds = [(p, p.detach(), p.data, p.clone()) for p in held]
            found = [t.requires_grad * (i + 1) for made in kinds for i, t in enumerate(made)]
            with torch.no_grad():
                found += [p.clone().requires_grad * 8 for p in held]
            return 100 * sum(found)

    module = Module()
    module.net.norm.requires_grad_(False)
    return module, token_pairs()


class Tied(Counting):
    """Its head has the weight of the embedding, which the first stage and the last one hold."""

    def __init__(self) -> None:
        super().__init__()
        self.net.head.weight = self.net.emb.weight


@CASES.add(equal="pp2", large="tp2 pp2_interleaved", trainer={"limit_train_batches": 1})
def a_tied_weight_that_hooks_freeze() -> Any:
    class Module(Tied):
        def on_train_epoch_start(self) -> None:
            self.net.head.requires_grad_(self.current_epoch != 1)
            self.net.emb.requires_grad_(self.current_epoch != 2)
            self.norm = float(sum(p.detach().pow(2).sum() for p in self.parameters()))
            self.names = len(list(self.named_parameters()))
            assert self.net.head.weight is self.net.emb.weight

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            factor = self.norm / self.names / 1000
            return super().training_step(batch, batch_idx) * factor

    return Module(), token_pairs()


class InTurns(BaseFinetuning):
    """Freezes a module before the training, and trains it, or another one, from epoch 1 on."""

    def __init__(self, first: str, later: str) -> None:
        super().__init__()
        self.first, self.later = first, later

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.get_submodule(self.first))

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            module = pl_module.get_submodule(self.later)
            self.unfreeze_and_add_param_group(module, optimizer, lr=0.1)


def _tied_in_turns() -> Any:
    class Module(Tied):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.3)

    return Module(), token_pairs()


@CASES.add(
    equal="pp2",
    large="pp2_interleaved tp2pp2",
    trainer=lambda: {"callbacks": [InTurns("net.head", "net.head")], "limit_train_batches": 2},
)
def a_tied_weight_that_a_callback_unfreezes() -> Any:
    return _tied_in_turns()


@CASES.add(
    large="pp2 pp2_interleaved zero3",
    trainer=lambda: {"callbacks": [InTurns("net.emb", "net.head")], "limit_train_batches": 2},
)
def a_tied_weight_that_a_callback_unfreezes_by_its_other_name() -> Any:
    return _tied_in_turns()


@CASES.add(equal="pp2", large="tp2 zero3")
def a_tied_weight_that_a_step_freezes() -> Any:
    class Module(Tied):
        def loss(self, batch: Any) -> Tensor:
            self.net.head.requires_grad_(self.global_step % 2 == 0)
            loss = super().loss(batch)
            return loss + self.net.emb.weight.square().sum() / 1000

    return Module(), token_pairs()


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist")
@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
