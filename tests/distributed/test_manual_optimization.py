"""Manual optimization: several optimizers and backwards in one step, as a user writes them."""

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from tests.support.models.gan import Gan, vectors
from tests.support.models.mixture import SgdMixtral, TwelveTexts
from tests.support.models.toy_gpt import ToyData, ToyModule
from tests.support.user_code import Cases

CASES = Cases(__name__)
NO_PIPELINE = "pipeline_parallel_size=2: .* uses manual optimization"
EVERY_BATCH = {"max_steps": 8}
"""Two optimizers count two steps a batch."""


@CASES.add(
    equal="zero0 zero1tp2",
    large="tp2 zero1 zero2 zero3",
    refused={"pp2": NO_PIPELINE},
    trainer=EVERY_BATCH,
)
def adversarial_networks() -> Any:
    return Gan(), vectors()


@CASES.add(equal="tp2 zero3", large="zero1", trainer=EVERY_BATCH)
def all_backwards_before_all_steps() -> Any:
    class Module(Gan):
        def training_step(self, real: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            fake = self.fake(real)
            first.zero_grad()
            loss = self.judge(fake, True)
            self.manual_backward(loss, retain_graph=True)
            second.zero_grad()
            critic_loss = self.judge(real, True) + self.judge(fake.detach(), False)
            self.manual_backward(critic_loss)
            first.step()
            second.step()
            self.log("loss", loss + critic_loss, sync_dist=True)

    return Module(), vectors()


@CASES.add(equal="tp2 zero3", large="zero1", trainer=EVERY_BATCH)
def closures_frozen_networks_and_weights_changed_by_hand() -> Any:
    class Module(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.average = copy.deepcopy(self.generator).requires_grad_(False)

        def training_step(self, real: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            with torch.no_grad():
                steady = self.average(real.new_ones(len(real), 3))

            def closure() -> Tensor:
                first.zero_grad()
                loss = self.judge(self.fake(real), True)
                self.manual_backward(loss)
                return loss

            self.critic.requires_grad_(False)
            first.step(closure=closure)
            with torch.no_grad():
                pairs = zip(self.average.parameters(), self.generator.parameters(), strict=True)
                for mean, parameter in pairs:
                    mean.lerp_(parameter, 0.5)
            self.critic.requires_grad_(True)
            loss = self.critic(self.fake(real).detach()).mean() - self.critic(real).mean()
            loss = loss + self.critic(steady).mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.2, 0.2)
            self.log("loss", loss, sync_dist=True)

    return Module(), vectors()


@CASES.add(equal="tp2 zero3", large="zero1", trainer={"max_steps": 7})
def critic_of_every_second_batch_and_one_schedule() -> Any:
    class Module(Gan):
        def training_step(self, real: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            loss = (self.fake(real) - real).square().mean()
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
            if batch_idx % 2:
                self.toggle_optimizer(second)
                second.zero_grad()
                self.manual_backward(self.judge(real, True))
                second.step()
                self.untoggle_optimizer(second)
            self.lr_schedulers().step()
            self.log("loss", loss, sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizers, (schedule, _) = super().configure_optimizers()
            return optimizers, [schedule]

    return Module(), vectors()


@CASES.add(equal="tp2 zero3", large="zero1", trainer=EVERY_BATCH)
def penalty_of_gradients() -> Any:
    class Module(Gan):
        def training_step(self, real: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            fake = self.fake(real).detach()
            share = torch.rand(len(real), 1, dtype=real.dtype, device=real.device)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
            loss = (slope.norm(dim=1) - 1).square().mean()
            loss = loss + self.critic(fake).mean() - self.critic(real).mean()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.toggle_optimizer(first)
            first.zero_grad()
            self.manual_backward(-self.critic(self.fake(real)).mean())
            first.step()
            self.untoggle_optimizer(first)
            self.log("loss", loss, sync_dist=True)

    return Module(), vectors()


@CASES.add(equal="tp2 zero3", large="zero1", trainer=EVERY_BATCH)
def weight_read_as_an_attribute() -> Any:
    class Module(Gan):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def training_step(self, real: Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            loss = (self.critic(real) * self.scale.exp().sum()).square().mean()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            again = (self.critic(real) - self.scale.sum()).square().mean()
            self.manual_backward(again)
            first.step()
            self.log("loss", loss + again, sync_dist=True)

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD([self.scale], lr=1e-3)
            return first, torch.optim.SGD(self.critic.parameters(), lr=1e-3)

    return Module(), vectors()


class Texts(ToyModule):
    """The loss is the mean over labels, of which replicas have different numbers."""

    validation_step = pl.LightningModule.validation_step

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Accumulate over two batches, clip, and step."""
        optimizer = self.optimizers()
        is_last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=is_last):
            loss = self.loss(batch)
            self.manual_backward(loss / 2)
            if is_last:
                norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
                total = grad_norm(self, 2)["grad_2.0_norm_total"]
                optimizer.step()
                optimizer.zero_grad()
                loss = loss + norm + total
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-6)


@CASES.add(equal="tp2 cp2 zero3", large="zero0 zero1 zero1tp2", tolerance=1e-7)
def accumulation_by_hand() -> Any:
    return Texts(), ToyData(32)


@CASES.add(equal="zero1 cp2")
def two_losses_over_labels_that_count() -> Any:
    class Module(Texts):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            second = 0.5 * self.loss(batch)
            self.manual_backward(second)
            optimizer.step()
            self.log("loss", loss + second, sync_dist=True)

    return Module(), ToyData(32, ignored=True)


@CASES.add(equal="zero1")
def losses_that_are_sums() -> Any:
    class Module(Gan):
        def training_step(self, real: Tensor, batch_idx: int) -> None:
            _, second = self.optimizers()
            loss = 0.1 * self.critic(real).square().sum()
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
            self.log("loss", loss, sync_dist=True, reduce_fx="sum")

    return Module(), vectors()


@CASES.add(equal="zero1ep2", tolerance=1e-7)
def experts() -> Any:
    class Module(SgdMixtral):
        validation_step = pl.LightningModule.validation_step

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            self.log("loss", loss, sync_dist=True)

    sizes = {"num_layers": 2, "model_dim": 12, "num_heads": 6, "num_kv_heads": 2, "ff_dim": 20}
    module = Module(overrides={**sizes, "vocab_size": 34, "max_length": 32, "num_experts": 4})
    module.configure_model()
    module.automatic_optimization = False
    return module, [TwelveTexts(False)[i % 12] for i in range(32)]


@CASES.add(refused={"tp2 zero1": "calls loss.backward.*self.manual_backward"})
def backward_without_the_strategy() -> Any:
    class Module(Gan):
        def training_step(self, real: Tensor, batch_idx: int) -> None:
            self.judge(real, True).backward()

    return Module(), vectors()


@CASES.add(
    refused={"zero0": "gradient_compression.*manual optimization"},
    strategy={"gradient_compression": "bf16"},
)
def compressed_gradients() -> Any:
    return Gan(), vectors()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
