"""Trace of a few training steps on one rank, comparable across meshes."""

import functools
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_par.checkpoint.progress import advance
from lightning_par.dtensor import full_tensors
from lightning_par.engine.batch import split_batch
from lightning_par.errors import LightningParError
from lightning_par.observe.modes import DoublePrecision, WithoutDropout
from lightning_par.observe.report import StepRecord
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import Hybrid3DStrategy
from lightning_par.strategies.proof.causes import StepReport
from lightning_par.strategies.step.pipelined_step import loss_of
from lightning_par.strategies.step.step_traces import logs_off

__all__ = ["Subject", "Trace", "describe_error", "trace_steps"]

_LOSS_KEY = "verified_loss"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Module, data and strategy that are verified.

    Attributes:
        module: The user's LightningModule; used for one run, since training changes it.
        batches: Global batches (of all replicas together), one per step.
        strategy: The user's strategy.
    """

    module: pl.LightningModule
    batches: Sequence[Any]
    strategy: MeshStrategy


@dataclass(kw_only=True)
class Trace:
    """What a run did on one rank.

    Attributes:
        steps: Record of every step: the loss of the global batch; the gradients before every
            optimizer, and the weights after the step, gathered over the shards.
        whole: FQNs of the parameters that are not sharded.
        dropouts: Number of dropout calls that were skipped.
        draws: Whether the loss depends on the seed although dropout is off; on one process only.
        unstyled: FQNs of the parameters that no pattern of the plan's tensor styles matches.
        styles: FQN of a module -> its tensor style.
        ties: FQN of every parameter -> FQN under which one process lists it (tied weights).
        report: What came out of the proof of another strategy's step.
        error: Error with which the run ended; None: it finished.
    """

    steps: list[StepRecord] = field(default_factory=list)
    whole: frozenset[str] = frozenset()
    dropouts: int = 0
    draws: bool = False
    unstyled: tuple[str, ...] = ()
    styles: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    report: StepReport | None = None
    error: str | None = None


class _Recorder(Callback):
    """Callback that fills a trace."""

    def __init__(self, trace: Trace, first_batch: Any) -> None:
        self._trace, self._first_batch = trace, first_batch
        self._step = StepRecord()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the sharding, and on one process whether the loss depends on the seed."""
        trace, strategy = self._trace, trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        named = dict(pl_module.named_parameters())
        resolved = strategy.parallel_model.resolved
        trace.styles = {fqn: str(style) for fqn, style in resolved.styles.items()}
        trace.ties = dict(resolved.canonical)
        trace.whole = frozenset(n for n, p in named.items() if not _is_sharded(p))
        trace.unstyled = tuple(n for n in named if n.rpartition(".")[0] not in resolved.styles)
        if strategy.sizes.world_size == 1:
            trace.draws = self._draws(pl_module)

    def _draws(self, module: pl.LightningModule) -> bool:
        # Two seeds, one loss: then nothing in the step draws random numbers.
        seen = set()
        # fork_rng: the extra steps must not move the random state that training starts from.
        with logs_off(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            for seed in (1, 2):
                torch.manual_seed(seed)
                seen.add(float(loss_of(module.training_step(self._first_batch, 0))))
        return len(seen) > 1

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Record the gradients; a collective, in the same order on all ranks."""
        found = ((n, p.grad) for n, p in pl_module.named_parameters())
        # As the backward left them: Lightning clips after this hook.
        self._step.gradients.append(_full_copies({n: g for n, g in found if g is not None}))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Record loss and weights."""
        # Reduced over the replicas by `sync_dist`, so that ranks show the same.
        self._step.losses.append(float(trainer.callback_metrics[_LOSS_KEY]))
        self._step.state = _full_copies(dict(pl_module.named_parameters()))
        self._trace.steps.append(self._step)
        self._step = StepRecord()
        advance("steps")


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def _full_copies(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, gathered over their shards.

    Of one that is not sharded, it is this rank's copy: whether those of other ranks are equal is
    what we verify.
    """
    own = [
        # No DTensor any more, so that `full_tensors` makes no collective of it.
        tensor.to_local() if isinstance(tensor, DTensor) and not _is_sharded(tensor) else tensor
        for tensor in named.values()
    ]
    return {name: full.clone() for name, full in zip(named, full_tensors(own), strict=True)}


def _with_logged_loss(module: pl.LightningModule) -> Callable[..., Any]:
    """Return the module's training step, wrapped to log its loss under our key."""
    step = module.training_step

    @functools.wraps(step)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        module.log(_LOSS_KEY, loss_of(output).detach(), sync_dist=True)
        return output

    return training_step


def trace_steps(
    subject: Subject,
    sizes: ParallelSizes,
    rank: int,
    *,
    dropout: bool = False,
) -> Trace:
    """Train one step per batch, in float64, and return the trace of this rank.

    Args:
        subject: Module, batches and strategy; the module is trained.
        sizes: Mesh sizes; with more than one rank, the process group is initialized.
        rank: Global rank of this process.
        dropout: Whether dropout is active.

    Returns:
        The trace; an exception of the run is its `error`, and is not raised.
    """
    trace = Trace()
    module = subject.module
    # On the object: the class is the user's.
    module.training_step = _with_logged_loss(module)  # type: ignore[method-assign]
    replica = sizes.data_rank(rank)
    own = [split_batch(batch, sizes.data)[replica] for batch in subject.batches]
    no_dropout = WithoutDropout()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        # Lightning's advice on loaders and loggers is for real runs.
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=sizes.world_size,
            strategy=_strategy_at(subject.strategy, sizes),
            precision="64-true",
            max_epochs=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # `own` is this replica's part already
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[_Recorder(trace, subject.batches[0])],
        )
        # On both sides, so that rounding of float32 hides no mistake.
        stack.enter_context(DoublePrecision())
        if not dropout:
            stack.enter_context(no_dropout)
        try:
            trainer.fit(module, DataLoader(own, batch_size=None))  # type: ignore[arg-type]
        # Kept: a run that fails on one layout is a finding.
        except Exception as error:
            trace.error = describe_error(error)
    trace.dropouts = no_dropout.calls
    return trace


def _strategy_at(strategy: MeshStrategy, sizes: ParallelSizes) -> MeshStrategy:
    """Return a new strategy with the options of another one and other mesh sizes.

    Options that hold for the user's own sizes only, such as `stage_blocks`, are left out where they
    do not fit.
    """
    asked, options = strategy.options, dict[str, Any]()
    if sizes.pipeline > 1:
        options["schedule"] = asked.schedule
        options["virtual_pipeline_size"] = asked.virtual_pipeline_size
        options["num_microbatches"] = asked.num_microbatches
    blocks = asked.stage_blocks
    if blocks is not None and len(blocks) == sizes.pipeline > 1:
        options["stage_blocks"] = blocks
    if sizes.context > 1:
        options["context_options"] = asked.context_options
    return Hybrid3DStrategy(
        tensor_parallel_size=sizes.tensor,
        pipeline_parallel_size=sizes.pipeline,
        context_parallel_size=sizes.context,
        data_parallel_size=sizes.data,
        expert_parallel_size=sizes.expert,
        zero_stage=asked.zero_stage,
        sequence_parallel=asked.sequence_parallel,
        plan=asked.plan,
        on_nonfinite="ignore",
        verify=False,  # a difference shall be looked into, not end the run
        **options,
    )


def describe_error(error: BaseException) -> str:
    """Return the type, the text and the place of an error in one line; of errors that are not of
    this package, the first line of the text.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    lines = str(error).splitlines()[: None if isinstance(error, LightningParError) else 1]
    text = " ".join(line.strip() for line in lines)
    return f"{type(error).__name__}: {text} ({Path(place.filename).name}:{place.lineno})"
