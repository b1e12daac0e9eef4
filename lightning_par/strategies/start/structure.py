"""Whether a hook has changed which parameters a module has, after the mesh took it over."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn, Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_par.errors import ConfigurationError

__all__ = ["Structure", "structure_kept"]


class Structure:
    """The modules of a module on a mesh, and their parameters.

    Args:
        module: The user's LightningModule.
        divides_blocks: Whether blocks have places on the mesh, so that lists may not get shorter.
    """

    def __init__(self, module: nn.Module, *, divides_blocks: bool) -> None:
        self._module = module
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        self._entries = {id(entry) for m in lists for entry in m} if divides_blocks else set()
        # The objects are held, so that no other one can get the same `id`.
        self._held = {
            name: (part, dict(part.named_parameters(recurse=False)))
            for name, part in module.named_modules(remove_duplicate=False)
        }

    def check(self) -> None:
        """Refuse parameters that were replaced, and modules that have changed their places or are
        gone from a list.

        Raises:
            ConfigurationError: On every rank.

        **Communicates**: their names, over all ranks.
        """
        now = dict(self._module.named_modules(remove_duplicate=False))
        here = {id(part) for part in now.values()}
        changed = [
            name
            for name, (part, _) in self._held.items()
            if now.get(name) is not part and id(part) in here | self._entries
        ]
        for name, (part, parameters) in self._held.items():
            own = dict(part.named_parameters(recurse=False))
            changed += [
                f"{name}.{key}"
                for key, held in parameters.items()
                if own.get(key, held) is not held
            ]
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, changed)
        changed = list(dict.fromkeys(name for names in found for name in names))
        if changed:
            raise _refusal(changed)


@contextmanager
def structure_kept(
    place_of: Callable[[Any], str | None],
    parameters: Collection[str],
    is_of_a_stage: Callable[[Tensor], bool],
) -> Iterator[None]:
    """Inside, refuse to replace a parameter, or a module that has some by one from outside; and to
    add a parameter that is made of one of a single pipeline stage.

    `Structure.check` looks once, before the first step; this is for every later hook. What a hook
    has made itself may be made anew.

    Args:
        place_of: Returns the FQN of a module that is on the mesh, else None.
        parameters: The names of those that are on the mesh.
        is_of_a_stage: Returns whether a tensor has its values on one pipeline stage alone.

    Raises:
        ConfigurationError: On every rank, as all run the hook.
    """

    def check(owner: nn.Module, name: str, new: Any) -> None:
        place = place_of(owner)
        if place is None:
            return
        entries: Any = owner._modules if isinstance(new, nn.Module) else owner._parameters
        # Not `get`, which does not ask for what a hook sees.
        if (name in entries and entries[name] is new) or place_of(new) is not None:
            return
        fqn = f"{place}.{name}".removeprefix(".")
        if name in entries and any(f"{held}.".startswith(f"{fqn}.") for held in parameters):
            raise _refusal([fqn])
        added = new.parameters() if isinstance(new, nn.Module) else [new]
        if any(is_of_a_stage(tensor) for tensor in added if tensor is not None):
            raise _of_a_stage(fqn)

    with (
        register_module_module_registration_hook(check),
        register_module_parameter_registration_hook(check),
    ):
        yield


def _of_a_stage(fqn: str) -> ConfigurationError:
    return ConfigurationError(
        "LP329",
        f"a hook adds the parameter {fqn}, which is made of a weight of one pipeline stage. The "
        "other stages do not have its values, and checkpoints would not contain it. Store the "
        "values as a tensor that is not a parameter: self.reference = "
        "self.net.head.weight.detach().clone().",
    )


def _refusal(changed: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        "LP329",
        f"a hook has replaced or deleted {', '.join(changed[:4])}, but the modules are "
        "already sharded, and the forward still uses the old modules and parameters. "
        "Replace modules and parameters earlier, in __init__, setup or configure_model; "
        "or write to a parameter in place: self.net.head.weight.data.copy_(values).",
    )
