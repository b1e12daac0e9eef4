"""Private names of Lightning; the only module here that imports it.

============================  ===============================================================
`CLIP_GRADIENTS`              name of the method of a precision plugin between a closure and
                              `configure_gradient_clipping`, which no hook of a strategy reaches
`SubprocessScriptLauncher`    the launcher that starts a script once per device; a strategy that
                              wants to act before and after it has to derive from it. Its
                              `_call_children_scripts` starts the processes
`TunerExit`                   raised to leave `Trainer.fit` early on purpose; no failure
`compute_dtype`               dtype that a precision plugin computes in, as Lightning's own
                              `ThroughputMonitor` finds it
`init_process_group`          make the default process group from a cluster environment, with its
                              messages and its clean-up
`plain_after_closure`         what every precision plugin does between closure and step, for one
                              that adds to it
============================  ===============================================================
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.optim import Optimizer

from lightning_par.upstream.presence import names_of

with names_of("lightning"):
    from lightning.fabric.utilities.distributed import _init_dist_connection
    from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
    from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.utilities.exceptions import _TunerExitException

    CLIP_GRADIENTS = Precision._clip_gradients.__name__
    plain_after_closure = Precision._after_closure
    # Called by, or overridden in, classes of ours: a Lightning that renames one would not call it.
    _HOOKS = (
        _SubprocessScriptLauncher._call_children_scripts,
        Strategy._configure_launcher,
    )

__all__ = [
    "CLIP_GRADIENTS",
    "SubprocessScriptLauncher",
    "TunerExit",
    "after_closure",
    "callbacks_of",
    "compute_dtype",
    "forget_trainer",
    "init_process_group",
    "is_accumulating",
    "is_logging_step",
    "launch_scripts",
    "leave_samplers",
    "loaders_of_loop",
    "next_of_fit",
    "noting_batches",
    "plain_after_closure",
    "predictions_of",
    "set_launcher",
    "synchronizes_batchnorm",
    "trainer_of",
    "unnoted_batches",
    "uses_distributed_sampler",
    "view_data_hooks",
]

SubprocessScriptLauncher = _SubprocessScriptLauncher
TunerExit = _TunerExitException
compute_dtype = _plugin_to_compute_dtype
init_process_group = _init_dist_connection


def after_closure(plugin: Precision, module: pl.LightningModule, optimizer: Optimizer) -> None:
    """Do what follows a backward: call `on_before_optimizer_step`, then clip the gradients.

    A precision plugin with an `optimizer_step` of its own has to call it; Lightning's own do.
    """
    plugin._after_closure(module, optimizer)


def is_logging_step(trainer: pl.Trainer) -> bool:
    """Whether metrics of this step go to the loggers, by `Trainer.log_every_n_steps`.

    It counts batches that stepped, also over a restart; no public counter does.
    """
    with names_of("lightning"):
        return bool(trainer._logger_connector.should_update_logs)


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Whether the optimizer does not step after this batch.

    It depends on `accumulate_grad_batches` and on which batch is the last one of the epoch, which
    only the loop knows.
    """
    with names_of("lightning"):
        should_accumulate = trainer.fit_loop._should_accumulate
    return bool(should_accumulate())


def next_of_fit(trainer: pl.Trainer) -> tuple[list[Any], list[object]]:
    """Return the batches that a fit has fetched and not used, and what its next ones come from.

    Only looks; both are empty outside of a fit, and where the step fetches its batches itself.

    Returns:
        Batches, as loaders gave them, and the iterators of all loaders that are in use.
    """
    with names_of("lightning"):
        fetcher: Any = trainer.fit_loop._data_fetcher
    if not hasattr(fetcher, "batches"):
        return [], []
    with names_of("lightning"):
        iterators = fetcher.combined_loader._iterator.iterators
    return [batch for batch, *_ in fetcher.batches], list(iterators)


def view_data_hooks(trainer: pl.Trainer, view: Callable[[], AbstractContextManager[None]]) -> None:
    """Let `view` surround the hooks that return loaders, in every loop of a Trainer."""

    def viewed(source: Any) -> Callable[[], Any]:
        def dataloader() -> Any:
            with view():
                return type(source).dataloader(source)

        return dataloader

    with names_of("lightning"):
        fit = trainer.fit_loop
        loops: Any = fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
        for source in [loop._data_source for loop in (*loops, trainer.predict_loop)]:
            source.dataloader = viewed(source)


def leave_samplers(trainer: pl.Trainer) -> None:
    """Let Lightning put no distributed sampler into loaders: the strategy divides their samples.

    By `is_distributed` of a strategy it would also leave out reductions of what is logged.
    """
    with names_of("lightning"):
        connector: Any = trainer._data_connector
        _ = connector._requires_distributed_sampler
    connector._requires_distributed_sampler = _requires_none


def _requires_none(_: object) -> bool:
    return False


def loaders_of_loop(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of the loop that runs, or is set up; empty before."""
    with names_of("lightning"):
        loop: Any = trainer._active_loop
        combined = None if loop is None else loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def predictions_of(trainer: pl.Trainer) -> list[list[Any]]:
    """Return the predictions of every loader so far, if the Trainer returns them; else nothing.

    These lists are what it returns.
    """
    with names_of("lightning"):
        loop = trainer.predict_loop
        return loop._predictions if loop.return_predictions else []


def unnoted_batches(batch_sampler: Any) -> Any:
    """Return a batch sampler without what notes its batches for writers of predictions."""
    if not isinstance(batch_sampler, _IndexBatchSamplerWrapper):
        return batch_sampler
    with names_of("lightning"):
        return batch_sampler._batch_sampler


def noting_batches(batch_sampler: Any) -> Any:
    """Return a batch sampler whose batches are noted for writers of predictions."""
    return _IndexBatchSamplerWrapper(batch_sampler)


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Whether Lightning puts its distributed sampler into loaders (`use_distributed_sampler`).

    The Trainer takes the option and does not give it back.
    """
    with names_of("lightning"):
        return bool(trainer._accelerator_connector.use_distributed_sampler)


def synchronizes_batchnorm(strategy: Strategy) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True``, which it tells its strategy only.

    Args:
        strategy: Those that are not parallel are never told.
    """
    if not isinstance(strategy, ParallelStrategy):
        return False
    with names_of("lightning"):
        return strategy._layer_sync is not None


def callbacks_of(trainer: pl.Trainer) -> list[Any]:
    """Return the list of a Trainer's callbacks, which Lightning does not declare on its class."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def trainer_of(module: pl.LightningModule | None) -> pl.Trainer | None:
    """Return the Trainer of a module, None if it has none; `LightningModule.trainer` raises."""
    if module is None:
        return None
    with names_of("lightning"):
        return module._trainer


def forget_trainer(module: pl.LightningModule) -> None:
    """Detach `module` from its Trainer, and not its children.

    ``module.trainer = None`` would detach those as well, which a shallow copy shares with its
    original.
    """
    with names_of("lightning"):
        _ = module._trainer
    module._trainer = None


def set_launcher(strategy: Strategy, launcher: Any) -> None:
    """Give a strategy its launcher, in its `_configure_launcher`.

    `Strategy.launcher` can only be read.
    """
    with names_of("lightning"):
        _ = strategy._launcher
    strategy._launcher = launcher


def launch_scripts(launcher: SubprocessScriptLauncher) -> None:
    """Start the script of this process once for every other device of the node."""
    launcher._call_children_scripts()
