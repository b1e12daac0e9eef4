"""The law of every strategy: the same loss, gradients and weights as one process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import full_tensors
from lightning_par.engine.tensor_tree import to_cpu
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.step.absent_parameter import AbsentParameter
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.one_gpu import on_cuda
from tests.support.ranks.api import run_ranks

Result = dict[str, Any]

ACCELERATOR = "cuda" if on_cuda() else "cpu"
TOLERANCE = 1e-10  # float64: sums in another order differ by about 1e-15 a step


class Recorder(Callback):
    """Keeps loss and whole gradients of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.is_late = False
        self.gradients: list[dict[str, Tensor | None]] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.states: dict[str, tuple[int, ...]] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """With an optimizer on the host, look at what its step has left: a hook before it would
        let gradients stay.
        """
        options = getattr(trainer.strategy, "options", None)
        if getattr(options, "offload_options", None) is not None:
            self.is_late = True
            nothing = MethodType(Callback.on_before_optimizer_step, self)
            vars(self)["on_before_optimizer_step"] = nothing

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note_gradients(pl_module)

    def _note_gradients(self, pl_module: Any) -> None:
        found = {name: p.grad for name, p in own_parameters(pl_module).items()}
        held = full_tensors(grad for grad in found.values() if grad is not None)
        self.gradients.append(
            {n: None if g is None else next(held).clone().cpu() for n, g in found.items()}
        )

    def note_late(self, trainer: Any, pl_module: Any) -> None:
        """Note what a step of the host has left."""
        if self.is_late and not trainer.fit_loop._should_accumulate():
            self._note_gradients(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note_late(trainer, pl_module)
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note what this rank holds; after the run it holds the whole module."""
        self.shapes = _local_shapes(own_parameters(pl_module))
        self.states = _local_shapes(_momenta(pl_module, trainer.optimizers[0]))


def quiet_trainer(*, proves: bool = False, **options: Any) -> pl.Trainer:
    """A Trainer that trains and does nothing else.

    Args:
        proves: Whether a strategy that is left to choose proves its first step, which takes longer
            than the step of a small model.
        options: Of the Trainer.
    """
    strategy = options.get("strategy")
    if isinstance(strategy, MeshStrategy) and strategy.options.verify == "auto" and not proves:
        strategy.options = replace(strategy.options, verify=False)
    quiet = {
        "accelerator": ACCELERATOR,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**{**quiet, **options})


def train(
    strategy: Any,
    *,
    devices: int,
    batch_size: int,
    size: int = 10,
    ignored: bool = False,
    module: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    proves: bool = False,
) -> Result:
    """Run one epoch, by default 3 batches in float64, and say what came out."""
    options = {"precision": "64-true", "max_epochs": 1, **(trainer or {})}
    if options["precision"] == "64-true":
        torch.set_default_dtype(torch.float64)
    recorder = Recorder()
    user = ToyModule(**(module or {}))
    made = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder, *callbacks],
        proves=proves,
        **options,
    )
    samples = ToyData(size, ignored)
    validation = loader(ToyData(4, ignored), batch_size)
    made.fit(user, loader(samples, batch_size), validation)
    state = getattr(made.strategy, "gather_state_dict", user.state_dict)()
    found: Result = to_cpu(
        {
            "losses": recorder.losses,
            "gradients": recorder.gradients,
            "weights": {k: v.detach().clone() for k, v in state.items()},
            "val_loss": float(made.callback_metrics["val_loss"]),
            "shapes": recorder.shapes,
            "states": recorder.states,
        }
    )
    return found


def _momenta(user: Any, optimizer: Any) -> dict[str, Tensor]:
    names = {id(p): name for name, p in user.named_parameters()}
    return {
        names[id(p)]: state.get("exp_avg", state.get("momentum_buffer"))
        for p, state in optimizer.state.items()
        if not isinstance(p, AbsentParameter)
    }


def own_parameters(module: Any) -> dict[str, Tensor]:
    """Return the parameters that this rank holds; a hook sees those of all stages."""
    named = module.named_parameters()
    return {name: p for name, p in named if not isinstance(p, AbsentParameter)}


def _local_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(t.to_local().shape if isinstance(t, DTensor) else t.shape)
        for name, t in tensors.items()
    }


def train_rank(rank: int, world: int, strategy: str, options: dict[str, Any], run: Any) -> Result:
    """Run `train` on one rank of a mesh."""
    import lightning_par

    kind = {
        "tensor_parallel": lightning_par.TensorParallelStrategy,
        "pipeline_1f1b": lightning_par.Pipeline1F1BStrategy,
        "sequence_ring": lightning_par.SequenceRingStrategy,
        "hybrid3d": lightning_par.Hybrid3DStrategy,
        "zero_offload": lightning_par.ZeROOffloadStrategy,
    }[strategy]
    return train(kind(**options), devices=world, **run)


@cache
def one_process(run: str) -> Result:
    """Run `train` here; `run` is the `repr` of its arguments, so that it can be a key."""
    try:
        return train("auto", devices=1, **eval(run))
    finally:
        torch.set_default_dtype(torch.float32)


def compare_with_one_process(
    strategy: str,
    options: dict[str, Any],
    world: int,
    replicas: int,
    *,
    callbacks: Sequence[Callback] = (),
    **run: Any,
) -> tuple[list[Result], Result]:
    """Run on `world` ranks, and in one process that sees the batches of all replicas.

    Args:
        strategy: Registered name.
        options: Of the strategy.
        world: Ranks.
        replicas: Among which the batches are divided.
        callbacks: Of the mesh only.
        run: Arguments of `train`; the batch size is that of the whole batch.
    """
    wanted = one_process(repr(run))
    part = {**run, "batch_size": run["batch_size"] // replicas, "callbacks": callbacks}
    results: list[Result] = run_ranks(train_rank, world, strategy, options, part, timeout=120)
    return results, wanted


def assert_parity(
    strategy: str,
    options: dict[str, Any],
    world: int,
    replicas: int,
    *,
    atol: float = TOLERANCE,
    rtol: float = 0,
    **run: Any,
) -> list[Result]:
    """Assert that every rank computes what one process does; gives what the ranks returned."""
    results, wanted = compare_with_one_process(strategy, options, world, replicas, **run)
    assert_results(results, wanted, atol=atol, rtol=rtol)
    return results


def assert_results(
    results: Sequence[Result], wanted: Result, *, atol: float = TOLERANCE, rtol: float = 0
) -> None:
    """Assert that what every rank returned from `train` is what one process returned."""
    close = {"rtol": rtol, "atol": atol, "equal_nan": True}
    assert len(wanted["gradients"]) >= 3
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["losses"], wanted["losses"], **close)
        torch.testing.assert_close(result["val_loss"], wanted["val_loss"], **close)
        assert len(result["gradients"]) == len(wanted["gradients"])
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for name, grad in got.items():
                tied = "model.embed.weight" if name not in want else name
                assert grad is not None, f"{name} has no gradient on rank {rank}"
                note = lambda m, n=name, r=rank: f"gradient of {n} on rank {r}: {m}"  # noqa: E731
                torch.testing.assert_close(grad, want[tied], **close, msg=note)
    seen = {name for r in results for g in r["gradients"][:1] for name in g}
    assert set(wanted["gradients"][0]) <= seen
    weights = results[0]["weights"]
    assert list(weights) == list(wanted["weights"])
    for name, weight in weights.items():
        note = lambda m, n=name: f"{n}: {m}"  # noqa: E731
        torch.testing.assert_close(weight, wanted["weights"][name], **close, msg=note)
