"""Searches the layout with the shortest predicted step, and says why its neighbors lost."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from lightning_par.checkpoint.progress import advance, counted
from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.errors import MeshError
from lightning_par.plan.block_partition import partition_blocks
from lightning_par.planner.constants import Constants
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import MemoryPrediction, peak_bytes, predict_memory
from lightning_par.planner.part_cost import PartCosts
from lightning_par.planner.profiles import DeviceProfile, reached
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.planner.step_time import make_clock, StepCost, StepTime

__all__ = ["Candidate", "Planner", "Rejection", "SearchResult"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its prediction.

    Attributes:
        layout: The layout.
        time: Its step.
        memory: Its bytes.
        tokens_per_second: Of all devices.
        mfu: Model FLOPs over what the devices could compute.
        traffic: Bytes that a rank sends in a step, by axis.
    """

    layout: Layout
    time: StepTime
    memory: MemoryPrediction
    tokens_per_second: float
    mfu: float
    traffic: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A layout that differs from the chosen one in one setting, and lost.

    Attributes:
        change: The setting and both values, as ``tensor 8 -> 4``.
        layout: The best layout with that change.
        reason: Why it lost, with numbers.
    """

    change: str
    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: The fastest layouts that fit, in order.
        rejections: Why neighbors of the first lost.
        considered: Number of valid layouts.
        fitting: Number of those that fit in memory.
    """

    best: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    considered: int
    fitting: int


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Predicts and searches the layouts of one model on one kind of device.

    Attributes:
        shape: The model.
        device: What every device can do.
        code: What the training code does.
        constants: What is reached of the peaks; None: what was measured, else fitted on the
            device's family.
        margin: Share of the device's memory that a prediction may take: the context, the
            allocator's gaps and the model's own error take the rest.
    """

    shape: TransformerShape
    device: DeviceProfile
    code: Implementation = field(default_factory=Implementation)
    constants: Constants | None = None
    margin: float = 0.9

    @property
    def reached(self) -> Constants:
        """The constants in use."""
        return self.constants or reached(self.device)

    def predict(self, layout: Layout) -> Candidate:
        """Return the prediction of a layout, whether it fits or not."""
        cost = StepCost(self.shape, layout, self.device, self.code, self.reached)
        time = cost.predict()
        flops = self.shape.flops(layout.samples)
        return Candidate(
            layout=layout,
            time=time,
            memory=predict_memory(self.shape, layout, self.code),
            tokens_per_second=layout.samples * self.shape.length / time.seconds,
            # Against the datasheet's peak, as papers report it, and not against what is reached.
            mfu=flops / (time.seconds * layout.sizes.world_size * self.device.flops),
            traffic=cost.traffic(),
        )

    def timeline(self, layout: Layout) -> tuple[tuple[TimedAction, ...], ...]:
        """Return the predicted actions of every rank of a pipeline, with their times in seconds."""
        virtual = layout.virtual if layout.in_rounds else None
        schedule = build_schedule(
            layout.schedule, layout.sizes.pipeline, layout.microbatches, virtual
        )
        cost = StepCost(self.shape, layout, self.device, self.code, self.reached)
        times = cost.stage_times()
        return simulate(
            schedule,
            forward=[stage.forward for stage in times],
            backward=[stage.backward for stage in times],
            backward_weight=[stage.weight for stage in times],
            p2p=cost.message if self.code.async_p2p else 0.0,
        ).events

    @property
    def limit(self) -> float:
        """Bytes that a layout may take on a device."""
        return self.margin * self.device.memory

    def search(self, space: LayoutSpace, *, beam: int = 16, keep: int = 5) -> SearchResult:
        """Return the layouts with the shortest steps.

        All layouts are ordered by a pipeline in closed form; the first of them are simulated, with
        stages cut by time.

        Args:
            space: What to choose from.
            beam: How many layouts are simulated.
            keep: How many are returned.

        Raises:
            MeshError: No layout divides the model, or none fits.
        """
        every = list(space.layouts(self.shape))
        if not every:
            raise MeshError(
                "LP105",
                f"no layout of {space.devices} devices can train this model with {space.samples} "
                "samples a step. In a layout, the number of replicas has to divide the number of "
                "samples, tensor_parallel_size has to divide the number of heads, and each stage "
                "needs a block. Use another number of samples or of nodes.",
            )
        # Checked by memory first: it costs microseconds, and leaves few layouts to time.
        fitting = list(self._fitting(every))
        if not fitting:
            raise MeshError("LP105", self._too_large(every, space))
        estimates = self._estimate(fitting)
        order = sorted(fitting, key=lambda one: estimates[one])
        with counted("layouts", "simulating the fastest layouts", len(order[:beam])):
            found = {one: self._simulate(one) for one in order[:beam]}
        # Whatever the closed form said, only simulated layouts are compared.
        best = min(order[:beam], key=lambda one: found[one].time.seconds)
        # The closed form may mislead: go on from a neighbor that is faster when simulated.
        while True:
            near = self._neighbors(best, every, estimates)
            new = [one for one in near.values() if one not in found]
            with counted("layouts", "simulating their neighbors", len(new)):
                found |= {one: self._simulate(one) for one in new}
            # A neighbor may be in `every` without fitting: it is simulated to say why it lost.
            fits = [one for one in near.values() if found[one].memory.peak <= self.limit]
            next_best = min([best, *fits], key=lambda one: found[one].time.seconds)
            if next_best == best:
                break
            best = next_best
        ranked = sorted(
            (one for one in found.values() if one.memory.peak <= self.limit),
            key=lambda one: one.time.seconds,
        )
        rejections = [
            Rejection(
                change=f"{respect} {_respects(best)[respect]} -> {value}",
                layout=one,
                reason=self._reason(found[best], found[one]),
            )
            for (respect, value), one in near.items()
        ]
        return SearchResult(
            best=tuple(ranked[:keep]),
            rejections=tuple(rejections),
            considered=len(every),
            fitting=len(fitting),
        )

    def _fitting(self, every: list[Layout]) -> Iterator[Layout]:
        """Yield what fits: of layouts that differ in recomputation, the one that does least."""
        # groupby: layouts of one key follow each other, those that recompute less first.
        for _, group in groupby(every, key=_but_recompute):
            for one in group:
                if peak_bytes(self.shape, one, self.code) <= self.limit:
                    yield one
                    break

    def _estimate(self, layouts: list[Layout]) -> dict[Layout, float]:
        blocks: dict[tuple[Any, ...], PartCosts] = {}
        found = {}
        for one in layouts:
            # Work of blocks is shared by all layouts that differ in pipeline and replicas only.
            key = _block_key(one)
            if key not in blocks:
                busy = one.sizes.world_size
                clock = make_clock(self.device, self.reached, self.code, busy)
                blocks[key] = PartCosts(self.shape, one, self.code, clock)
            cost = StepCost(self.shape, one, self.device, self.code, self.reached, blocks[key])
            found[one] = cost.estimate()
        return found

    def _simulate(self, layout: Layout) -> Candidate:
        """Return the prediction with stages cut by time, unless these need too much memory."""
        advance("layouts")
        even, cut = self.predict(layout), self.cut(layout)
        if cut.blocks == layout.split(self.shape.layers):
            return even
        found = self.predict(cut)
        # Stages cut by time may put more blocks where memory is scarce.
        if found.memory.peak > self.limit or found.time.seconds >= even.time.seconds:
            return even
        return found

    def cut(self, layout: Layout) -> Layout:
        """Return the layout with the stages whose slowest one is fastest."""
        if layout.stages == 1:
            return layout
        cost = StepCost(self.shape, layout, self.device, self.code, self.reached)
        blocks, ends = cost.block.chain()
        # Whole numbers, as the partition is exact and its results are cached.
        unit = max(blocks) / 1000
        first, last = (round(seconds / unit) for seconds in ends)
        cut = _partition(tuple(round(b / unit) for b in blocks), first, last, layout.stages)
        return replace(layout, blocks=cut)

    # Why the others lost --------------------------------------------------------------------------

    def _too_large(self, every: list[Layout], space: LayoutSpace) -> str:
        least = min(every, key=lambda one: peak_bytes(self.shape, one, self.code))
        needs = peak_bytes(self.shape, least, self.code) / _GIB
        more = "" if space.offload else ", or offload the optimizer"
        return (
            f"none of {len(every)} layouts fits into {self.limit / _GIB:.1f} GiB, "
            f"{self.margin:.0%} of the memory of a {self.device.name}. The smallest layout, "
            f"{least}, needs {needs:.1f} GiB on each device. Use more devices{more}."
        )

    def _neighbors(
        self, chosen: Layout, every: list[Layout], estimates: Mapping[Layout, float]
    ) -> dict[tuple[str, Any], Layout]:
        """Return, for every respect and value, the best layout that differs in it alone."""
        nearest: dict[tuple[str, Any], Layout] = {}
        ours = _respects(chosen)
        for one in every:
            changed = _difference(ours, _respects(one))
            if changed is None:
                continue
            kept = nearest.get(changed)
            if kept is None or self._rank(one, estimates) < self._rank(kept, estimates):
                nearest[changed] = one
        return nearest

    def _rank(self, one: Layout, estimates: Mapping[Layout, float]) -> tuple[int, float]:
        """Order by time what fits, then by memory what does not."""
        if one in estimates:
            return 0, estimates[one]
        return 1, peak_bytes(self.shape, one, self.code)

    def _reason(self, best: Candidate, other: Candidate) -> str:
        if other.memory.peak > self.limit:
            rank = other.memory.peak_rank
            kind, size = max(other.memory.ranks[rank].items(), key=lambda item: item[1])
            return (
                f"memory: {other.memory.peak / _GIB:.1f} GiB on pipeline rank {rank}, "
                f"{size / _GIB:.1f} of it {kind}; {self.limit / _GIB:.1f} fit"
            )
        ours, theirs = best.time, other.time
        grown = {name: value - ours.parts[name] for name, value in theirs.parts.items()}
        part = max(grown, key=lambda name: grown[name])
        return (
            f"{part}: {ours.parts[part]:.3g} s became {theirs.parts[part]:.3g} s, the step "
            f"{theirs.seconds / ours.seconds - 1:+.1%}"
        )


@lru_cache(maxsize=1 << 10)
def _partition(blocks: tuple[int, ...], first: int, last: int, stages: int) -> tuple[int, ...]:
    """Return the exact partition of blocks by their costs, with two edges."""
    return tuple(partition_blocks(blocks, (first, last), stages))


def _block_key(one: Layout) -> tuple[Any, ...]:
    """Return what the work of a block depends on."""
    sizes = one.sizes
    return (
        (sizes.tensor, sizes.context, sizes.expert, one.micro_batch),
        (one.recompute, one.sequence_parallel, one.microbatches > 1),
    )


def _but_recompute(one: Layout) -> tuple[Any, ...]:
    return (one.sizes, one.zero_stage, one.micro_batch, one.schedule, one.virtual)


def _respects(one: Layout) -> dict[str, Any]:
    """Return the settings in which a neighbor may differ: name -> value of this layout.

    The degree of data parallelism is not among them, as it follows from the others.
    """
    sizes = one.sizes
    return {
        "tensor": sizes.tensor,
        "pipeline": sizes.pipeline,
        "context": sizes.context,
        "expert": sizes.expert,
        "micro-batch": one.micro_batch,
        "ZeRO stage": one.zero_stage,
        "copies": sizes.data_replicate,
        "schedule": one.schedule + (f" x{one.virtual}" if one.virtual > 1 else ""),
        "recompute": one.recompute,
    }


def _difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any] | None:
    """Return the one respect in which two layouts differ, with the other's value; a degree may be
    twice or half.
    """
    names = [name for name in ours if ours[name] != theirs[name]]
    if len(names) != 1:
        return None
    name = names[0]
    # A degree of 8 next to 2 differs in more than one respect of the hardware.
    if isinstance(ours[name], int) and name != "ZeRO stage":
        small, large = sorted((ours[name], theirs[name]))
        if large != 2 * small:
            return None
    return name, theirs[name]
