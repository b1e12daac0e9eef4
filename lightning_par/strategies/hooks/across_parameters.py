"""Finds a hook that combines gradients of several parameters, which a pipeline stage cannot do."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.step.absent_parameter import user_line
from lightning_par.upstream.functions import replaced

__all__ = ["AcrossParameters"]

_TO_PYTHON = frozenset(
    {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__}
)


class AcrossParameters(TorchFunctionMode):
    """Raises if an operation meets values that stem from different parameters or their gradients,
    or if numbers of several become numbers of Python, where nobody sees what becomes of them.

    Args:
        name: Of the hooks, for the message.
        module: Its parameters on this rank.
        cure: What to do instead.
    """

    def __init__(self, name: str, module: nn.Module, cure: str) -> None:
        super().__init__()
        self._name, self._cure, self._paused = name, cure, False
        # Name of the parameter that a tensor stems from; the tensor is kept for its id.
        self._stems: dict[int, tuple[Any, str]] = {}
        self._numbers: set[str] = set()
        for fqn, parameter in module.named_parameters():
            # By identity, as tensors compare entry by entry.
            self._stems[id(parameter)] = parameter, fqn
            if parameter.grad is not None:
                self._stems[id(parameter.grad)] = parameter.grad, fqn

    def paused(self) -> AbstractContextManager[None]:
        """Inside, nothing is looked at."""
        return replaced(self, "_paused", True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow an operation."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        # Of a list operation, entries at the same place belong together.
        lists = [a for a in (*args, *kwargs.values()) if isinstance(a, list | tuple)]
        # As in `torch._foreach_norm(grads)`.
        if getattr(func, "__name__", "").startswith("_foreach_") and lists:
            out = func(*args, **kwargs)
            for number, result in enumerate(out or ()):
                inputs = [one[number] for one in lists if number < len(one)]
                self._remember(result, self._stem(inputs))
            return out
        stem = self._stem((args, kwargs))
        if stem is not None and func in _TO_PYTHON:
            self._numbers.add(stem)
            # E.g. `sum(p.grad.norm().item() for ...)`: added up in Python, where no mode sees it.
            if len(self._numbers) > 1:
                self._refuse(*sorted(self._numbers)[:2])
        out = func(*args, **kwargs)
        if stem is not None:
            for result in out if isinstance(out, list | tuple) else (out,):
                self._remember(result, stem)
        return out

    def _remember(self, value: Any, stem: str | None) -> None:
        if stem is not None and isinstance(value, Tensor):
            self._stems[id(value)] = value, stem

    def _stem(self, inputs: Any) -> str | None:
        found: str | None = None
        for tensor in _tensors(inputs):
            stem = self._stems.get(id(tensor), (None, None))[1]
            if stem is not None and found is not None and stem != found:
                self._refuse(found, stem)
            found = stem or found
        return found

    def _refuse(self, one: str, other: str) -> None:
        raise ConfigurationError(
            "LP410",
            f"{self._name} combines values of {one} and {other}{user_line()}. Under a pipeline "
            "every stage has gradients of its own parameters only, so the result would cover only "
            f"a part of the model. {self._cure}",
        )


def _tensors(value: Any) -> Iterator[Tensor]:
    # Not as pytrees do it, for which a list of a class of its own is no container.
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)
