"""Host offload inside Lightning: when gradients are sent to the host, when updates are complete."""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_par.engine.offload.adam import check_optimizer
from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.engine.offload.offload_state import OffloadState
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.averaging_checks import averaging_callbacks
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.precision import MasterWeightPrecision
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.lightning import callbacks_of, hook_calls

__all__ = ["HostOffload", "cache_folder", "is_offloaded", "offload_precision"]

_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
"""Hooks of modules and callbacks in which gradients are read or changed."""
_OF_MODULES = ("backward", "configure_gradient_clipping", "optimizer_step")
"""The same of modules alone."""
_SEE_UPDATES = ("on_validation_start", "on_train_end")
"""Hooks that find pending updates complete; Lightning calls the strategy's own after them."""


def cache_folder() -> Path:
    """Return where compiled kernels are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_par"


def _without_delay(options: OffloadOptions, trainer: pl.Trainer) -> OffloadOptions:
    """Return options that let callbacks average, between steps, the weights after each step."""
    names = sorted({type(callback).__name__ for callback in averaging_callbacks(trainer)})
    # `is False`: the delay may be the number 0.
    if options.delayed_update is False or not names:
        return options
    rank_zero_warn(
        f"delayed_update={options.delayed_update} has no effect with {' and '.join(names)}, which "
        "averages weights after each step and therefore waits for each update."
    )
    return replace(options, delayed_update=False)


def offload_precision(options: OffloadOptions | None, plugin: Precision) -> Precision:
    """Return the precision plugin: where a part of the optimizer stays on the device, that part
    keeps float32 masters, too.

    Args:
        options: None: nothing is offloaded.
        plugin: What the Trainer was given.
    """
    # The host keeps masters of its part: a device that updates 16-bit weights in place would
    # round the rest.
    is_divided = options is not None and options.offload_fraction < 1
    return MasterWeightPrecision() if is_divided and type(plugin) is HalfPrecision else plugin


def is_offloaded(
    module: pl.LightningModule,
    optimizers: Sequence[Optimizer],
    options: OffloadOptions | None,
    device: torch.device,
) -> bool:
    """Return whether the optimizer of a run is to be moved to the host.

    On the CPU it is there. If it steps in a way that no kernel computes, it is left as it is,
    unless options ask for more than its place.

    Args:
        module: The user's module.
        optimizers: What its `configure_optimizers` gave.
        options: What is to be offloaded, and how; None: nothing is.
        device: Device of this rank.

    Raises:
        ConfigurationError: The module steps its optimizer by itself, or it is no Adam.
    """
    if options is None:
        return False
    # On the CPU a run without offloading steps the same optimizer in the same memory.
    try:
        _check_steps(module, optimizers)
    except ConfigurationError:
        # Of a dataclass, the delay 0 (from the first step on) equals the default False.
        asks_more = options != OffloadOptions() or options.delays(0)
        if device.type != "cpu" or asks_more:
            raise
        rank_zero_info(
            "The Trainer runs on the CPU, where the optimizer already is, so nothing is offloaded."
        )
        return False
    return True


def _hooks_on_gradients(module: pl.LightningModule) -> Iterator[str]:
    """Yield the hooks of the user's that may read or change gradients before the step."""
    for name in (*_SEE_GRADIENTS, *_OF_MODULES):
        if is_overridden(name, module, pl.LightningModule):
            yield f"{type(module).__name__}.{name}"
    for callback in callbacks_of(module.trainer):
        kind = type(callback)
        # Callbacks of ours know where gradients are.
        if kind.__module__.startswith("lightning_par."):
            continue
        found = (n for n in _SEE_GRADIENTS if is_overridden(n, callback, pl.Callback))
        yield from (f"{kind.__name__}.{name}" for name in found)


def _check_steps(module: pl.LightningModule, optimizers: Sequence[Optimizer]) -> None:
    if not module.automatic_optimization:
        raise ConfigurationError(
            "LP604",
            f"{type(module).__name__} uses manual optimization, but an optimizer can be offloaded "
            "only if Lightning calls its step. Set automatic_optimization=True, or use a strategy "
            "without offloading.",
        )
    (optimizer,) = optimizers
    check_optimizer(optimizer)


class HostOffload:
    """The optimizer of a run on the host; made with the optimizer, and closed before the next.

    Args:
        model: The model on its mesh; its gradients are sent to the host from now on.
        optimizers: The user's only optimizer, whose step the host makes; see `is_offloaded`.
        options: The options of the strategy, with those of offloading.
        device: Device of this rank.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        options: MeshOptions,
        device: torch.device,
    ) -> None:
        module, offload = model.module, options.offload_options
        assert offload is not None
        (optimizer,) = optimizers
        offload = _without_delay(offload, module.trainer)
        self._model, self._ignores_nonfinite = model, options.on_nonfinite == "ignore"
        self._options, self._device = offload, device
        self._move(optimizer)
        self._opened = ExitStack()
        if offload.delayed_update is not False:
            # Lightning calls callbacks before the strategy's own hook: replaced, so that a
            # callback that reads weights finds the pending update done.
            caller = hook_calls["callbacks"]
            call = partial(self._call_hooks, getattr(*caller))
            self._opened.enter_context(replaced(*caller, call))
        seen = list(_hooks_on_gradients(module))
        if seen:
            on_device = offload.accumulate_on == "device"
            rank_zero_info(
                "Gradients are copied to the CPU only at the optimizer step, since "
                f"{' and '.join(seen)} may read them before. Until then the device holds all "
                "gradients" + ("." if on_device else ", and accumulate_on='host' has no effect.")
            )

    def _move(self, optimizer: Optimizer) -> None:
        """Let the host make the steps of an optimizer from now on."""
        model, offload, device = self._model, self._options, self._device
        # Every micro-batch adds to a gradient: none is final before the last one's backward.
        # With a pipeline, overlap is off: see below.
        pipeline = model.steps.pipeline
        kernel = choose_kernel(offload.cpu_kernel, cache_folder())
        rank_zero_info(
            f"The optimizer steps are computed on the CPU, with the kernel {kernel.name!r}."
        )
        self._optimizer = optimizer
        self._host = model.gradients.host = HostOptimizer(
            optimizer,
            device=device,
            options=offload if pipeline is None else replace(offload, overlap="off"),
            worker=UpdateWorker(kernel, torch.get_num_threads(), device),
            late=model.gradients.reduced_late,
            unsure=() if model.sharding.absent is None else model.sharding.absent.filled,
        )
        # A hook that reads gradients has to find them on the device.
        self._host.defers = any(True for _ in _hooks_on_gradients(model.module))

    def _follow(self, optimizer: Optimizer) -> None:
        """Move the optimizer that user code has put in the place of the one that is moved."""
        if optimizer is self._optimizer:
            return
        if self._host.state not in (OffloadState.IDLE, OffloadState.DELAYED):
            raise ConfigurationError(
                "LP604",
                "a hook has replaced an optimizer in trainer.optimizers between two accumulated "
                "batches of one step, but the CPU memory already holds gradients for the old "
                "optimizer. Replace the optimizer after the step, or use a strategy without "
                "offloading.",
            )
        _check_steps(self._model.module, [optimizer])
        self._host.close()
        self._move(optimizer)

    @classmethod
    def of_run(
        cls,
        model: ParallelModel,
        optimizers: Sequence[Optimizer],
        options: MeshOptions,
        device: torch.device,
    ) -> "HostOffload | None":
        """Return the optimizer of a run on the host; None if it stays where it is."""
        if not is_offloaded(model.module, optimizers, options.offload_options, device):
            return None
        return cls(model, optimizers, options, device)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Surrounds a batch that is not the last one of its step."""
        if self._host.accumulates:
            with self._host.accumulating():
                yield
        else:
            with self._model.sharding.no_sync():
                yield

    def before_backward(self) -> None:
        """Prepare for a backward whose gradients are sent to the host."""
        # Gradients of this backward stay local and are not final.
        if not self._model.sharding.synchronizes:
            return
        trainer = self._model.module.trainer
        clips = trainer.gradient_clip_val
        by_value = bool(clips) and trainer.gradient_clip_algorithm == "value"
        self._host.begin(
            trainer.global_step,
            # An update may start before the backward ends if it needs no other gradient.
            streams=self._ignores_nonfinite
            and not self._host.defers
            and self._model.gradients.scaler is None
            and (not clips or by_value),
            largest=float(clips or 0) if by_value and not self._host.defers else float("inf"),
        )

    def complete(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure of an optimizer's step after which every gradient is on its way."""
        self._follow(optimizer)

        def completed() -> Any:
            result = closure()
            # Its loss was None: a hook of the gradients never came, and the step would wait for
            # them.
            if self._host.has_unfinished_gradients:  # the last batch of a step had no backward
                self.before_backward()
                self._model.gradients.after_backward()
            return result

        return completed

    def flush(self) -> None:
        """Complete every update that was computed behind a step."""
        self._host.flush()

    def _call_hooks(self, inner: Any, trainer: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a hook of all callbacks as Lightning does, which calls the module's after them."""
        if name in _SEE_UPDATES and trainer is self._model.module.trainer:
            self.flush()
        return inner(trainer, name, *args, **kwargs)

    def close(self) -> None:
        """Complete every update and give the host's memory up."""
        # First Lightning's own function is put back, then nobody sends gradients any more.
        self._opened.close()
        self._model.gradients.host = None
        self._host.close()
