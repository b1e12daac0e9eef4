"""A few training steps of a user's module, with everything that another layout has to reproduce."""

import functools
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par.engine.batch import batch_size, split_batch
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.step.pipelined_step import loss_of
from lightning_par.verification.determinism import DoublePrecision
from lightning_par.verification.eval_mode import WithoutDropout
from lightning_par.verification.layouts import strategy_at

__all__ = ["Subject", "Trace", "describe_error", "trace_steps"]

_LOSS = "verified_loss"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is verified.

    Attributes:
        module: The user's; used once, since training changes it.
        batches: Whole ones, of all replicas; one for every step.
        strategy: Of the user.
    """

    module: pl.LightningModule
    batches: Sequence[Any]
    strategy: MeshStrategy


@dataclass(kw_only=True)
class Trace:
    """What one rank saw.

    Attributes:
        losses: Of the whole batch, one per step.
        gradients: Before every optimizer step: FQN -> whole gradient, or None.
        weights: After every optimizer step: FQN -> whole weight.
        whole: FQNs of parameters that are not sharded.
        part_losses: Before the first step, for every part of its batch: samples and mean loss.
        dropouts: How many calls of dropout were passed over.
        draws: Whether the loss depends on random numbers all the same.
        unstyled: FQNs of parameters that no pattern of the plan's tensor styles matches.
        styles: FQN of a module -> its tensor-parallel style.
        ties: FQN of every parameter -> the one under which one process lists it.
        error: What the run ended with, if it did.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    whole: frozenset[str] = frozenset()
    part_losses: list[tuple[int, float]] = field(default_factory=list)
    dropouts: int = 0
    draws: bool = False
    unstyled: tuple[str, ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    error: str | None = None


class _Recorder(Callback):
    """Fills a trace while the Trainer runs."""

    def __init__(self, trace: Trace, first: Any, parts: tuple[int, int]) -> None:
        self._trace, self._first, self._parts = trace, first, parts

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what is known of the layout, and the losses of the parts of the first batch."""
        trace, strategy = self._trace, trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        named = dict(pl_module.named_parameters())
        layout = strategy.parallel_model.resolved
        trace.styles = {fqn: str(style) for fqn, style in layout.styles.items()}
        trace.ties = dict(layout.canonical)
        trace.whole = frozenset(n for n, p in named.items() if not isinstance(p, DTensor))
        trace.whole |= {n for n, p in named.items() if isinstance(p, DTensor) and not _shards(p)}
        trace.unstyled = tuple(n for n in named if n.rpartition(".")[0] not in layout.styles)
        if strategy.sizes.world_size == 1:
            with _silent_logs(pl_module), torch.no_grad(), torch.random.fork_rng(devices=[]):
                self._probe(pl_module)

    def _probe(self, module: pl.LightningModule) -> None:
        replicas, micro_batches = self._parts
        for part in split_batch(self._first, replicas):
            for micro_batch in split_batch(part, micro_batches):
                loss = float(loss_of(module.training_step(micro_batch, 0)))
                self._trace.part_losses.append((batch_size(micro_batch), loss))
        seen = set()
        for seed in (1, 2):
            torch.manual_seed(seed)
            seen.add(float(loss_of(module.training_step(self._first, 0))))
        self._trace.draws = len(seen) > 1

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Keep the gradients; all ranks gather in the same order."""
        found = {n: _whole(p.grad) for n, p in pl_module.named_parameters()}
        self._trace.gradients.append(found)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Keep loss and weights."""
        self._trace.losses.append(float(trainer.callback_metrics[_LOSS]))
        held = {n: _whole(p.detach()) for n, p in pl_module.named_parameters()}
        self._trace.weights.append({n: w for n, w in held.items() if w is not None})


def _shards(parameter: DTensor) -> bool:
    return any(not p.is_replicate() for p in parameter.placements)


def _whole(value: Tensor | None) -> Tensor | None:
    if isinstance(value, DTensor):
        if not _shards(value):
            return value.to_local().clone()  # of this rank: another one's copy may differ
        value = value.full_tensor()
    return None if value is None else value.clone()


@contextmanager
def _silent_logs(module: pl.LightningModule) -> Iterator[None]:
    module.__dict__["log"] = module.__dict__["log_dict"] = lambda *_, **__: None
    try:
        yield
    finally:
        del module.__dict__["log"], module.__dict__["log_dict"]


def _logging(module: pl.LightningModule) -> Callable[..., Any]:
    """Return the module's training step, which also logs its loss."""
    step = module.training_step

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        module.log(_LOSS, loss_of(output).detach(), sync_dist=True)
        return output

    return training_step


def trace_steps(
    subject: Subject,
    sizes: ParallelSizes,
    rank: int,
    *,
    parts: tuple[int, int] = (1, 1),
    dropout: bool = False,
) -> Trace:
    """Train one step on every batch, in float64, and say what happened on this rank.

    Args:
        subject: Changed.
        sizes: Of the mesh, whose process group exists.
        rank: Of this process.
        parts: Into how many parts, and each of these again, the first batch is cut for
            `Trace.part_losses`.
        dropout: Whether dropout draws.
    """
    trace = Trace()
    module = subject.module
    module.training_step = _logging(module)  # type: ignore[method-assign]
    replica = sizes.data_rank(rank)
    own = [_part_of(batch, sizes.data, replica) for batch in subject.batches]
    still = WithoutDropout()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=sizes.world_size,
            strategy=strategy_at(subject.strategy, sizes),
            precision="64-true",
            max_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_Recorder(trace, subject.batches[0], parts)],
        )
        stack.enter_context(DoublePrecision())
        if not dropout:
            stack.enter_context(still)
        try:
            trainer.fit(module, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
        except Exception as error:
            trace.error = describe_error(error)
    trace.dropouts = still.calls
    return trace


def describe_error(error: BaseException) -> str:
    """Return kind, text and place of an error in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).splitlines()
    first = text[0] if text else ""
    return f"{type(error).__name__}: {first} ({Path(place.filename).name}:{place.lineno})"


def _part_of(batch: Any, replicas: int, replica: int) -> Any:
    return split_batch(batch, replicas)[replica]
