"""What one step leaves behind: nothing on the strategy, and nothing on the user's plugin."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_par
from lightning_par import Hybrid3DStrategy, ZeROOffloadStrategy
from lightning_par.models import GPTModule
from lightning_par.strategies import MeshStrategy
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.samples import byte_loader

PACKAGE = Path(lightning_par.__file__).parent
REPLICAS = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
CONTEXT = {**REPLICAS, "context_parallel_size": 2}
PIPELINE = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


class StopError(Exception):
    """Raised between a forward and its backward."""


class Observer(Callback):
    """Sees the step between forward and backward, and its absence everywhere else."""

    def __init__(self, *, raises: bool) -> None:
        self.raises, self.between, self.after = raises, [], []

    def on_before_zero_grad(self, trainer: Any, *_: Any) -> None:
        self.between.append(trainer.strategy._step is not None)
        if self.raises and len(self.between) == 2:
            raise StopError

    def on_after_backward(self, trainer: Any, *_: Any) -> None:
        self.after.append(trainer.strategy._step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.after.append(trainer.strategy._step)


class Skipping(ToyModule):
    """Every second step has no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


def train(rank: int, world: int, options: dict[str, Any], kind: str) -> Any:
    observer = Observer(raises=kind == "raises")
    made = quiet_trainer(
        strategy=Hybrid3DStrategy(**options), devices=world, max_epochs=1, callbacks=[observer]
    )
    module = Skipping() if kind == "skips" else ToyModule(masked=kind == "masked")
    data = ToyData(16, ignored=kind == "masked")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made.fit(module, loader(data, 4), loader(ToyData(4), 4))
        except StopError:
            observer.after.append("stopped")
    model = made.strategy.parallel_model
    whole = model.steps.sequence is None or model.steps.sequence.shard.layout is None
    hooks = len(model.sharding.zero_weight._handles)
    return observer.between, observer.after, made.strategy._step, whole, hooks


@pytest.mark.parametrize("options", [REPLICAS, CONTEXT, PIPELINE], ids=["dp", "cp", "pp"])
@pytest.mark.parametrize("kind", ["trains", "masked", "raises"])
def test_a_step_is_there_from_its_forward_to_its_backward(options: Any, kind: str) -> None:
    for between, after, step, whole, hooks in run_ranks(train, 2, options, kind):
        assert all(between)
        assert [a for a in after if a is not None] == (["stopped"] if kind == "raises" else [])
        assert step is None
        assert whole
        assert hooks == 0


def test_a_step_without_a_loss_leaves_nothing() -> None:
    for between, after, step, _, _ in run_ranks(train, 1, REPLICAS, "skips"):
        assert between == [True, False, True, False]
        assert after.count(None) == len(after)
        assert step is None


class Recorded(ToyModule):
    """Keeps its losses, and the norm of the gradients that the optimizer gets."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        return loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        grads = [p.grad.flatten() for p in self.parameters() if p.grad is not None]
        self.norms.append(float(torch.cat(grads).norm()))


def fit_with(plugin: MixedPrecision, strategy: Any, algorithm: str) -> Any:
    module = Recorded()
    made = quiet_trainer(
        strategy=strategy,
        devices=1,
        max_steps=3,
        plugins=[plugin],
        gradient_clip_val=0.01,
        gradient_clip_algorithm=algorithm,
    )
    made.fit(module, loader(ToyData(12), 4), loader(ToyData(4), 4))
    return module.losses, module.norms


def reuse(rank: int, world: int, precision: str, algorithm: str) -> Any:
    def make() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return MixedPrecision(precision, "cpu", scaler if precision == "16-mixed" else None)

    plugin = make()
    before, kind = dict(vars(plugin)), type(plugin)
    state = None if plugin.scaler is None else plugin.scaler.state_dict()
    ours = fit_with(plugin, Hybrid3DStrategy(), algorithm)
    same = dict(vars(plugin)) == before and type(plugin) is kind
    same &= plugin.scaler is None or plugin.scaler.state_dict() == state
    plain = fit_with(plugin, "auto", algorithm)
    scale = None if plugin.scaler is None else plugin.scaler.get_scale()
    return same, ours, plain, fit_with(make(), "auto", algorithm), scale


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_precision_plugin_serves_another_trainer_afterwards(
    precision: str, algorithm: str
) -> None:
    """Ours leaves the object as it is; a plain Trainer then clips and scales as with a new one."""
    ((same, ours, plain, fresh, scale),) = run_ranks(reuse, 1, precision, algorithm)
    assert same
    assert plain == fresh
    assert ours[0] == pytest.approx(plain[0], rel=1e-2)
    assert ours[1] == pytest.approx(plain[1], rel=1e-2)
    if algorithm == "norm":
        assert plain[1] == pytest.approx([0.01] * 3, rel=1e-2)
    assert scale == (2.0**11 if precision == "16-mixed" else None)


def test_strategies_inherit_from_nothing_of_ours_but_mesh_strategy() -> None:
    for kind in (MeshStrategy, Hybrid3DStrategy, ZeROOffloadStrategy):
        ours = {c for c in kind.__mro__ if c.__module__.startswith("lightning_par")}
        assert ours == {kind, MeshStrategy}


class EnteredFiles:
    """Samples which write down what files of the package, models aside, a later step of a run
    enters: until then shapes are known, and the questions of the first steps answered."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        self.files: set[str] = set()
        self._samples, self._batch_size = samples, batch_size

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        if index % self._batch_size == 0:
            sys.setprofile(self._note if index == 5 * self._batch_size else None)
        return self._samples[index]

    def _note(self, frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents and path.relative_to(PACKAGE).parts[0] != "models":
            self.files.add(str(path.relative_to(PACKAGE)))


def files_of_a_step(rank: int, world: int) -> set[str]:
    entered = EnteredFiles(byte_loader(40).dataset, 4)
    options = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    made = quiet_trainer(
        strategy=Hybrid3DStrategy(**options),
        devices=world,
        max_steps=8,
        gradient_clip_val=1.0,
    )
    made.fit(GPTModule(overrides={"num_layers": 2, "dropout": 0.0}), DataLoader(entered, 4))
    return entered.files


def test_a_steady_hybrid_step_enters_few_files() -> None:
    found = run_ranks(files_of_a_step, 4)
    assert all({"strategies/mesh_strategy.py", "engine/pipeline/executor.py"} <= f for f in found)
    # 22 of the step itself, with the one that keeps T, which shards along T do not tell, and the
    # one that lets an optimizer step on shards, which saves torch's dispatch of DTensors. Ten
    # watch: collectives over all ranks (two), what it writes and leaves in attributes and outside
    # of the module (five), forwards and other code of hooks (two), the form of the loss.
    watches = {
        "observe/outside.py",
        "strategies/processes/world_collectives.py",
        "strategies/components/attribute_values.py",
        "strategies/components/sendable.py",
        "strategies/components/step_attributes.py",
        "strategies/components/step_writes.py",
        "strategies/hooks/outer_forward.py",
        "strategies/hooks/user_hooks.py",
        "strategies/step/loss_form.py",
        "upstream/functions.py",
    }
    assert max(len(files - watches) for files in found) <= 22, "\n".join(
        sorted(set().union(*found))
    )
