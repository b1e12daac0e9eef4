"""Buffers that a forward writes, such as running means, where it runs a second time."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn, Tensor

from lightning_par.upstream.tensor import count_of_changes

__all__ = ["WrittenBuffers"]

_UNCOUNTED = ("running_mean", "running_var")
_Key = tuple[int, str]


class WrittenBuffers:
    """The buffers that the forward of a module writes.

    A recomputation works on copies of what its forward has found in them, so that it gives the same
    and that each forward counts once.

    Args:
        module: Its forward is recomputed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parts: list[nn.Module] = []
        self._written: set[_Key] | None = None  # None: no forward has shown it

    def of_both(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is called once for a forward, and then to recompute it.

        Args:
            call: What it calls.
        """
        # Not before the first forward: parts may still be put in the place of others.
        self._parts = self._parts or [*self._module.modules()]
        found = self._named()
        if not found:
            return call
        written = self._written
        # Here, and not in `both`, whose operations a selective checkpoint counts.
        before = {k: b.clone() for k, b in found.items() if written is None or k in written}
        is_again = False

        def both(*values: Any) -> Any:
            nonlocal is_again
            if not is_again:
                is_again = True
                try:
                    return self._watched(call, *values)
                finally:
                    for key in before.keys() - (self._written or set()):
                        del before[key]
            now = {key: buffer for key, buffer in self._named().items() if key in before}
            self._put(before)
            try:
                return call(*values)
            finally:  # torch ends it with an exception where nothing more is wanted
                self._put(now)

        return both

    def _watched(self, call: Callable[..., Any], *values: Any) -> Any:
        """Call, and note which buffers have changed."""
        found = {key: (held, count_of_changes(held)) for key, held in self._named().items()}
        try:
            return call(*values)
        finally:
            self._written = self._written or set()
            for key, now in self._named().items():
                held, count = found.get(key, (None, 0))
                # Torch does not count how often batch_norm writes its running means.
                if now is not held or count_of_changes(now) != count or key[1] in _UNCOUNTED:
                    self._written.add(key)

    def _named(self) -> dict[_Key, Tensor]:
        return {
            (place, name): held
            for place, part in enumerate(self._parts)
            for name, held in part._buffers.items()
            if held is not None and not held.is_inference()
        }

    def _put(self, buffers: Mapping[_Key, Tensor]) -> None:
        for (place, name), buffer in buffers.items():
            self._parts[place]._buffers[name] = buffer
