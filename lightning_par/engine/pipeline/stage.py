"""Pipeline stages of a model: which blocks a stage runs, what it receives and what it hands on.

`module_split.py` makes them, and puts stubs into the model: modules that stand for what other
stages hold. Neither the model nor the step that calls it is changed.

Note [Stage exit]: every stage runs the user's own step on the whole micro-batch. Blocks
of earlier stages are stubs; the one just before the local blocks answers with what was received.
The stub after the last local block raises `StageExit`, which unwinds the step. So user code between
two blocks runs where its result is needed, the loss is computed on the last stage, and nothing runs
twice on one stage.

Note [Poison]: what belongs to another stage answers with NaN, never with zeros, so that a step
which uses it shows a NaN loss instead of a plausible number.

Length: a stage and its stubs answer for each other at every call.
"""

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import torch
from torch import nn, Tensor
from torch.utils.checkpoint import CheckpointFunction

from lightning_par.dtensor import like_parameter
from lightning_par.engine.pipeline.captured_outputs import add_stand_ins
from lightning_par.engine.pipeline.refusals import (
    called_by_a_hook,
    called_outside,
    PassedOverError,
    SecondCallError,
)
from lightning_par.engine.rng import draws_on_meta, fork_torch_rng
from lightning_par.errors import PipelineError, PlanError
from lightning_par.plan.parallel_plan import match_pattern
from lightning_par.upstream.pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AbsentModule",
    "EarlierBlock",
    "GhostModule",
    "LaterBlock",
    "Message",
    "MicroBatchState",
    "Stage",
    "StageExit",
    "StageStub",
    "TokenCount",
    "check_last_block",
    "earlier_block",
    "matching_modules",
    "number_of_block",
    "poison",
    "stands_for",
]

Message = dict[str, Any]
"""Message between stages: ``"3"`` -> output tree of block 3, ``"3.name"`` -> attribute it
stored, ``"tokens"`` -> see `TokenCount`.
"""


class StageExit(BaseException):
    """Unwinds the user's step at the end of a stage; user code must let it pass, as any
    BaseException. It holds the arguments of the first block of the next stage.
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
        called: Numbers of the blocks whose forward, or that of their stub, ran.
        left: Whether the user's step was unwound at the end of the stage.
    """

    received: Message = field(default_factory=dict)
    recorded: Message = field(default_factory=dict)
    called: set[int] = field(default_factory=set)
    left: bool = False


@dataclass(eq=False)
class TokenCount:
    """T of the activations in hand, where tensor-parallel ranks hold shards along T.

    Attributes:
        whole: None where T divides by the ranks, so that a shard tells it.
    """

    whole: int | None = None


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
        after_blocks: Called when the last block of the model has run; None: nothing is.
        problems: What stubs saw that explains a loss of NaN.
        tokens: T of the activations of this stage; None: they are whole.
        in_backward: True while gradients are computed; then blocks only run to recompute.
        may_skip: Whether what runs may pass blocks over, as a call of a part of the model does.
        known: What is known of the parameters of all stages, as whether they train, by FQN.
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
        self.after_blocks: Callable[[], None] | None = None
        self.in_backward = self.may_skip = False
        self.problems: set[str] = set()
        self.known: Mapping[str, Any] = {}
        self.tokens: TokenCount | None = None

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
            PassedOverError: The step ended without reaching the end of the stage.
            PipelineError: It reached it where no graph is recorded.
        """
        if self.tokens is not None and not self.is_first:
            self.tokens.whole = state.received["tokens"]
        with self.hold(state):
            result = None
            try:
                result = step()
            except StageExit:
                state.left = True
        if self.may_skip:
            return result
        if not self.is_last and not state.left:
            raise PassedOverError.before(self.end_block)
        if self.is_last and self.end_block - 1 not in state.called:
            raise PassedOverError.of_last()
        return result

    def outgoing(self, state: MicroBatchState) -> Message:
        """Return the message for the next stage: what was received and what was recorded."""
        message = dict(state.received)
        if not self.is_first and self.first_block - 1 not in self.kept:
            # The hidden states that came in have been used; only side values are handed on.
            key = str(self.first_block - 1)
            if key in message:  # else it was passed over, as an encoder is that has run before
                message[key] = _elide_hidden(message[key])
        if self.tokens is not None:
            message["tokens"] = self.tokens.whole
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
            raise SecondCallError.of(block)
        if module.training and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            raise PipelineError(
                "LP406",
                f"block {block} is called through checkpoint(..., use_reentrant=True), which "
                "records no autograd graph that another stage could continue. Pass "
                "use_reentrant=False, or use the ActivationCheckpointing callback.",
            )
        state.called.add(block)
        is_last_block = block == self.end_block - 1
        if self.is_last:
            if is_last_block and self.after_blocks is not None:
                self.after_blocks()
            return
        if is_last_block:
            check_last_block(block, module)  # anew: hooks may come after the cut
        whole = is_last_block or block in self.kept
        state.recorded[str(block)] = output if whole else _elide_hidden(output)
        for name in self.carried:
            value = getattr(module, name, None)
            if isinstance(value, Tensor | tuple):
                state.recorded[f"{block}.{name}"] = value


def check_last_block(number: int, block: nn.Module) -> None:
    """Refuse backward hooks of the last block of a stage that is not the last.

    Args:
        number: Of the block.
        block: The block.

    Raises:
        PipelineError: It has such a hook.
    """
    if block._backward_hooks or block._backward_pre_hooks:
        raise PipelineError(
            "LP406",
            f"block {number} is the last block of a pipeline stage and has a backward hook. This "
            "hook would not be called, since the gradient of the block's output comes from "
            "another stage. Register the hook on a module inside of the block, or let a forward "
            "hook register it on the block's output (output.register_hook).",
        )


def _in_reentrant_checkpoint() -> bool:
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


def _elide_hidden(tree: Any) -> Any:
    """Return a block's output tree without its hidden states, which are its first tensor."""
    leaves, spec = tree_flatten(tree)
    # By convention the first tensor of a block's output is its hidden states.
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[position] = _Elided()
            break
    return tree_unflatten(leaves, spec)


def _fill_hidden(tree: Any, hidden: Any) -> Any:
    """Put hidden states back into a block's output tree that was carried on without them."""
    return tree_map(lambda t: hidden if isinstance(t, _Elided) else t, tree)


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or zeros where the dtype has none; see Note [Poison]."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


class _AbsentTensor(Tensor):
    """A parameter of another stage: says its dtype, device and shape, and refuses to be used."""

    _fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Shapes and dtypes are read through properties (`__get__`) and these methods.
        if getattr(func, "__name__", "") not in ("__get__", "dim", "size", "numel"):
            fqn = next(t._fqn for t in tree_leaves((args, kwargs)) if isinstance(t, _AbsentTensor))
            raise PipelineError(
                "LP407",
                f"{fqn} is on another pipeline stage than the code that uses it. To place this "
                "module on every stage, name it in ParallelPlan(replicated=...). If the module is "
                "in a block, use it only in the forward of this block. Or use "
                "pipeline_parallel_size=1.",
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Shape(StageStub):
    """A stub that answers for the plain attributes of the module that it replaces.

    It shares no parameter with the model, so that ties stay between real parameters. While a step
    runs, `isinstance` finds it an instance of the module's class, as forwards tell layers apart.

    Args:
        module: What it replaces.
        fqn: For messages.
        stage: Runs the steps; None: of those nothing is known.
    """

    def __init__(self, module: nn.Module, fqn: str, stage: Stage | None = None) -> None:
        super().__init__()
        self.training = module.training
        params = module.parameters()
        # Given to deepcopy as copied already, and on meta: the copy of the module takes no memory,
        # and has no tensor to move, which the fake ones of a rehearsal refuse.
        memo: dict[int, Any] = {id(p): like_parameter(p, p.to("meta")) for p in params}
        memo |= {id(buffer): buffer.detach().to("meta") for buffer in module.buffers()}
        kept = (v for part in module.modules() for v in vars(part).values())
        computed = (v for v in kept if isinstance(v, Tensor) and not v.is_leaf)
        # deepcopy refuses tensors with a graph, as weight_norm leaves them on the module.
        memo |= {id(v): v.detach().to("meta") for v in computed}
        # Into __dict__: as a child module it would be found by parameters() and state_dict().
        self.__dict__["_shape_only"] = copy.deepcopy(module, memo)
        self.__dict__["_fqn"], self.__dict__["_stage"] = fqn, stage
        self.__dict__["_read"] = set()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return the module's class while a step runs, but a list's: stubs have no children."""
        stage = self.__dict__.get("_stage")
        if stage is None or stage.current is None:
            return type(self)
        kind = type(self.__dict__["_shape_only"])
        return type(self) if kind.forward is nn.Module.forward else kind

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; of its tensors, only what they look like."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_shape_only"], name)
        self.__dict__["_read"].add(name)
        fqn = f"{self.__dict__['_fqn']}.{name}"
        if isinstance(value, Tensor):
            # One element, expanded: code may ask for the shape and go on.
            seen = poison((), value.dtype, torch.device("cpu")).expand(value.shape)
            absent = seen.as_subclass(_AbsentTensor)
            absent._fqn = fqn
            return absent
        if isinstance(value, nn.Module):
            value = self.__dict__[name] = type(self)(value, fqn, self.__dict__["_stage"])
        return value


class EarlierBlock(StageStub):
    """Stub of a block of an earlier stage; returns what was received in the place of its output.

    Its class also derives from that of the block, which a model may look for with `isinstance`.
    """

    _stage: Stage
    _number: int
    _shape: nn.Module
    _replay: Callable[[], None] | None

    def __getattr__(self, name: str) -> Any:
        """Return what the block's own __init__ would have set; of its tensors, how they look."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        try:
            # What __init__ set is on the copy; what the block's forward sets arrives as
            # `carried`.
            return getattr(self.__dict__["_shape"], name)
        except AttributeError as error:  # told by `explain_absent`
            raise AttributeError(str(error), name=name, obj=self) from None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was received in the place of the block's output."""
        state = self._stage.current
        if state is None:
            raise called_outside(stands_for(self)[0])
        if not self._stage.in_backward:
            if self._number in state.called:
                raise SecondCallError.of(self._number)
            state.called.add(self._number)
        # Before the answer: code after the block reads its attributes.
        for name in self._stage.carried:
            value = state.received.get(f"{self._number}.{name}")
            if value is not None:
                object.__setattr__(self, name, value)
        if self._replay is not None:
            self._replay()
        answer = state.received.get(str(self._number))
        if answer is None:
            raise PlanError(
                "LP406",
                f"block {self._number} sent no output to the next pipeline stage, since the code "
                "calls block.forward(x), which skips the hooks of the block. Call block(x) "
                "instead, or use pipeline_parallel_size=1.",
            )
        # Only the output of the block right before this stage has its hidden states.
        if self._number == self._stage.first_block - 1:
            return answer
        # An output carried on has no hidden states; those that come in stand in for them.
        leaves = tree_leaves((args, kwargs))
        return _fill_hidden(answer, next(t for t in leaves if isinstance(t, Tensor)))


@cache
def _stub_class(block: Hashable) -> type[EarlierBlock]:
    assert isinstance(block, type)
    # The message is read at each call; traced, it would be a constant of the graph.
    members = {"forward": torch.compiler.disable(EarlierBlock.forward)}
    return type(f"Earlier{block.__name__}", (EarlierBlock, block), members)


def earlier_block(
    block: nn.Module, fqn: str, stage: Stage, number: int, captured: Mapping[str, int]
) -> nn.Module:
    """Return the stub of a block that runs before `stage`.

    Args:
        block: The block that it replaces.
        fqn: Its name.
        stage: Gives the received message.
        number: Index of the block.
        captured: As in the plan.
    """
    # Not the block's own __init__, which would make parameters.
    kind = _stub_class(cast(Hashable, type(block)))
    stub = kind.__new__(kind)
    nn.Module.__init__(stub)
    stub.training = block.training
    stub.__dict__["_stage"], stub.__dict__["_number"] = stage, number
    stub.__dict__["_shape"] = _Shape(block, fqn)
    stub.__dict__["_replay"] = add_stand_ins(stub, block, captured, StageStub)
    return stub


def number_of_block(stub: EarlierBlock) -> int:
    """Return the number of the block that a stub stands for."""
    return stub._number


def stands_for(stub: StageStub) -> tuple[str, nn.Module]:
    """Return the FQN of the module that a stub stands for, and this module on meta."""
    shape = vars(vars(stub).get("_shape", stub))
    return shape["_fqn"], shape["_shape_only"]


class LaterBlock(_Shape):
    """Stub of a block of a later stage: calling it ends this stage's share of the step."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageExit`; outside of a step, what to do."""
        if self.__dict__["_stage"].current is None:
            raise called_outside(self.__dict__["_fqn"])
        # The arguments go along: `ModelCalls` finds caches in them.
        raise StageExit(args, kwargs)


class AbsentModule(_Shape):
    """Stub of a module that only the last stage holds; it may not be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PipelineError`."""
        # Outside of a step, it is a hook that calls it, and the cure is another one.
        stage = self.__dict__["_stage"]
        if stage is not None and stage.current is None:
            raise called_by_a_hook(self.__dict__["_fqn"])
        raise PipelineError(
            "LP407",
            f"the module {self.__dict__['_fqn']} is placed on the last pipeline stage, but was "
            "called before the blocks. Name it in ParallelPlan(first=...) or "
            "ParallelPlan(replicated=...).",
        )


def _shape_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


class GhostModule(_Shape):
    """Stub of a module of the first stage: runs on meta for its shapes, and returns NaNs."""

    def __init__(self, module: nn.Module, fqn: str, stage: Stage | None = None) -> None:
        super().__init__(module, fqn, stage)
        self.__dict__["_answers"] = {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GhostModule":
        """Follow changes of dtype, never of device: shapes are computed on meta."""
        shape_only = self.__dict__["_shape_only"]
        # `module.half()` and the like: shapes do not change, but the dtype of answers does.
        for dtype in {p.dtype for p in shape_only.parameters() if p.is_floating_point()}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                shape_only.to(wanted)
                self.__dict__["_answers"].clear()
        return self

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return NaNs of the right shapes; note it if the last block has run."""
        stage = self.__dict__["_stage"]
        if stage is not None and stage.passed_blocks:
            stage.problems.add(
                f"{self.__dict__['_fqn']} is used after the blocks, but defined before them, so it "
                "is placed on the first pipeline stage. Name it in ParallelPlan(last=...), or in "
                "replicated= if it is also used before them."
            )
        given, spec = tree_flatten((args, kwargs))
        device = next((t.device for t in given if isinstance(t, Tensor)), torch.device("cpu"))
        # Shapes in, shapes out: known after the first micro-batch unless other values take part.
        # Keyed by structure, shapes and dtypes: anything else in the arguments may change the
        # answer.
        known, key = self.__dict__["_answers"], (spec, *map(_shape_of, given))
        # None in the key: a value that is no tensor, of which the answer may depend.
        if None in key or key not in known or draws_on_meta():
            known[key] = self._run_on_meta(args, kwargs)
        out = known[key]
        return tree_map(lambda t: self._poisoned(t, device) if isinstance(t, Tensor) else t, out)

    def _poisoned(self, tensor: Tensor, device: torch.device) -> Tensor:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise PipelineError(
                "LP407",
                f"the module {self.__dict__['_fqn']} returns a tensor of {tensor.dtype} on another "
                "pipeline stage, so this stage lacks the values. Name this module, and the "
                "modules that compute its inputs, in ParallelPlan(replicated=...).",
            )
        return poison(tensor.shape, tensor.dtype, device)

    def _run_on_meta(self, args: Any, kwargs: Any) -> Any:
        to_meta = lambda t: t.to("meta") if isinstance(t, Tensor) else t  # noqa: E731
        args, kwargs = tree_map(to_meta, (args, kwargs))
        # The ghost draws on meta what the real module draws: generators are put back, unless
        # draws are shared and have to advance as on one process.
        restored = nullcontext() if draws_on_meta() else fork_torch_rng(torch.device("cpu"))
        try:
            with torch.no_grad(), restored:
                return self.__dict__["_shape_only"](*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise PipelineError(
                "LP407",
                f"the module {self.__dict__['_fqn']} is on another pipeline stage, and the shapes "
                "of its output depend on values that this stage lacks "
                f"({str(error).splitlines()[0]}). Name this module in "
                "ParallelPlan(replicated=...).",
            ) from error
