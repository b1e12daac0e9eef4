"""The tensors of a module of another pipeline stage, as hooks see them."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from lightning_par.strategies.step.absent_parameter import About

__all__ = ["Reads", "WholeTensors"]


class Reads(Protocol):
    """What knows whether a hook is at work, and stands for what other stages hold."""

    @property
    def in_hooks(self) -> bool:
        """Whether a hook is at work."""

    def absent(self, about: About) -> Tensor:
        """Return what stands for a tensor."""


class WholeTensors(dict[str, Any]):
    """The parameters or buffers of what stands for a module: none, but in hooks those of it.

    What a hook assigns to one is what the stage that holds it computes; here nothing is kept.

    Args:
        reads: Knows whether a hook is at work.
        absent: Name of a tensor of the module -> what is known of it.
        held: What it has besides: names that are None.
    """

    def __init__(self, reads: Reads, absent: Mapping[str, About], held: Mapping[str, Any]) -> None:
        super().__init__(held)
        self._reads, self._absent = reads, absent

    @override
    def __reduce__(self) -> Any:
        return dict, (dict(self.items()),)

    @override
    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self._reads.in_hooks and name in self._absent)

    @override
    def __getitem__(self, name: str) -> Any:
        if self._reads.in_hooks and name in self._absent:
            return self._reads.absent(self._absent[name])
        return super().__getitem__(name)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        if not (self._reads.in_hooks and name in self._absent):
            super().__setitem__(name, value)

    @override
    def items(self) -> Any:
        found = {n: self._reads.absent(a) for n, a in self._absent.items() if self._reads.in_hooks}
        return {**dict(super().items()), **found}.items()

    @override
    def values(self) -> Any:
        return dict(self.items()).values()
