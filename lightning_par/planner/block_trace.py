"""Traces a step of a model of the user's own and reads the shape of its parts.

Nothing is computed of a large model: its tensors are on the meta device. Operators are seen with
the package's FLOP counter, what autograd keeps by its hooks for saved tensors, and what the tensor
axis divides by following the shards from modules that make them to those that take them.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn, Tensor

from lightning_par.engine.experts.token_dispatch import computes_rows
from lightning_par.engine.pipeline.stage import matching_modules
from lightning_par.errors import ConfigurationError, PlanError
from lightning_par.inference.examples import runs_of
from lightning_par.inference.forked import ForkError, run_forked
from lightning_par.observe.recorder import (
    called_around,
    input_paths,
    tensors_in,
    trace_forward,
)
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import check_plan, resolve_plan, ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.planner.model_parts import (
    Amount,
    Cut,
    ModelPart,
    TracedShape,
)
from lightning_par.planner.model_shape import experts_of_token, find_shape
from lightning_par.planner.shapes import TransformerShape
from lightning_par.planner.step_recorder import AFTER, BEFORE, RecordedPart, StepRecorder
from lightning_par.sizes import ParallelSizes

__all__ = ["length_of_step", "shape_of", "trace_shape"]

_logger = logging.getLogger(__name__)

_DEGREES = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 36, 64, 72)
"""Tensor-parallel degrees that are looked at: the sizes of nodes and their divisors."""


def shape_of(
    module: nn.Module,
    length: int | None = None,
    *,
    plan: Callable[[], ParallelPlan],
    example: Callable[[], Any],
    eager: bool = False,
    seen: Callable[[], int | None] | None = None,
) -> TransformerShape:
    """Return the shape of a model: from its configuration, if that describes it, or from a trace.

    What a configuration does not tell is traced: frozen weights, models that are none of equal
    blocks, and what operators move where nothing fuses them.

    Args:
        module: Parameters may be on meta.
        length: T; None: that of the example, or the longest that a configuration allows where
            there is no example.
        plan: Returns the plan; called where a trace is needed.
        example: Returns what `trace_shape` takes; likewise, in a fork of this process.
        eager: Trace forward and backward wherever that is possible.
        seen: Returns T of the example, if it is known; None: `length_of_step` finds it.

    Raises:
        ConfigurationError: There is no such configuration, and the step cannot be traced.
    """
    # A backward can be traced only where forward and loss run on meta without values.
    if eager:
        try:
            found = _traced(module, plan(), example, backward=True)
            if length in (None, found.length):
                return found
            why = f"the example has T={found.length}, not {length}"
        except ConfigurationError as error:
            why = error.message
        _logger.info("the prediction assumes fused norms and activations, since %s", why)
    unread = ""
    # A configuration says nothing of frozen weights, which have no gradient and no state.
    if all(parameter.requires_grad for parameter in module.parameters()):
        try:
            return find_shape(
                module, length or (seen or partial(length_of_step, module, example))()
            )
        except ConfigurationError as error:
            unread = f"{error.message.removesuffix('.')}. Also, "
    try:
        return _traced(module, plan(), example, length)
    except ConfigurationError as error:
        raise ConfigurationError("LP907", unread + error.message) from None


def length_of_step(module: nn.Module, example: Callable[[], Any]) -> int | None:
    """Return T: the largest number of tokens of a sample that an embedding gets in a step.

    Args:
        module: Parameters may be on meta.
        example: As for `shape_of`.

    Returns:
        None if the step cannot be run, or calls no embedding.
    """
    try:
        # In a fork: examples come from the user's loaders, which must not be started here.
        return run_forked(lambda: _embedded(module, example()))
    except Exception:  # of data of the user, or no fork can be made
        return None


def _embedded(module: nn.Module, example: Any) -> int | None:
    found: list[int] = []

    def before(_: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        if isinstance(child, nn.Embedding):
            # [B, T] or more dims: ids of one dim are no tokens of samples, as a table of types
            # has.
            found.extend(t.shape[-1] for t in tensors_in((args, kwargs)) if t.ndim > 1)

    def watched(run: Callable[[Any], Any], given: Any) -> Any:
        with called_around(module, before, lambda *_: None):
            return run(given)

    for run, given in runs_of(module, example) if example is not None else ():
        # What comes after the embeddings may need values that a trace does not have.
        with suppress(Exception):
            trace_forward(module, partial(watched, run), given)
        if found:
            break
    return max(found, default=None)


def _traced(
    module: nn.Module, plan: ParallelPlan, example: Callable[[], Any], *args: Any, **options: Any
) -> TracedShape:
    """Return `trace_shape` of a fork: examples come from the user's data, the step is his code."""
    try:
        return run_forked(lambda: trace_shape(module, plan, example(), *args, **options))
    except ForkError as error:
        raise ConfigurationError(
            "LP907",
            f"the time of {type(module).__name__} cannot be predicted: one of its steps could not "
            f"be traced in a fork of this process ({error}). Choose the sizes of the mesh yourself",
        ) from None


def trace_shape(
    model: nn.Module,
    plan: ParallelPlan,
    example: Any,
    length: int | None = None,
    *,
    backward: bool = False,
) -> TracedShape:
    """Return the shape of a model from a trace of its step.

    Args:
        model: A module, perhaps a LightningModule; parameters may be on meta. It is not changed.
        plan: Its own, or the one inferred from its structure.
        example: As for `infer_plan`: a few samples of the training data; None: a guess.
        length: T of a sample; None: as many as enter the first block.
        backward: Whether to run the backward, too, and to count what operators read and write.

    Raises:
        ConfigurationError: The step cannot be traced, or routes tokens to experts.
    """
    name = type(model).__name__
    experts = matching_modules(model, plan.experts).values()
    if any(map(computes_rows, experts)):
        raise ConfigurationError(
            "LP907",
            f"the time of {name} cannot be predicted from a trace of its step, since it routes "
            "tokens to experts and the work of each expert is not known. Give the model an "
            "attribute `config` that holds its sizes, such as MixtralConfig",
        )
    resolved = resolve_plan(model, plan)
    recorder, samples, reason = None, 1, "what its forward takes as input is not known"
    for run, given in runs_of(model, example):
        recorder = StepRecorder(model, resolved, backward=backward)
        try:
            trace_forward(model, recorder.recorded(run), given)
        except Exception as error:  # whatever a stranger's forward raises
            recorder, reason = None, " ".join(f"{type(error).__name__}: {error}".split())[:300]
            continue
        samples = _samples(given, plan)
        break
    if recorder is None:
        raise ConfigurationError(
            "LP907",
            f"no step of {name} could be traced, so its time cannot be predicted ({reason}). Pass "
            "data with at least one sample, or set example_input_array; or give the model an "
            "attribute `config` that holds the sizes of a transformer, such as GPTConfig",
        )
    return _shape(model, resolved, recorder, samples, length)


def _samples(example: Any, plan: ParallelPlan) -> int:
    """Return the number of samples of an example."""
    for path, tensor in input_paths(example):
        if tensor.ndim and path not in plan.batch.whole:
            return max(1, tensor.shape[plan.batch.batch_dims.get(path, 0)])
    return 1


def _shape(
    model: nn.Module,
    resolved: ResolvedPlan,
    recorder: "StepRecorder",
    samples: int,
    length: int | None,
) -> TracedShape:
    weights = _Weights(model, resolved)
    known: dict[ModelPart, ModelPart] = {}

    def part(place: int) -> ModelPart:
        # A block that no operator ran in is empty, and holds weights all the same.
        made = recorder.parts.setdefault(place, RecordedPart()).freeze(samples, *weights.of(place))
        experts, trained = weights.of(place, experts=True)
        made = replace(made, experts=experts, trained_experts=trained)
        return known.setdefault(made, made)  # equal blocks are one object

    # Without blocks, the whole model is one, which nothing can cut.
    blocks = tuple(map(part, range(max(1, len(resolved.block_names)))))
    before, after = part(BEFORE), part(AFTER)
    entered = blocks[0].entered.total
    tokens, width = recorder.hidden or (1, 1)
    # The length that is asked for: only words are scaled by it, the trace is of the example's.
    tokens = length or tokens
    attentions = [a for b in blocks for a in b.attentions]
    return TracedShape(
        layers=len(blocks),
        # What enters a block for each token, so that messages between stages have their size.
        model_dim=max(1, round(entered / tokens)) if entered else width,
        heads=max([1, *(round(a.heads) for a in attentions)]),
        head_dim=max([1, *(round(a.width) for a in attentions)]),
        ff_dim=1,
        length=tokens,
        vocab=recorder.classes,
        blocks=blocks,
        before=before,
        after=after,
        chunked_loss=recorder.has_chunks,
        shared=weights.shared(trained=False),
        shared_trained=weights.shared(trained=True),
        tensor_degrees=_degrees(model, resolved.plan),
        experts=_experts(model, resolved.plan),
        experts_per_token=experts_of_token(model),
    )


def _experts(model: nn.Module, plan: ParallelPlan) -> int:
    """Return the largest number by which replicas can divide the experts of every layer."""
    modules = matching_modules(model, plan.experts).values()
    sizes = (p.shape[0] for module in modules for p in module.parameters() if p.ndim)
    return math.gcd(*sizes) or 1


def _degrees(model: nn.Module, plan: ParallelPlan) -> tuple[int, ...]:
    """Return the tensor-parallel degrees that a plan allows."""
    found = [1]
    for degree in _DEGREES if plan.tensor else ():
        try:
            # Divisibility of heads and features is checked by the rules of a run.
            check_plan(model, plan, ParallelSizes(tensor=degree))
        except PlanError:
            continue
        found.append(degree)
    return tuple(found)


class _Weights:
    """The parameters of each part, by what divides them."""

    def __init__(self, model: nn.Module, resolved: ResolvedPlan) -> None:
        self._blocks = resolved.block_names
        # What every stage computes is counted where the first stage has it.
        places = {"first": BEFORE, "last": AFTER, "every": BEFORE}
        self._units = {fqn: places[place] for fqn, place in resolved.units.items()}
        self._held: dict[int, dict[int, tuple[Tensor, Cut]]] = {}
        experts = matching_modules(model, resolved.plan.experts).values()
        self._experts = {id(p) for module in experts for p in module.parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            owner, _, own = name.rpartition(".")
            style = resolved.styles.get(owner)
            divided = style is not None and TENSOR_STYLES[style].sharded_dim(own) is not None
            held = self._held.setdefault(self._place(name), {})
            # A tied weight is counted once in a part, though it has two names there.
            held.setdefault(id(parameter), (parameter, "tensor" if divided else "whole"))

    def _place(self, name: str) -> int:
        for number, block in enumerate(self._blocks):
            if name.startswith(block + "."):
                return number
        for unit, place in self._units.items():
            if name == unit or name.startswith(unit + "."):
                return place
        return BEFORE if self._blocks else 0

    def of(self, place: int, *, experts: bool = False) -> tuple[Amount, Amount]:
        """Return the parameters of a part, or of its experts, and those that are trained."""
        inside = self._held.get(place, {}).items()
        held = [given for key, given in inside if not experts or key in self._experts]
        return _amount(held), _amount([h for h in held if h[0].requires_grad])

    def shared(self, *, trained: bool) -> Amount:
        """Return what is before the blocks and after them, too."""
        before, after = (self._held.get(place, {}) for place in (BEFORE, AFTER))
        # A tied table: the outer stages hold it both, and one device that has both ends holds it
        # once.
        both = [held for key, held in before.items() if key in after]
        return _amount([h for h in both if h[0].requires_grad or not trained])


def _amount(held: Sequence[tuple[Tensor, Cut]]) -> Amount:
    sizes = {"tensor": 0, "whole": 0}
    for parameter, cut in held:
        sizes[cut] += parameter.numel()
    return Amount(tensor=sizes["tensor"], whole=sizes["whole"])
