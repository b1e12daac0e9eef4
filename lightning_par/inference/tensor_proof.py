"""Proof that a module computes the same under tensor styles: it is run on simulated ranks.

Every rank is a thread with a copy of the module, random weights in float64, and the engine's own
style functions; collectives exchange tensors between the threads. Output, the gradient of the input
and the gradients of all parameters are compared with those of the whole module. Random weights give
equal numbers by chance with probability 0.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import like_parameter
from lightning_par.engine.collectives import apply_function
from lightning_par.engine.rng import fork_torch_rng
from lightning_par.engine.tensor.sequence_parallel import Region, SEQUENCE_DIM
from lightning_par.engine.tensor.styles import apply_style
from lightning_par.observe.recorder import Call, tensors_in
from lightning_par.plan.tensor_styles import TENSOR_STYLES, TensorStyle
from lightning_par.upstream.pytree import tree_map

__all__ = ["Proof", "prove_styles"]

_WAIT = 60.0  # seconds
_TOLERANCE = 1e-7
_MOST_PARAMETERS = 3e8  # of a module that is run in float64, once and divided


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What a proof found.

    Attributes:
        partial: Names of whole parameters of which each rank computes a part of the gradient.
    """

    partial: frozenset[str]


def prove_styles(
    call: Call,
    styles: Mapping[str, TensorStyle],
    divided: Mapping[str, Sequence[str]],
    ranks: int,
    *,
    sequence_parallel: bool = False,
) -> Proof | None:
    """Run a module whole and on simulated ranks, and compare.

    Args:
        call: A traced call of the module; random values take the place of its tensors.
        styles: Name of a submodule, the empty name for the module -> its style.
        divided: Name of a submodule -> attributes that are divided by the number of ranks.
        ranks: Number of simulated ranks.
        sequence_parallel: Cut the first input, and with it the output, along T.

    Returns:
        None if anything differs, or cannot be run.
    """
    # Twice in float64: the whole, and all ranks together.
    if sum(p.numel() for p in call.module.parameters()) > _MOST_PARAMETERS:
        return None
    # A mask may mean "visible" or "hidden": with the wrong one attention sees nothing.
    for flag in (True, False):  # of all boolean masks: where one says that nothing is seen
        try:
            with fork_torch_rng(torch.device("cpu")), torch.enable_grad():
                torch.manual_seed(0)
                # The same seed for both flags, so that runs are compared with themselves.
                bench = _Bench(call, styles, divided, ranks, sequence_parallel, flag)
                if bench.wanted_is_finite:
                    return bench.compare()
        except Exception:  # whatever a forward raises on shapes that it does not expect
            return None
    return None


class _Bench:
    def __init__(
        self,
        call: Call,
        styles: Mapping[str, TensorStyle],
        divided: Mapping[str, Sequence[str]],
        ranks: int,
        sequence_parallel: bool,
        flag: bool,
    ) -> None:
        self.styles, self.divided, self.ranks = styles, divided, ranks
        self.sequence_parallel = sequence_parallel
        self.whole = _real_copy(call.module)
        self.args, self.kwargs = _real_arguments(call, flag)
        self.cotangents: list[Tensor] = []
        self.meeting = _Meeting(ranks)
        self.wanted = self._run(self.whole, 0, 1)
        self.wanted_is_finite = all(bool(t.isfinite().all()) for t in self.wanted.outputs)

    def compare(self) -> Proof | None:
        """Return what is equal, or None."""
        parts = [copy.deepcopy(self.whole) for _ in range(self.ranks)]
        found: list[_Result | None] = [None] * self.ranks

        def work(rank: int) -> None:
            try:
                self._divide(parts[rank], rank)
                found[rank] = self._run(parts[rank], rank, self.ranks)
            # Others wait at the barrier for this rank.
            except BaseException:
                self.meeting.barrier.abort()

        # Autograd's mode is one of a thread.
        # Daemons, as one that hangs must not keep the process.
        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * _WAIT)
        results = [result for result in found if result is not None]
        return self._judge(self.wanted, results) if len(results) == self.ranks else None

    def _run(self, module: nn.Module, rank: int, ranks: int) -> "_Result":
        args, kwargs, leaves = self._arguments(rank, ranks)
        module.zero_grad(set_to_none=True)
        outputs = [t for t in tensors_in(module(*args, **kwargs)) if t.is_floating_point()]
        if not self.cotangents:  # the whole run is the first one
            # Random weights of the outputs: a sum alone would hide errors that cancel out.
            self.cotangents = [torch.randn_like(t) for t in outputs]
        cotangents = [self._cut(c, rank, ranks) for c in self.cotangents]
        pairs = zip(outputs, cotangents, strict=True)
        total = sum(((o * c).sum() for o, c in pairs), torch.zeros((), dtype=torch.float64))
        total.backward()
        gradients = {name: p.grad for name, p in module.named_parameters()}
        return _Result([t.detach() for t in outputs], [t.grad for t in leaves], gradients)

    def _arguments(self, rank: int, ranks: int) -> tuple[Any, Any, list[Tensor]]:
        leaves: dict[int, Tensor] = {}
        first = next(iter(tensors_in((self.args, self.kwargs))), None)

        def fresh(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            if id(tensor) not in leaves:
                value = self._cut(tensor, rank, ranks) if tensor is first else tensor
                value = value.detach().clone()
                # Of rotary tables and masks that come as arguments, nobody takes the gradient.
                leaves[id(tensor)] = value.requires_grad_(
                    value.is_floating_point() and (tensor is first or tensor.requires_grad)
                )
            # Not the leaf itself, which code may change in place.
            made = leaves[id(tensor)]
            # Tensors that need no gradient cannot fail by being changed.
            return made * 1.0 if made.requires_grad else made

        args, kwargs = tree_map(fresh, (self.args, self.kwargs))
        return args, kwargs, [t for t in leaves.values() if t.requires_grad]

    def _cut(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        if ranks == 1 or not self.sequence_parallel:
            return tensor
        if tensor.ndim != 3 or tensor.shape[SEQUENCE_DIM] % ranks:
            raise ValueError("no tokens that can be divided")
        # Equal parts: the proof is of a degree that divides.
        return tensor.chunk(ranks, SEQUENCE_DIM)[rank]

    def _divide(self, module: nn.Module, rank: int) -> None:
        region = _SimulatedRegion(self.meeting, rank, self.sequence_parallel)
        for name, style in self.styles.items():
            part, spec = module.get_submodule(name), TENSOR_STYLES[style]
            for own, parameter in list(part.named_parameters(recurse=False)):
                dim = spec.sharded_dim(own)
                if dim is not None:
                    shard = parameter.detach().chunk(self.ranks, dim)[rank].clone()
                    part._parameters[own] = like_parameter(parameter, shard)
            apply_style(part, style, region)
        for name, attributes in self.divided.items():
            part = module.get_submodule(name)
            for attribute in attributes:
                setattr(part, attribute, getattr(part, attribute) // self.ranks)

    def _judge(self, wanted: "_Result", results: Sequence["_Result"]) -> Proof | None:
        join = (lambda ts: torch.cat(ts, SEQUENCE_DIM)) if self.sequence_parallel else None
        for place, output in enumerate(wanted.outputs):
            if not _same(output, [r.outputs[place] for r in results], join):
                return None
        for place, grad in enumerate(wanted.inputs):
            given = [r.inputs[place] for r in results]
            joined = join if place == 0 else _total if self.sequence_parallel else None
            # Other inputs than the first are whole on every rank, and have parts of their
            # gradients.
            if not _same(grad, given, joined):
                return None
        summed = set()
        for name, grad in wanted.gradients.items():
            owner, _, own = name.rpartition(".")
            style = self.styles.get(owner)
            dim = None if style is None else TENSOR_STYLES[style].sharded_dim(own)
            given = [r.gradients[name] for r in results]
            if dim is not None:
                if not _same(grad, given, partial(torch.cat, dim=dim)):
                    return None
            # Equal on every rank, or parts that sum up: which of them decides the style.
            elif not _same(grad, given, None):
                if not _same(grad, given, _total):
                    return None
                summed.add(name)
        return Proof(partial=frozenset(summed))


@dataclass(frozen=True, eq=False)
class _Result:
    outputs: list[Tensor]
    inputs: list[Tensor | None]
    gradients: Mapping[str, Tensor | None]


def _total(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _same(
    wanted: Tensor | None,
    found: Sequence[Tensor | None],
    join: Callable[[list[Tensor]], Tensor] | None,
) -> bool:
    """Whether all ranks found what is wanted, or, with `join`, their parts give it together."""
    if wanted is None:
        return all(tensor is None for tensor in found)
    there = [tensor for tensor in found if tensor is not None]
    if join is _total:
        # A rank without a gradient adds nothing to a sum.
        there = there or [torch.zeros_like(wanted)]
    elif len(there) < len(found):
        return False
    tensors = there if join is None else [join(there)]
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    return all(
        t.shape == wanted.shape
        # Relative to the largest entry, as small ones carry its rounding.
        and torch.allclose(t, wanted, rtol=_TOLERANCE, atol=_TOLERANCE * max(scale, 1e-3))
        for t in tensors
    )


def _real_copy(module: nn.Module) -> nn.Module:
    """Return a copy in float64 with random parameters, without dropout."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        made = torch.randn(parameter.shape, dtype=torch.float64)
        # 1 / sqrt(inputs): activations keep their size, so that no softmax saturates.
        spread = max(1, parameter.shape[-1]) ** -0.5 if parameter.ndim > 1 else 1.0
        memo[id(parameter)] = like_parameter(parameter, made * spread).requires_grad_()
    for buffer in module.buffers():
        if buffer.device.type == "meta":
            memo[id(buffer)] = torch.ones(buffer.shape, dtype=buffer.dtype)
    # In evaluation mode: dropout would draw for each rank.
    return copy.deepcopy(module, memo).cpu().double().eval()


def _real_arguments(call: Call, flag: bool) -> tuple[Any, Any]:
    made: dict[int, Tensor] = {}

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            shape = tuple(value.shape)
            if value.is_floating_point():
                made[id(value)] = torch.randn(shape, dtype=torch.float64)
                made[id(value)].requires_grad_(value.requires_grad)
            elif value.dtype == torch.bool:
                made[id(value)] = torch.full(shape, flag)
            else:
                # Indices within the smallest table that there may be.
                size = max(shape, default=1)
                count = torch.arange(value.numel()).reshape(shape) % max(size, 1)
                made[id(value)] = count.to(value.dtype)
        return made[id(value)]

    args, kwargs = tree_map(real, (call.args, dict(call.kwargs)))
    return args, kwargs


class _Meeting:
    """Where the threads of one proof exchange tensors."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=_WAIT)
        self._table: list[Any] = [None] * ranks

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Give this rank's tensor, and take those of all."""
        self._table[rank] = tensor.detach()
        self.barrier.wait()
        taken = list(self._table)
        # Twice: nobody writes the next round before all have read this one.
        self.barrier.wait()
        return taken


class _SimulatedGroup:
    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self.meeting, self.own = meeting, rank

    def size(self) -> int:
        return self.meeting.ranks

    def rank(self) -> int:
        return self.own

    def sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.own, tensor)).sum(0)

    def join(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.own, tensor), SEQUENCE_DIM)

    def part(self, tensor: Tensor) -> Tensor:
        return tensor.chunk(self.size(), SEQUENCE_DIM)[self.own]


class _SimulatedRegion(Region):
    """`Region` whose collectives go between threads."""

    def __init__(self, meeting: _Meeting, rank: int, sequence_parallel: bool) -> None:
        group: Any = _SimulatedGroup(meeting, rank)
        self.group, self.sequence_parallel = cast(dist.ProcessGroup, group), sequence_parallel

    def enter(self, x: Tensor) -> Tensor:
        return apply_function(_Gather if self.sequence_parallel else _Copy, x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return apply_function(_Scatter if self.sequence_parallel else _Sum, x, self.group)


class _Function(torch.autograd.Function):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.back(grad), None


class _Copy(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _SimulatedGroup) -> Tensor:
        ctx.back = group.sum
        return x.view_as(x)


class _Sum(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _SimulatedGroup) -> Tensor:
        ctx.back = lambda grad: grad
        return group.sum(x)


class _Gather(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _SimulatedGroup) -> Tensor:
        ctx.back = lambda grad: group.part(group.sum(grad))
        return group.join(x)


class _Scatter(_Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: _SimulatedGroup) -> Tensor:
        ctx.back = group.join
        return group.part(group.sum(x)).clone()
