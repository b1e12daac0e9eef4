"""Offloading inside Lightning: when gradients leave, when updates are complete."""

import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine.grad_scaler import MeshGradScaler
from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import check_optimizer, HostOptimizer
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.components.checkpoint_load import CheckpointedProcesses
from lightning_par.strategies.setup.precision import MasterWeightPrecision

__all__ = ["OffloadedProcesses", "cache_folder"]

_log = logging.getLogger(__name__)
_SEE_GRADIENTS = ("configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step")


def cache_folder() -> Path:
    """Return where compiled kernels are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lightning_par"


class OffloadedProcesses(CheckpointedProcesses):
    """Moves the optimizer to the host, if that is asked for.

    Args:
        offload: How; None: the optimizer is where the parameters are.
        **options: Those of `CheckpointedProcesses`.
    """

    on_nonfinite: str
    zero_stage: int

    def __init__(self, *, offload: OffloadOptions | None, **options: Any) -> None:
        super().__init__(**options)
        self.offload_options = offload

    @override
    def setup_environment(self) -> None:
        options, plugin = self.offload_options, self.precision_plugin
        if options is not None and options.offload_parameters:
            self._check_parameters()
        if options is not None and options.offload_fraction < 1 and type(plugin) is HalfPrecision:
            # The part on the device keeps float32 masters, too.
            self.precision_plugin = MasterWeightPrecision()
        super().setup_environment()

    def _check_parameters(self) -> None:
        if self.zero_stage != 3 or self.sizes.data_shard == 1 or self.sizes.expert > 1:
            raise ConfigurationError(
                f"offload_parameters=True with zero_stage={self.zero_stage} on {self.sizes}: what "
                "comes to the device block by block are the shards of stage 3. Use stage 3, 2 or "
                "more replicas that shard, and undivided experts; or offload_parameters=False."
            )

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._close_host()
        super().setup_optimizers(trainer)
        if self.parallel_model.compression is not None:
            self.parallel_model.compression.reset()
        if self.offload_options is None:
            return
        module = self.parallel_model.module
        if not module.automatic_optimization:
            raise ConfigurationError(
                f"{type(module).__name__} uses manual optimization, but the optimizer is "
                "offloaded when Lightning steps it. Set automatic_optimization=True, or use a "
                "strategy without offloading."
            )
        (optimizer,) = self.optimizers
        host = self._make_host(optimizer, self.offload_options)
        self.parallel_model.host = self.parallel_model.states.host = host
        scaler = self.parallel_model.steps.scaler
        if isinstance(scaler, MeshGradScaler):
            scaler.offloaded_gradients = host.offloaded_gradients
        seen = [name for name in _SEE_GRADIENTS if is_overridden(name, module, pl.LightningModule)]
        if seen:
            rank_zero_warn(
                f"{type(module).__name__}.{' and '.join(seen)} runs when gradients have left for "
                "the host: parameters have none there. self.clip_gradients works."
            )

    def _make_host(self, optimizer: Optimizer, options: OffloadOptions) -> HostOptimizer:
        check_optimizer(optimizer)
        parallel_model = self.parallel_model
        if parallel_model.steps.executor is not None:
            # Every micro-batch adds to a gradient: none is final before the last one's backward.
            options = replace(options, overlap="off")
        kernel = choose_kernel(options.cpu_kernel, cache_folder())
        rank_zero_info(f"The optimizer steps on the host, with the kernel {kernel.name!r}.")
        return HostOptimizer(
            optimizer,
            device=self.root_device,
            options=options,
            worker=UpdateWorker(kernel, torch.get_num_threads()),
            late=parallel_model.reduced_late,
        )

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Surrounds a batch that is not the last one of its step."""
        host = self.parallel_model.host
        if host is None or not host.accumulates:
            with self.parallel_model.sharding.no_sync():
                yield
        else:
            with host.accumulating():
                yield

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        def complete() -> Any:
            result = closure()
            host = self.parallel_model.host
            if host is not None and host.has_unfinished_gradients:
                self.begin_offload()
                self.parallel_model.finish_gradients()
            return result

        return super().optimizer_step(optimizer, complete, model, **options)

    def begin_offload(self) -> None:
        """Prepare for a backward whose gradients leave for the host."""
        host, steps = self.parallel_model.host, self.parallel_model.steps
        if host is None or not self.parallel_model.sharding.synchronizes:
            return
        trainer = self._trainer
        clips = trainer.gradient_clip_val
        by_value = bool(clips) and trainer.gradient_clip_algorithm == "value"
        module = self.parallel_model.module
        host.begin(
            trainer.global_step,
            streams=self.on_nonfinite == "ignore"
            and steps.scaler is None
            and (not clips or by_value)
            and not is_overridden("configure_gradient_clipping", module, pl.LightningModule),
            largest=float(clips) if clips and by_value else float("inf"),
        )

    def flush_offload(self) -> None:
        """Complete every update that was computed behind a step."""
        if self._is_offloaded:
            assert self.parallel_model.host is not None
            self.parallel_model.host.flush()

    @property
    def _is_offloaded(self) -> bool:
        raise NotImplementedError

    def _close_host(self) -> None:
        if self._is_offloaded:
            host, self.parallel_model.host = self.parallel_model.host, None
            self.parallel_model.states.host = None
            assert host is not None
            host.close()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.flush_offload()
        return super().lightning_module_state_dict()

    @override
    def gather_state_dict(self) -> dict[str, Any]:
        self.flush_offload()
        return super().gather_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.flush_offload()
        return super().optimizer_state(optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self.flush_offload()

    @override
    def on_validation_start(self) -> None:
        self.flush_offload()
        super().on_validation_start()

    @override
    def on_train_end(self) -> None:
        self.flush_offload()
        super().on_train_end()
