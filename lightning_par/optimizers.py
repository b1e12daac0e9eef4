"""Adam and AdamW whose two moments take fewer bytes on the device, with one result on any mesh.

`states` says what is kept between steps: ``"float32"`` both moments in float32, as in torch (8
bytes of a weight); ``"bfloat16"`` both in bfloat16 (4 bytes); ``"packed"`` both in 16 bits (2
bytes), see Note [Packed moments].

A step computes in float32, or in float64 for weights in float64, and rounds what it keeps; see Note
[Stochastic rounding]. They are optimizers of torch, for any Trainer and loop.

Note [Packed moments]: v has 7 bits of exponent and 3 of mantissa. m has a sign and 5 bits of its
ratio to the root of v as it was rounded: their steps are 1/64 where it is small, and a quarter of a
power of 2 beyond; the ratio is below 16. So each entry is kept by itself, without a scale of a
block, which a shard would have to share with another one. One byte holds the 8 highest bits of v,
the other one the rest. v holds squares of gradients from about 1e-12 to 1e7; others end there.

Note [Same bits]: states and weights are the same bit for bit on any mesh, given the same gradients.
So each operation here rounds once, as IEEE 754 says: compilers may fuse a product into a sum, and
do so in some kernels for the vectors only, and not for the entries that are left.

**Source**: Kingma and Ba 1412.6980, algorithm 1; Loshchilov and Hutter 1711.05101.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_box, local_part
from lightning_par.engine.master_weights import keep_dtypes
from lightning_par.engine.offload.adam import AdamRule
from lightning_par.engine.offload.rounding import (
    cut_bits,
    entry_index,
    mixed,
    NEAREST,
    random_bits,
    round_to_bfloat16,
)
from lightning_par.errors import ConfigurationError, either

__all__ = ["Adam", "AdamW"]

_CPU_TILE, _TILE = 2**18, 2**22
"""Entries that are updated at once: on a CPU what is computed on the way stays in the cache."""


class _Form(Protocol):
    """How two moments are kept in two tensors of the shape of their parameter."""

    names: tuple[str, str]

    def dtype(self, wide: torch.dtype) -> torch.dtype: ...

    def read(self, held: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]: ...

    def write(
        self, held: Sequence[Tensor], mean: Tensor, square: Tensor, random: Tensor | int
    ) -> None: ...


class _Apart:
    """Each in a tensor of its own, under the name that it has in torch."""

    names = ("exp_avg", "exp_avg_sq")

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype

    def dtype(self, wide: torch.dtype) -> torch.dtype:
        return self._dtype or wide

    def read(self, held: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        mean, square = (tensor.to(wide) for tensor in held)
        return mean, square

    def write(
        self, held: Sequence[Tensor], mean: Tensor, square: Tensor, random: Tensor | int
    ) -> None:
        if self._dtype is None:
            held[0].copy_(mean)
            held[1].copy_(square)
        else:  # one hash serves both: 16 bits each, as many as are cut off
            round_to_bfloat16(mean.float(), random, held[0])
            round_to_bfloat16(square.float(), random >> 16, held[1])


class _Packed:
    """Both in two bytes; see Note [Packed moments]."""

    names = ("moments_high", "moments_low")
    # v ends at twice that, so that its bits of exponent begin with a 0; below 2**-80 it is 0.
    _LARGEST = 2.0**46
    _OFFSET = 2.0**-4  # below it, bits of a float32 would need another power for each
    _FIRST = (127 - 4) << 2  # bits of `_OFFSET` without those that are cut off

    def dtype(self, wide: torch.dtype) -> torch.dtype:
        return torch.uint8

    def read(self, held: Sequence[Tensor], wide: torch.dtype) -> tuple[Tensor, Tensor]:
        high, low = (tensor.to(torch.int32) for tensor in held)
        square = _from_bits(((high << 2) | (low >> 6)) << 20) * self._LARGEST
        ratio = _from_bits(((low & 31) + self._FIRST) << 21) - self._OFFSET
        mean = torch.where((low & 32) > 0, -ratio, ratio) * square.sqrt()
        return mean.to(wide), square.to(wide)

    def write(
        self, held: Sequence[Tensor], mean: Tensor, square: Tensor, random: Tensor | int
    ) -> None:
        code = cut_bits(square.float() / self._LARGEST, random >> 16, 20).clamp_(0, 1023)
        root = (_from_bits(code << 20) * self._LARGEST).sqrt()
        ratio = mean.float() / root.clamp_(min=torch.finfo(torch.float32).tiny)
        size = cut_bits(ratio.abs() + self._OFFSET, random, 21) - self._FIRST
        held[0].copy_(code >> 2)
        held[1].copy_(((code & 3) << 6) | ((ratio < 0).int() << 5) | size.clamp_(0, 31))


def _from_bits(bits: Tensor) -> Tensor:
    return bits.view(torch.float32)


_FORMS: dict[str, _Form] = {
    "float32": _Apart(None),
    "bfloat16": _Apart(torch.bfloat16),
    "packed": _Packed(),
}


class Adam(torch.optim.Adam):
    """Adam with moments in fewer bits: torch's update, computed in float32 and rounded.

    States of any of these forms, of torch's Adam and AdamW too, can be loaded. torch's read those
    of ``"float32"`` and ``"bfloat16"``.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Factor of the weight in the gradient.
        maximize: Go along the gradient, not against it.
        states: How the moments are kept: ``"float32"``, ``"bfloat16"`` or ``"packed"``, in 8, 4 or
            2 bytes for each weight.
        decoupled_weight_decay: Let the decay bypass the moments, as AdamW.

    Raises:
        ConfigurationError: `states` is none of these.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> optimizer = Adam([weight], lr=0.1)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].dtype
        torch.bfloat16
    """

    looks_across = "entry"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        states: Literal["float32", "bfloat16", "packed"] = "bfloat16",
        decoupled_weight_decay: bool = False,
    ) -> None:
        if states not in _FORMS:
            choices = either([repr(name) for name in _FORMS])
            raise ConfigurationError("LP902", f"states={states!r} must be {choices}.")
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
        )
        self.states = states
        keep_dtypes(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        Args:
            closure: Computes the loss and the gradients.

        Returns:
            What `closure` returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rule = AdamRule.of_group(group, decoupled=False)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _check(self, group, parameter)
                    self._update(rule, parameter)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch's has groups and states only; this is also how an optimizer is copied.
        return {**super().__getstate__(), "states": self.states}

    def _update(self, rule: AdamRule, parameter: nn.Parameter) -> None:
        form, state = _FORMS[self.states], self.state[parameter]
        _fit(form, state, parameter)
        state["step"] += 1
        number = int(state["step"])
        data, grad = parameter.data, parameter.grad
        assert grad is not None
        if isinstance(data, DTensor) and isinstance(grad, DTensor):
            grad = grad.redistribute(placements=data.placements)  # mostly it is placed so
        tensors = [parameter, grad, *(state[name] for name in form.names)]
        low = local_box("parameter", data).offset
        for (weight, slope, *held), first in _tiles([local_part(t) for t in tensors], low):
            wide = _wide(weight.dtype)
            moments = form.read(held, wide)
            updated, mean, square = _adam(rule, number, weight.to(wide), slope.to(wide), *moments)
            random: Tensor | int = NEAREST
            if form.dtype(wide) != wide:
                index = entry_index(weight.shape, first, parameter.shape or (1,), weight.device)
                random = random_bits(index, mixed(number))
            form.write(held, mean, square, random)
            weight.copy_(updated)


class AdamW(Adam):
    """AdamW with moments in fewer bits: `Adam` whose weight decay bypasses the moments.

    Args:
        params: As for `Adam`, and so are the other arguments.
        lr: Learning rate.
        betas: Decay rates of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Part of a weight, times `lr`, that a step takes away.
        maximize: Go along the gradient, not against it.
        states: ``"float32"``, ``"bfloat16"`` or ``"packed"``.

    Examples:
        >>> weight = nn.Parameter(torch.ones(2, 3))
        >>> optimizer = AdamW([weight], lr=0.1, states="packed")
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> sum(v.nbytes for v in optimizer.state[weight].values() if v.ndim) / weight.numel()
        2.0
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        states: Literal["float32", "bfloat16", "packed"] = "bfloat16",
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            maximize=maximize,
            states=states,
            decoupled_weight_decay=True,
        )


def _check(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Refuse what the update does not compute, before it changes anything of the parameter."""
    kind, grad = type(optimizer).__name__, parameter.grad
    found = {
        "amsgrad=True": group["amsgrad"],
        "complex parameters": parameter.is_complex(),
        "sparse gradients": grad is not None and grad.is_sparse,
    }
    for what, is_so in found.items():
        if is_so:
            raise ConfigurationError(
                "LP902",
                f"lightning_par.optimizers.{kind} does not support {what}. Use torch.optim.{kind}.",
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parameters of a dtype are updated."""
    return torch.promote_types(dtype, torch.float32)


def _fit(form: _Form, state: dict[str, Any], parameter: nn.Parameter) -> None:
    """Begin the states of a parameter, or give loaded ones another form."""
    wide = _wide(parameter.dtype)
    dtype = form.dtype(wide)
    if all(name in state and state[name].dtype == dtype for name in form.names):
        return
    old = next((other for other in _FORMS.values() if other.names[0] in state), None)
    before = [] if old is None else [local_part(state.pop(name)) for name in old.names]
    state.setdefault("step", torch.zeros((), dtype=torch.float32))
    state.update({name: torch.zeros_like(parameter, dtype=dtype) for name in form.names})
    if old is not None:
        made = [local_part(state[name]) for name in form.names]
        form.write(made, *old.read(before, wide), NEAREST)


def _tiles(
    tensors: Sequence[Tensor], low: Sequence[int]
) -> Iterator[tuple[list[Tensor], tuple[int, ...]]]:
    """Yield rows of tensors of one shape, with the place of the first entry in the whole tensor.

    Args:
        tensors: Parts of whole tensors, with any strides.
        low: Place of their first entry.
    """
    if not low:  # a number
        tensors, low = [tensor.view(1) for tensor in tensors], (0,)
    length, most = len(tensors[0]), _CPU_TILE if tensors[0].device.type == "cpu" else _TILE
    rows = max(1, most * length // max(1, tensors[0].numel()))
    for first in range(0, length, rows):
        yield [tensor[first : first + rows] for tensor in tensors], (low[0] + first, *low[1:])


def _adam(
    rule: AdamRule, number: int, weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return weight and moments after a step; see Note [Same bits].

    Args:
        rule: Hyperparameters.
        number: Number of the step, from 1.
        weight: Before the step.
        grad: Its gradient.
        mean: First moment before the step.
        square: Second moment before the step.
    """
    first, second = rule.betas
    if rule.maximize:
        grad = -grad
    if rule.decoupled:
        weight = weight * (1 - rule.lr * rule.weight_decay)
    else:
        grad = grad + weight * rule.weight_decay
    mean = mean + (grad - mean) * (1 - first)
    square = square * second + grad * grad * (1 - second)
    root = square.sqrt() / math.sqrt(1 - second**number) + rule.eps
    return weight - mean * (rule.lr / (1 - first**number)) / root, mean, square
