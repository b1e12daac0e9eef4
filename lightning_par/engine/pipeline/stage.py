"""Pipeline stages of a model, and what stands for the parts that a stage does not hold.

`cutting.py` puts them in place; neither the model nor the step that calls it is changed.

Note [Leave at the boundary]: every stage runs the user's own step on the whole micro-batch. Blocks
of earlier stages are stubs; the one just before the local blocks answers with what was received.
The stub after the last local block raises `StageExit`, which unwinds the step. So user code between
two blocks runs where its result is needed, the loss is computed on the last stage, and nothing runs
twice on one stage.

Note [Poison]: what belongs to another stage answers with NaN, never with zeros, so that a step
which uses it shows a NaN loss instead of a plausible number.
"""

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn, Tensor

from lightning_par.engine.pipeline.captured_outputs import add_stand_ins
from lightning_par.errors import PipelineError
from lightning_par.upstream.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AbsentModule",
    "GhostModule",
    "LaterBlock",
    "Message",
    "MicroBatchState",
    "Stage",
    "StageExit",
    "StageStub",
    "earlier_block",
    "poison",
]

Message = dict[str, Any]
"""What crosses a boundary: ``"3"`` -> output tree of block 3, ``"3.name"`` -> attribute it
stored.
"""


class StageExit(BaseException):
    """Unwinds the user's step at the end of a stage; user code must let it pass, as any
    BaseException.
    """


@dataclass(frozen=True)
class _Elided:
    """Stands for hidden states that nobody needs any more in an output tree that is carried on."""


@dataclass(eq=False)
class MicroBatchState:
    """What one stage knows about one micro-batch in flight.

    Attributes:
        received: What came from the previous stage; empty on the first.
        recorded: What the local blocks produced.
        called: Blocks whose forward ran.
        left: Whether the step was unwound at the end of the stage.
    """

    received: Message = field(default_factory=dict)
    recorded: Message = field(default_factory=dict)
    called: set[int] = field(default_factory=set)
    left: bool = False


class StageStub(nn.Module):
    """Base of the modules that stand for what another stage holds; it has no parameters."""


class Stage:
    """One pipeline stage of a model that `cut_stages` has cut.

    Attributes:
        index: Which stage, 0 .. count - 1.
        count: Number of stages, on all ranks.
        bounds: First and one-past-last block of every stage.
        slots: Module, name of a child, and the child that this stage sees there. Empty where a rank
            holds one stage: then the model shows nothing else.
        current: The micro-batch in hand, None outside of a step.
        in_backward: True while gradients are computed; then blocks only run to recompute.
    """

    def __init__(
        self, index: int, bounds: Sequence[tuple[int, int]], carried: Sequence[str]
    ) -> None:
        self.index, self.count, self.bounds = index, len(bounds), tuple(bounds)
        self.first_block, self.end_block = bounds[index]
        self.carried = tuple(carried)
        self.slots: list[tuple[nn.Module, str, nn.Module]] = []
        self.current: MicroBatchState | None = None
        self.in_backward = False

    @property
    def is_first(self) -> bool:
        """Whether this stage holds what comes before the blocks."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage holds what comes after the blocks, and computes the loss."""
        return self.index == self.count - 1

    @contextmanager
    def hold(self, state: MicroBatchState, *, in_backward: bool = False) -> Iterator[None]:
        """Let the model show this stage, and its stubs answer for `state`."""
        previous = self.current, self.in_backward
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
        """Return what the next stage needs: everything carried so far and the last block's
        output.
        """
        message = dict(state.received)
        if not self.is_first:
            key = str(self.first_block - 1)
            message[key] = _elide_hidden(message[key])
        return {**message, **state.recorded}

    def record(self, block: int, module: nn.Module, output: Any) -> None:
        """Keep what later stages need of a local block's output."""
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
        last = block == self.end_block - 1
        state.recorded[str(block)] = output if last else _elide_hidden(output)
        for name in self.carried:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                state.recorded[f"{block}.{name}"] = value


def _elide_hidden(tree: Any) -> Any:
    """Drop the hidden states, the first tensor, from a block's output tree; side values stay."""
    leaves, spec = tree_flatten(tree)
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[position] = _Elided()
            break
    return tree_unflatten(leaves, spec)


def _fill_hidden(tree: Any, hidden: Any) -> Any:
    return tree_map(lambda t: hidden if isinstance(t, _Elided) else t, tree)


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or zeros where the dtype has none; see Note [Poison]."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


class _EarlierBlock(StageStub):
    """Answers for a block of an earlier stage; mixed with the block's class, which models may look
    for.
    """

    _stage: Stage
    _number: int
    _replay: Callable[[], None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._stage.current
        if state is None:
            raise PipelineError(f"block {self._number} lives on an earlier pipeline stage.")
        for name in self._stage.carried:
            value = state.received.get(f"{self._number}.{name}")
            if value is not None:
                object.__setattr__(self, name, value)
        self._replay()
        answer = state.received[str(self._number)]
        if self._number == self._stage.first_block - 1:
            return answer
        leaves = tree_leaves((args, kwargs))
        return _fill_hidden(answer, next(t for t in leaves if isinstance(t, Tensor)))


@cache
def _stub_class(block: Hashable) -> type[_EarlierBlock]:
    assert isinstance(block, type)
    members = {"forward": torch.compiler.disable(_EarlierBlock.forward)}
    return type(f"Earlier{block.__name__}", (_EarlierBlock, block), members)


def earlier_block(
    block: nn.Module, stage: Stage, number: int, captured: Mapping[str, int]
) -> nn.Module:
    """Make the stub of a block that runs before `stage`.

    Args:
        block: What it stands for.
        stage: Whose received message it answers with.
        number: Of the block.
        captured: As in the plan.
    """
    kind = _stub_class(cast(Hashable, type(block)))
    stub = kind.__new__(kind)
    nn.Module.__init__(stub)
    stub.__dict__["_stage"], stub.__dict__["_number"] = stage, number
    stub.__dict__["_replay"] = add_stand_ins(stub, block, captured, StageStub)
    return stub


class LaterBlock(StageStub):
    """Stands for a block of a later stage: reaching it ends this stage's part of the step."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageExit`."""
        raise StageExit


class AbsentModule(StageStub):
    """Stands for a module that only the last stage holds."""

    def __init__(self, fqn: str) -> None:
        super().__init__()
        self.fqn = fqn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse."""
        raise PipelineError(
            f"{self.fqn} belongs to the last pipeline stage but was called before the blocks; name "
            "it in "
            "ParallelPlan(first=...) or ParallelPlan(replicated=...)."
        )


def _shape_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


class GhostModule(StageStub):
    """Stands for a module of the first stage: runs on meta for its shapes and answers with poison.

    It shares no parameter with the model, so that ties stay between real parameters.
    """

    def __init__(self, module: nn.Module, fqn: str) -> None:
        super().__init__()
        memo = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
        self.__dict__["_shape_only"] = copy.deepcopy(module, memo).to("meta")
        self.__dict__["_fqn"] = fqn
        self.__dict__["_answers"] = {}

    def __getattr__(self, name: str) -> Any:
        """Answer with plain attributes of the module it stands for; its tensors are not here."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_shape_only"], name)
        fqn = f"{self.__dict__['_fqn']}.{name}"
        if isinstance(value, Tensor):
            raise PipelineError(
                f"{fqn} lives on the first pipeline stage but is used after it; name its module in "
                "ParallelPlan(replicated=...)."
            )
        if isinstance(value, nn.Module):
            value = self.__dict__[name] = GhostModule(value, fqn)
        return value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GhostModule":
        """Follow changes of dtype, never of device."""
        shape_only = self.__dict__["_shape_only"]
        for dtype in {p.dtype for p in shape_only.parameters() if p.is_floating_point()}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                shape_only.to(wanted)
                self.__dict__["_answers"].clear()
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer with poison of the right shapes."""
        given, spec = tree_flatten((args, kwargs))
        device = next((t.device for t in given if isinstance(t, Tensor)), torch.device("cpu"))
        # Shapes in, shapes out: known after the first micro-batch unless other values take part.
        known, key = self.__dict__["_answers"], (spec, *map(_shape_of, given))
        if None in key or key not in known:
            known[key] = self._run_on_meta(args, kwargs)
        out = known[key]
        return tree_map(lambda t: self._poisoned(t, device) if isinstance(t, Tensor) else t, out)

    def _poisoned(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise PipelineError(
                f"{self.__dict__['_fqn']} gives a tensor of {tensor.dtype}, which later pipeline "
                "stages would need: name it in ParallelPlan(replicated=...)."
            )
        return poison(tensor.shape, tensor.dtype, device)

    def _run_on_meta(self, args: Any, kwargs: Any) -> Any:
        to_meta = lambda t: t.to("meta") if isinstance(t, Tensor) else t  # noqa: E731
        args, kwargs = tree_map(to_meta, (args, kwargs))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return self.__dict__["_shape_only"](*args, **kwargs)
