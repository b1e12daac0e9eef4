"""What the memory model says of the step in which a rank ran out of memory, and what would fit."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_par.engine.batch import find_batch_dims
from lightning_par.engine.tensor_tree import map_tensors, tensors_of
from lightning_par.errors import ConfigurationError
from lightning_par.inference.forked import run_forked
from lightning_par.inference.infer import infer_here
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.planner.block_trace import shape_of
from lightning_par.planner.memory import logit_bytes, predict_memory
from lightning_par.planner.model_shape import find_shape
from lightning_par.planner.profiles import implementation
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, Recompute, TransformerShape
from lightning_par.profiling.post_mortem import Change
from lightning_par.strategies.auto.machine import find_profile
from lightning_par.strategies.setup.parallel_model import ParallelModel

__all__ = ["Forecast", "forecast_step"]

_MARGINS = {"cpu": 0.6}
"""Share of the memory that a change may take by the forecast: on a CPU, whose C library gives back
late what was freed; elsewhere as in a search.
"""
_UNLIKE = 2.0
_HELD = ("weights", "gradients", "states")
"""Kinds that an update needs."""
_MOST = 3
_SAMPLES = 2
"""Samples of the batch with which a step is traced."""
_PIECES = 64
"""Into how many parts a batch is cut at most."""
_NAMES = {"states": "optimizer states", "moment": "logits, or the block that runs"}
_STRONGER: dict[Recompute, tuple[Recompute, ...]] = {
    "none": ("selective", "full"),
    "selective": ("full",),
    "full": (),
}


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The memory model of one step on one rank.

    Attributes:
        planner: Of the model, on this device.
        layout: Of the step.
        stage: Pipeline rank of this rank.
        logits: Bytes of the copies of logits at the peak of the loss, on the rank that has them.
    """

    planner: Planner
    layout: Layout
    stage: int
    logits: float

    @property
    def kinds(self) -> dict[str, float]:
        """Kind -> bytes at the peak of the step."""
        found = _bytes(self.planner, self.layout, self.stage)
        return {_NAMES.get(kind, kind): size for kind, size in found.items() if size}

    @property
    def is_of_logits(self) -> bool:
        """Whether the logits need more than the activations of all blocks."""
        kinds = _bytes(self.planner, self.layout, self.stage)
        return self.logits >= max(kinds["moment"], kinds["activations"])

    def changes(
        self, room: float | None, reached: float, *, updates: bool
    ) -> tuple[list[Change], bool | None]:
        """Return changes that need less, those with the shortest steps first, and whether they fit.

        If none fits, or nobody knows: those first that save most, of about equal ones the shortest
        step.

        Args:
            room: Bytes that the model may take; None: unknown.
            reached: Bytes that the step had taken, with what it asked for: where this is more than
                the forecast of the peak, forecasts are that much too small.
            updates: Whether the optimizer was at work, beside which there are no activations.
        """

        def needed_by(planner: Planner, layout: Layout) -> float:
            sizes = _bytes(planner, layout, self.stage)
            return sum(size for kind, size in sizes.items() if kind in _HELD or not updates)

        now = needed_by(self.planner, self.layout)
        # What holds so much more than a step is none of the model's: no one knows what it needs.
        if reached > _UNLIKE * now:
            room = None
        scale = max(1.0, reached / now)
        margin = _MARGINS.get(self.planner.device.accelerator, self.planner.margin)
        seconds = self.planner.predict(self.layout).time.seconds
        found, fitting = list[tuple[float, Change]](), set[str]()
        for kind, words, planner, layout in self._alternatives():
            if kind in fitting:  # a smaller change of this kind fits already
                continue
            needed = needed_by(planner, layout)
            fits = room is not None and scale * needed <= margin * room
            if needed >= now:
                continue
            if fits:
                fitting.add(kind)
            slower = planner.predict(layout).time.seconds / seconds - 1
            change = Change(write=words, less=now - needed, slower=slower)
            found.append((0.0 if fits else 1.0, change))
        fit = [change for missing, change in found if not missing]
        if fit:
            return sorted(fit, key=lambda one: one.slower or 0.0)[:_MOST], True
        rest = [one for _, one in found]
        most = max((one.less or 0.0 for one in rest), default=0.0)
        rest.sort(key=lambda one: (-round((one.less or 0.0) / most, 1), one.slower or 0.0))
        return rest[:_MOST], None if room is None else False

    def _alternatives(self) -> Iterator[tuple[str, str, Planner, Layout]]:
        """Yield the kind of a change, what to write, and what is then predicted."""
        planner, layout = self.planner, self.layout
        shape = planner.shape
        if not shape.chunked_loss and self.logits:
            chunked = replace(planner, shape=replace(shape, chunked_loss=True))
            words = "a chunked loss (chunked_loss=True of the model, or linear_cross_entropy)"
            yield "loss", words, chunked, layout
        for mode in _STRONGER[layout.recompute]:
            words = f'callbacks=[ActivationCheckpointing("{mode}")]'
            yield "recompute", words, planner, replace(layout, recompute=mode)
        if layout.sizes.data > 1:
            for stage in range(layout.zero_stage + 1, 4):
                sizes = layout.sizes
                if not layout.zero_stage:  # whole replicas would shard
                    sizes = replace(sizes, data_replicate=1, data_shard=sizes.data)
                sharded = replace(layout, zero_stage=stage, sizes=sizes)
                yield "zero", f"zero_stage={stage}", planner, sharded
        pieces = 2
        while pieces <= min(_PIECES, layout.micro_batch) and layout.micro_batch % pieces == 0:
            cut = replace(
                layout,
                micro_batch=layout.micro_batch // pieces,
                microbatches=layout.microbatches * pieces,
            )
            if layout.sizes.pipeline > 1:
                words = f"num_microbatches={cut.microbatches}"
            else:
                words = f"batch_size={cut.micro_batch} and accumulate_grad_batches="
                words += str(cut.microbatches)
            yield "batch", words, planner, cut
            pieces *= 2
        if planner.device.accelerator != "cpu" and not layout.offload:
            words = "offload_options={} (the optimizer in CPU memory)"
            yield "offload", words, planner, replace(layout, offload=True)


def _bytes(planner: Planner, layout: Layout, stage: int) -> Mapping[str, float]:
    return predict_memory(planner.shape, layout, planner.code).ranks[stage]


def forecast_step(
    error: BaseException, model: ParallelModel, options: Any, device: torch.device
) -> Forecast:
    """Return the forecast of the training step that has begun last.

    Args:
        error: What it raised.
        model: The model on its mesh.
        options: Of the strategy.
        device: Of this rank.

    Raises:
        ConfigurationError: The model's step cannot be predicted.
    """
    module, sizes, trainer = model.module, model.mesh.sizes, model.module.trainer
    _, args, dims, _ = model.steps.begun
    # Where nothing divides a batch, nobody has asked for its dims.
    size = dims.size or find_batch_dims(args[0], model.steps.batch_layout).size
    words = [t for t in tensors_of(args[0]) if t.ndim > 1 and not t.is_floating_point()]
    length = max((t.shape[1] * sizes.context for t in words), default=None)

    def example() -> Any:
        # Called in a fork of this process, which has room for a trace without the failed step.
        traceback.clear_frames(error.__traceback__)
        module.zero_grad()
        # Numbers are of one sample, whatever the batch.
        return map_tensors(args[0], lambda t: t[:_SAMPLES] if t.shape[:1] == (size,) else t)

    profile = find_profile(None, device, int(trainer.num_devices))
    code = implementation(str(trainer.precision), profile)
    planner = Planner(
        shape=_shape(model, length, example),
        device=profile,
        code=code,
    )
    kept = options.recomputation
    layout = Layout.from_options(
        options,
        sizes,
        size or 1,
        accumulated=int(trainer.accumulate_grad_batches),
        recompute="none" if kept is None else kept.mode,
    )
    stage = sizes.coordinates(model.mesh.rank)["pp"]
    has_logits = layout.owners[-1] == stage
    logits = logit_bytes(planner.shape, layout, code) if has_logits else 0.0
    return Forecast(planner=planner, layout=layout, stage=stage, logits=logits)


def _shape(
    model: ParallelModel, length: int | None, example: Callable[[], Any]
) -> TransformerShape:
    """Return the shape of a model; only a process that is alone traces a step for it.

    The forward of several ranks gathers weights: in a fork of one it would wait for the others.
    """
    module, sizes = model.module, model.mesh.sizes
    if sizes.world_size == 1:
        return shape_of(module, length, plan=lambda: _find_plan(model, example), example=example)
    trained = all(parameter.requires_grad for parameter in module.parameters())
    if length is None or sizes.pipeline > 1 or not trained:
        raise ConfigurationError(
            "LP907",
            f"the step of {type(module).__name__} would have to be traced, which one of several "
            "ranks cannot do alone. A forecast without a trace needs a language model with a "
            "`config` that trains all its weights, without a pipeline. For other models, "
            "`lightning-par rehearse --config FILE` predicts the memory before the run",
        )
    return find_shape(module, length)


def _find_plan(model: ParallelModel, example: Callable[[], Any]) -> ParallelPlan:
    """Return the plan of a run on one device, where nobody has asked for blocks, with blocks.

    Of a model as one whole, the forecast knows neither the block whose activations are recomputed
    nor the loss after the blocks.
    """
    plan = model.resolved.plan
    if plan.blocks:
        return plan

    def infer() -> ParallelPlan:
        return infer_here(
            model.module, example=example(), tensor_parallel_size=2, pipeline_parallel_size=2
        )

    found = run_forked(infer)
    return found if found.blocks else plan
