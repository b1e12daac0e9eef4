"""`MeshStrategy`: Lightning's hooks, delegated to components; named strategies are its presets.

Length: these are all hooks of one interface, and the help of all options.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from types import EllipsisType
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch import nn, Tensor
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.engine.activations.checkpointing import Recomputation
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.compression.options import GradientCompression
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.init.deferred_init import ConstructionRecord, record_construction
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.sizes import AutoRule, ParallelSizes, Size
from lightning_par.strategies.components.checkpoint_load import CheckpointLoad
from lightning_par.strategies.components.checkpoint_save import CheckpointSave
from lightning_par.strategies.components.gather_after_run import gather_after_run
from lightning_par.strategies.components.host_offload import HostOffload, offload_precision
from lightning_par.strategies.components.islands import IslandRounds
from lightning_par.strategies.components.weight_averages import defer_averages, make_averages
from lightning_par.strategies.data.loaders import EarlyLoaders
from lightning_par.strategies.hooks.user_hooks import UserHooks
from lightning_par.strategies.hooks.whole_module import whole_module
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.processes.world_collectives import gather_over_replicas
from lightning_par.strategies.setup.before_setup import plain_before_setup
from lightning_par.strategies.setup.checks import check_module, check_options, check_trainer
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.parallelize import parallelize
from lightning_par.strategies.setup.precision import AdoptedPrecision
from lightning_par.strategies.setup.preflight import check_run
from lightning_par.strategies.setup.stage_optimizers import (
    adopt_optimizers,
    kept_by_optimizers,
    move_states,
    optimizers_of_a_stage,
    prepare_optimizers,
)
from lightning_par.strategies.setup.world_reads import check_world_reads
from lightning_par.strategies.step.batch_weights import Step
from lightning_par.upstream.lightning import set_launcher

__all__ = ["MeshStrategy"]


class MeshStrategy(ParallelStrategy):
    """Trains an unchanged LightningModule with tensor, pipeline, context and data parallelism.

    Sizes are whole numbers or ``"auto"``; what "auto" gives is said by each named strategy.

    Args:
        tensor_parallel_size: Ranks over which every layer's weights are sharded.
        tensor_parallel_across_hosts: Let such ranks be on different hosts, which is slow.
        pipeline_parallel_size: Ranks over which the blocks are split into stages.
        context_parallel_size: Ranks over which sequences are sharded.
        context_options: How they are sharded: a `ContextOptions`, or a dict of its fields.
        data_parallel_size: Replicas that see different samples.
        data_parallel_replicate_size: Copies of the sharded state ("auto": 1, at ZeRO stage 0 all).
        expert_parallel_size: Ranks of ``dp_shard x cp`` over which experts are sharded ("auto": 1).
        expert_max_rows: Rows of every part sent to experts, by padding; None: as many as chosen.
        zero_stage: What replicas shard: 0 nothing, 1 optimizer states, 2 + gradients, 3 + weights.
        num_microbatches: Of a replica's batch ("auto": 4 per pipeline rank, or one per sample).
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"``, ``"interleaved-zb"``, ``"zb-h1"``,
            ``"zb-h2"``, ``"zbv"``, ``"dualpipev"``, or the path of a file (`read_schedule`).
        virtual_pipeline_size: Stages per rank of the interleaved schedules ("auto": 2).
        stage_blocks: Number of blocks of every stage; None balances them by parameters.
        sequence_parallel: Shard activations between the blocks along T under tensor parallelism.
        compile_blocks: `torch.compile` blocks, embeddings and head; a dict has its options.
        async_tensor_parallel: Let the compiler hide messages of tensor parallelism, on GPUs.
        checkpoint_format: ``"file"``, which a plain `Trainer` reads, too, ``"folder"``, or "auto".
        save_distributed_checkpoint: Lightning's name: True is ``"folder"``, False ``"file"``.
        async_save: Train on while a checkpoint is written, from a copy in host memory.
        plan: Used instead of the model's `parallel_plan()`; FQNs as seen from the LightningModule.
        process_group_backend: Backend of torch.distributed; by default gloo, on CUDA gloo and NCCL.
        timeout: Time after which a collective of any group gives up.
        on_nonfinite: What happens if the loss or a gradient is NaN or infinite on any rank:
            "raise" on every rank before the optimizer step, "skip" the step, or "ignore" it.
        verify: Compare steps with one process: ``"auto"`` (small models: for 1 % of the time),
            ``"2 %"`` of the time, ``"every 500"`` steps, ``"first_step"`` or False.
        on_difference: Then ``"stop"`` the run, ``"warn"``, or ``"evict"`` a host that is to blame.
        offload_options: Move the optimizer to the host: `OffloadOptions`, or a dict of its fields.
        gradient_compression: Compression of what whole replicas (ZeRO stage 0) send: ``"fp16"``,
            ``"bf16"``, ``"int8"``, ``"topk"``, ``"powersgd"``, or `GradientCompression` fields.
        gather_after_run: Give every rank the whole module again after a run; "auto": if it fits.
        gather_predictions: Let `predict` return those of all replicas, in order, on every rank.
        outer: Make this run one of several islands that meet at a server: `Outer`, or its fields.

    Attributes:
        options: What the user chose, and what callbacks added; see `change_options`.
        processes: Sizes, mesh, launcher and collectives of this run.
        activity: What this rank is doing.
        start: Looks at the steps of this run, and proves the first; made by `setup`.
        offload: The optimizer on the host; None: it is on the device, as always before a fit.
        islands: Exchanges with other islands; None: there are none, as always before a fit.

    Raises:
        MeshError: The sizes do not fit the devices; raised by the Trainer's constructor.
        ConfigurationError: An option has no such value.
        TypeError: There is no such option.

    Examples:
        >>> strategy = MeshStrategy(tensor_parallel_size=2, data_parallel_size=2, zero_stage=3)
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy)
        >>> str(strategy.sizes)
        'dp_shard 2 x tp 2'
    """

    strategy_name: ClassVar[str] = "mesh"
    _auto_rule: ClassVar[AutoRule] = "balanced"
    _process_type: ClassVar[type[MeshProcesses]] = MeshProcesses

    def __init__(  # house: half of it names the options
        self,
        *,
        tensor_parallel_size: Size = "auto",
        tensor_parallel_across_hosts: bool = False,
        pipeline_parallel_size: Size = "auto",
        context_parallel_size: Size = "auto",
        context_options: ContextOptions | dict[str, Any] | None = None,
        data_parallel_size: Size = "auto",
        data_parallel_replicate_size: Size = "auto",
        expert_parallel_size: Size = "auto",
        expert_max_rows: int | None = None,
        zero_stage: int = 1,
        num_microbatches: Size = "auto",
        schedule: str = "1f1b",
        virtual_pipeline_size: Size = "auto",
        stage_blocks: Sequence[int] | None = None,
        sequence_parallel: bool = True,
        compile_blocks: bool | dict[str, Any] = False,
        async_tensor_parallel: bool = False,
        checkpoint_format: str = "auto",
        save_distributed_checkpoint: bool | None = None,
        async_save: bool = False,
        plan: ParallelPlan | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        on_nonfinite: str = "raise",
        verify: bool | str = "auto",
        on_difference: str = "stop",
        offload_options: OffloadOptions | dict[str, Any] | None = None,
        gradient_compression: GradientCompression | dict[str, Any] | str | None = None,
        gather_after_run: bool | str = "auto",
        gather_predictions: bool = True,
        outer: Outer | dict[str, Any] | None = None,
        **lightning_options: Any,
    ) -> None:
        names = {field.name for field in fields(MeshOptions)}
        chosen: dict[str, Any] = {name: v for name, v in locals().items() if name in names}
        check_options(type(self), lightning_options)
        self.options = MeshOptions(**chosen, auto_rule=self._auto_rule)
        # Under another name, as LightningCLI follows super().__init__(**...) to more options.
        (initialize := super().__init__)(**lightning_options)
        self.num_nodes, self.processes = 1, self._process_type(self.options)
        self.activity = self.processes.activity
        self.offload: HostOffload | None = None
        self._saving = CheckpointSave(self.options, self.processes)
        self._loading = CheckpointLoad(self.processes)
        self.islands: IslandRounds | None = None
        self._precision, self._hooks, self._early = AdoptedPrecision(), UserHooks(), EarlyLoaders()
        self._record: ConstructionRecord | None = None
        self._parallel_model: ParallelModel | None = None
        self._step: Step | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave process groups, and what holds them, behind."""
        left = ("_record", "_parallel_model", "start", "_launcher", "_step", "offload", "islands")
        plugin = self._precision.given or self.precision_plugin
        own = {"_precision_plugin": plugin, "_precision": AdoptedPrecision(), "_hooks": UserHooks()}
        return {**super().__getstate__(), **dict.fromkeys(left), **own}

    @property
    def parallel_model(self) -> ParallelModel:
        """The model on the mesh; made by `setup`."""
        assert self._parallel_model is not None
        return self._parallel_model

    @property
    def sizes(self) -> ParallelSizes:
        """The size of every axis; a MeshError if they do not fit the devices."""
        return self.processes.sizes

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh of this run; a MeshError before its processes are set up."""
        return self.processes.mesh

    @property
    def zero_stage(self) -> int:
        """What the replicas shard."""
        return self.options.zero_stage

    @property
    def schedule(self) -> str:
        """Name or path of the pipeline schedule."""
        return self.options.schedule

    @property
    @override
    def global_rank(self) -> int:
        return self.processes.rank_of_step

    def change_options(
        self,
        *,
        recomputation: Recomputation | EllipsisType | None = ...,
        reduce_dtype: torch.dtype | EllipsisType | None = ...,
    ) -> None:
        """Change, before `setup`, the options that callbacks add; what is left out stays.

        Args:
            recomputation: Which blocks recompute their activations; None: none.
            reduce_dtype: Dtype in which the replicas sum gradients; None: that of the parameters.
        """
        changes: dict[str, Any] = {"recomputation": recomputation, "reduce_dtype": reduce_dtype}
        self.options = replace(self.options, **{n: v for n, v in changes.items() if v is not ...})

    def pipeline_timeline(self) -> list[list[TimedAction]]:
        """Return when every stage ran its actions in the last pipelined step, in seconds.

        Every rank has to call this; empty without a pipeline. The clock is `time.monotonic`.
        """
        return self.parallel_model.steps.timeline()

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning has to shard the data: only over replicas, and over islands."""
        return self.processes.samplers["num_replicas"] > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.processes.samplers

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions which rank this is."""
        devices, nodes = self.parallel_devices or [], self.num_nodes
        self.cluster_environment = self.processes.attach(devices, nodes, self.cluster_environment)

    @override
    def connect(self, model: pl.LightningModule) -> None:
        super().connect(model)
        self.processes.interruption.module = model

    @override
    def _configure_launcher(self) -> None:
        set_launcher(self, self.processes.make_launcher(self._preflight))

    def _preflight(self, trainer: pl.Trainer | None, model: Any) -> None:
        """Refuse what cannot work before any other process starts."""
        if trainer is not None and isinstance(model, pl.LightningModule):
            check_trainer(trainer, model, self.sizes)
            if not self._on_mesh(model) and next(model.parameters(), None) is not None:
                check_module(model, self.options, self.sizes, infers=False)

    @override
    def setup_environment(self) -> None:
        plugin = offload_precision(self.options.offload_options, self.precision_plugin)
        self.precision_plugin = plugin
        assert self.lightning_module is not None
        self._saving.check(self.checkpoint_io, self.lightning_module.trainer)
        super().setup_environment()
        self.processes.set_up()
        defer_averages(self.lightning_module.trainer)
        if self.options.outer is not None:
            rest = self.processes, self._saving, lambda: self.parallel_model
            self.islands = IslandRounds(self.options.outer, *rest)
            self.islands.attach(self.lightning_module.trainer)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._hooks.barrier(name, self.processes)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.processes.broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.processes.reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.processes.decide(decision, unanimous=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.world_size == 1:
            return tensor
        self.processes.before_exchange("all_gather")
        return gather_over_replicas(self.mesh, tensor, group, sync_grads)

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Inside `configure_model`, parameters are made on the meta device."""
        if self._on_mesh(self.lightning_module):
            yield
            return
        parameters: Any = getattr(self.lightning_module, "parameters", tuple)
        with record_construction(parameters()) as record:
            yield
        self._record = record if any(made.is_meta for made in parameters()) else None

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        module, accelerator = self.lightning_module, self.accelerator
        assert accelerator is not None
        assert module is not None
        accelerator.setup(trainer)
        plugin = self.precision_plugin = self._precision.adopt(self.precision_plugin)
        if not self._on_mesh(module):
            resolved = check_run(trainer, module, self.options, self.processes)
            if self._record is not None:
                self._record.remember(module)
            self.model = plugin.convert_module(module)
            # Names, asked before `parallelize` replaces these parameters.
            kept = kept_by_optimizers(self._parallel_model, module, self.optimizers)
            rest = self.mesh, self.root_device, self._record, self.options, self.processes
            self._parallel_model, self.start = parallelize(module, resolved, *rest)
            kept(self._parallel_model)
            self.processes.catch_up = self._parallel_model.sharding.catch_up
        make_averages(trainer, self.parallel_model)
        self._loading.complete(self.parallel_model)
        self._early.hand_over(self.parallel_model.steps, trainer, resumes=self._loading.resumes)
        self._precision.connect(self.parallel_model.gradients, self._around_backward)
        self._hooks.attach(self.parallel_model, trainer, self.processes)
        if trainer.state.fn == "fit":
            self.optimizers, self.lr_scheduler_configs = [], []
            self.setup_optimizers(trainer)
            prepare_optimizers(self.optimizers, self.parallel_model, self.root_device)
        self.setup_precision_plugin()
        if trainer.state.fn == "fit":
            move_states(self.optimizers, self.root_device)

    def _on_mesh(self, module: pl.LightningModule | None) -> bool:
        """Whether a module is in its parallel form already, as in the middle of a run."""
        model = self._parallel_model
        return model is not None and model.module is module and not model.forms.is_whole

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        self._close_offload()
        with self._hooks.configuring(), optimizers_of_a_stage(self.sizes.pipeline):
            check_world_reads(super().setup_optimizers, trainer)
        adopt_optimizers(self.optimizers, self.parallel_model)
        given = self.parallel_model, self.optimizers, self.options, self.root_device
        self.offload = HostOffload.of_run(*given)

    @override
    def model_to_device(self) -> None:
        """Parameters are made on the device by `setup`."""

    def _is_set_up(self) -> bool:
        """Whether `setup` has seen the module; a test may connect one and do without a run."""
        model = self._parallel_model
        return model is not None and model.module is self.lightning_module

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if not self._on_mesh(self.lightning_module):
            return self._early.prepare(dataloader, self)
        self._loading.before_loader(self.parallel_model)
        return self.parallel_model.steps.prepare_loader(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        move = super().batch_to_device
        if not self._is_set_up():  # no decorator: each step would enter one more file
            return move(batch, device, dataloader_idx)
        return self.parallel_model.steps.prepare_batch(batch, move, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._drop_step()
        model, given = self.parallel_model, [*args, *kwargs.values()]
        if not self.start.proof.is_over:  # a steady step does not even ask
            self.start.prove(model, self.precision_plugin, given)
        output, step = model.steps.training(self.precision_plugin, given)
        if output is None or not model.module.automatic_optimization:
            step.close()  # no backward follows: there is none, or it has run inside the step
        else:
            self._step = step
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        context = getattr(self.precision_plugin, f"{name.replace('validation', 'val')}_context")
        return self.parallel_model.steps.evaluation(name, context, [*args, *kwargs.values()])

    @contextmanager
    def _around_backward(self, loss: Tensor) -> Iterator[Tensor]:
        """Surrounds the backward of a loss; gives what is to be differentiated."""
        model = self.parallel_model
        step, self._step = self._step or model.steps.manual.step or Step(), None
        if step.skips:
            return (yield loss)
        with model.steps.whole_backward(loss, step, model.gradients, self.offload) as weighted:
            yield weighted
        if not self.start.proof.is_over:
            self.start.proof.after_backward(weighted)
        self.activity.begin("optimizer step")

    def _drop_step(self) -> None:
        """Close a step that had no backward, as after an exception."""
        step, self._step = self._step, None
        if step is not None:
            step.close()

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        closure = closure if self.offload is None else self.offload.complete(optimizer, closure)
        with self._hooks.updating(closure) as closure:
            output = super().optimizer_step(optimizer, closure, model, **options)
        self.activity.end_step()
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Surrounds a batch that is not the last one of its step."""
        sharding, offload = self.parallel_model.sharding, self.offload
        with sharding.no_sync() if offload is None else offload.block_backward_sync():
            yield

    def gradient_norms(self, norm_type: float = 2.0) -> dict[str, Tensor]:
        """Return FQN -> norm of each gradient over all ranks; every rank has to call this."""
        return self.parallel_model.gradient_norms(norm_type)

    def full_parameter(self, name: str) -> Tensor:
        """Return a copy of a whole parameter, by its FQN; every rank has to call this."""
        self.flush_offload()
        return self.parallel_model.full_parameter(name)

    def whole(self, module: nn.Module | None = None, on: str = "every") -> Any:
        """Surround code that gets the whole, plain module, as by `FSDP.summon_full_params`.

        Every rank has to call this, in a hook; writes are kept. See docs/outside_of_steps.md.

        Args:
            module: What is yielded, with all weights: one in the LightningModule; None: that.
            on: ``"every"``: all ranks have to write the same; ``"rank 0"``: others get None, and
                what rank 0 writes.

        **Communicates**: all weights, to rank 0; with "every" then to each rank, which holds them.
        """
        self.flush_offload()
        return whole_module(self._parallel_model, self.processes, self.lightning_module, module, on)

    def gather_state_dict(self) -> dict[str, Any]:
        """Return the whole state dict on the CPU of rank 0, elsewhere {}; every rank calls this."""
        self.flush_offload()
        return self.parallel_model.gather_weights()

    @override
    @plain_before_setup
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.flush_offload()
        return self._saving.weights(self.parallel_model)

    @override
    @plain_before_setup
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self.flush_offload()
        return self._saving.optimizer(self.parallel_model, optimizer, self._hooks.see_checkpoints)

    @override
    @plain_before_setup
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self._hooks.complete(checkpoint)
        rest = checkpoint, filepath, storage_options, self.checkpoint_io
        self._saving.save(self.parallel_model, *rest)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._saving.remove(filepath, self.checkpoint_io)

    def finish_saving(self) -> None:
        """Wait for a save in the background; raise if it failed, or log it in an exception."""
        self._saving.finish()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        self._saving.wait()
        module = self.lightning_module
        return self._loading.read(module, checkpoint_path, weights_only, self.checkpoint_io)

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        """False where a fit starts from weights alone."""
        return self._loading.restores_optimizer

    @override
    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        model = self._parallel_model if self._on_mesh(module) else None
        if model is None and self._record is None:
            self.precision_plugin.convert_module(module)  # later it would round the weights
        self._loading.load_weights(model, module, checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        saved = checkpoint["optimizer_states"]
        self._loading.load_optimizers(self.parallel_model, self.optimizers, saved)
        self.flush_offload()

    def flush_offload(self) -> None:
        """Complete every update that the host computes behind a step."""
        if self.offload is not None:
            self.offload.flush()

    def _close_offload(self) -> None:
        if self.offload is not None:
            offload, self.offload = self.offload, None
            offload.close()

    @override
    def on_train_start(self) -> None:
        self._loading.before_training()
        self.processes.begin_loop()

    @override
    def on_validation_start(self) -> None:
        self.flush_offload()
        self.processes.begin_loop()

    on_test_start = on_predict_start = on_validation_start

    @override
    def on_train_end(self) -> None:
        self.flush_offload()
        self.start.end_training(self.parallel_model, self.options)
        self.processes.end_loop()

    def _end_evaluation(self) -> None:
        self.parallel_model.steps.end_evaluation()
        self.processes.end_loop()

    on_validation_end = on_test_end = on_predict_end = _end_evaluation

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._drop_step()

    @override
    def teardown(self) -> None:
        self.finish_saving()
        self._drop_step()
        self._close_offload()
        self._hooks.close()
        if self.islands is not None and self.lightning_module is not None:
            self.islands.detach(self.lightning_module.trainer)
        if self._parallel_model is not None:
            self.start.proof.end_run()
            gather_after_run(self._parallel_model, self.optimizers, self.options, self.processes)
        parts: Any = self.cluster_environment, self.precision_plugin, self.accelerator
        for part in (*parts, self.checkpoint_io):
            part.teardown()
        self.processes.close()
