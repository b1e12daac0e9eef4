"""`MeshOptions`: what a user chose for a mesh strategy, as one checked, immutable value."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.distributed.constants import default_pg_timeout

from lightning_par.engine.activations.checkpointing import Recomputation
from lightning_par.engine.context.options import ContextOptions
from lightning_par.engine.data.compression.options import GradientCompression, read_compression
from lightning_par.engine.data.islands.options import Outer, read_outer
from lightning_par.engine.offload.options import OffloadOptions, read_offload_options
from lightning_par.engine.option_fields import read_fields
from lightning_par.engine.pipeline.actions import Schedule
from lightning_par.engine.pipeline.schedules import build_schedule, place_stages, SCHEDULES
from lightning_par.errors import ConfigurationError, either, MeshError, Problem, raise_problems
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.planner.layouts import divisors
from lightning_par.sizes import AutoRule, fit_sizes, is_count, ParallelSizes, Size

__all__ = ["CHECKPOINT_FORMATS", "MeshOptions"]

_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_NONFINITE = ("raise", "skip", "ignore")
_ON_DIFFERENCE = ("stop", "warn", "evict")
_VERIFY = ("auto", "first_step", True, False)
_SHARE = 0.01
"""Share of the time of a run that ``verify="auto"`` leaves to proofs."""
CHECKPOINT_FORMATS = ("auto", "file", "folder")
"""Values of `checkpoint_format`."""


@dataclass(frozen=True, kw_only=True)
class MeshOptions:
    """The options of a `MeshStrategy`, where each is explained, and what callbacks add to them.

    `context_options`, `offload_options`, `gradient_compression` and `outer` may be given as dicts
    of their fields; they are read into their classes.

    Attributes:
        auto_rule: What sizes left to "auto" become; see `fit_sizes`.
        recomputation: Which blocks recompute their activations; None: none.
        reduce_dtype: Dtype in which the replicas sum gradients; None: that of the parameters.

    Raises:
        ConfigurationError: An option has no such value.
    """

    tensor_parallel_size: Size = "auto"
    tensor_parallel_across_hosts: bool = False
    pipeline_parallel_size: Size = "auto"
    context_parallel_size: Size = "auto"
    context_options: ContextOptions = field(default_factory=ContextOptions)
    data_parallel_size: Size = "auto"
    data_parallel_replicate_size: Size = "auto"
    expert_parallel_size: Size = "auto"
    expert_max_rows: int | None = None
    zero_stage: int = 1
    num_microbatches: Size = "auto"
    schedule: str = "1f1b"
    virtual_pipeline_size: Size = "auto"
    stage_blocks: Sequence[int] | None = None
    sequence_parallel: bool = True
    compile_blocks: bool | dict[str, Any] = False
    async_tensor_parallel: bool = False
    checkpoint_format: str = "auto"
    save_distributed_checkpoint: bool | None = None
    async_save: bool = False
    plan: ParallelPlan | None = None
    process_group_backend: str | None = None
    timeout: timedelta | None = default_pg_timeout
    on_nonfinite: str = "raise"
    verify: bool | str = "auto"
    on_difference: str = "stop"
    offload_options: OffloadOptions | None = None
    gradient_compression: GradientCompression | None = None
    gather_after_run: bool | str = "auto"
    gather_predictions: bool = True
    outer: Outer | None = None
    auto_rule: AutoRule = "balanced"
    recomputation: Recomputation | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        read: dict[str, Any] = {
            "offload_options": read_offload_options(self.offload_options),
            "gradient_compression": read_compression(self.gradient_compression, self.zero_stage),
            "outer": read_outer(self.outer),
        }
        if self.outer is not None and self.offload_options is not None:
            raise ConfigurationError(
                "LP706",
                "outer= is not supported with offload_options=: the offloaded optimizer has its "
                "own copy of the weights, which an exchange between islands would not change. "
                "Remove outer= or offload_options=.",
            )
        read["checkpoint_format"] = self._read_checkpoint_format()
        raise_problems(
            ConfigurationError, "LP902", [*self._schedule_problems(), *self._count_problems()]
        )
        read["context_options"] = _read_context_options(self.context_options)
        if self.gather_after_run not in (True, False, "auto"):
            raise ConfigurationError(
                "LP902",
                f"gather_after_run={self.gather_after_run!r} must be True, False or 'auto'.",
            )
        for name, choices in (("on_nonfinite", _NONFINITE), ("on_difference", _ON_DIFFERENCE)):
            if (value := getattr(self, name)) not in choices:
                valid = either([repr(choice) for choice in choices])
                raise ConfigurationError("LP902", f"{name}={value!r} must be {valid}.")
        if not (self.verify in _VERIFY or self.verify_every or self.verify_share):
            cadences = "'every 500' (a number of steps)", "'2 %' (a share of the run's time)"
            valid = either([*map(repr, _VERIFY), *cadences])
            raise ConfigurationError("LP902", f"verify={self.verify!r} must be {valid}.")
        for name, value in read.items():
            object.__setattr__(self, name, value)  # how a frozen dataclass sets its own fields

    @property
    def verify_every(self) -> int | None:
        """Optimizer steps after which one is proved again; None: no such number is given."""
        found = re.fullmatch(r"every ([1-9]\d*)", str(self.verify))
        return int(found[1]) if found else None

    @property
    def verify_share(self) -> float | None:
        """Share of the time of a run that proofs of later steps may take; None: none is given."""
        if self.verify == "auto":
            return _SHARE
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", str(self.verify))
        share = float(found[1]) / 100 if found else 0.0
        return share if 0 < share < 1 else None

    def _read_checkpoint_format(self) -> str:
        """Return the form of checkpoints, from its own option or from that of Lightning."""
        form, distributed = self.checkpoint_format, self.save_distributed_checkpoint
        if form not in CHECKPOINT_FORMATS:
            valid = either([repr(choice) for choice in CHECKPOINT_FORMATS])
            raise ConfigurationError("LP511", f"checkpoint_format={form!r} must be {valid}.")
        if distributed is None:
            return form
        other = "folder" if distributed else "file"
        if form not in ("auto", other):
            raise ConfigurationError(
                "LP511",
                f"save_distributed_checkpoint={distributed} means checkpoint_format={other!r}, "
                f"but checkpoint_format={form!r} is given, too. Give only one of these two "
                "options.",
            )
        return other

    def _schedule_problems(self) -> list[Problem]:
        problems = list[Problem]()
        schedule, virtual = self.schedule, self.virtual_pipeline_size
        if schedule not in SCHEDULES and not Path(schedule).is_file():
            near = get_close_matches(str(schedule), sorted(SCHEDULES), n=1, cutoff=0.3)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            valid = either([*sorted(SCHEDULES), "a file"])
            problems.append(("LP401", f"schedule={schedule!r} must be {valid}{hint}"))
        if virtual == "auto":
            return problems
        if not is_count(virtual) or virtual == 1:
            problems.append(
                f"virtual_pipeline_size={virtual!r} must be a whole number of 2 or more, or 'auto'."
            )
        elif schedule not in (free := [name for name, row in SCHEDULES.items() if row.chosen]):
            problems.append(
                f"virtual_pipeline_size={virtual} needs schedule={either(list(map(repr, free)))}; "
                f"schedule={schedule!r} has a fixed number of stages on each rank."
            )
        return problems

    def _count_problems(self) -> list[str]:
        problems, count, blocks = [], self.num_microbatches, self.stage_blocks
        if self.expert_max_rows is not None and not is_count(self.expert_max_rows):
            problems.append(
                f"expert_max_rows={self.expert_max_rows!r} must be a whole number of 1 or more, "
                "or None."
            )
        if count != "auto" and not is_count(count):
            problems.append(
                f"num_microbatches={count!r} must be a whole number of 1 or more, or 'auto'."
            )
        listed = isinstance(blocks, Sequence) and not isinstance(blocks, str)
        if blocks is not None and not (listed and all(map(is_count, blocks))):
            problems.append(
                f"stage_blocks={blocks!r} must be a list with the number of blocks of each stage, "
                "such as [3, 4, 5]. Each number has to be 1 or more."
            )
        return problems

    @property
    def compiler(self) -> dict[str, Any]:
        """Arguments of `torch.compile` for the blocks."""
        return self.compile_blocks if isinstance(self.compile_blocks, dict) else {}

    @property
    def records_graphs(self) -> bool:
        """Whether compiled blocks are recorded as CUDA graphs, where there is a GPU."""
        asked = (self.compiler.get("options") or {}).get("triton.cudagraphs")
        mode, backend = self.compiler.get("mode"), self.compiler.get("backend")
        return bool(asked) or mode in _GRAPH_MODES or backend == "cudagraphs"

    def fit_sizes(self, num_devices: int, devices_per_node: int) -> ParallelSizes:
        """Return the size of every axis.

        Args:
            num_devices: Ranks of the world.
            devices_per_node: Ranks of one node.

        Raises:
            MeshError: The sizes do not fit the devices.
        """
        return fit_sizes(
            num_devices=num_devices,
            devices_per_node=devices_per_node,
            tensor=self.tensor_parallel_size,
            tensor_across_nodes=self.tensor_parallel_across_hosts,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            data_replicate=self.data_parallel_replicate_size,
            context=self.context_parallel_size,
            expert=self.expert_parallel_size,
            zero_stage=self.zero_stage,
            auto=self.auto_rule,
        )

    def possible_sizes(self, num_devices: int, devices_per_node: int) -> list[ParallelSizes]:
        """Return the meshes that keep the sizes given, the ones that divide the model least first.

        Tensor, pipeline and data sizes that are "auto" are free; the context is 1 then.

        Args:
            num_devices: Ranks of the world.
            devices_per_node: Ranks of one node.

        Raises:
            MeshError: There is none.
        """
        found, problems = list[ParallelSizes](), list[MeshError]()
        tensor, pipeline = self.tensor_parallel_size, self.pipeline_parallel_size
        tensors = divisors(devices_per_node) if tensor == "auto" else [tensor]
        pipelines = divisors(num_devices) if pipeline == "auto" else [pipeline]
        for tp, pp in product(tensors, pipelines):
            one = replace(
                self, tensor_parallel_size=tp, pipeline_parallel_size=pp, auto_rule="data"
            )
            try:
                found.append(one.fit_sizes(num_devices, devices_per_node))
            except MeshError as error:
                problems.append(error)
        if not found:
            # Of the sizes that were given alone, if it can be said of them.
            replace(self, auto_rule="data").fit_sizes(num_devices, devices_per_node)
            raise problems[0]
        return sorted(found, key=lambda s: (s.tensor * s.pipeline * s.context, s.pipeline))

    def microbatches(self, ranks: int) -> int:
        """Return the number of micro-batches of a replica's batch on `ranks` pipeline ranks."""
        return 4 * ranks if self.num_microbatches == "auto" else self.num_microbatches

    def build_schedule(self, ranks: int, num_microbatches: int) -> Schedule:
        """Return the training schedule of `ranks` pipeline ranks.

        Raises:
            ScheduleError: The schedule does not fit these numbers.
        """
        return build_schedule(self.schedule, ranks, num_microbatches, self._chunks)

    def place_stages(self, ranks: int) -> tuple[int, ...]:
        """Return the pipeline rank that holds each stage, of `ranks`.

        Raises:
            ScheduleError: The schedule does not fit the number of ranks, or of micro-batches.
        """
        count = 1 if self.num_microbatches == "auto" else self.num_microbatches
        return place_stages(self.schedule, ranks, self._chunks, num_microbatches=count)

    @property
    def _chunks(self) -> int | None:
        return None if self.virtual_pipeline_size == "auto" else self.virtual_pipeline_size


def _read_context_options(options: Any) -> ContextOptions:
    """Return the options of the context axis, read from a dict of its fields or None.

    Raises:
        ConfigurationError: A field does not exist, has no such value, or names a backend that this
            machine does not have.
    """
    read: ContextOptions = (
        options
        if isinstance(options, ContextOptions)
        else read_fields(ContextOptions, options or {}, "context_options")
    )
    read.check()
    return read
