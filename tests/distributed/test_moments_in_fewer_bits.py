"""Optimizers with moments in fewer bits: the same on any mesh, in checkpoints of any layout."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy, optimizers, ParallelPlan
from lightning_par.callbacks import MixedPrecision
from lightning_par.dtensor import local_part, shard_of
from lightning_par.engine.rng import seed_of
from lightning_par.models import GPTModule
from lightning_par.models.language_module import group_parameters
from tests.distributed.user_code.test_own_experts import OwnMixture
from tests.support.models.plain_language_model import (
    AttendingNet,
    PlainModule,
    PlainNet,
    token_pairs,
)
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.resharding import differences, run_layout
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)
CLIPS = {"gradient_clip_val": 0.5}
BYTES = {"torch": 8, "float32": 8, "bfloat16": 4, "packed": 2}
_TP2_ZERO3 = {**LAYOUTS["zero1tp2"], "zero_stage": 3}
FORMS = [(states, states) for states in BYTES]
CHANGES = [
    *FORMS,
    *(("bfloat16", "torch"), ("packed", "torch"), ("float32", "packed"), ("packed", "bfloat16")),
    *(("torch", "bfloat16"), ("torch", "float32"), ("float32", "torch")),
]
"""What goes on, and what was saved."""
MESHES = {"one": LAYOUTS["one"], "four": _TP2_ZERO3, **LAYOUTS}


class Module(PlainModule):
    """Is handed the same gradients on any mesh; those of a loss differ by the rounding of sums."""

    def __init__(self, states: Any, *, attends: bool = False) -> None:
        super().__init__(AttendingNet() if attends else None)
        self.states = states
        self.bytes = 0.0

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, tensor={}) if isinstance(self.net, AttendingNet) else plan

    def configure_optimizers(self) -> Any:
        if self.states == "torch":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizers.AdamW(self.parameters(), lr=0.01, states=self.states)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            drawn = torch.Generator().manual_seed(seed_of(name, self.global_step))
            # Cubes: of many sizes.
            grad = torch.randn(parameter.shape, generator=drawn) ** 3
            local_part(parameter.grad).copy_(local_part(shard_of(grad, parameter.data)))

    def on_train_end(self) -> None:
        held = self.trainer.optimizers[0].state.values()
        moments = [local_part(v) for state in held for v in state.values() if v.ndim]
        entries = sum(local_part(p).numel() for p in self.parameters())
        self.bytes = sum(tensor.nbytes for tensor in moments) / entries


def fit(
    world: int,
    layout: str | None,
    states: str,
    steps: int,
    *,
    source: Any = None,
    attends: bool = False,
    **options: Any,
) -> tuple[Any, Module]:
    torch.manual_seed(0)
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**MESHES[layout])
    trainer = quiet_trainer(
        devices=world, strategy=strategy, max_steps=steps, max_epochs=-1, **options
    )
    module = Module(states, attends=attends)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(token_pairs(), batch_size=2), ckpt_path=source)
    return trainer, module


def save(rank: int, world: int, layout: str | None, to: Path, source: Path | None) -> Any:
    """Train 3 steps in every form, or go on from files of 3 steps to 6, in other forms too."""
    counted = {}
    for states, before in FORMS if source is None else CHANGES:
        file = None if source is None else source / f"{before}-"
        trainer, module = fit(
            world, layout, states, 3 if source is None else 6, source=file, attends=attends(to)
        )
        trainer.save_checkpoint(to / f"{states}-{before if source else ''}")
        counted[states] = module.bytes
    return counted


def attends(to: Path) -> bool:
    return "cp2" in to.name


def run(layout: str | None, to: Path, source: Path | None = None) -> Path:
    world = 1 if layout in (None, "one") else 4 if layout == "four" else 2
    to.mkdir(exist_ok=True)
    for counted in run_ranks(save, world, layout, to, source, timeout=150):
        assert counted == BYTES
    return to


def read(file: Path) -> tuple[Any, Any]:
    found = torch.load(file, weights_only=False)
    return found["state_dict"], found["optimizer_states"][0]["state"]


def check(folder: Path, wanted: Path) -> None:
    """Assert that files are the same bit for bit, but for those that torch's optimizer wrote."""
    found = sorted(file.name for file in wanted.iterdir())
    assert found == sorted(file.name for file in folder.iterdir())
    for name in found:
        (weights, states), (same_weights, same_states) = read(folder / name), read(wanted / name)
        assert states.keys() == same_states.keys()
        # Vectors and entries that are left over are rounded otherwise in kernels of torch's.
        close = 1e-6 if "torch" in name else 0
        torch.testing.assert_close(weights, same_weights, rtol=close, atol=close)
        for number, held in states.items():
            torch.testing.assert_close(held, same_states[number], rtol=close, atol=close)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    for net in ("cp2", "all"):
        run(None, folder / f"{net} end", run(None, folder / f"{net} middle"))
    return folder


@pytest.mark.parametrize(
    ("layout", "later"),
    [
        ("tp2", "zero3"),
        ("zero3", "pp2"),
        ("pp2", "zero1"),
        ("four", "tp2"),
        ("one", "four"),
        ("cp2", "cp2"),
    ],
)
def test_states_and_weights_are_the_same_bits_on_any_mesh(
    layout: str, later: str, plain: Path, tmp_path: Path
) -> None:
    """Three steps on a mesh, then three on another one, in the same form and in another one."""
    net = "cp2" if layout == "cp2" else "all"
    middle = run(layout, tmp_path / f"{net} middle")
    check(middle, plain / middle.name)
    check(run(later, tmp_path / f"{net} end", middle), plain / f"{net} end")


def with_masters(rank: int, world: int, layout: str | None, to: Path) -> None:
    for states in ("bfloat16", "packed"):
        callbacks = [MixedPrecision("bf16-true")]
        trainer, _ = fit(world, layout, states, 6, callbacks=callbacks)
        trainer.save_checkpoint(to / states)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_float32_masters_beside_them_are_the_same_bits(layout: str, tmp_path: Path) -> None:
    for name, count in ((None, 1), (layout, 2)):
        (tmp_path / str(name)).mkdir()
        run_ranks(with_masters, count, name, tmp_path / str(name), timeout=150)
    check(tmp_path / layout, tmp_path / "None")
    _, held = read(tmp_path / layout / "packed")
    assert held[0]["master"].dtype is torch.float32


def test_a_run_that_went_on_equals_one_that_did_not_stop(plain: Path) -> None:
    for states in BYTES:
        weights, held = read(plain / "all end" / f"{states}-{states}")
        trainer, _ = fit(1, None, states, 6)
        whole = trainer.optimizers[0].state_dict()["state"]
        torch.testing.assert_close(weights, trainer.lightning_module.state_dict(), rtol=0, atol=0)
        torch.testing.assert_close(held, whole, rtol=0, atol=0)


class Packed(GPTModule):
    def configure_optimizers(self) -> Any:
        groups = group_parameters(self.named_parameters(), weight_decay=0.1)
        made = optimizers.AdamW(groups, lr=1e-2, states="packed")
        return {"optimizer": made, "lr_scheduler": StepLR(made, 1, 0.5)}


@pytest.mark.parametrize(
    "layout",
    ["dp2 zero 3", "tp2 pp2", pytest.param("tp2 pp2 dp2", marks=pytest.mark.exhaustive)],
)
def test_shards_of_unequal_sizes_are_the_same_bits(layout: str, tmp_path: Path) -> None:
    """In float64; after the run, too, each rank has its part of the states."""
    file = tmp_path / "middle.ckpt"
    one = run_layout("one", tmp_path, steps=6, save_at=3, save_to=file, kind=Packed)[0]["end"]
    for source in (None, file):
        end = run_layout(layout, tmp_path, steps=6, source=source, kind=Packed)[0]["end"]
        assert differences(end["optimizers"], one["optimizers"]) == []
        torch.testing.assert_close(end["weights"], one["weights"], rtol=0, atol=1e-9)


class Trained(PlainModule):
    """Has the gradients of its loss, and two groups."""

    def __init__(self, kind: Any, states: Any, net: Any = None) -> None:
        super().__init__(net)
        self.kind, self.states = kind, states

    def configure_optimizers(self) -> Any:
        groups: list[Any] = [{"params": []}, {"params": [], "weight_decay": 0.0, "eps": 1e-3}]
        for parameter in self.parameters():
            groups[parameter.ndim < 2]["params"].append(parameter)
        made = self.kind(groups, lr=0.02, weight_decay=0.1, states=self.states)
        schedule = {"scheduler": StepLR(made, 1, 0.5), "interval": "step"}
        return {"optimizer": made, "lr_scheduler": schedule}


@CASES.add(equal="tp2 pp2 zero0 zero2 zero3", large="tp2pp2 zero1tp2", trainer=CLIPS)
def adamw_in_bfloat16() -> Any:
    return Trained(optimizers.AdamW, "bfloat16"), token_pairs()


@CASES.add(equal="tp2 pp2 zero3", large="zero1 zero1pp2 zero2_offload", trainer=CLIPS)
def adam_in_two_bytes() -> Any:
    return Trained(optimizers.Adam, "packed"), token_pairs()


@CASES.add(
    equal="tp2 pp2 zero3", large="zero1tp2", tolerance=0.02, trainer={"precision": "32-true"}
)
def the_proof_of_a_step_in_float32() -> Any:
    """Where gradients differ in a last bit, a moment may be rounded to another number. The proof
    updates one process by the gradients of the mesh, so that it is not misled.
    """
    return Trained(optimizers.AdamW, "packed"), token_pairs()


class Loads(Trained):
    """Makes its optimizer before the mesh, and gives it the states of an earlier run."""

    def __init__(self, states: Any) -> None:
        super().__init__(optimizers.AdamW, states)
        self.early = self.double().configure_optimizers()
        earlier = copy.deepcopy(self)
        optimizer = earlier.early["optimizer"]
        for number, parameter in enumerate(earlier.parameters()):
            grad = torch.linspace(-1, 1 + number, parameter.numel(), dtype=torch.float64)
            parameter.grad = grad.view_as(parameter)
        optimizer.step()
        optimizer.step()
        self.early["optimizer"].load_state_dict(optimizer.state_dict())

    def configure_optimizers(self) -> Any:
        return getattr(self, "early", None) or super().configure_optimizers()


@CASES.add(equal="tp2 zero3 pp2", large="zero1tp2")
def states_in_two_bytes_from_before_the_mesh() -> Any:
    return Loads("packed"), token_pairs()


@CASES.add(equal="zero1ep2", large="zero3ep2 zero1ep2pp2")
def experts_in_two_bytes() -> Any:
    net = PlainNet()
    for number in range(len(net.blocks)):
        net.blocks[number] = OwnMixture()
    module = Trained(optimizers.AdamW, "packed", net)
    plan = replace(module.parallel_plan(), tensor={}, experts=("net.blocks.*.experts",))
    module.parallel_plan = lambda: plan  # type: ignore[method-assign]
    return module, token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_trains_as_on_one_process(case: str, layout: str, refusal: str | None) -> None:
    """In float64, so that gradients are alike in all bits that rounding looks at."""
    CASES.check(case, layout, refusal)
