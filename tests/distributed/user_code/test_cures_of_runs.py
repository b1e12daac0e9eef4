"""What a mesh refuses of the time and place at which a run does something, and its cures."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader

from tests.support.cures import Cures
from tests.support.models.plain_language_model import PlainModule, token_pairs

CURES = Cures(__name__)
CASES = CURES.cases


@CURES.add("LP104", r"strategy\.mesh was read before .* in setup or a later hook", "zero2")
def the_number_of_replicas_for_a_learning_rate(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_callbacks(self) -> Any:
            if not cured:
                self.look()
            return []

        def setup(self, stage: str) -> None:
            if cured:
                self.look()

        def look(self) -> None:
            mesh = getattr(self.trainer.strategy, "mesh", None)
            replicas = 1 if mesh is None else mesh.sizes.data
            self.lr = 0.5 if replicas in (1, 2) else 0.0

    return Module()


class Distills(PlainModule):
    """Is trained towards a copy of itself as it was at first."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.made = made
        if made == "init":
            self.copy()

    def copy(self) -> None:
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def setup(self, stage: str) -> None:
        if self.made == "setup":
            self.copy()

    def on_fit_start(self) -> None:
        if self.made == "fit":
            self.copy()

    def loss(self, batch: Any) -> Tensor:
        logits, wanted = self.net(batch[0]), self.teacher(batch[0])
        return super().loss(batch) + (logits - wanted).square().mean()


@CURES.add("LP328", r"copy\.deepcopy\(self\.net\) in __init__ or setup, before", "zero3")
def a_teacher_that_is_copied_on_the_mesh(cured: bool) -> nn.Module:
    return Distills("init" if cured else "fit")


@CURES.add("LP328", r"copy\.deepcopy\(self\.net\) in __init__ or setup, before", "zero1")
def a_teacher_that_is_copied_in_setup(cured: bool) -> nn.Module:
    return Distills("setup" if cured else "fit")


@CURES.add("LP328", r"copy\.deepcopy\(self\.net\) in __init__ or setup, before", "pp2")
def a_teacher_that_is_copied_under_a_pipeline(cured: bool) -> nn.Module:
    class Module(Distills):
        """Its teacher averages the weights, and nothing is computed with it."""

        def loss(self, batch: Any) -> Tensor:
            return PlainModule.loss(self, batch)

        @torch.no_grad()
        def on_train_batch_end(self, *_: Any) -> None:
            for mine, weight in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.lerp_(weight, 0.1)
            self.lr = float(sum(mine.square().sum() for mine in self.teacher.parameters()))

    return Module("init" if cured else "fit")


def _small_head() -> nn.Parameter:
    return nn.Parameter(torch.full((64, 32), 0.01, dtype=torch.float64))


@CURES.add(
    "LP329",
    r"replaced or deleted net\.head\.weight.*in __init__, setup or configure_model",
    "zero3",
)
def a_parameter_that_is_replaced(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def setup(self, stage: str) -> None:
            if cured:
                self.net.head.weight = nn.Parameter(torch.full((64, 32), 0.01))

        def on_fit_start(self) -> None:
            if not cured:
                self.net.head.weight = _small_head()

    return Module()


@CURES.add(
    "LP329", r"replaced or deleted net\.head\.weight.*__init__, setup or configure_model", "pp2"
)
def a_parameter_that_is_tied(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_model(self) -> None:
            if cured:
                self.net.head.weight = self.net.emb.weight

        def on_fit_start(self) -> None:
            if not cured:
                self.net.head.weight = self.net.emb.weight

    return Module()


@CURES.add(
    "LP329", r"adds the parameter reference, which is made of a weight of one pipeline", "pp2"
)
def a_copy_of_a_weight_that_a_hook_keeps(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_train_start(self) -> None:
            weight = self.net.head.weight
            self.reference = weight.detach().clone() if cured else copy.deepcopy(weight)

    return Module()


@CURES.add(
    "LP329",
    r"replaced or deleted net\.blocks\.0.*in __init__, setup or configure_model",
    options={"blocks": 4},
)
def blocks_that_change_places(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def __init__(self) -> None:
            super().__init__()
            if cured:
                self.swap()

        def on_fit_start(self) -> None:
            if not cured:
                self.swap()

        def swap(self) -> None:
            blocks = self.net.blocks
            blocks[0], blocks[1] = blocks[1], blocks[0]

    return Module()


@CURES.add("LP329", r"deleted .*net\.blocks\.1.*in __init__, setup or configure_model", "tp2")
def a_block_that_is_deleted(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def setup(self, stage: str) -> None:
            if cured:
                del self.net.blocks[1]

        def on_fit_start(self) -> None:
            if not cured:
                del self.net.blocks[1]

    return Module()


@CURES.add("LP329", r"replaced or deleted net\.head\.weight.*write to a parameter in place", "tp2")
def values_of_another_parameter(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_fit_start(self) -> None:
            if cured:
                self.net.head.weight.data.copy_(_small_head().data)
            else:
                self.net.head.weight = _small_head()

    return Module()


@CURES.add("LP328", r"To copy only its weights, use .name: w\.detach\(\)\.clone", "zero1")
def weights_that_are_copied_on_the_mesh(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def on_fit_start(self) -> None:
            if cured:
                self.first = {n: w.detach().clone() for n, w in self.net.named_parameters()}
            else:
                self.first = dict(copy.deepcopy(self.net).named_parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                for name, weight in self.net.named_parameters():
                    weight.lerp_(self.first[name], 0.1)

    return Module()


class MadeOnTheMesh(PlainModule):
    """Makes a scale of the loss in `configure_model`."""

    def __init__(self, cured: bool) -> None:
        super().__init__()
        self.cured, self.scale = cured, None

    def configure_model(self) -> None:
        if self.scale is None:
            self.scale = self.make()

    def make(self) -> Any:
        raise NotImplementedError

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * self.scale.mean()


@CURES.add("LP209", r"the parameter 'scale' is made with .* its 32 values.*nn\.init\.", "zero3")
def a_parameter_without_values(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        def make(self) -> Any:
            scale = nn.Parameter(torch.empty(32))
            return nn.init.ones_(scale) if self.cured else scale

    return Module(cured)


@CURES.add("LP209", r"the parameter scale .* not made inside configure_model", "zero3")
def a_parameter_on_meta(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        def make(self) -> Any:
            return nn.Parameter(torch.ones(8))

    module = Module(cured)
    if not cured:
        module.scale = nn.Parameter(torch.ones(8, device="meta"))
    return module


@CURES.add("LP209", r"the parameter scale .* outside configure_model.*Make it inside", "zero3")
def a_parameter_that_is_made_on_meta(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        def make(self) -> Any:
            return nn.Parameter(torch.ones(8)) if self.cured else self.early

    module = Module(cured)
    vars(module)["early"] = nn.Parameter(torch.ones(8, device="meta"))
    return module


@CURES.add("LP210", r"needs the values of .*Compute the result from shapes", "zero3")
def a_number_of_a_weight_that_is_made(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        def make(self) -> Any:
            norm = nn.LayerNorm(32)
            total = norm.weight.numel() if self.cured else norm.weight.sum().item()
            return nn.Parameter(torch.full((8,), total / 32))

    return Module(cured)


@CURES.add("LP210", r"needs the values of .*or compute it in the first step", "zero3")
def a_number_of_a_weight_in_the_first_step(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        start = None

        def make(self) -> Any:
            self.scale = nn.Parameter(torch.linspace(0.5, 1.0, 8))
            if not self.cured:
                self.start = float(self.scale.sum())
            return self.scale

        def loss(self, batch: Any) -> Tensor:
            if self.start is None:
                self.start = float(self.scale.detach().sum())
            return super().loss(batch) / self.start

    return Module(cured)


@CURES.add(
    "LP210", r"the buffer origin was computed .*Compute the buffer from other values", "zero3"
)
def a_buffer_that_copies_a_weight(cured: bool) -> nn.Module:
    class Module(MadeOnTheMesh):
        def make(self) -> Any:
            self.scale = nn.Parameter(torch.ones(8))
            start = torch.ones(8) if self.cured else self.scale.detach().clone()
            self.register_buffer("origin", start)
            return self.scale

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + (self.scale - self.origin).square().sum()

    return Module(cured)


class Skipping(torch.optim.Muon):
    """Leaves out its closure where it is told to, which no trial of it sees."""

    skips = False

    def step(self, closure: Any = None) -> Any:
        if not self.skips:
            return super().step(closure)
        return super().step()


@CURES.add(
    "LP610", r"did not call the closure .*Call the closure at the beginning of every step", "tp2"
)
def a_closure_that_is_left_out(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Skipping([p for p in self.parameters() if p.ndim == 2], lr=0.1)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.trainer.optimizers[0]
            optimizer.skips = batch_idx == 2 and not cured

    return Module()


@CURES.add("LP610", r"divides .* over all processes by itself.*AdamW\(.*zero_stage=1", "zero1")
def an_optimizer_that_divides_its_states(cured: bool) -> nn.Module:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            if cured:
                return torch.optim.AdamW(self.parameters(), lr=0.01)
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.01)

    return Module()


@CURES.add(
    "LP409",
    r"attribute shadow of net\.blocks\.0\. .*has changed.*in an attribute of the Lightning",
    options={"trainer": {"limit_train_batches": 2}},
)
def averages_that_blocks_keep_for_validation(cured: bool) -> nn.Module:
    class Module(PlainModule):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.shadows = [{"mean": torch.zeros(48, dtype=torch.float64)} for _ in self.net.blocks]
            for block, shadow in zip(self.net.blocks, self.shadows, strict=True):
                block.shadow = {"mean": shadow["mean"].clone()}  # type: ignore[assignment]

        def kept(self) -> Any:
            return self.shadows if cured else [block.shadow for block in self.net.blocks]

        @torch.no_grad()
        def on_train_batch_end(self, *_: Any) -> None:
            for shadow, block in zip(self.kept(), self.net.blocks, strict=True):
                shadow["mean"].lerp_(block.mlp.up.bias, 0.5)  # type: ignore[union-attr]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.factor

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.factor = 1 + float(sum(shadow["mean"].square().sum() for shadow in self.kept()))
            self.log("factor", self.loss(batch) * self.factor)

        def val_dataloader(self) -> Any:
            return DataLoader(token_pairs()[:8], 4)

    return Module()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CURES.check(case, layout, refusal)


class Pickles(PlainModule):
    """Saves a part of its model in a hook, as a whole or its state dict."""

    def __init__(self, hook: str, *, whole: bool, part: str = "net") -> None:
        super().__init__()
        self.hook, self.whole, self.part = hook, whole, part

    def save(self, hook: str) -> None:
        if hook == self.hook:
            part = self.get_submodule(self.part)
            torch.save(part if self.whole else part.state_dict(), io.BytesIO())

    def on_train_batch_end(self, *_: Any) -> None:
        self.save("on_train_batch_end")

    def on_fit_end(self) -> None:
        self.save("on_fit_end")


@CURES.add("LP328", r"call torch\.save\(self\.net\.state_dict\(\), path\)", "pp2")
def blocks_that_are_pickled(cured: bool) -> nn.Module:
    return Pickles("on_train_batch_end", whole=not cured, part="net.blocks.0")


@CURES.add("LP328", r"call torch\.save\(self\.net\.state_dict\(\), path\)", "zero3")
def shards_that_are_pickled(cured: bool) -> nn.Module:
    return Pickles("on_train_batch_end", whole=not cured)


@CURES.add("LP328", r"or save the module in on_fit_end", "tp2")
def a_module_saved_after_the_run(cured: bool) -> nn.Module:
    return Pickles("on_fit_end" if cured else "on_train_batch_end", whole=True)
