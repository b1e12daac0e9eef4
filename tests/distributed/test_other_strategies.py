"""`FirstStepProof`: Lightning's strategies against one process, with the cause of what differs."""

import random
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
from torch.utils.data import DataLoader

from benchmarks.other_strategies import judge
from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import FirstStepProof
from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError, VerificationError
from lightning_par.observe.whole_tensors import whole_tensors
from lightning_par.verification import processes
from tests.support.cli_scripts import command
from tests.support.models.other_strategies import divided, MODULES, STRATEGIES, strategy_named
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks

pytestmark = pytest.mark.timeout(300)

AVERAGING = ["DDP", "FSDP", "ModelParallel, fully_shard"]


def report_of(module: str, strategy: str) -> Any:
    """Return the report, which all ranks have alike."""
    one, other = run_ranks(judge, 2, module, strategy, timeout=120)
    assert str(one) == str(other)
    return one


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("module", ["GPT", "dropout", "accumulation"])
def test_a_healthy_module_is_equal(module: str, strategy: str) -> None:
    report = report_of(module, strategy)
    assert report.equal, str(report)
    name = type(strategy_named(strategy)).__name__
    assert f"the first step of {name} on 2 ranks equals that of one process." in str(report)


@pytest.mark.parametrize("module", ["two steps by hand", "clipping", "AdamW"])
def test_hooks_clipping_and_manual_steps_are_followed(module: str) -> None:
    assert report_of(module, "DDP").equal


CAUSES = {
    "BatchNorm": "BatchNorm: net.statistics normalizes over the samples of one rank",
    "unequal labels": "a mean of means: the ranks have 27, 34 labels",
    "contrastive": "a loss that is not a mean with equal weights",
    "sum over samples": "a loss that is a sum over the samples",
    "noise": "random numbers besides dropout",
}


@pytest.mark.parametrize("strategy", AVERAGING)
@pytest.mark.parametrize("module", ["BatchNorm", "unequal labels"])
def test_a_loss_that_is_no_mean_over_parts_is_told(module: str, strategy: str) -> None:
    report = report_of(module, strategy)
    assert not report.equal
    assert report.difference.kind == "loss"
    assert [cause[: len(CAUSES[module])] for cause in report.causes] == [CAUSES[module]]


@pytest.mark.parametrize("module", sorted(CAUSES))
def test_each_cause_is_told_under_ddp_and_is_none_under_tensor_parallelism(module: str) -> None:
    (cause,) = report_of(module, "DDP").causes
    assert cause.startswith(CAUSES[module])
    assert report_of(module, "ModelParallel, tensor").equal


class ForgetsToReduce(DDPStrategy):
    """Takes every forward in `no_sync`."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None
        with self.model.no_sync():  # type: ignore[operator]
            return super().training_step(*args, **kwargs)


class LeavesOneOut(DDPStrategy):
    """Averages all gradients but that of the head's bias on rank 1, which rank 0 does not see."""

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().backward(*args, **kwargs)
        assert isinstance(self.lightning_module, PlainModule)
        if self.global_rank == 1:
            bias = self.lightning_module.net.head.bias
            assert bias.grad is not None
            bias.grad *= 2
        return loss


class Sums(DDPStrategy):
    """Sums gradients where the mean is needed."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        hooks = [p.register_hook(lambda grad: grad * 2) for p in module.parameters()]
        try:
            return super().backward(loss, *args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()


def fit(module: Any, strategy: Any, world: int, callbacks: Any, **options: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    data = options.pop("data", None) or DataLoader(token_pairs(), 4)
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **{"max_steps": 1, **options},
    )
    trainer.fit(module, data)
    return trainer


FAULTY: dict[str, tuple[Any, str | None, str, str]] = {
    "forgets to reduce": (ForgetsToReduce, "gradient", "a missing all-reduce", "net.emb.weight"),
    "leaves one out": (LeavesOneOut, None, "a missing all-reduce", "net.head.bias"),
    "sums": (Sums, "gradient", "the result of the strategy differs", "by the factor 2"),
}


@ranks(2)
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_a_strategy_of_the_users_is_told(rank: int, world: int, name: str) -> None:
    seed_everything(0, verbose=False)
    proof = FirstStepProof(on_difference="raise")
    kind, differing, cause, named = FAULTY[name]
    with pytest.raises(VerificationError, match=cause) as caught:
        fit(PlainModule(), kind(), world, [proof])
    assert caught.value.code == "LP801"
    assert proof.report is not None
    found = proof.report.difference
    assert (None if found is None else found.kind) == differing
    assert proof.report.causes[0].startswith(cause)
    assert named in str(proof.report)


class ClipsShards(PlainModule):
    """Clips by the norm of what a rank holds."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        parts = [local_part(p.grad) for p in self.parameters() if p.grad is not None]
        norm = torch.stack([part.norm() for part in parts]).norm()
        for part in parts:
            part.mul_(0.05 / norm)


class ByNorm(torch.optim.SGD):
    """Divides each gradient by the norm of what a rank holds of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                part = local_part(parameter.grad)
                local_part(parameter).sub_(part / (part.norm() + 1e-3))
        return loss


class StepsByNorm(PlainModule):
    def configure_optimizers(self) -> Any:
        return ByNorm(self.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize(
    ("kind", "differing", "cause"),
    [
        (ClipsShards, "handed", "clipping by the norm of a shard"),
        (StepsByNorm, "weight", "an optimizer or a hook that uses the number of ranks, or that"),
    ],
)
def test_what_looks_at_a_shard_is_told(
    rank: int, world: int, kind: Any, differing: str, cause: str
) -> None:
    seed_everything(0, verbose=False)
    proof = FirstStepProof()
    strategy = strategy_named("ModelParallel, fully_shard")
    options = {"gradient_clip_val": 0.05} if kind is ClipsShards else {}
    fit(divided(kind()), strategy, world, [proof], **options)
    assert proof.report is not None
    assert proof.report.difference is not None
    assert proof.report.difference.kind == differing
    assert proof.report.causes[0].startswith(cause)


class Traces(Callback):
    """Notes losses and the states of generators, and what hooks see of the module."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["loss"]))
        self.found.append((torch.rand(1).item(), random.random(), float(np.random.rand())))


CALLS: list[str] = []
"""Outside of the module: the step on one process calls its hooks once more."""


class Counting(PlainModule):
    """Drops, and counts its hooks in itself and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.seen += 1
        logits = torch.nn.functional.dropout(self.net(x), 0.3, self.training)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def on_train_batch_start(self, *_: Any) -> None:
        self.calls.append("start")
        CALLS.append("start")

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.calls.append("before")
        CALLS.append("before")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_run_is_the_same_bit_by_bit(rank: int, world: int, name: str) -> None:
    found = []
    for proves in (False, True):
        seed_everything(rank, verbose=False)
        torch.manual_seed(0)
        CALLS.clear()
        module = Counting()
        if name.startswith("ModelParallel"):
            divided(module)
        traces, proof = Traces(), FirstStepProof()
        torch.manual_seed(rank)
        trainer = fit(
            module,
            strategy_named(name),
            world,
            [traces, proof] if proves else [traces],
            max_steps=3,
        )
        weights = whole_tensors(module, within=trainer.strategy.model, buffers=True)
        found.append((traces.found, module.calls, list(CALLS), weights))
        if proves:
            assert proof.report is not None
            # Dropout of a tensor-parallel rank is not that of one process.
            unknown = "it draws random numbers" if name == "ModelParallel, tensor" else ""
            assert proof.report.unknown.startswith(unknown)
            assert proof.report.equal == (not unknown)
    one, other = found
    assert one[:3] == other[:3]
    assert len(one[2]) == 6
    assert one[3].keys() == other[3].keys()
    assert all(torch.equal(one[3][key], other[3][key]) for key in one[3])


class MadeLate(PlainModule):
    """Makes its layers where it divides them, also over a mesh of one rank, and on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is not None:
            return
        with torch.device("meta"):
            self.net = PlainNet()
        mesh = self.device_mesh
        assert mesh is not None
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.net.blocks:
            parallelize_module(block.mlp, mesh["tensor_parallel"], styles)
        fully_shard(self.net, mesh=mesh["data_parallel"])


@ranks(2)
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_layers_that_are_made_late_are_compared(
    rank: int, world: int, sizes: tuple[int, int]
) -> None:
    seed_everything(0, verbose=False)
    proof = FirstStepProof()
    fit(MadeLate(), ModelParallelStrategy(*sizes), world, [proof])
    assert proof.report is not None
    assert proof.report.equal, str(proof.report)


@ranks(2)
def test_what_cannot_be_compared_is_said(rank: int, world: int) -> None:
    class Uncopied(PlainModule):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("no copies of this")

    seed_everything(0, verbose=False)
    proof = FirstStepProof(on_difference="raise")
    fit(Uncopied(), DDPStrategy(), world, [proof])
    assert proof.report is not None
    assert "the module cannot be copied (TypeError: no copies of this)" in str(proof.report)
    assert not proof.report.equal
    assert not proof.report.differs


class Still(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * 0


@ranks(2)
def test_a_step_that_shows_nothing_is_not_called_equal(rank: int, world: int) -> None:
    proof = FirstStepProof()
    fit(Still(), DDPStrategy(), world, [proof])
    assert proof.report is not None
    assert proof.report.unknown == "all of its gradients are zero"


@ranks(2)
def test_a_fit_that_goes_on_says_that_the_update_is_not_compared(rank: int, world: int) -> None:
    seed_everything(0, verbose=False)
    proof = FirstStepProof()
    trainer = fit(PlainModule(), DDPStrategy(), world, [proof])
    assert proof.report is not None
    assert not proof.report.notes
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(PlainModule(), DataLoader(token_pairs(), 4))
    assert proof.report.equal
    assert (
        "the update is not compared, since it continues from loaded optimizer states"
        in proof.report.notes
    )


class Seeded(Callback):
    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        torch.manual_seed(trainer.global_rank)


@ranks(2)
@pytest.mark.parametrize("shared", [False, True])
def test_replicas_with_the_same_samples_or_random_numbers_are_noted(
    rank: int, world: int, shared: bool
) -> None:
    seed_everything(0, verbose=False)
    module, proof = MODULES["dropout"].make(), FirstStepProof()
    callbacks = [proof] if shared else [proof, Seeded()]
    fit(module, DDPStrategy(), world, callbacks, use_distributed_sampler=not shared)
    assert proof.report is not None
    assert proof.report.equal
    notes = " ".join(proof.report.notes)
    assert ("replicas have the same batch" in notes) == shared
    assert ("dropout masks repeat" in notes) == shared


@ranks(2)
def test_samples_that_an_evaluation_repeats_are_told(rank: int, world: int) -> None:
    class Validated(PlainModule):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    trainer = quiet_trainer(devices=world, strategy=DDPStrategy(), callbacks=[FirstStepProof()])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.validate(Validated(), DataLoader(token_pairs(7), 2), verbose=False)
        trainer.validate(Validated(), DataLoader(token_pairs(8), 2), verbose=False)
    told = [str(w.message) for w in caught if " twice, so " in str(w.message)]
    assert len(told) == (1 if rank == 0 else 0)
    assert all("validation uses 1 of 7 samples twice" in text for text in told)


def test_strategies_of_this_package_and_other_words_are_refused() -> None:
    trainer = quiet_trainer(
        devices=1, strategy=Hybrid3DStrategy(), callbacks=[FirstStepProof()], max_steps=1
    )
    with pytest.raises(ConfigurationError, match="is not needed with Hybrid3DStrategy") as ours:
        trainer.fit(PlainModule(), DataLoader(token_pairs(), 4))
    assert ours.value.code == "LP808"
    with pytest.raises(ConfigurationError, match="on_difference='stop' must be 'warn' or 'raise'"):
        FirstStepProof(on_difference="stop")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_fails_in_its_first_step_leaves_the_strategy_as_it_was() -> None:
    class Failing(PlainModule):
        def loss(self, batch: Any) -> Tensor:
            raise KeyError("no such entry")

    proof = FirstStepProof()
    trainer = quiet_trainer(devices=1, strategy="auto", callbacks=[proof], max_steps=1)
    before = set(vars(trainer.strategy)), set(vars(trainer.precision_plugin))
    with pytest.raises(KeyError, match="no such entry"):
        trainer.fit(Failing(), DataLoader(token_pairs(), 4))
    assert (set(vars(trainer.strategy)), set(vars(trainer.precision_plugin))) == before
    assert proof.report is None


def test_one_device_is_equal() -> None:
    proof = FirstStepProof(on_difference="raise")
    fit(PlainModule(), "auto", 1, [proof])
    assert proof.report is not None
    assert proof.report.equal
    assert "SingleDeviceStrategy on 1 rank equals" in str(proof.report)


RUN = """
model: tests.support.models.other_strategies.{model}
data: tests.support.models.other_strategies.Pairs
trainer: {{accelerator: cpu, devices: 2, strategy: {strategy}}}
"""


def on_ranks(make: Any, sizes: Any, *, timeout: float, body: Any) -> list[Any]:
    """What processes of ``verify`` give, on ranks that are there already."""
    return run_ranks(run_body, sizes.world_size, body, make, sizes, timeout=timeout)


def run_body(rank: int, world: int, body: Any, make: Any, sizes: Any) -> Any:
    return body(make, sizes, rank)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
@pytest.mark.parametrize(
    ("strategy", "model", "said"),
    [
        (
            "{class_path: tests.support.models.other_strategies.CPUFSDPStrategy}",
            "PlainModule",
            "the first step of CPUFSDPStrategy on 2 ranks equals that of one process",
        ),
        ("ddp", "Normalizing", "Likely cause: BatchNorm: net.statistics"),
        (
            "{class_path: ModelParallelStrategy}",
            "PlainModule",
            "not equal: the run failed: TypeError",
        ),
    ],
)
def test_verify_takes_any_strategy(
    strategy: str,
    model: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first one in processes of its own, as a user has it."""
    config = tmp_path / "run.yaml"
    config.write_text(RUN.format(strategy=strategy, model=model))
    if "equals" not in said:
        monkeypatch.setattr(processes, "run_ranks", on_ranks)
    status, out, _ = command(monkeypatch, capsys, "verify", f"--config={config}")
    assert said in out
    assert status == (0 if "equals" in said else 1)


@ranks(2)
@pytest.mark.parametrize("name", STRATEGIES)
def test_groups_can_be_made_afterwards(rank: int, world: int, name: str) -> None:
    """torch numbers groups on each rank: one that rank 0 makes alone lets later ones wait."""
    proof = FirstStepProof()
    for _ in range(2):
        module = PlainModule()
        module = divided(module) if name.startswith("ModelParallel") else module
        fit(module, strategy_named(name), world, [proof])
    # Ranks keep groups for later tests; no other one makes some like it.
    dist.all_reduce(torch.ones(()), group=dist.new_group(timeout=timedelta(seconds=37)))
