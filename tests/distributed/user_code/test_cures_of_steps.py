"""What a pipeline refuses of steps and hooks, and the same as the refusal advises."""

from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn, Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric

from lightning_par import BatchLayout
from tests.distributed.user_code.test_writes import KeepingLogger
from tests.support.cures import Cures
from tests.support.models.plain_language_model import PlainModule

CURES = Cures(__name__)
CASES = CURES.cases


class Denoiser(PlainModule):
    """Learns from embeddings with noise, which cases draw in the step."""

    def noise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        h = self.net.emb(batch[0])
        h = h + self.noise(h)
        for block in self.net.blocks:
            h = block(h)
        return self.net.norm(h).sigmoid().square().mean()


@CURES.add("LP311", r"NumPy or Python.*Draw the numbers with torch \(torch\.rand\(batch_size\)\)")
def numbers_of_numpy_or_of_torch(cured: bool) -> nn.Module:
    class Module(Denoiser):
        def noise(self, h: Tensor) -> Tensor:
            size = len(h)
            scales = torch.rand(size) if cured else torch.from_numpy(np.random.rand(size))
            return scales.to(h)[:, None, None].expand_as(h)

    return Module()


@CURES.add(
    "LP410", r"a ModuleDict that is not .*Call grad_norm\(self, norm_type\), or pass a submodule of"
)
def norms_of_a_submodule(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_before_optimizer_step(self, _: Any) -> None:
            part = self.net.head if cured else nn.ModuleDict({"head": self.net.head})
            total = grad_norm(part, 2)["grad_2.0_norm_total"]
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(total)

    return Module()


@CURES.add(
    "LP422",
    r"weight of shape .* in place between the forward.*in on_train_batch_end",
    options={"trainer": {"precision": "bf16-mixed"}, "tolerance": 0.05},
)
def a_weight_that_a_step_scales(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            if not cured:
                self.net.blocks[0].register_forward_hook(self.scaled)

        def on_train_batch_end(self, *_: Any) -> None:
            if cured:
                self.scaled()

        def scaled(self, *_: Any) -> None:
            with torch.no_grad():
                self.net.blocks[0].mlp.up.weight.mul_(0.99)

    return Module()


@CURES.add(
    "LP415", r"different calls .*Make the calls named here on every rank, outside of `if trainer"
)
def a_forward_for_the_first_rank(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            if cured or self.trainer.is_global_zero:
                with torch.no_grad():
                    out = self.net(torch.arange(8).view(2, 4))
                self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 + float(out.std())

    return Module()


@CURES.add("LP415", r"different calls .*compute arrays on every rank \(p\.detach\(\)")
def arrays_for_the_first_rank(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            if cured:
                made = [(p.detach().numpy(), p.grad.numpy()) for _, p in self.named_parameters()]
            if self.trainer.is_global_zero:
                if not cured:
                    made = [(p.detach().numpy(), p.grad.numpy()) for p in self.parameters()]
                assert all(weight.shape == grad.shape for weight, grad in made)

    return Module()


@CURES.add("LP418", r"Log the graph in setup, .*self\.example_input_array")
def the_graph_of_the_module(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(2, 4, dtype=torch.long)

        def setup(self, stage: str) -> None:
            if cured and self.trainer.is_global_zero:
                self.trace()

        def trace(self) -> None:
            torch.jit.trace(self, self.example_input_array, check_trace=False)

        def forward(self, tokens: Tensor) -> Any:
            return self.net(tokens)

        def on_fit_start(self) -> None:
            if not cured:
                self.trace()

    return Module()


@CURES.add("LP203", r"backbone.0 and net.blocks.0.*'backbone' into a property of Module")
def blocks_with_a_second_name(cured: bool) -> nn.Module:
    class Base(PlainModule):
        @property
        def backbone(self) -> Any:
            return self.net.blocks

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net.blocks

    return Base() if cured else Module()


class Logs(PlainModule):
    """Logs its loss in a form of its own."""

    def form(self, loss: Tensor) -> None:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.form(loss)
        return loss


@CURES.add("LP316", r"self\.log\('loss', value, \.\.\.\) .*Pass the options by keyword")
def options_of_a_log_by_place(cured: bool) -> nn.Module:
    class Module(Logs):
        def form(self, loss: Tensor) -> None:
            self.log("loss", loss, prog_bar=False) if cured else self.log("loss", loss, False)

    return Module()


@CURES.add("LP316", r"self\.log\('all', \.\.\.\) got a dict\. Use self\.log_dict")
def a_dict_of_logs(cured: bool) -> nn.Module:
    class Module(Logs):
        def form(self, loss: Tensor) -> None:
            found = {"loss": loss, "twice": 2 * loss}
            if cured:
                self.log_dict(found)
            else:
                self.log("loss", loss)
                self.log("all", found)  # type: ignore[arg-type]

    return Module()


@CURES.add("LP316", r"is not an attribute of Module\. Assign it in __init__, as in self\.mean")
def a_metric_in_a_list(cured: bool) -> nn.Module:
    class Module(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.held = [MeanMetric()]
            if cured:
                self.mean = self.held[0]

        def form(self, loss: Tensor) -> None:
            self.log("loss", loss)
            self.held[0].update(loss.detach())
            self.log("mean", self.held[0])

    return Module()


@CURES.add("LP316", r"self\.log\(reduce_fx='median'\) is not supported.*Use reduce_fx='mean'")
def the_median_of_a_log(cured: bool) -> nn.Module:
    class Module(Logs):
        def form(self, loss: Tensor) -> None:
            self.log(
                "loss", loss, on_step=True, on_epoch=True, reduce_fx="mean" if cured else "median"
            )

    return Module()


_LEFT_OUT = r"sync_dist=True, .* in on_before_optimizer_step, and set every p\.grad = None"


class LeavesOut(PlainModule):
    """Leaves out batches of a large loss, by what the step returns, or by its gradients."""

    bound = 4.3

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured = cured

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.cured or float(loss) < self.bound else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.cured and self.trainer.callback_metrics["loss"] > self.bound:
            for p in self.parameters():
                p.grad = None


@CURES.add("LP318", rf"training_step returned None.*{_LEFT_OUT}")
def batches_left_out_by_their_loss(cured: bool) -> nn.Module:
    return LeavesOut(cured)


@CURES.add(
    "LP303", "fails when it gets . of the . samples.*Write the step for any number of samples"
)
def a_step_for_one_number_of_samples(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            logits = self.net(x).view(len(x) if cured else 8, 12, 64)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Module()


@CURES.add(
    "LP405",
    r"frozen or unfrozen within an epoch\. .* at the start of an epoch, in on_train_epoch_",
    options={"blocks": 4},
)
def an_embedding_frozen_after_some_steps(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net.emb.requires_grad_(not cured)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not cured:
                self.net.emb.requires_grad_(False)
                self.net.blocks[0].requires_grad_(False)
                self.net.blocks[1].requires_grad_(False)

    return Module()


@CURES.add("LP309", r"on different sides of the bound.*Apply the bound to the loss of each sample")
def a_bound_of_the_mean_or_of_each_sample(cured: bool) -> nn.Module:
    """Losses of samples are on both sides from the second step on."""

    class Module(PlainModule):
        low = 4.0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.low = 4.35 if batch_idx else 4.0

        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch[0])
            each = F.cross_entropy(logits.mT, batch[1], reduction="none").mean(1)
            return each.clamp(min=self.low).mean() if cured else each.mean().clamp(min=self.low)

    return Module()


@CURES.add("LP913", r"backward reads gradients \(grad\), .*Read or change gradients in on_after")
def gradients_in_a_backward_of_its_own(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward()
            for p in self.parameters():
                p.grad.div_(1 + p.grad.norm())

    class Cured(PlainModule):
        def backward(self, loss: Tensor, *_: Any, **__: Any) -> None:
            loss.backward()

        def on_after_backward(self) -> None:
            for p in self.parameters():
                p.grad.div_(1 + p.grad.norm())

    return Cured() if cured else Module()


@CURES.add(
    "LP913",
    r"on_after_backward reads gradients \(grad\), .*change gradients in on_before_optimizer_step",
    "zero3",
    options={"trainer": {"accumulate_grad_batches": 2}},
)
def gradients_while_batches_add_up(cured: bool) -> nn.Module:
    def act(self: Any, *_: Any) -> None:
        for p in self.parameters():
            p.grad.div_(1 + p.grad.norm())

    hook = "on_before_optimizer_step" if cured else "on_after_backward"
    return type("Module", (PlainModule,), {hook: act})()  # type: ignore[no-any-return]


@CURES.add("LP913", r"uses manual optimization, .*Set automatic_optimization=True")
def a_step_that_optimizes_by_itself(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = cured

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not cured:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    return Module()


class Manual(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@CURES.add("LP309", r"cuts its batch and accumulates .*after every n-th batch", "zero1")
def a_step_that_cuts_its_batch(cured: bool) -> nn.Module:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            halves = list(zip(*(entry.chunk(2) for entry in batch), strict=True))
            for part in [batch] if cured else halves:
                self.manual_backward(super().training_step(part, batch_idx) / 2)
            if not cured or batch_idx % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()

    return Module()


@CURES.add(
    "LP309",
    r"What to write:\n  - If the step takes gradients .*all_gather\(gradient\)\.mean\(0\)",
    "zero1",
    batch=BatchLayout(loss_weight="samples"),
)
def a_weight_of_a_loss_by_gradients(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            logits = self.net(batch[0])
            terms = (
                F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()),
                logits.square().mean(),
            )
            found = [torch.autograd.grad(t, logits, retain_graph=True)[0].sum(0) for t in terms]
            if cured:
                found = [
                    self.all_gather(gradient).view(-1, *gradient.shape).mean(0)
                    for gradient in found
                ]
            weight = found[0].norm() / found[1].norm()
            return terms[0] + weight.detach() * terms[1]

    return Module()


@CURES.add("LP315", r"autograd\.grad for parameters.*change parameter\.grad after", "zero1")
def gradients_of_one_rank(cured: bool) -> nn.Module:
    class Module(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            if cured:
                self.manual_backward(loss)
            members = list(self.parameters())
            if cured:
                found = [p.grad for p in members]
            else:
                found = list(torch.autograd.grad(loss, members, allow_unused=True))
            for p, gradient in zip(members, found, strict=True):
                p.grad = None if gradient is None else 0.5 * gradient
            optimizer.step()

    return Module()


@CURES.add(
    "LP323",
    r"cannot pickle 'generator' object.*Pass numbers, text, arrays and tensors instead",
    "pp2_one_microbatch",
    options={"trainer": lambda: {"logger": KeepingLogger()}},
)
def a_list_in_the_place_of_a_generator(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            images = (float(each) for each in loss.detach().view(1))
            logger: Any = self.logger
            logger.log_image(key="loss", images=list(images) if cured else images)
            return loss

        def on_train_end(self) -> None:
            logger: Any = self.logger
            if self.trainer.is_global_zero:
                last = pytest.approx(float(self.trainer.callback_metrics["loss"]), abs=1e-5)
                assert logger.images[-1] == ("loss", [last])

    return Module()


@CURES.add(
    "LP325",
    r"(?s)depends on values that an earlier .*self\.kept.*and store trainer\.callback_metrics",
    "zero1pp2",
    options={"strategy": {"verify": False}},
)
def a_mean_that_the_next_step_adds(cured: bool) -> nn.Module:
    class Module(PlainModule):
        kept: Any = 0.0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            moved = loss * (1 + 0.1 * self.kept)
            if cured:
                self.log("x", loss.detach(), sync_dist=True)
            else:
                self.kept = loss.detach()
            return moved

        def on_train_batch_end(self, *_: Any) -> None:
            if cured:
                self.kept = self.trainer.callback_metrics["x"]

    return Module()


@CURES.add(
    "LP713",
    r"in different places.*the same decision, such as should_stop, .*trainer\.strategy\.broadcast",
    "zero1",
)
def a_decision_that_is_broadcast(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            stops = self.trainer.is_global_zero and self.global_step == 2
            if cured:
                stops = self.trainer.strategy.broadcast(stops)
            self.trainer.should_stop = stops

    return Module()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)
