"""The whole of a sharded parameter, read outside of its module's forward, with its gradient.

Note [Gradients of shards on the host]: autograd adds to a gradient in a thread of the gradient's
device. FSDP2 adds that of the forward in the thread of the accelerator, also where the shard is on
the host, and neither waits for the other: one of the two could be lost. So there the gradients of
whole parameters are added after the backward.

Note [Flags of wholes]: a whole tensor is no leaf. Torch refuses to change its `requires_grad`, and
code that freezes adapters passes tensors over that are no leaves. So a whole answers as the
parameter does on one process, and gives the flag to the shards. That counts for what computes with
the parameter afterwards.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import shard_of, whole
from lightning_par.engine.collectives import refuses_second_gradient

__all__ = ["WholeParameters", "as_parameter"]

_TENSOR: Any = Tensor


class _AsParameter(Tensor):
    """A whole tensor in the place of a parameter; see Note [Flags of wholes].

    Attributes:
        shards: What the module and the optimizer hold of the parameter; none of what is detached,
            which answers as any tensor: `nn.Parameter` asks for the same class.
    """

    shards: Sequence[Tensor] = ()
    # As of a parameter: functions give plain tensors.
    __torch_function__ = nn.Parameter.__torch_function__

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True, as of every parameter."""
        return bool(self.shards) or _TENSOR.is_leaf.__get__(self)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter trains."""
        flagged = self.shards or (self,)
        return bool(_TENSOR.requires_grad.__get__(flagged[0]))

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        for shard in self.shards or (self,):
            _TENSOR.requires_grad.__set__(shard, flag)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set whether the parameter trains."""
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Tensor:
        """Return the same entries without a gradient."""
        found = super().detach()
        found.__class__ = type(self)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = _copied(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copied(self).__reduce_ex__(protocol)


def _copied(value: _AsParameter) -> Tensor:
    """Return a plain one: shards and that class have no place in copies and files."""
    made = value.detach().clone()
    is_parameter = value.shards or isinstance(value, nn.Parameter)
    return nn.Parameter(made, value.requires_grad) if is_parameter else made


@cache
def _class_like(kind: type[Tensor]) -> type[Tensor]:
    """Return a class that answers as a parameter, else as `kind`: that of fakes in a rehearsal."""
    if kind is Tensor:
        return _AsParameter
    own = {"__module__": kind.__module__, "__torch_function__": kind.__torch_function__}
    return type(f"_{kind.__name__}AsParameter", (_AsParameter, kind), own)


def as_parameter(value: Tensor, *shards: Tensor) -> Tensor:
    """Let a whole tensor tell and set `requires_grad` of a parameter; see Note [Flags of wholes].

    Args:
        value: Not a parameter; changed in place.
        shards: What the module and the optimizer hold of the parameter.
    """
    value.__class__ = _class_like(type(value))
    # No parameter for `isinstance`: a module would register it where a step keeps it.
    value.shards = shards  # type: ignore[attr-defined]
    return value


class WholeParameters:
    """Gives whole parameters, and adds those of their gradients that autograd does not add.

    Args:
        device: Of this rank.
        wait: Lets the host wait for the gradients that are on their way to shards.

    Attributes:
        late: Shards, and gradients that `add_gradients` has to add to theirs.
    """

    def __init__(self, device: torch.device, wait: Callable[[], None]) -> None:
        self._device, self._wait = device, wait
        self.late: list[tuple[DTensor, Tensor]] = []

    def of(self, parameter: DTensor, average: Callable[[Tensor], Tensor]) -> Tensor:
        """Return all entries of a parameter, whose shard gets this rank's part of the gradient.

        Args:
            parameter: Sharded.
            average: Makes a whole gradient one that is counted once.

        **Communicates**: the parameter, over the axes that shard it.
        """
        # The shard is on the host, the gradient on the device: see the note.
        late = None if parameter.device.type == self._device.type else self.late
        found: Tensor = _Whole.apply(parameter, average, late)  # type: ignore[no-untyped-call]
        return found

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add, after a backward, what it left; see Note [Gradients of shards on the host]."""
        self._wait()
        for shard, grad in self.late:
            shard.grad = grad if shard.grad is None else shard.grad + grad
        self.late.clear()


class _Whole(torch.autograd.Function):
    """The whole of a sharded parameter; its gradient is this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        parameter: DTensor,
        average: Callable[[Tensor], Tensor],
        late: list[tuple[DTensor, Tensor]] | None,
    ) -> Tensor:
        """Return all entries; `late` takes gradients that autograd is not to add."""
        ctx.parameter, ctx.average, ctx.late = parameter, average, late
        # A copy: of a parameter that has one shard, `whole` may give the memory of the parameter.
        return whole(parameter.detach()).detach().clone()

    @staticmethod
    @refuses_second_gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the part of this rank."""
        # Averaged whole, and cut after: FSDP2 averages only what it has reduced itself.
        part = shard_of(ctx.average(grad), ctx.parameter)
        if ctx.late is None:
            return part, None, None
        ctx.late.append((ctx.parameter, part))
        return None, None, None
