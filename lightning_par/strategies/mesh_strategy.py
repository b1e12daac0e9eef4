"""`MeshStrategy`: one path from a LightningModule to a mesh; the named strategies are presets of
it.
"""

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn, Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine.activations.checkpointing import Recomputation
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.compression.options import GradientCompression, read_compression
from lightning_par.engine.init.deferred_init import ConstructionRecord, record_construction
from lightning_par.engine.offload.options import OffloadOptions, read_offload_options
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.schedules import place_stages
from lightning_par.errors import LightningParError
from lightning_par.plan import ParallelPlan
from lightning_par.plan_lookup import find_plan
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.sizes import AutoRule, Size
from lightning_par.strategies.components.gradient_guard import check_nonfinite_choice, GradientGuard
from lightning_par.strategies.components.host_offload import OffloadedProcesses
from lightning_par.strategies.setup.block_wrapping import check_recomputation
from lightning_par.strategies.setup.checks import (
    check_batch,
    check_loader,
    check_module,
    check_options,
    check_trainer,
    check_values,
    check_whole,
    read_context_options,
)
from lightning_par.strategies.setup.memory_check import check_memory
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.parallelize import parallelize
from lightning_par.strategies.setup.precision import share_overflows
from lightning_par.strategies.setup.stage_optimizers import check_optimizers, optimizers_of_a_stage
from lightning_par.strategies.step.batch_broadcast import BatchSharing
from lightning_par.strategies.step.uneven_batches import join_ranks, samples_differ
from lightning_par.upstream.lightning import move_optimizer_states

__all__ = ["MeshStrategy"]


class MeshStrategy(OffloadedProcesses):
    """Trains an unchanged LightningModule on a mesh of tensor, pipeline, context and data
    parallelism.

    Sizes are whole numbers or ``"auto"``; what "auto" gives is said by each named strategy.

    Args:
        tensor_parallel_size: Ranks over which every layer's weights are sharded.
        pipeline_parallel_size: Ranks over which the blocks are cut into stages.
        context_parallel_size: Ranks over which sequences are divided.
        context_options: How they are divided: a `ContextOptions`, or a dict of its fields.
        data_parallel_size: Replicas that see different samples.
        data_parallel_replicate_size: How many of the replicas hold a whole copy of the sharded
            state ("auto": 1, at ZeRO stage 0 all).
        expert_parallel_size: Ranks of ``dp_shard x cp`` over which experts are divided ("auto": 1).
        zero_stage: What the replicas shard: 0 nothing, 1 optimizer states, 2 also gradients, 3 also
            parameters.
        num_microbatches: Micro-batches per batch of a replica ("auto": 4 per stage, or the batch
            size if smaller).
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"zb-h1"``, ``"zb-h2"``, ``"zbv"``,
            or the path of one written by hand (see `engine.builders.read_schedule`).
        virtual_pipeline_size: Stages per rank under ``"interleaved"`` ("auto": 2).
        stage_blocks: Number of blocks of every stage; None balances them by parameters.
        sequence_parallel: Shard activations between the blocks along T under tensor parallelism.
        compile_blocks: Compile every block with `torch.compile`; a dict gives its options, such as
            ``{"mode": "max-autotune"}``.
        save_distributed_checkpoint: Write checkpoints as folders, to which every rank writes its
            part and which any layout reads. False: as one file, gathered on rank 0, which a plain
            `Trainer` reads, too.
        async_save: Train on while a checkpoint is written; costs a copy of weights and optimizer
            states in host memory.
        plan: Used instead of what the model's `parallel_plan()` gives; FQNs as seen from the
            LightningModule.
        process_group_backend: Of torch.distributed; by default gloo, on CUDA gloo and NCCL.
        timeout: After which a collective of any group gives up.
        on_nonfinite: What happens if the loss or a gradient is NaN or infinite on any rank:
            "raise" on every rank before the optimizer step, "skip" the step, or "ignore" it.
        offload_options: Move the optimizer to the host: `OffloadOptions`, or a dict of its fields.
        gradient_compression: Of what whole replicas (ZeRO stage 0) send: ``"fp16"``, ``"bf16"``,
            ``"int8"``, ``"topk"``, ``"powersgd"``, or a `GradientCompression` (or its fields).

    Raises:
        MeshError: The sizes do not fit the devices; raised by the Trainer's constructor.
        ConfigurationError: An option has no such value.
        TypeError: There is no such option.
    """

    strategy_name: ClassVar[str] = "mesh"
    _auto_rule: ClassVar[AutoRule] = "balanced"
    recomputation: Recomputation | None = None
    reduce_dtype: torch.dtype | None = None

    _record: ConstructionRecord | None = None
    _parallel_model: ParallelModel | None = None
    _sharing: BatchSharing | None = None
    _guard: GradientGuard | None = None

    def __init__(  # house: half of it names the options
        self,
        *,
        tensor_parallel_size: Size = "auto",
        pipeline_parallel_size: Size = "auto",
        context_parallel_size: Size = "auto",
        context_options: ContextOptions | dict[str, Any] | None = None,
        data_parallel_size: Size = "auto",
        data_parallel_replicate_size: Size = "auto",
        expert_parallel_size: Size = "auto",
        zero_stage: int = 1,
        num_microbatches: Size = "auto",
        schedule: str = "1f1b",
        virtual_pipeline_size: Size = "auto",
        stage_blocks: Sequence[int] | None = None,
        sequence_parallel: bool = True,
        compile_blocks: bool | dict[str, Any] = False,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        plan: ParallelPlan | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        on_nonfinite: str = "raise",
        offload_options: OffloadOptions | dict[str, Any] | None = None,
        gradient_compression: GradientCompression | dict[str, Any] | str | None = None,
        **lightning_options: Any,
    ) -> None:
        check_options(type(self), lightning_options)
        super().__init__(
            sizes={
                "tensor": tensor_parallel_size,
                "pipeline": pipeline_parallel_size,
                "context": context_parallel_size,
                "data": data_parallel_size,
                "data_replicate": data_parallel_replicate_size,
                "expert": expert_parallel_size,
                "zero_stage": zero_stage,
            },
            auto=self._auto_rule,
            process_group_backend=process_group_backend,
            timeout=timeout,
            lightning_options=lightning_options,
            save_distributed_checkpoint=save_distributed_checkpoint,
            async_save=async_save,
            offload=read_offload_options(offload_options),
            compression=read_compression(gradient_compression, zero_stage),
        )
        check_values(schedule, num_microbatches, stage_blocks, virtual_pipeline_size)
        self.context_options = read_context_options(context_options)
        self.on_nonfinite = check_nonfinite_choice(on_nonfinite)
        self.virtual_pipeline_size = _given(virtual_pipeline_size)
        self.zero_stage, self.schedule, self.compile_blocks = zero_stage, schedule, compile_blocks
        self.num_microbatches = _given(num_microbatches)
        self.stage_blocks, self.sequence_parallel, self.plan = stage_blocks, sequence_parallel, plan

    @property
    @override
    def parallel_model(self) -> ParallelModel:
        """The model on the mesh; made by `setup`."""
        assert self._parallel_model is not None
        return self._parallel_model

    @property
    @override
    def _is_offloaded(self) -> bool:
        return self._parallel_model is not None and self._parallel_model.host is not None

    def pipeline_timeline(self) -> list[list[TimedAction]]:
        """Return when every stage ran its actions in the last pipelined step, in seconds.

        Every rank has to call this. Without a pipeline, or before a step, the list is empty. The
        clock is `time.monotonic`, which the processes of one node share.

        **Communicates**: the actions of every stage, over the ``pp`` axis.
        """
        run = self.parallel_model.steps.last_run
        if run is None:
            return []
        rows: list[Any] = [None] * self.sizes.pipeline
        dist.all_gather_object(rows, run.events, group=self.mesh.group("pp"))
        return rows

    def _preflight(self, trainer: pl.Trainer | None, model: Any) -> None:
        """Refuse what cannot work before any other process starts."""
        if trainer is not None and isinstance(model, pl.LightningModule):
            check_trainer(trainer, model, self.sizes)
            if self._parallel_model is None and next(model.parameters(), None) is not None:
                check_module(model, self._find_plan(model), self)

    def _find_plan(self, model: nn.Module) -> ParallelPlan | None:
        return self.plan if self.plan is not None else find_plan(model)

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Inside `configure_model`, parameters are made on the meta device."""
        if self._parallel_model is not None:
            yield
            return
        with record_construction() as self._record:
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        if self._parallel_model is None or self._parallel_model.module is not module:
            resolved = self._check(trainer, module)
            if self._record is not None:
                self._record.remember(module)
            self.model = self.precision_plugin.convert_module(self.model)
            self._parallel_model = parallelize(module, resolved, self.mesh, self._record, self)
            plugin = self.precision_plugin = self.precision_plugin
            self._parallel_model.steps.scaler = share_overflows(plugin)
            self._guard = GradientGuard(self._parallel_model, plugin, self.on_nonfinite)
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers, self.lr_scheduler_configs = [], []
            if self.sizes.pipeline > 1:
                with optimizers_of_a_stage():
                    self.setup_optimizers(trainer)
                check_optimizers(self.optimizers, self.mesh.group("pp"), self.root_device)
            else:
                self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            move_optimizer_states(self.optimizers, self.root_device)

    def _check(self, trainer: pl.Trainer, module: pl.LightningModule) -> ResolvedPlan:
        """Refuse what cannot work; of the processes that a script started, the first one speaks."""
        assert self.cluster_environment is not None
        try:
            check_trainer(trainer, module, self.sizes)
            check_whole(module)
            resolved = check_module(module, self._find_plan(module), self)
            check_memory(module, resolved, self)
            if self.recomputation is not None:
                ranks, chunks = self.sizes.pipeline, self.virtual_pipeline_size
                num_stages = len(place_stages(self.schedule, ranks, chunks))
                check_recomputation(module, resolved, self.recomputation, num_stages)
        except LightningParError:
            if self.local_rank and not self.cluster_environment.creates_processes_externally:
                raise SystemExit(1) from None
            raise
        if self.sizes.data == 1:
            # All ranks log the same values; Lightning cannot know.
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*when logging on epoch")
        return resolved

    @override
    def model_to_device(self) -> None:
        """Parameters are made on the device by `setup`."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.sizes.pipeline > 1:
            check_loader(dataloader, self.num_microbatches)
        dataloader = super().process_dataloader(dataloader)
        module = self.parallel_model.module
        shared = module.trainer.predicting and self.sizes.data > 1
        if shared and samples_differ(dataloader, self.root_device):
            self.parallel_model.sharding.hold()
        return join_ranks(dataloader, module.trainer, self.root_device)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        module = self.parallel_model.module
        self.activity.step = module.trainer.global_step
        self.activity.begin("sharing of the batch")
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._sharing is None:
            self._sharing = BatchSharing(self.mesh)
        batch = self._sharing.share(batch)
        check_batch(
            batch,
            self.parallel_model.resolved.plan.batch,
            self.sizes,
            self.sequence_parallel,
            labels_needed=not module.trainer.predicting,
        )
        self.activity.begin("start of the batch")
        return batch

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.train_step_context
        return self.parallel_model.steps.training(context, [*args, *kwargs.values()])

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self._evaluate("predict_step", context, args, kwargs)

    def _evaluate(
        self, name: str, context: Callable[[], Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return self.parallel_model.steps.evaluation(name, context, [*args, *kwargs.values()])

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        module = self.lightning_module
        assert module is not None
        steps, plugin = self.parallel_model.steps, self.precision_plugin
        self.pre_backward(closure_loss)
        loss = plugin.pre_backward(closure_loss, module)
        if steps.executor is None:
            self.parallel_model.sharding.before_backward()
        self.begin_offload()
        scale = steps.loss_scale
        weighted = loss if scale is None else torch.where(scale > 0, loss, 0) * scale.to(loss.dtype)
        if self._guard is not None:
            self._guard.see(weighted, steps.counts)
        self.activity.begin("backward")
        with steps.backward_of_step():
            plugin.backward(weighted, module, optimizer, *args, **kwargs)
        steps.sequence.close()
        self.parallel_model.finish_gradients(None if self._guard is None else self._guard.loss)
        self.activity.begin("optimizer step")
        loss = plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.activity.begin("between steps")
        return output

    @override
    def on_validation_end(self) -> None:
        self.parallel_model.sharding.release()

    @override
    def on_test_end(self) -> None:
        self.parallel_model.sharding.release()

    @override
    def on_predict_end(self) -> None:
        self.parallel_model.sharding.release()

    @override
    def teardown(self) -> None:
        self.finish_saving()
        self._close_host()
        if self._parallel_model is not None:
            self._parallel_model.sharding.release()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self._close_watch()

    def __getstate__(self) -> dict[str, Any]:
        """Leave process groups, and what holds them, behind."""
        left = ("_mesh", "_parallel_model", "_sharing", "_record", "_launcher", "_guard", "_watch")
        return {**super().__getstate__(), **dict.fromkeys(left)}


def _given(size: Size) -> int | None:
    """Return a size that the user chose, or None."""
    return None if size == "auto" else int(size)
