"""Stubs: modules that stand in the model for what another pipeline stage holds.

`module_split.py` puts them in place; see Note [Stage exit] in `stage.py`.

Note [Poison]: what belongs to another stage answers with NaN, never with zeros, so that a step
which uses it shows a NaN loss instead of a plausible number.
"""

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import nn, Tensor

from lightning_par.engine.pipeline.captured_outputs import add_stand_ins
from lightning_par.engine.pipeline.stage import fill_hidden, Stage, StageExit, StageStub
from lightning_par.engine.rng import draws_on_meta, fork_torch_rng
from lightning_par.errors import PipelineError, PlanError
from lightning_par.upstream.pytree import tree_flatten, tree_leaves, tree_map

__all__ = [
    "AbsentModule",
    "EarlierBlock",
    "GhostModule",
    "LaterBlock",
    "earlier_block",
    "poison",
    "shape_of_block",
]


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return NaNs, or zeros where the dtype has none; see Note [Poison]."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


class _AbsentTensor(Tensor):
    """A parameter of another stage: says its dtype, device and shape, and refuses to be used."""

    _fqn: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "dim", "size", "numel"):
            fqn = next(t._fqn for t in tree_leaves((args, kwargs)) if isinstance(t, _AbsentTensor))
            raise PipelineError(
                f"{fqn} lives on another pipeline stage than the code that uses it; name its "
                "module in ParallelPlan(replicated=...)."
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class _Shape(StageStub):
    """A stub that answers for the plain attributes of the module that it replaces.

    It shares no parameter with the model, so that ties stay between real parameters.

    Args:
        module: What it replaces.
        fqn: For messages.
    """

    def __init__(self, module: nn.Module, fqn: str) -> None:
        super().__init__()
        # Given to deepcopy as copied already, so that the values are never duplicated.
        memo = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
        self.__dict__["_shape_only"] = copy.deepcopy(module, memo).to("meta")
        self.__dict__["_fqn"] = fqn

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module; of its tensors, only what they look like."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__["_shape_only"], name)
        fqn = f"{self.__dict__['_fqn']}.{name}"
        if isinstance(value, Tensor):
            # One element in memory, whatever the shape, on a device where code can go on.
            seen = poison((), value.dtype, torch.device("cpu")).expand(value.shape)
            absent = seen.as_subclass(_AbsentTensor)
            absent._fqn = fqn
            return absent
        if isinstance(value, nn.Module):
            value = self.__dict__[name] = self._part(value, fqn)
        return value

    def _part(self, module: nn.Module, fqn: str) -> "_Shape":
        return type(self)(module, fqn)


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
            return getattr(self.__dict__["_shape"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what was received in the place of the block's output."""
        state = self._stage.current
        if state is None:
            raise PipelineError(f"block {self._number} lives on an earlier pipeline stage.")
        for name in self._stage.carried:
            value = state.received.get(f"{self._number}.{name}")
            if value is not None:
                object.__setattr__(self, name, value)
        if self._replay is not None:
            self._replay()
        answer = state.received.get(str(self._number))
        if answer is None:
            raise PlanError(
                f"block {self._number} gave no output to the next stage: its forward was called by "
                "name, which passes its hooks over. Call the block, as in block(x), not "
                "block.forward(x), or use pipeline_parallel_size=1."
            )
        if self._number == self._stage.first_block - 1:
            return answer
        # An output carried on has no hidden states; those that come in stand in for them.
        leaves = tree_leaves((args, kwargs))
        return fill_hidden(answer, next(t for t in leaves if isinstance(t, Tensor)))


@cache
def _stub_class(block: Hashable) -> type[EarlierBlock]:
    assert isinstance(block, type)
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
    stub.__dict__["_stage"], stub.__dict__["_number"] = stage, number
    stub.__dict__["_shape"] = _Shape(block, fqn)
    stub.__dict__["_replay"] = add_stand_ins(stub, block, captured, StageStub)
    return stub


def shape_of_block(stub: EarlierBlock) -> tuple[int, nn.Module]:
    """Return the number of the block that a stub stands for, and the block on meta."""
    return stub._number, stub._shape.__dict__["_shape_only"]


class LaterBlock(_Shape):
    """Stub of a block of a later stage: calling it ends this stage's share of the step."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `StageExit`."""
        raise StageExit


class AbsentModule(_Shape):
    """Stub of a module that only the last stage holds; it may not be called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `PipelineError`."""
        raise PipelineError(
            f"{self.__dict__['_fqn']} belongs to the last pipeline stage but was called before the "
            "blocks; name it in ParallelPlan(first=...) or ParallelPlan(replicated=...)."
        )


def _shape_of(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


class GhostModule(_Shape):
    """Stub of a module of the first stage: runs on meta for its shapes, and returns NaNs."""

    def __init__(self, module: nn.Module, fqn: str, stage: Stage | None = None) -> None:
        super().__init__(module, fqn)
        self.__dict__["_answers"] = {}
        self.__dict__["_stage"] = stage

    def _part(self, module: nn.Module, fqn: str) -> "_Shape":
        return GhostModule(module, fqn, self.__dict__["_stage"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GhostModule":
        """Follow changes of dtype, never of device: shapes are computed on meta."""
        shape_only = self.__dict__["_shape_only"]
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
                f"{self.__dict__['_fqn']} is used after the blocks, but the first pipeline stage "
                "holds it, since it is defined before them. Name it in ParallelPlan(last=...), or "
                "in ParallelPlan(replicated=...) if it is used before them too."
            )
        given, spec = tree_flatten((args, kwargs))
        device = next((t.device for t in given if isinstance(t, Tensor)), torch.device("cpu"))
        # Shapes in, shapes out: known after the first micro-batch unless other values take part.
        known, key = self.__dict__["_answers"], (spec, *map(_shape_of, given))
        if None in key or key not in known or draws_on_meta():
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
        restored = nullcontext() if draws_on_meta() else fork_torch_rng(torch.device("cpu"))
        with torch.no_grad(), restored:
            return self.__dict__["_shape_only"](*args, **kwargs)
