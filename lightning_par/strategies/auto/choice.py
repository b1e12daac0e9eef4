"""The choice of a layout: the fastest that the planner predicts and that nothing refuses.

Speed is samples a second, where every replica draws batches of the size of its loader, as under
DDP. A model that the planner cannot read gets the layout that divides the model least.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_par.engine.activations.checkpointing import Recomputation
from lightning_par.engine.experts.token_dispatch import computes_rows
from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.engine.pipeline.stage import matching_modules
from lightning_par.errors import ConfigurationError, LightningParError, MeshError
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.planner.block_trace import shape_of
from lightning_par.planner.layouts import divisors, LayoutSpace
from lightning_par.planner.profiles import DeviceProfile, implementation
from lightning_par.planner.search import Candidate, Planner
from lightning_par.planner.shapes import Layout
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.auto.machine import find_profile
from lightning_par.strategies.auto.training_data import look_at_data, TrainingData
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.block_wrapping import check_recomputation
from lightning_par.strategies.setup.checks import check_module, check_trainer, divides_nothing
from lightning_par.strategies.setup.inferred_plan import first_samples, plan_of_run
from lightning_par.strategies.setup.memory_check import MemoryCheck
from lightning_par.strategies.step.batch_statistics import refuse_parts, training_batchnorms
from lightning_par.upstream.lightning import synchronizes_batchnorm

__all__ = ["CHOSEN", "Choice", "LayoutChooser", "Wish"]

_SIZES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipeline",
    "context_parallel_size": "context",
    "data_parallel_size": "data",
    "data_parallel_replicate_size": "data_replicate",
    "expert_parallel_size": "expert",
}
"""Option -> its name in `LayoutSpace.fixed`."""
CHOSEN = (
    *_SIZES,
    "zero_stage",
    "schedule",
    "sequence_parallel",
    "num_microbatches",
    "virtual_pipeline_size",
    "stage_blocks",
)
"""Options that a choice sets, unless they are given."""
_TOLD = 3
"""Refusals that an error tells."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the user left to choose, beside the sizes that are "auto" in the options.

    Attributes:
        profile: See `AutoParallelStrategy`.
        zero_stage: Whether the ZeRO stage.
        schedule: Whether the schedule of a pipeline.
        sequence_parallel: Whether activations between the blocks are sharded.
    """

    profile: str | None = None
    zero_stage: bool = True
    schedule: bool = True
    sequence_parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout that nothing refuses.

    Attributes:
        layout: The layout.
        predicted: Its prediction; None: there is none.
        runner_up: The next best on another mesh, if it was looked for and found.
        reason: Why there is no prediction; empty if there is one.
        left_out: Why a run would refuse the first one that came before; empty: none did.
        profile: Name of the device profile.
        is_measured: Whether that was measured on the user's machine.
    """

    layout: Layout
    predicted: Candidate | None = None
    runner_up: Candidate | None = None
    reason: str = ""
    left_out: str = ""
    profile: str = ""
    is_measured: bool = False

    def recomputes(self, options: MeshOptions) -> bool:
        """Return whether it was this choice that made the blocks recompute."""
        mode, kept = self.layout.recompute, options.recomputation
        return mode != "none" and kept == Recomputation(mode=mode)

    def __str__(self) -> str:
        left_out = (
            (f" A layout that auto_parallel prefers is not possible: {self.left_out}")
            if self.left_out
            else ""
        )
        if self.predicted is None:
            return (
                f"auto_parallel chose {self.layout} without a prediction of its time, since "
                f"{self.reason}. Without a prediction, auto_parallel prefers replicas, then ZeRO "
                f"sharding, then layouts that divide the model.{left_out}"
            )
        lines = [
            f"auto_parallel chose {_describe(self.predicted)}, predicted with the device profile "
            f"{self.profile}"
        ]
        if self.runner_up is not None:
            lines.append(f"the next best layout is {_describe(self.runner_up)}")
        return "; ".join(lines) + "." + left_out


def _describe(one: Candidate) -> str:
    return (
        f"{one.layout}: {one.time.seconds:.3g} s a step, "
        f"{one.layout.samples / one.time.seconds:.4g} samples/s, "
        f"{one.memory.peak / 2**20:.4g} MiB"
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutChooser:
    """Chooses the layout of one run.

    Every rank comes to the same choice from the same data, model and devices; rank 0's counts.

    Attributes:
        trainer: The user's Trainer.
        module: The user's LightningModule, whole; parameters may be on meta.
        options: As the user gave them, with what callbacks added.
        wish: What else is free.
        device: Of this rank.
        devices: Of all nodes.
        node: Devices of a node.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    options: MeshOptions
    wish: Wish
    device: torch.device
    devices: int
    node: int

    def choose(self) -> Choice:
        """Return the choice.

        Raises:
            LightningParError: Every layout is refused, or none fits in memory; or there is no such
                profile.
        """
        try:
            planner = self._planner()
        # A model that the planner cannot read still has layouts that work.
        except ConfigurationError as error:
            if self.wish.profile is not None:  # a wrong one is an error, and this finds it again
                find_profile(self.wish.profile, self.device, self.node)
            return self._plain_choice({}, None, error.message)
        refusals: dict[tuple[Any, ...], str] = {}
        ranked = self._ranked(planner, refusals)
        try:
            best = next(ranked, None)
        # Nothing fits in memory. The first refusal says more where the model itself is at fault.
        except MeshError as error:
            told = " ".join([error.message, *islice(refusals.values(), 1)])
            raise MeshError("LP105", told) from None
        if best is None:  # sizes that the planner would not think of
            return self._plain_choice(refusals, planner)
        made = self._choice(planner, best, refusals)
        # The same generator goes on: it has seen the mesh of the best.
        return replace(made, runner_up=next(ranked, None))

    def _choice(
        self, planner: Planner, best: Candidate, refusals: dict[tuple[Any, ...], str]
    ) -> Choice:
        return Choice(
            layout=best.layout,
            predicted=best,
            left_out=next(iter(refusals.values()), ""),
            profile=planner.device.name,
            is_measured=planner.device.calibration is not None,
        )

    def settings(self, layout: Layout) -> MeshOptions:
        """Return the options of a layout; what the user gave is kept."""
        made = {**layout.options(), "auto_rule": "data"}
        # The planner counts those of a step, the option those of a batch.
        pieces = layout.microbatches // self._accumulated
        kept = self.options.num_microbatches
        made["num_microbatches"] = pieces if kept == "auto" else kept
        given = {"offload_options": True, "stage_blocks": self.options.stage_blocks is not None}
        given["sequence_parallel"] = not self.wish.sequence_parallel
        # What the user gave counts, whatever the layout says.
        for name in (name for name, is_given in given.items() if is_given):
            made.pop(name, None)
        if self.options.recomputation is None and layout.recompute != "none":
            made["recomputation"] = Recomputation(mode=layout.recompute)
        return replace(self.options, **made)

    # What the planner knows -----------------------------------------------------------------------

    def _planner(self) -> Planner:
        """Return the planner of this model on these devices.

        Raises:
            ConfigurationError: The model has no shape that it could read, or the GPU no profile.
        """
        if self.options.schedule not in SCHEDULES:
            raise ConfigurationError(
                "LP907",
                f"schedule={self.options.schedule!r} is a file, and the time of such schedules "
                "cannot be predicted. For a prediction use the name of a schedule, such as '1f1b'",
            )
        device = find_profile(self.wish.profile, self.device, self.node)
        code = implementation(str(self.trainer.precision), device)
        if self.device.type == "cpu":  # whose cores also send
            code = replace(code, overlap_data=False, async_p2p=False)
        shape = shape_of(
            self.module,
            self._data.length,
            plan=self._whole_plan,
            example=self._example,
            eager=device.runs_eagerly,
        )
        return Planner(shape=shape, device=_in_words(device, code.activation_bytes), code=code)

    def _whole_plan(self) -> ParallelPlan:
        # Both axes, so that a plan of the user's method says what it knows of either.
        sizes = ParallelSizes(tensor=2, pipeline=2)
        return plan_of_run(self.module, self.options.plan, sizes) or ParallelPlan()

    def _example(self) -> Any:
        try:
            return first_samples(self.module)
        except Exception:  # of a loader or dataset of the user; the run will meet it again
            return None

    def _ranked(
        self, planner: Planner, refusals: dict[tuple[Any, ...], str]
    ) -> Iterator[Candidate]:
        """Yield the layouts that nothing refuses, by predicted samples a second; a search is
        repeated without what was refused.
        """

        def accepts(sizes: ParallelSizes, zero: int) -> bool:
            return self._has_samples(sizes) and _kind(sizes, zero) not in refusals

        seen = set[ParallelSizes]()
        while True:
            # Anew after each refusal: without it another layout may be among those that are kept.
            best = self._search(planner, accepts)
            # Spaces differ in samples a step, so that seconds alone do not compare.
            for one in sorted(best, key=lambda one: -one.layout.samples / one.time.seconds):
                if one.layout.sizes in seen:
                    continue
                refusal = self._refusal(one.layout)
                if refusal is not None:
                    refusals[_kind(one.layout.sizes, one.layout.zero_stage)] = refusal
                    # Out of the for only: searched again without this kind.
                    break
                seen.add(one.layout.sizes)
                yield one
            else:
                return

    def _search(self, planner: Planner, accepts: Any) -> Iterator[Candidate]:
        """Yield the best layouts of every number of replicas.

        Raises:
            MeshError: There are layouts, and none of them fits in memory.
        """
        problems, fits = list[MeshError](), False
        for space in self._spaces(accepts):
            if next(space.layouts(planner.shape), None) is None:
                continue
            try:
                yield from planner.search(space, keep=16).best
                fits = True
            except MeshError as error:
                problems.append(error)
        if problems and not fits:
            raise MeshError(
                "LP105",
                f"auto_parallel: {problems[-1].message} This is a prediction. To train without "
                "a prediction, use Hybrid3DStrategy with sizes that you choose.",
            )

    def _spaces(self, accepts: Any) -> Iterator[LayoutSpace]:
        options, wish = self.options, self.wish
        given = {name: getattr(options, option) for option, name in _SIZES.items()}
        fixed = {name: size for name, size in given.items() if size != "auto"}
        kept = options.recomputation
        # A space for each number of replicas, as the samples of a step follow from it.
        for data in divisors(self.devices):
            if fixed.get("data", data) != data:
                continue
            yield LayoutSpace(
                devices=self.devices,
                samples=data * self._batch_size * self._accumulated,
                node=self.node,
                zero_stages=(1, 2, 3) if wish.zero_stage else (options.zero_stage,),
                recompute=("none", "selective", "full") if kept is None else (kept.mode,),
                shortest_context=1 if "context" in fixed else 2048,
                offload=options.offload_options is not None,
                expert_max_rows=options.expert_max_rows,
                fixed=tuple({**fixed, "data": data}.items()),
                accumulated=self._accumulated,
                pieces=self._pieces,
                sequence_parallel=self._data.is_even if wish.sequence_parallel else True,
                schedules=None if wish.schedule else (options.schedule,),
                accepts=accepts,
            )

    # What can be had ------------------------------------------------------------------------------

    def _plain_choice(
        self, refusals: dict[tuple[Any, ...], str], planner: Planner | None, reason: str = ""
    ) -> Choice:
        """Return the first layout that nothing refuses, of those that divide the model least.

        Args:
            refusals: What is known already; those that are met come to it.
            planner: Predicts it, if there is one.
            reason: Why there is none.
        """
        for sizes in self.options.possible_sizes(self.devices, self.node):
            # With one replica nothing is sharded, whatever the stage.
            free = self.wish.zero_stage and sizes.data > 1
            for zero in (1, 2, 3) if free else (self.options.zero_stage,):
                asked = replace(
                    self.options,
                    zero_stage=zero,
                    num_microbatches=self._pieces or "auto",
                    sequence_parallel=self._data.is_even,
                    stage_blocks=None,
                    offload_options=None,
                )
                layout = Layout.from_options(
                    asked, sizes, self._batch_size, accumulated=self._accumulated
                )
                refusal = self._refusal(layout, fits=True)
                if refusal is None and planner is not None:
                    return self._choice(planner, planner.predict(layout), refusals)
                if refusal is None:
                    left_out = next(iter(refusals.values()), "")
                    return Choice(layout=layout, reason=reason, left_out=left_out)
                refusals[_kind(sizes, zero)] = refusal
        few = "\n".join(f"- {text}" for text in list(dict.fromkeys(refusals.values()))[:_TOLD])
        raise ConfigurationError(
            "LP105",
            f"auto_parallel found no layout of {self.devices} devices that can train "
            f"{type(self.module).__name__}. The layouts were refused for these reasons:\n{few}",
        )

    def _refusal(self, layout: Layout, *, fits: bool = False) -> str | None:
        """Return why a run would refuse a layout, or None.

        Args:
            layout: The layout.
            fits: Whether memory is a reason, too, by what the parameters need.
        """
        options, sizes = self.settings(layout), layout.sizes
        # First, as it costs nothing; memory last, as it goes over the model.
        if not self._has_samples(sizes):
            return (
                f"{sizes.data} replicas with batches of {self._batch_size} samples need more than "
                f"the {self._data.samples} samples of the data set. Use a smaller batch_size."
            )
        try:
            check_trainer(self.trainer, self.module, sizes)
            self._check_batch_statistics(layout)
            resolved = check_module(self.module, options, sizes)
            if options.recomputation is not None:
                count = len(options.place_stages(sizes.pipeline))
                check_recomputation(self.module, resolved, options.recomputation, count)
        except LightningParError as error:
            return error.message
        if sizes.tensor > 1 and divides_nothing(resolved.plan):
            return f"tensor_parallel_size={sizes.tensor} would shard no layer of this model."
        memory = MemoryCheck(
            module=self.module,
            resolved=resolved,
            options=options,
            sizes=sizes,
            precision=str(self.trainer.precision),
            ranks_per_host=self.node,
        )
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return memory.explain_misfit(device=total, host=available_memory())
        return memory.explain_misfit(device=None, host=available_memory()) if fits else None

    def _has_samples(self, sizes: ParallelSizes) -> bool:
        """Whether every replica has a batch of its own; a number of replicas given is kept."""
        samples = self._data.samples if self.options.data_parallel_size == "auto" else None
        return samples is None or sizes.data == 1 or sizes.data * self._batch_size <= samples

    def _check_batch_statistics(self, layout: Layout) -> None:
        pieces = layout.microbatches // self._accumulated
        joins = synchronizes_batchnorm(self.trainer.strategy) and pieces == 1
        if self._plan.batch.local_statistics or joins or (layout.sizes.data == 1 and pieces == 1):
            return
        refuse_parts(training_batchnorms(self.module), layout.sizes.data, pieces)

    @cached_property
    def _plan(self) -> ParallelPlan:
        """The plan as far as it is declared."""
        return self.options.plan or find_plan(self.module) or ParallelPlan()

    @cached_property
    def _data(self) -> TrainingData:
        return look_at_data(self.trainer, self.module, self._plan.batch)

    @property
    def _pieces(self) -> int:
        """Micro-batches of a batch under a pipeline; 0: any number."""
        given = self.options.num_microbatches
        # Losses that balance experts are none of parts of a batch; models of transformers that
        # have such a loss are refused by their plan.
        experts = matching_modules(self.module, self._plan.experts).values()
        balances = self._plan.replica_sums or any(map(computes_rows, experts))
        alone = 1 if balances else 0
        return alone if given == "auto" else given

    @property
    def _batch_size(self) -> int:
        return self._data.batch_size or 1

    @property
    def _accumulated(self) -> int:
        return int(self.trainer.accumulate_grad_batches)


def _kind(sizes: ParallelSizes, zero: int) -> tuple[Any, ...]:
    """Return what of a mesh a refusal depends on."""
    # Not the number of replicas: what is refused with 2 is refused with 4, and the search gets
    # shorter.
    rest = sizes.data > 1, sizes.data_shard > 1, zero
    return (sizes.tensor, sizes.pipeline, sizes.context, sizes.expert, *rest)


def _in_words(device: DeviceProfile, width: float) -> DeviceProfile:
    """Return a CPU's profile for numbers of 8 bytes, which it computes half as fast as those of 4;
    profiles of GPUs are those of 16 bits.
    """
    halves = device.name == "cpu" and width == 8
    return replace(device, flops=device.flops / 2) if halves else device
