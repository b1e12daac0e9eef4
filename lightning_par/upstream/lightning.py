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
`hook_calls`                  by which module and name Lightning's loops call a hook of the module,
                              and one of the callbacks; a strategy is told of neither
`init_process_group`          make the default process group from a cluster environment, with its
                              messages and its clean-up
`plain_after_closure`         what every precision plugin does between closure and step, for one
                              that adds to it
============================  ===============================================================
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.optim import Optimizer

from lightning_par.upstream.presence import names_of

with names_of("lightning"):
    from lightning.fabric.utilities.distributed import _init_dist_connection
    from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
    from lightning.pytorch.trainer import call as _call
    from lightning.pytorch.utilities.exceptions import _TunerExitException

    CLIP_GRADIENTS = Precision._clip_gradients.__name__
    plain_after_closure = Precision._after_closure
    hook_calls = {
        "module": (_call, _call._call_lightning_module_hook.__name__),
        "callbacks": (_call, _call._call_callback_hooks.__name__),
    }
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
    "forget_loaders",
    "forget_trainer",
    "hook_calls",
    "init_process_group",
    "is_accumulating",
    "is_logging_step",
    "launch_scripts",
    "leave_samplers",
    "loaders_in_use",
    "next_of_fit",
    "noted_batches",
    "plain_after_closure",
    "set_launcher",
    "synchronizes_batchnorm",
    "trainer_of",
    "uses_distributed_sampler",
    "view_data_hooks",
]

_CHOSEN = "lightning_par_divides_samples"
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


def loaders_in_use(loop: Any) -> tuple[Any, bool]:
    """Return the nest of the loaders of a loop that runs, and whether a batch comes of several.

    `Trainer.train_dataloader` and the like do not tell how `CombinedLoader` combines them. A loop
    that does not run, as in `on_fit_end`, has none.
    """
    with names_of("lightning"):
        fetcher: Any = loop._data_fetcher
    if fetcher is None:
        return [], False
    with names_of("lightning"):
        iterators = fetcher.combined_loader._iterator.iterators
    return fetcher.combined_loader.iterables, len(iterators) > 1


def forget_loaders(loop: Any, given: Sequence[Any]) -> None:
    """Let the loop of training prepare its loaders anew; it has prepared `given`."""
    for name, held in list(vars(loop).items()):
        if isinstance(held, CombinedLoader):
            # One of the user's is changed in place, and the loop may get it again.
            held.flattened = list(given)
            setattr(loop, name, None)


def view_data_hooks(trainer: pl.Trainer, view: Callable[[], AbstractContextManager[None]]) -> None:
    """Let `view` surround the hooks that return loaders, in every loop of a Trainer."""
    fit = trainer.fit_loop
    loops = fit, fit.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
    for loop in (*loops, trainer.predict_loop):
        for part in vars(loop).values():
            # `_DataLoaderSource` of each loop; the class's own method is called, so that views do
            # not pile up.
            if hasattr(part, "dataloader") and hasattr(part, "is_module"):  # its source of data
                part.dataloader = _ViewedSource(part, view)


@dataclass(frozen=True, eq=False)
class _ViewedSource:
    """Calls a hook that returns loaders in a view; a copy, also by pickle, is the hook itself.

    Attributes:
        source: A `_DataLoaderSource`.
        view: Surrounds the call.
    """

    source: Any
    view: Callable[[], AbstractContextManager[None]]

    def __call__(self) -> Any:
        with self.view():
            return type(self.source).dataloader(self.source)

    def __reduce__(self) -> Any:
        return getattr, (self.source, "dataloader")


def leave_samplers(trainer: pl.Trainer) -> None:
    """Let Lightning put no distributed sampler into loaders: the strategy divides their samples.

    By `is_distributed` of a strategy it would also leave out reductions of what is logged.
    """
    with names_of("lightning"):
        connector: Any = trainer._accelerator_connector
    # `setdefault`: called again, it would take its own False for the user's choice.
    vars(connector).setdefault(_CHOSEN, connector.use_distributed_sampler)
    connector.use_distributed_sampler = False


def uses_distributed_sampler(trainer: pl.Trainer) -> bool:
    """Whether the samples of loaders are to be divided (`use_distributed_sampler`).

    The Trainer takes the option and does not give it back.
    """
    with names_of("lightning"):
        connector = trainer._accelerator_connector
    return bool(getattr(connector, _CHOSEN, connector.use_distributed_sampler))


def synchronizes_batchnorm(strategy: Strategy) -> bool:
    """Whether the Trainer was given ``sync_batchnorm=True``, which it tells its strategy only.

    Args:
        strategy: Those that are not parallel are never told.
    """
    if not isinstance(strategy, ParallelStrategy):
        return False
    with names_of("lightning"):
        return strategy._layer_sync is not None


def noted_batches(sampler: Any) -> Any:
    """Return the batch sampler inside of the one by which Lightning notes batches in prediction."""
    with names_of("lightning"):
        return sampler._batch_sampler


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
