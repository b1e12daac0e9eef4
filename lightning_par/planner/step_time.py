"""Time of an optimizer step: the pipeline, what replicas exchange, and the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf

from lightning_par.planner.constants import Constants
from lightning_par.planner.operations import Clock, Collective, ranks_inside
from lightning_par.planner.part_cost import PartCosts, StageTime
from lightning_par.planner.pipeline_time import pipeline_seconds, quick_pipeline
from lightning_par.planner.profiles import DeviceProfile, reached
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape

_CONTENTION = 0.1
"""Share of hidden traffic by which what hides it becomes slower."""

__all__ = ["StepCost", "StepTime", "make_clock", "predict_step"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a step.

    Attributes:
        seconds: Of the step.
        bubble: Idle fraction of the pipeline.
        parts: Seconds of the slowest rank, by kind; they sum up to `seconds`.
    """

    seconds: float
    bubble: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Shared:
    """Weights that replicas share.

    Attributes:
        number: Of one rank, before the ranks divide them.
        ranks: That share their states.
        degree: Of the expert axis, if they are experts.
    """

    number: float
    ranks: int
    degree: int = 1


class StepCost:
    """What a step of a layout is made of.

    Args:
        shape: The model.
        layout: The layout.
        device: Physics.
        code: What the training code does.
        constants: What is reached of the peaks.
        block: Work of the model's parts, if it has been computed for a layout that differs only in
            the pipeline and the replicas.
        busy: Share of the devices that compute at any time; less than 1 in a pipeline.

    Attributes:
        block: Work of the model's parts.
        times: Of every stage, for one micro-batch.
        message: Seconds of a message between two stages.
    """

    def __init__(
        self,
        shape: TransformerShape,
        layout: Layout,
        device: DeviceProfile,
        code: Implementation,
        constants: Constants,
        block: PartCosts | None = None,
        busy: float = 1.0,
    ) -> None:
        self.shape, self.layout, self.code, self._busy = shape, layout, code, busy
        self.clock = make_clock(device, constants, code, layout.sizes.world_size * busy)
        self.block = block or PartCosts(shape, layout, code, self.clock)
        self.times = self.block.stages(layout.split(shape.layers))
        self.message = self._message() if layout.sizes.pipeline > 1 else 0.0

    def _message(self) -> float:
        sizes = self.layout.sizes
        split = self.layout.sequence_parallel or self.code.sharded_p2p
        size = self.block.hidden_bytes / (sizes.tensor if split else 1)
        # Neighbors on the pipeline axis are as many ranks apart as there are in one stage.
        between = sizes.tensor * sizes.context * sizes.data >= self.clock.device.node
        return self.clock.message(size, between_nodes=between)

    # Replicas -------------------------------------------------------------------------------------

    def held(self, expert: float, *, trained: bool = False) -> float:
        """Return the weights of the fullest rank's stages, before the replicas divide them.

        Args:
            expert: Degree of the expert axis; infinite: without experts.
            trained: Count those that are trained: frozen ones have no gradient and no state.
        """
        m, layout, sizes = self.shape, self.layout, self.layout.sizes
        fullest = max(
            sum(
                m.span_weights(start, end, sizes.tensor, expert, trained=trained)
                for start, end in spans
            )
            for spans in layout.spans(m.layers)
        )
        # The first stage has the table; without a pipeline also the head.
        alone = sizes.pipeline == 1
        return fullest + m.end_weights(sizes.tensor, first=True, last=alone, trained=trained)

    def _shared(self, weights: Callable[[float], float]) -> list[_Shared]:
        """Return the weights of a rank by the ranks that share them.

        Args:
            weights: Number of the weights for a degree of the expert axis.
        """
        code, layout, degree = self.code, self.layout, self.layout.sizes.expert
        shards, found = code.shards(layout), weights(degree)
        if degree == 1 or shards == 1:
            return [_Shared(found, shards)]
        others = weights(inf)
        experts = _Shared(found - others, code.expert_shards(layout), degree)
        return [_Shared(others, shards), experts]

    def _trained(self) -> list[_Shared]:
        return self._shared(lambda expert: self.held(expert, trained=True))

    def over_data(
        self, kind: Collective, width: float, weights: list[_Shared], pieces: int = 1
    ) -> float:
        """Return the time of a collective over the replicas, sharded first, then replicated.

        Args:
            kind: Which.
            width: Bytes of a weight.
            weights: The whole.
            pieces: Collectives that share them, each of which waits; they start while others run.
        """
        return sum(self._over_ranks(kind, width * one.number, one, pieces) for one in weights)

    def _over_ranks(self, kind: Collective, size: float, one: _Shared, pieces: int) -> float:
        sizes, node, shard = self.layout.sizes, self.clock.device.node, one.ranks
        apart = sizes.tensor * one.degree
        # HSDP: whole copies of the sharded state, between which an all-reduce follows.
        copies = sizes.data * sizes.context // (shard * one.degree)
        inside = ranks_inside(shard, apart, node)
        waits = (pieces - 1) * self.clock.wait
        slower = self.clock.shared if self.code.fsdp and shard <= inside else None
        if slower is None:
            time = self.clock.collective(kind, size, shard, inside)
            time += waits if shard > 1 else 0.0
        elif shard > 1:
            piece = self.clock.collective(kind, size / pieces, shard, inside)
            time = slower * pieces * (piece - self.clock.wait)
        else:
            time = 0.0
        # Weights are gathered inside of a copy only.
        if copies > 1 and kind != "all_gather":
            inside = ranks_inside(copies, apart * shard, node)
            time += self.clock.collective("all_reduce", size / shard, copies, inside) + waits
        return time

    def replicas(self) -> float:
        """Return the time of gradients, and of weights back, outside of the micro-batches."""
        code, trained, stage = self.code, self._trained(), self.layout.zero_stage
        # Whole replicas: one all-reduce, nothing comes back.
        if stage == 0:
            return self.over_data("all_reduce", code.reduce_bytes, trained)
        pieces = self._blocks() + 1  # every block, and what is around them
        reduced = self.over_data("reduce_scatter", code.reduce_bytes, trained, pieces)
        return reduced + (
            self.over_data("all_gather", code.gather_bytes, trained, pieces) if stage < 3 else 0
        )

    def _blocks(self) -> int:
        """Return the blocks of the rank that has most of them."""
        return max(self.layout.split(self.shape.layers)) * self.layout.stages_per_rank

    def gathers(self) -> float:
        """Return the seconds that a block's collectives take in a micro-batch under ZeRO stage 3.

        The block is gathered for the forward and again for the backward. Its gradients are summed
        in each micro-batch, or once for all, which is then divided by their number.
        """
        tensor, weights = self.layout.sizes.tensor, self.shape.block_weights
        held = self._shared(lambda expert: weights(tensor, expert))
        trained = self._shared(lambda expert: weights(tensor, expert, trained=True))
        # In the forward, and again in the backward, as blocks are resharded between them.
        gathered = 2 * self.over_data("all_gather", self.code.gather_bytes, held)
        reduced = self.over_data("reduce_scatter", self.code.reduce_bytes, trained)
        each = self.code.reduces_each(self.layout)
        return gathered + (reduced if each else reduced / self.layout.microbatches)

    def tied(self) -> float:
        """Return the time of the sum of gradients of weights that the outer stages both hold.

        It follows the sum over replicas where those keep parts of gradients, else it precedes it.
        """
        layout, sizes, clock = self.layout, self.layout.sizes, self.clock
        first, last = layout.owners[0], layout.owners[-1]
        if first == last:
            return 0.0
        size = self.code.gradient_bytes * self.shape.shared_weights(sizes.tensor)
        if self.code.fsdp and layout.zero_stage:
            size /= self.code.shards(layout)
        # Ranks of one stage lie between the two outer ones.
        distance = abs(last - first) * sizes.tensor * sizes.context * sizes.data
        inside = 1 if distance >= clock.device.node else 2
        return clock.collective("all_reduce", size, 2, inside) if size else 0.0

    def optimizer(self) -> float:
        """Return the time of the update of what this rank owns, and of the norm of gradients."""
        trained, sharded = self._trained(), self.layout.zero_stage > 0
        # Sharded states: each rank updates its part.
        owned = sum(one.number / (one.ranks if sharded else 1) for one in trained)
        traffic = self.code.step_traffic * owned + 8 * sum(one.number for one in trained)
        if self.layout.offload:
            # Gradients to the host and weights back; the update itself reads host memory.
            host = self.clock.device.host_link
            return owned * (self.code.reduce_bytes + self.code.gather_bytes) / host
        return self.clock.stream(traffic, 100)

    def traffic(self) -> dict[str, float]:
        """Return the bytes that a rank sends in a step, by axis, as rings send them."""
        m, layout, code, sizes = self.shape, self.layout, self.code, self.layout.sizes
        passes = layout.microbatches * self._blocks()
        again = 1 if layout.recompute == "full" else 0
        hidden = self.block.hidden_bytes
        # Forward, backward, and a recomputed forward.
        of_tokens = passes * (2 + again) * hidden
        of_experts = passes * (2 + again) * 2 * code.expert_bytes(m, layout)
        keys = (
            2 * code.activation_bytes * self.block.tokens * m.kv_heads * m.head_dim / sizes.tensor
        )
        split = layout.sequence_parallel or code.sharded_p2p
        reductions = layout.microbatches if code.reduces_each(layout) else 1
        # Stage 3: for each micro-batch in forward and backward; below, once a step.
        gathers = 2 * layout.microbatches if layout.zero_stage == 3 else 1
        trained = self._trained()
        # Stages below 3 gather what the optimizer has changed; stage 3 gathers all there is.
        gathered = self._shared(self.held) if layout.zero_stage == 3 else trained
        sent = [_sent(one.ranks, reductions * code.reduce_bytes * one.number) for one in trained]
        sent += [_sent(one.ranks, gathers * code.gather_bytes * one.number) for one in gathered]
        copied = [2 * code.reduce_bytes * one.number / one.ranks for one in trained]
        return {
            "pp": 2
            * layout.microbatches
            * layout.stages_per_rank
            * hidden
            / (sizes.tensor if split else 1)
            * (sizes.pipeline > 1),
            "dp_replicate": _sent(sizes.data_replicate, sum(copied)),
            "dp_shard": sum(sent),
            "cp": (sizes.context - 1) * passes * (3 + again) * keys
            # Context ranks share experts that are divided.
            + _sent(sizes.context, copied[0] if code.fsdp else 0),
            "ep": _sent(sizes.expert, of_experts),
            # Half of it enters divided layers, and half leaves them.
            "tp": _sent(
                sizes.tensor,
                m.tensor_sums * of_tokens * (1 + code.activation_bytes / code.stream_bytes),
            ),
        }

    # The step -------------------------------------------------------------------------------------

    def stage_times(self) -> list[StageTime]:
        """Return the times of every stage, with the messages that hold it up."""
        if self.code.async_p2p or self.layout.sizes.pipeline == 1:
            return self.times
        # A stage that waits for its message adds it to every forward and backward.
        held = self.message + self.clock.constants.stage_start
        return [StageTime(t.forward + held, t.backward + held, t.weight) for t in self.times]

    def busy(self) -> float:
        """Return the seconds that the busiest rank works on all micro-batches."""
        times, p = self.stage_times(), self.layout.sizes.pipeline
        owners = self.layout.owners
        loads = [0.0] * p
        for time, owner in zip(times, owners, strict=True):
            loads[owner] += time.forward + time.backward
        return self.layout.microbatches * max(loads)

    def body(self) -> float:
        """Return the time of all micro-batches through the simulated pipeline."""
        layout = self.layout
        if layout.sizes.pipeline == 1:
            return self.busy()
        message = self.message if self.code.async_p2p else 0.0
        return pipeline_seconds(
            layout.schedule,
            layout.sizes.pipeline,
            layout.microbatches,
            layout.virtual,
            self.stage_times(),
            message,
        )

    def exposed(self, body: float) -> float:
        """Return the time of what replicas exchange that nothing hides.

        Args:
            body: Seconds of all micro-batches.
        """
        layout, m = self.layout, self.layout.microbatches
        if layout.sizes.shares == 1:
            return 0.0
        hides = body if self.code.overlap_data else 0.0
        if layout.zero_stage == 3:
            # For each block and micro-batch, on the rank that has most blocks.
            traffic = m * self._blocks() * self.gathers()
        elif self.code.reduces_each(layout) and m > 1:
            traffic = m * self.over_data(
                "reduce_scatter", self.code.reduce_bytes, self._trained(), self._blocks() + 1
            )
        else:
            # Gradients are whole in the last backward only; weights are gathered by the first
            # forward.
            # Only one of m backwards hides it.
            traffic, hides = self.replicas(), hides / m
            if layout.in_rounds:
                # A stage is done long before its rank is: the last round covers the others.
                hides *= min(m, layout.sizes.pipeline)
        # What is hidden takes a part of the memory's bandwidth and of the processors.
        return max(0.0, traffic - hides) + _CONTENTION * min(traffic, hides)

    def predict(self) -> StepTime:
        """Return the time of the step and what it is made of."""
        time, clock = self._compose(self.body()), self.clock
        idle = self._busy == 1.0 and time.bubble > 0
        # Nothing to gain: no idle time, or devices that do not slow each other down.
        if not idle or (clock.crowding == 1.0 and not clock.wait):
            return time
        # Devices that share cores are faster while others wait in the pipeline.
        again = StepCost(
            self.shape,
            self.layout,
            clock.device,
            self.code,
            clock.constants,
            busy=1 - time.bubble,
        )
        return again.predict()

    def estimate(self) -> float:
        """Return the time of the step with the pipeline in closed form, see `quick_pipeline`."""
        layout = self.layout
        if layout.sizes.pipeline == 1:
            return self.predict().seconds
        message = self.message if self.code.async_p2p else 0.0
        body = quick_pipeline(layout, self.stage_times(), self.busy(), message)
        return body + self.exposed(body) + self.tied() + self.optimizer()

    def _compose(self, body: float) -> StepTime:
        layout, busy, block, blocks = self.layout, self.busy(), self.block, self._blocks()
        works = (block.forward, block.backward, block.recomputed)
        parts = {
            axis: layout.microbatches * blocks * sum(w.communication.get(axis, 0.0) for w in works)
            for axis in ("tensor", "context", "expert")
        }
        parts["recompute"] = layout.microbatches * blocks * block.recomputed.compute
        # What is left of the busiest rank's time, so that the parts sum up to the step.
        parts = {"compute": max(0.0, busy - sum(parts.values())), **parts}
        parts |= {
            "bubble": body - busy,
            "replicas": self.exposed(body),
            "tied": self.tied(),
            "optimizer": self.optimizer(),
        }
        seconds = body + parts["replicas"] + parts["tied"] + parts["optimizer"]
        return StepTime(seconds=seconds, bubble=max(0.0, 1 - busy / body), parts=parts)


def _sent(ranks: int, size: float) -> float:
    """Return what a rank of a ring sends of `size` bytes."""
    # In one pass; an all-reduce is two.
    return (ranks - 1) / ranks * size


def make_clock(
    device: DeviceProfile, constants: Constants, code: Implementation, busy: float
) -> Clock:
    """Return the times of operations while so many devices compute.

    Args:
        device: Physics.
        constants: What is reached of it.
        code: What the training code does.
        busy: Devices of all nodes that compute at any time, on average.
    """
    calibration = device.calibration
    if calibration is None:
        # Datasheet numbers: devices do not slow each other down.
        return Clock(device, constants, code.activation_bytes)
    busy = min(busy, device.node)
    crowding, wait = calibration.crowding(busy), calibration.wait(busy)
    return Clock(device, constants, code.activation_bytes, crowding, wait, busy)


def predict_step(
    shape: TransformerShape,
    layout: Layout,
    device: DeviceProfile,
    code: Implementation | None = None,
    constants: Constants | None = None,
) -> StepTime:
    """Predict the time of one optimizer step.

    Args:
        shape: The model.
        layout: The layout.
        device: What every device can do.
        code: What the training code does; None: this package.
        constants: What is reached of the peaks; None: what was fitted on the device's family.
    """
    cost = StepCost(shape, layout, device, code or Implementation(), constants or reached(device))
    return cost.predict()
