"""Whether devices and hosts can hold a run, before it starts: an estimate, and the refusal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_par.engine.memory.estimate import estimate_memory, MemoryEstimate, misfits
from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.errors import ConfigurationError
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions

__all__ = ["MemoryCheck"]

_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryCheck:
    """What a run would hold, and whether its devices and hosts can.

    Attributes:
        module: Whole module; parameters may be on meta.
        resolved: Its resolved plan.
        options: The options of the strategy.
        sizes: Sizes of the mesh.
        precision: Name of the Trainer's precision, such as ``"bf16-true"``.
        ranks_per_host: Ranks that share the memory of a host.
    """

    module: nn.Module
    resolved: ResolvedPlan
    options: MeshOptions
    sizes: ParallelSizes
    precision: str
    ranks_per_host: int

    def estimate(
        self, *, zero_stage: int | None = None, offload: OffloadOptions | None = None
    ) -> MemoryEstimate:
        """Return the bytes that the fullest rank holds, on its device and on its host, by kind.

        Args:
            zero_stage: Instead of the one of the options.
            offload: Instead of the one of the options.
        """
        options, sizes = self.options, self.sizes
        stage = options.zero_stage if zero_stage is None else zero_stage
        if stage and not options.zero_stage:  # whole replicas would shard
            sizes = replace(sizes, data_replicate=1, data_shard=sizes.data)
        return estimate_memory(
            self.module,
            self.resolved,
            sizes,
            zero_stage=stage,
            rank_of_stage=options.place_stages(sizes.pipeline),
            stage_blocks=options.stage_blocks,
            offload=options.offload_options if offload is None else offload,
            dtype=_DTYPES.get(self.precision),
            compression=None if stage else options.gradient_compression,
        )

    def check(self, device: torch.device) -> None:
        """Refuse a run that cannot fit, where the device is a GPU or the optimizer is offloaded;
        warn of one that is to shard its parameters and has to gather all of them at once.

        Args:
            device: Device of this rank.

        Raises:
            ConfigurationError: With what is needed, what there is, and the option that would fit.
        """
        is_sharded = self.options.zero_stage == 3 and self.sizes.data_shard > 1
        # Without blocks FSDP has one unit, the whole model, and stage 3 saves nothing in a step.
        if is_sharded and not self.resolved.block_names:
            rank_zero_warn(
                f"zero_stage=3: the plan of {type(self.module).__name__} does not say which "
                "modules are its blocks, so every step gathers all parameters at once. Return "
                "ParallelPlan(blocks=...) from parallel_plan() of the model: each step then "
                "gathers the parameters of one block at a time."
            )
        is_gpu = device.type == "cuda"
        if not is_gpu and self.options.offload_options is None:
            return
        # All of it, and not what is free: another process may be about to end.
        memory = torch.cuda.get_device_properties(device).total_memory if is_gpu else None
        said = self.explain_misfit(device=memory, host=available_memory())
        if said is not None:
            raise ConfigurationError("LP606", said)

    def explain_misfit(self, *, device: int | None, host: int | None) -> str | None:
        """Return why a run cannot fit and which options would, or None if it may.

        Args:
            device: Bytes of one device; None if the devices are the host.
            host: Bytes that the host can give; None: unknown.
        """

        def problems(**changes: Any) -> list[str]:
            return misfits(
                self.estimate(**changes),
                device=device,
                host=host,
                ranks_per_host=self.ranks_per_host,
                shared=device is None,
            )

        found = problems()
        if not found:
            return None
        # Lazily, as each estimate walks over all parameters; the first that fits is named.
        fitting = (words for words, changes in self._alternatives() if not problems(**changes))
        hint = next(fitting, "more devices, or a smaller model")
        return f"{self.sizes} cannot hold the model: {', and '.join(found)}. Use {hint}."

    def _alternatives(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Give options that need less, the ones that cost least first."""
        offload, own_stage = self.options.offload_options, self.options.zero_stage
        stages = [own_stage]
        if self.sizes.data > 1 and own_stage < 3:
            stages.append(3)
        without = ", gradient_compression=None" if self.options.gradient_compression else ""
        for stage in stages:
            words = [] if stage == own_stage else [f"zero_stage={stage}{without}"]
            if words:
                yield words[0], {"zero_stage": stage}
            kinds: list[tuple[str, OffloadOptions]] = []
            if offload is None:
                kinds.append(("offload_options={} (the optimizer in CPU memory)", OffloadOptions()))
            elif offload.delayed_update is not False:
                kinds.append(("delayed_update=False", replace(offload, delayed_update=False)))
            if offload is not None and offload.state_dtype == "float32":
                smaller = replace(offload, state_dtype="bfloat16", delayed_update=False)
                off = "delayed_update=False and " if offload.delayed_update is not False else ""
                kinds.append((f'{off}state_dtype="bfloat16"', smaller))
            for text, options in kinds:
                yield " and ".join([*words, text]), {"zero_stage": stage, "offload": options}
