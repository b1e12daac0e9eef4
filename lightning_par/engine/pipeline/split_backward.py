"""The split of a backward into input (I) and weight (W), as zero-bubble schedules need it.

y = x W^T has the gradients dx = dy W, which the previous stage waits for, and dW = dy^T x, which
no other stage needs. While a `WeightGradients` collects, a backward computes dx only and keeps
(dy, x) for later. What is not a linear map of a parameter computes all its gradients at once.

Blocks are wrapped, not the model, so that a recomputation of a block enters the wrapper again. One
of a part of a block, by a checkpoint in its forward, does not, and would keep other tensors than
the forward did; so the linear maps inside of it compute all their gradients at once.

**Source**: Qi et al. 2401.10241, section 4 (the split of the backward); ours catches
`F.linear`, so that no layer has to be written for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.upstream.autograd import saved_tensor_hooks
from lightning_par.upstream.dtensor import TO_LOCAL_NODE

__all__ = ["Deferred", "WeightGradients", "defer_weight_gradients", "undeferred"]

_UNDEFERRED: ContextVar[bool] = ContextVar("undeferred", default=False)

_CASTS = ("ToCopyBackward0", TO_LOCAL_NODE)
"""Nodes between a parameter and what a layer multiplies with that keep nothing of the forward."""


@dataclass(frozen=True, eq=False)
class Deferred:
    """The gradient of one weight, not computed yet.

    Attributes:
        weight: [out, in], a parameter or a cast of one.
        x: [..., in], input of the linear map.
        grad: [..., out], gradient of its output.
    """

    weight: Tensor
    x: Tensor
    grad: Tensor

    def accumulate(self) -> None:
        """Compute the gradient, [out, in], and add it to the parameter's."""
        # [out, B T] @ [B T, in], both flattened to two dims.
        with torch.no_grad():
            grad = self.grad.flatten(0, -2).t() @ self.x.flatten(0, -2)
            grad = grad.to(self.weight.dtype)
        # Through autograd and not by hand: hooks of the parameter (FSDP, DTensor) have to run.
        torch.autograd.backward([self.weight], [grad])

    def zeroed(self) -> "Deferred":
        """Return one that accumulates 0, for a loss with weight 0."""
        return Deferred(self.weight, self.x, torch.zeros_like(self.grad))


class WeightGradients:
    """Where backwards put the weights' gradients that they leave for later.

    Attributes:
        is_used: Whether any module was told to leave its weights' gradients here.
    """

    def __init__(self) -> None:
        self.is_used = False
        self._waiting: list[Deferred] | None = None

    @contextmanager
    def collect(self, waiting: list[Deferred]) -> Iterator[None]:
        """Let the backwards inside append to `waiting`."""
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None

    def put(self, deferred: Deferred) -> None:
        """Keep a gradient for later; compute it at once where nothing collects."""
        # Outside of a schedule, as in a call without a pipeline step: nothing would compute it
        # later.
        if self._waiting is None:
            deferred.accumulate()
        else:
            self._waiting.append(deferred)


@contextmanager
def undeferred() -> Iterator[None]:
    """Leave the linear maps of forwards inside as they are."""
    before = _UNDEFERRED.set(True)
    try:
        yield
    finally:
        _UNDEFERRED.reset(before)


def defer_weight_gradients(module: nn.Module, gradients: WeightGradients) -> None:
    """Make the linear maps in a module's forward leave their weights' gradients for later.

    Args:
        module: Its forward is wrapped.
        gradients: Where the backward leaves them.
    """
    gradients.is_used = True

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if _UNDEFERRED.get() else _CatchLinear(gradients):
                return inner(*args, **kwargs)

        return forward

    wrap_forward(module, around, "deferred_weight_gradients")


class _CatchLinear(TorchFunctionMode):
    def __init__(self, gradients: WeightGradients) -> None:
        super().__init__()
        # The hooks that are there when the block begins; a checkpoint inside pushes others.
        self._gradients, self._hooks = gradients, saved_tensor_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Those of a checkpoint, if its function has begun since the block did.
        is_inside = func is F.linear and saved_tensor_hooks() != self._hooks
        if func is F.linear and torch.is_grad_enabled() and not is_inside:
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        tensors = [t for t in (input, weight, bias) if t is not None]
        # A rehearsal has fake tensors.
        # A subclass, as a DTensor or a float8 weight, has rules of its own for F.linear.
        plain = all(type(t) in (Tensor, nn.Parameter) or hasattr(t, "fake_mode") for t in tensors)
        # The weight is hidden from autograd, so that something else must call for the backward.
        waits = plain and input.requires_grad and input.dim() > 1
        if not waits or not _leads_to_a_parameter(weight):
            return F.linear(input, weight, bias)
        # As F.linear casts under autocast: a Function is not on its list of operations. The
        # Function casts the weight, so that no micro-batch in flight keeps a cast of it.
        dtype = weight.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
            input = input.to(dtype)  # noqa: A001
            bias = None if bias is None else bias.to(dtype)
        held = _Held(weight, dtype, self._gradients)
        # Detached, and the weight hidden in `held`: autograd asks for gradients of x and bias
        # only.
        output: Tensor = _Linear.apply(input, weight.detach(), bias, held)  # type: ignore[no-untyped-call]
        return output


def _leads_to_a_parameter(weight: Tensor) -> bool:
    """Whether a later backward from `weight` meets nothing that this one uses or frees."""
    node: Any = weight.grad_fn
    # A weight computed from other weights shares their graph, which this backward frees.
    while node is not None and node.name() in _CASTS:
        node = node.next_functions[0][0]
    at_parameter = node is None or node.name() == "torch::autograd::AccumulateGrad"
    return weight.requires_grad and at_parameter


@dataclass(frozen=True, eq=False)
class _Held:
    """Hides the weight from autograd, which would otherwise ask for its gradient at once.

    Attributes:
        dtype: In which the map is computed.
    """

    weight: Tensor
    dtype: torch.dtype
    gradients: WeightGradients


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, held: _Held) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.held = held
        return F.linear(x, weight.to(held.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # dx = dy W, at once: the previous stage waits for it.
        grad_x = grad @ weight.to(ctx.held.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        ctx.held.gradients.put(Deferred(ctx.held.weight, x, grad))
        return grad_x, None, grad_bias, None
