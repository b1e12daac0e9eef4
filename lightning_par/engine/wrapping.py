"""Wrappers around the `forward` of a module, which change what it computes or where.

Note [Order of wrappers]: what is wrapped later is outside. It matters: an exchange outside of a
recomputation is not repeated in the backward, and inside of a compiled forward it is compiled.
`wrappers_of` gives the order, for people and for tests.
"""

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

from torch import nn

from lightning_par.errors import ConfigurationError

__all__ = ["Forward", "copy_refused", "wrap_forward", "wrapped_parts", "wrappers_of"]

Forward = Callable[..., Any]
_WRAPPERS = "_lightning_par_forward_wrappers"


def copy_refused() -> ConfigurationError:
    """Return the error of code that copies or pickles a module on a mesh."""
    return ConfigurationError(
        "LP328",
        "a module on a mesh cannot be copied by copy.deepcopy, or pickled: the forward of the "
        "copy would compute with the weights of the original. To copy the module, call "
        "self.teacher = copy.deepcopy(self.net) in __init__ or setup, before it is sharded. To "
        "copy only its weights, use "
        "{name: w.detach().clone() for name, w in self.net.named_parameters()}. To save it, call "
        "torch.save(self.net.state_dict(), path) on all ranks instead of torch.save(self.net, "
        "path), or save the module in on_fit_end.",
    )


class _Names(list[str]):
    """Names of wrappers, of a module that cannot be copied or pickled any more."""

    def __copy__(self) -> "_Names":
        return _Names(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise copy_refused()


def wrap_forward(module: nn.Module, around: Callable[[Forward], Forward], name: str) -> None:
    """Replace the forward of a module; its hooks stay outside, and its signature can be inspected.

    A module has to be copied before it is wrapped: the forward of a copy would still be that of the
    original, as for every attribute that holds a function. `copy.deepcopy` raises.

    Args:
        module: Changed in place.
        around: Takes the forward so far and returns the new one, as a decorator does.
        name: Of the mechanism, for `wrappers_of`.
    """
    inner = module.forward
    # Not the function's __dict__: a mark such as torch.compile's reference to what it compiled
    # would make a later compiler pass this wrapper over.
    outer = update_wrapper(around(inner), inner, updated=())
    module.__dict__.setdefault(_WRAPPERS, _Names()).append(name)
    module.forward = outer


def wrappers_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the wrappers of a module's forward, the outermost first."""
    return tuple(reversed(module.__dict__.get(_WRAPPERS, ())))


def wrapped_parts(module: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Return the modules with wrappers that lie in no block: a step may call any of them.

    Args:
        module: The user's module.
        blocks: FQNs of its blocks; a block itself may be returned.
    """
    inside = tuple(f"{name}." for name in blocks)
    named = module.named_modules()
    return [part for name, part in named if wrappers_of(part) and not name.startswith(inside)]
