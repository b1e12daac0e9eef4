"""The buffers of a block of another pipeline stage, as hooks see them."""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from typing_extensions import override

from lightning_par.strategies.step.absent_parameter import About

__all__ = ["WholeBuffers"]


class _Reads(Protocol):
    """What knows whether a hook is at work, and stands for what other stages hold."""

    @property
    def in_hooks(self) -> bool: ...

    def absent(self, about: About) -> Tensor: ...


class WholeBuffers(dict[str, Any]):
    """The buffers of what stands for a block: none, but in hooks those of the block.

    What a hook assigns to one is what the stage that holds it computes; here nothing is kept.

    Args:
        reads: Knows whether a hook is at work.
        absent: Name of a buffer below the block -> what is known of it.
    """

    def __init__(self, reads: _Reads, absent: Mapping[str, About]) -> None:
        super().__init__()
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
