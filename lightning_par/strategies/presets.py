"""The named strategies: presets of `MeshStrategy`, which may all be combined."""

from typing import Any, ClassVar, Literal

from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.errors import ConfigurationError, UnknownOptionError
from lightning_par.sizes import AutoRule
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.processes.device_islands import DeviceIslands

__all__ = [
    "Hybrid3DStrategy",
    "IslandsStrategy",
    "Pipeline1F1BStrategy",
    "SequenceRingStrategy",
    "TensorParallelStrategy",
    "ZeROOffloadStrategy",
]


class TensorParallelStrategy(MeshStrategy):
    """Tensor parallelism: every layer is sharded over the devices of a node.

    "auto": ``tensor_parallel_size`` takes all devices of a node, ``pipeline_parallel_size`` is 1,
    and ``data_parallel_size`` is what is left, the number of nodes. The arguments are those of
    `MeshStrategy`.

    Examples:
        >>> strategy = TensorParallelStrategy()
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy)
        >>> str(strategy.sizes)
        'tp 4'
    """

    strategy_name: ClassVar[str] = "tensor_parallel"
    _auto_rule: ClassVar[AutoRule] = "tensor"


class Pipeline1F1BStrategy(MeshStrategy):
    """Pipeline parallelism with the one-forward-one-backward schedule: the blocks are split into
    stages.

    "auto": ``pipeline_parallel_size`` takes all devices, the others are 1. The arguments are those
    of `MeshStrategy`.

    Examples:
        >>> strategy = Pipeline1F1BStrategy(num_microbatches=8)
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy)
        >>> str(strategy.sizes)
        'pp 2'
    """

    strategy_name: ClassVar[str] = "pipeline_1f1b"
    _auto_rule: ClassVar[AutoRule] = "pipeline"


class SequenceRingStrategy(MeshStrategy):
    """Context parallelism: the tokens of every sequence are sharded over the devices, and attention
    stays exact.

    "auto": ``context_parallel_size`` takes all devices, the others are 1.

    Args:
        method: ``"ring"``, ``"ulysses"`` or ``"hybrid"``; see `ContextOptions`.
        ulysses_size: Ranks that exchange heads under ``"hybrid"``.
        layout: ``"zigzag"`` or ``"contiguous"``.
        route: ``"direct"`` or ``"ring"``.
        attention_backend: ``"auto"``, or a name that ``lightning-par backends`` lists.
        options: Those of `MeshStrategy`.

    Examples:
        >>> strategy = SequenceRingStrategy(method="hybrid", ulysses_size=2)
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy)
        >>> str(strategy.sizes)
        'cp 4'
    """

    strategy_name: ClassVar[str] = "sequence_ring"
    _auto_rule: ClassVar[AutoRule] = "context"

    def __init__(
        self,
        *,
        method: Literal["ring", "ulysses", "hybrid"] = "ring",
        ulysses_size: int | None = None,
        layout: Literal["zigzag", "contiguous"] = "zigzag",
        route: Literal["direct", "ring"] = "direct",
        attention_backend: str = "auto",
        **options: Any,
    ) -> None:
        context = ContextOptions(
            method=method,
            ulysses_size=ulysses_size,
            layout=layout,
            route=route,
            backend=attention_backend,
        )
        super().__init__(context_options=context, **options)


class Hybrid3DStrategy(MeshStrategy):
    """Tensor, pipeline, context and data parallelism together.

    "auto": ``tensor_parallel_size`` is 2 where the devices of a node are even, then
    ``pipeline_parallel_size`` is 2 where what is left is even, and ``data_parallel_size`` is the
    rest: 2 devices are tp 2, 4 are tp 2 x pp 2, 8 are tp 2 x pp 2 x dp 2, and on 1 device every
    size is 1; ``context_parallel_size`` is 1. The arguments are those of `MeshStrategy`.

    Examples:
        >>> strategy = Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=2)
        >>> trainer = L.Trainer(accelerator="cpu", devices=8, strategy=strategy)
        >>> str(strategy.sizes)
        'pp 2 x dp_shard 2 x tp 2'
    """

    strategy_name: ClassVar[str] = "hybrid3d"
    _auto_rule: ClassVar[AutoRule] = "balanced"


class ZeROOffloadStrategy(MeshStrategy):
    """Sharded data parallelism whose optimizer is on the host: the device holds parameters,
    activations and a few gradients.

    "auto": ``data_parallel_size`` takes all devices, the others are 1.

    Args:
        stage: What the replicas shard besides optimizer states, as `zero_stage` of `MeshStrategy`:
            1 nothing, 2 gradients, 3 also parameters.
        offload_optimizer: True: to the memory of the host; ``"nvme:/folder"``: states to a file in
            this folder; False: not at all.
        offload_fraction: Which part of the parameters; the others are updated on the device.
        offload_parameters: Also keep the parameters on the host; with stage 3 and several replicas.
        delayed_update: Number of the first step whose update is computed behind the next step.
        overlap: ``"auto"`` sends gradients, and updates, during the backward; ``"off"`` after it.
        pin_memory: Page-lock the memory through which gradients and parameters go.
        bucket_size_mb: MiB of gradients that are updated together.
        cpu_kernel: ``"native"``, ``"torch"`` or ``"auto"``.
        state_dtype: Of the moments: ``"float32"`` or ``"bfloat16"``.
        accumulate_on: Where gradients of several batches are added up: ``"device"`` or ``"host"``.
        options: Those of `MeshStrategy`, but for `zero_stage` and `offload_options`.

    Raises:
        ConfigurationError: An option has no such value.
        TypeError: There is no such option.

    Examples:
        >>> strategy = ZeROOffloadStrategy(stage=3, offload_fraction=0.5)
        >>> trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy)
        >>> str(strategy.sizes)
        'dp_shard 2'
    """

    strategy_name: ClassVar[str] = "zero_offload"
    _auto_rule: ClassVar[AutoRule] = "data"

    def __init__(
        self,
        *,
        stage: Literal[1, 2, 3] = 2,
        offload_optimizer: bool | str = True,
        offload_fraction: float = 1.0,
        offload_parameters: bool = False,
        delayed_update: bool | int = False,
        overlap: Literal["auto", "off"] = "auto",
        pin_memory: bool | Literal["auto"] = "auto",
        bucket_size_mb: float = 32,
        cpu_kernel: Literal["native", "torch", "auto"] = "auto",
        state_dtype: Literal["float32", "bfloat16"] = "float32",
        accumulate_on: Literal["device", "host"] = "device",
        **options: Any,
    ) -> None:
        offload = OffloadOptions(
            offload_optimizer=offload_optimizer or True,
            offload_fraction=offload_fraction,
            offload_parameters=offload_parameters,
            delayed_update=delayed_update,
            overlap=overlap,
            pin_memory=pin_memory,
            bucket_size_mb=bucket_size_mb,
            cpu_kernel=cpu_kernel,
            state_dtype=state_dtype,
            accumulate_on=accumulate_on,
        )
        for name in ("zero_stage", "offload_options"):
            if name in options:
                raise UnknownOptionError(
                    "LP901",
                    f"ZeROOffloadStrategy has no option {name!r}. Pass stage= and the options of "
                    f"offloading directly, or use Hybrid3DStrategy({name}=...).",
                )
        if stage not in (1, 2, 3):
            raise ConfigurationError("LP902", f"stage={stage!r} must be 1, 2 or 3.")
        chosen = None if offload_optimizer is False else offload
        super().__init__(zero_stage=stage, offload_options=chosen, **options)


class IslandsStrategy(MeshStrategy):
    """Islands of one device each: every device trains by itself, and sends how far its weights
    moved every few steps; nobody waits for one that dies.

    ``devices=4`` gives four islands. The first process of a script is also the server, and starts
    the others; on several hosts, or under torchrun or SLURM, ``lightning-par serve`` is. For
    islands that are meshes themselves, use another strategy with ``outer=``.

    Args:
        outer: When they meet, and what is made of it: `Outer`, or a dict of its fields.
        options: Those of `MeshStrategy`.

    Raises:
        ConfigurationError: An option has no such value.
        MeshError: A size is not 1; raised by the Trainer's constructor.
        TypeError: There is no such option.

    Examples:
        >>> strategy = IslandsStrategy(outer={"every": 20, "adapt": True})
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy)
        >>> strategy.distributed_sampler_kwargs
        {'num_replicas': 4, 'rank': 0}
    """

    strategy_name: ClassVar[str] = "islands"
    _auto_rule: ClassVar[AutoRule] = "data"
    _process_type = DeviceIslands

    def __init__(self, *, outer: Outer | dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(outer=Outer() if outer is None else outer, **options)
