"""Pipeline stages of a model: which blocks a stage runs, what it receives and what it hands on.

`module_split.py` makes them, with stubs (`stubs.py`) for what other stages hold; neither the model
nor the step that calls it is changed.

Note [Stage exit]: every stage runs the user's own step on the whole micro-batch. Blocks
of earlier stages are stubs; the one just before the local blocks answers with what was received.
The stub after the last local block raises `StageExit`, which unwinds the step. So user code between
two blocks runs where its result is needed, the loss is computed on the last stage, and nothing runs
twice on one stage.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn, Tensor

from lightning_par.errors import PipelineError
from lightning_par.plan.parallel_plan import match_pattern
from lightning_par.upstream.pytree import tree_flatten, tree_map, tree_unflatten

__all__ = [
    "Message",
    "MicroBatchState",
    "Stage",
    "StageExit",
    "StageStub",
    "fill_hidden",
    "matching_modules",
]

Message = dict[str, Any]
"""Message between stages: ``"3"`` -> output tree of block 3, ``"3.name"`` -> attribute it
stored.
"""


class StageExit(BaseException):
    """Unwinds the user's step at the end of a stage; user code must let it pass, as any
    BaseException.
    """


@dataclass(frozen=True)
class _Elided:
    """Placeholder of hidden states that no later stage needs, in an output tree handed on."""


@dataclass(eq=False)
class MicroBatchState:
    """State of one micro-batch in flight on one stage.

    Attributes:
        received: Message of the previous stage; empty on the first.
        recorded: Outputs of the local blocks that later stages need.
        called: Numbers of the blocks whose forward ran.
        left: Whether the user's step was unwound at the end of the stage.
    """

    received: Message = field(default_factory=dict)
    recorded: Message = field(default_factory=dict)
    called: set[int] = field(default_factory=set)
    left: bool = False


class StageStub(nn.Module):
    """Base class of stubs, the modules in the place of what another stage holds; no parameters."""


def matching_modules(model: nn.Module, patterns: Iterable[str]) -> dict[str, nn.Module]:
    """Return FQN -> module for those of this stage that match a pattern of a plan.

    Args:
        model: Stubs may stand for what other stages hold.
        patterns: See `match_pattern`.
    """
    wanted = list(patterns)
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, StageStub) and any(match_pattern(p, name) for p in wanted)
    }


class Stage:
    """One pipeline stage of a model, made by `cut_stages`.

    Attributes:
        index: Index of the stage, 0 .. count - 1.
        count: Number of stages, on all ranks.
        bounds: First and one-past-last block of every stage.
        carried: Attributes of a block that are sent to later stages, besides its output.
        kept: Numbers of the blocks whose whole output is sent to all later stages.
        slots: Module, name of a child, and the child that this stage sees there. Empty where a rank
            holds one stage: then the model never shows anything else.
        current: The micro-batch in hand, None outside of a step.
        problems: What stubs saw that explains a loss of NaN.
        in_backward: True while gradients are computed; then blocks only run to recompute.
    """

    def __init__(
        self,
        index: int,
        bounds: Sequence[tuple[int, int]],
        carried: Sequence[str],
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self.index, self.count, self.bounds = index, len(bounds), tuple(bounds)
        self.first_block, self.end_block = bounds[index]
        self.carried, self.kept = tuple(carried), kept
        self.slots: list[tuple[nn.Module, str, nn.Module]] = []
        self.current: MicroBatchState | None = None
        self.in_backward = False
        self.problems: set[str] = set()

    @property
    def is_first(self) -> bool:
        """Whether this stage holds what comes before the blocks."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds what comes after the blocks, and computes the loss."""
        return self.index == self.count - 1

    @property
    def passed_blocks(self) -> bool:
        """Whether the last block of the model has run for the micro-batch in hand."""
        return (
            self.is_last and self.current is not None and self.end_block - 1 in self.current.called
        )

    @contextmanager
    def hold(self, state: MicroBatchState, *, in_backward: bool = False) -> Iterator[None]:
        """Put the children of this stage into the model, and let its stubs answer for `state`."""
        previous = self.current, self.in_backward
        # Straight into _modules: setattr would run the checks of nn.Module for every micro-batch.
        resting = [(owner, name, owner._modules[name]) for owner, name, _ in self.slots]
        self.current, self.in_backward = state, in_backward
        for owner, name, module in self.slots:
            owner._modules[name] = module
        try:
            yield
        finally:
            for owner, name, rest in resting:
                owner._modules[name] = rest
            self.current, self.in_backward = previous

    def run(self, state: MicroBatchState, step: Callable[[], Any]) -> Any:
        """Run the user's step for one micro-batch up to the end of this stage.

        Args:
            state: Holds what was received; gets what is recorded.
            step: Calls the model once.

        Returns:
            The step's own result on the last stage, None elsewhere.

        Raises:
            PipelineError: The step ended without reaching the end of the stage.
        """
        with self.hold(state):
            result = None
            try:
                result = step()
            except StageExit:
                state.left = True
        if not self.is_last and not state.left:
            raise PipelineError(
                f"the step returned before block {self.end_block}: it skipped blocks, returned "
                "early, or caught the "
                "BaseException that ends a stage (a bare `except:` around the model call)."
            )
        if self.is_last and self.end_block - 1 not in state.called:
            raise PipelineError("the step returned a result without calling the last block.")
        return result

    def outgoing(self, state: MicroBatchState) -> Message:
        """Return the message for the next stage: what was received and what was recorded."""
        message = dict(state.received)
        if not self.is_first and self.first_block - 1 not in self.kept:
            # The hidden states that came in have been used; only side values are handed on.
            key = str(self.first_block - 1)
            message[key] = _elide_hidden(message[key])
        return {**message, **state.recorded}

    def record(self, block: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Keep what later stages need of a local block; its forward hook.

        Args:
            block: Number of the block, of which a hook knows nothing.
            module: The block.
            inputs: Not used.
            output: Of its forward.
        """
        state = self.current
        if state is None or self.in_backward:
            return
        if block in state.called:
            raise PipelineError(
                f"block {block} was called twice in one step; a pipeline passes through the blocks "
                "once."
            )
        state.called.add(block)
        if self.is_last:
            return
        whole = block == self.end_block - 1 or block in self.kept
        state.recorded[str(block)] = output if whole else _elide_hidden(output)
        for name in self.carried:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                state.recorded[f"{block}.{name}"] = value


def _elide_hidden(tree: Any) -> Any:
    """Return a block's output tree without its hidden states, which are its first tensor."""
    leaves, spec = tree_flatten(tree)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[position] = _Elided()
            break
    return tree_unflatten(leaves, spec)


def fill_hidden(tree: Any, hidden: Any) -> Any:
    """Put hidden states back into a block's output tree that was carried on without them."""
    return tree_map(lambda t: hidden if isinstance(t, _Elided) else t, tree)
