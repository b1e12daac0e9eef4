"""Steps that read, or write, parameters of the model themselves."""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)
ELSEWHERE = r"step uses net\..* at test_parameters.py:\d+, but this parameter is on another"


def penalized(term: Callable[[PlainModule], Any], scale: float = 1e-2) -> Any:
    """A term of the parameters is added to the loss."""

    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch) + scale * term(self)
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="zero3", large="tp2 zero0 zero1", refused={"pp2 tp2pp2": ELSEWHERE})
def sum_of_squares() -> Any:
    return penalized(lambda m: sum(p.pow(2).sum() for p in m.parameters()))


@CASES.add(equal="tp2", large="tp2_whole_sequence zero3", refused={"pp2": ELSEWHERE})
def absolute_values_of_named_weights() -> Any:
    def term(module: nn.Module) -> Any:
        return sum(p.abs().mean() for n, p in module.named_parameters() if n.endswith("weight"))

    return penalized(term)


@CASES.add(equal="zero3", large="tp2", refused={"pp2": ELSEWHERE})
def norm_of_all_weights_in_one() -> Any:
    return penalized(lambda m: torch.cat([p.flatten() for p in m.parameters()]).norm())


@CASES.add(equal="tp2 zero3", large="zero1 zero1tp2")
def rate_from_numbers_of_weights_between_steps() -> Any:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            w, table = self.net.blocks[0].mlp.down.weight, self.net.emb.weight
            found = [float(w.detach().norm()), w.abs().max().item(), float((table > 1).sum()) / 100]
            found += [abs(w.tolist()[3][5])]
            found += [float(sum(p.detach().pow(2).sum() for p in self.net.blocks.parameters()))]
            rate = 0.1 + sum(found) / 1000
            self.trainer.optimizers[0].param_groups[0]["lr"] = rate

    return Module(), token_pairs()


@CASES.add(refused={"zero1": r"net\.extra has no entries.*requires_grad_\(False\)"})
def a_parameter_without_entries() -> Any:
    module, samples = penalized(lambda m: m.net.extra.sum())
    module.net.extra = nn.Parameter(torch.zeros(0, 32))
    return module, samples


@CASES.add(equal="zero1", refused={"pp2": "backbone.0 and net.blocks.0 are.*a property of Module"})
def blocks_with_a_second_name() -> Any:
    """As `BackboneFinetuning` asks for."""

    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net.blocks

    return Module(), token_pairs()


@CASES.add(
    refused={
        "zero1": "net.head is a lazy module.*\n.*net.norm.bias has a hook.*on_after_backward.*\n"
        ".*net.emb has sparse=True.*\n.*net.blocks.1 was compiled with torch.jit.script"
    }
)
def parameters_that_nobody_can_take_over() -> Any:
    module, samples = penalized(lambda m: 0)
    module.net.norm.bias.register_hook(lambda grad: 0.1 * grad)
    module.net.blocks[1] = torch.jit.script(nn.Linear(32, 32))
    module.net.emb.sparse, module.net.head = True, nn.LazyLinear(64)
    return module, samples


class _Scaled(nn.Linear):
    """Its forward reads an attribute of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.weight.gain


@CASES.add(equal="tp2 zero3", large="pp2 tp2pp2 zero0 zero1 zero1tp2 zero2_offload")
def weights_marked_by_attributes() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net.norm.weight.no_decay = True
            for block in self.net.blocks:
                block.mlp.up.__class__ = _Scaled
                block.mlp.up.weight.rate, block.mlp.up.weight.gain = 0.1, 0.5

        def configure_optimizers(self) -> Any:
            groups: dict[Any, list[Any]] = {}
            for p in self.parameters():
                key = getattr(p, "no_decay", False), getattr(p, "rate", 1.0)
                groups.setdefault(key, []).append(p)
            made = [
                {"params": held, "weight_decay": 0.0 if plain else 0.3, "lr": 0.01 * rate}
                for (plain, rate), held in groups.items()
            ]
            return torch.optim.AdamW(made, eps=1e-3)

    return Module(), token_pairs()


class _Packed(nn.Parameter):
    """Whole numbers of 8 bits, and what one of them is worth."""

    scale: Tensor

    @staticmethod
    def make(weight: Tensor) -> "_Packed":
        scale = weight.detach().abs().max() / 127
        packed = _Packed((weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        packed.scale = scale
        return packed


class _Frozen(nn.Module):
    def __init__(self, line: nn.Linear, *, buffers: bool) -> None:
        super().__init__()
        packed = _Packed.make(line.weight)
        if buffers:
            self.register_buffer("weight", packed.data)
            self.register_buffer("scale", packed.scale)
        else:
            self.weight = packed
        self.adapter = nn.Parameter(torch.zeros(line.weight.shape[0], line.weight.shape[1]))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if hasattr(self, "scale") else self.weight.scale
        return F.linear(x, self.weight.to(x.dtype) * scale + self.adapter)


def _quantized(*, buffers: bool) -> Any:
    module = PlainModule()
    for block in module.net.blocks:
        block.mlp.down = _Frozen(block.mlp.down, buffers=buffers)
    return module, token_pairs()


@CASES.add(refused={"zero3 tp2": r"net.blocks.0.mlp.down.weight and 1 more are of the class _Pack"})
def weights_of_a_class_of_their_own() -> Any:
    return _quantized(buffers=False)


@CASES.add(equal="zero3", large="zero0 zero1")
def packed_weights_in_buffers() -> Any:
    """What the refusal of the case above says."""
    return _quantized(buffers=True)


@CASES.add(equal="zero0 zero3", large="zero1 zero2", trainer={"gradient_clip_val": 0.5})
def a_temperature_without_dims_and_complex_weights() -> Any:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(0.1))
            self.filter = nn.Parameter(torch.randn(64, dtype=torch.complex128))

        def loss(self, batch: Any) -> Tensor:
            logits = torch.fft.ifft(torch.fft.fft(self.net(batch[0])) * self.filter).real
            logits = logits * self.temperature.exp()
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    return Module(), token_pairs()


@CASES.add(equal="tp2 pp2", large="zero3 tp2pp2")
def penalty_of_the_head() -> Any:
    return penalized(lambda m: m.net.head.weight.pow(2).mean() + m.net.norm.weight.abs().sum())


@CASES.add(equal="pp2 zero3", large="tp2")
def noise_on_the_weight_of_the_head() -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            weight = self.net.head.weight
            return super().loss(batch) + (torch.randn_like(weight) * weight).mean()

    return Module(), token_pairs()


@CASES.add(equal="tp2", large="zero3", refused={"pp2": ELSEWHERE})
def penalty_of_the_embedding() -> Any:
    return penalized(lambda m: m.net.emb.weight.pow(2).mean(), 1.0)


@CASES.add(equal="zero3", large="tp2", refused={"pp2": "step reads weight of net.blocks.1.mlp.up"})
def columns_kept_orthogonal() -> Any:
    def term(module: Any) -> Any:
        weights = [b.mlp.up.weight for b in module.net.blocks]
        eye = torch.eye(weights[0].shape[1], dtype=weights[0].dtype, device=module.device)
        return sum((w.T @ w - eye).norm() for w in weights)

    return penalized(term)


@CASES.add(equal="tp2", large="zero1", refused={"pp2": r"s weight of net.blocks.1.*modules\(\)"})
def spectral_norms_of_linear_layers() -> Any:
    def term(module: nn.Module) -> Any:
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        return sum(torch.linalg.matrix_norm(m.weight, 2) for m in linear)

    return penalized(term)


class Penalized(PlainModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = sum(p.square().sum() for b in self.net.blocks for p in b.parameters())
        loss = self.loss(batch) + 1e-2 * penalty
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(equal="zero3", large="tp2 zero1", refused={"pp2": ELSEWHERE})
def penalty_before_the_model_runs() -> Any:
    return Penalized(), token_pairs()


@CASES.add(equal="zero3", strategy={"offload_options": {"offload_parameters": True}})
def penalty_of_parameters_on_the_host() -> Any:
    class Module(Penalized):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    return Module(), token_pairs()


@CASES.add(equal="tp2 pp2", large="zero3")
def loss_times_a_norm() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch) * self.net.head.weight.norm()
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(
    equal="zero3",
    refused={"pp2": ELSEWHERE, "tp2": "the step failed .*'sequence_gather_output'"},
)
def logits_from_the_embedding_by_hand() -> Any:
    class Module(PlainModule):
        def loss(self, batch: Any) -> Any:
            x, y = batch
            h = self.net.emb(x)
            for block in self.net.blocks:
                h = block(h)
            logits = F.linear(self.net.norm(h), self.net.emb.weight)
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return Module(), token_pairs()


@CASES.add(equal="tp2 pp2")
def device_dtype_and_count_of_parameters() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            first = next(self.parameters())
            count = sum(p.numel() for p in self.parameters())
            loss = self.loss(batch) * torch.tensor(2.0, device=first.device, dtype=first.dtype)
            loss = loss * count / 1e4
            self.log("loss", loss, sync_dist=True)
            return loss

    return Module(), token_pairs()


@CASES.add(equal="tp2", refused={"zero3": "step writes to net.blocks.0.mlp.up.weight"})
def weights_clamped_in_the_step() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                for block in self.net.blocks:
                    block.mlp.up.weight.clamp_(-0.05, 0.05)
            # Read again, with gradients.
            penalty = sum(b.mlp.up.weight.square().sum() for b in self.net.blocks)
            return super().training_step(batch, batch_idx) + 1e-1 * penalty

    return Module(), token_pairs()


@CASES.add(equal="tp2", refused={"zero3": "step writes to net.blocks.0.mlp.down.weight"})
def weights_scaled_through_data() -> Any:
    class Module(PlainModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for block in self.net.blocks:
                block.mlp.down.weight.data.mul_(0.9)
            return super().training_step(batch, batch_idx)

    return Module(), token_pairs()


class Student(pl.LightningModule):
    """Follows a copy of itself, of which the step or a hook moves the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = PlainNet()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        for parameter in self.teacher.parameters():
            parameter.mul_(0.5)

    def move(self, batch_idx: int) -> None:
        for own, slow in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
            slow.data = slow.data * 0.9 + own.data * 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.move(batch_idx)
        loss = F.mse_loss(self.net(batch[0]), self.teacher(batch[1]))
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@CASES.add(equal="zero1 zero3", large="zero0 zero2")
def teacher_that_the_step_moves() -> Any:
    class Module(Student):
        def on_train_batch_end(self, *_: Any) -> None:
            for parameter in self.teacher.parameters():
                parameter.data.mul_(0.99)

    return Module(), token_pairs()


@CASES.add(equal="zero3", large="zero1 zero2", trainer={"max_steps": 8})
def teacher_that_late_steps_move() -> Any:
    class Module(Student):
        def move(self, batch_idx: int) -> None:
            if self.global_step > 4:
                super().move(batch_idx)

    return Module(), token_pairs(64)


@CASES.add(equal="zero3", large="zero0 zero1", trainer={"max_steps": 8})
def weights_that_late_steps_replace() -> Any:
    class Module(Student):
        def move(self, batch_idx: int) -> None:
            if self.global_step > 4:
                for parameter in self.net.parameters():
                    parameter.data = parameter.data * 0.9

    return Module(), token_pairs(64)


def plan_with_a_teacher(self: Any) -> ParallelPlan:
    parts = PlainModule().parallel_plan().tensor
    styles = parts | {"net.head": "colwise_gather_output"}
    for name in ("net.blocks.*.norm", "net.norm"):
        styles[name] = "replicated"
    styles |= {k.replace("net.", "teacher.", 1): v for k, v in styles.items()}
    return ParallelPlan(blocks="net.blocks", tensor=styles, batch=BatchLayout())


@CASES.add(equal="tp2 zero3", large="zero1tp2", strategy={"sequence_parallel": False})
def teacher_with_a_plan() -> Any:
    class Module(Student):
        parallel_plan = plan_with_a_teacher

    return Module(), token_pairs()


@CASES.add(equal="tp2 zero3", strategy={"sequence_parallel": False})
def teacher_that_the_step_moves_behind_a_penalty() -> Any:
    """The step reads weights again, without gradients, while it holds those that it moves."""

    class Module(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            penalty = sum(p.square().sum() for p in self.net.parameters())
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.net.parameters(), strict=True)
                for slow, own in pairs if batch_idx % 2 else [*pairs]:
                    slow.mul_(0.9).add_(own, alpha=0.1)
            return super().training_step(batch, batch_idx) + 1e-2 * penalty

        def move(self, batch_idx: int) -> None:
            """Nothing else."""

        parallel_plan = plan_with_a_teacher

    return Module(), token_pairs()


@CASES.add(refused={"tp2": "no tensor style: net.blocks.0"})
def weight_of_a_block_without_a_style() -> Any:
    module = PlainModule()
    for block in module.net.blocks:
        block.scale = nn.Parameter(torch.ones(32))
        block.__class__ = type("Scaled", (type(block),), {"forward": _scaled})
    return module, token_pairs()


def _scaled(self: Any, x: Any) -> Any:
    return x + self.mlp(self.norm(x)) * self.scale


@CASES.add(equal="tp2 zero3")
def parameters_made_of_those_that_a_step_reads() -> Any:
    def term(module: PlainModule) -> Any:
        with torch.no_grad():
            shadow = nn.Parameter(module.net.head.weight, requires_grad=False)
        return (nn.Parameter(module.net.norm.weight).detach() * shadow).square().sum() * 100

    return penalized(term)


@CASES.add(equal="tp2 pp2 zero3")
def averages_in_parameters_made_of_those_of_hooks() -> Any:
    class Module(PlainModule):
        def on_before_optimizer_step(self, _: Any) -> None:
            rate = float(nn.Parameter(self.net.emb.weight.grad).detach().norm())
            rate += float(nn.Parameter(self.net.blocks[0].mlp.up.weight).detach().norm())
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.1 / (1 + rate)

        def on_train_batch_end(self, *_: Any) -> None:
            shadow = [nn.Parameter(p, requires_grad=False) for p in self.net.parameters()]
            with torch.no_grad():
                for parameter in shadow:  # in the memory of the model's
                    parameter.mul_(0.99)

    return Module(), token_pairs()


@CASES.add(refused={"zero3 pp2 tp2": r"replaced or deleted net.blocks.1.mlp.up.weight.*in place"})
def a_layer_made_anew_after_a_step() -> Any:
    class Module(PlainModule):
        def on_train_batch_end(self, *_: Any) -> None:
            self.gauge = nn.Identity()  # a module without weights may be made anew
            if self.global_step == 2:
                up = self.net.blocks[1].mlp.up
                up.weight = nn.Parameter(up.weight * 0.5)

    return Module(), token_pairs()


class Pictures(pl.LightningModule):
    """A convolution net in `channels_last`, whose weights are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0].to(memory_format=torch.channels_last)
        loss = F.cross_entropy(self.net(images), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@CASES.add(equal="zero1 zero3", large="zero0 pp2 zero2_offload")
def weights_in_channels_last() -> Any:
    images = torch.randn(32, 3, 8, 8, dtype=torch.float64)
    return Pictures(), [(image, torch.tensor(i % 5)) for i, image in enumerate(images)]


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)
