"""The modules of other pipeline stages, as hooks see them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_par.engine.pipeline.refusals import called_by_a_hook
from lightning_par.engine.pipeline.stage import StageStub, stands_for
from lightning_par.strategies.hooks.whole_tensors import Reads, WholeTensors
from lightning_par.strategies.step.absent_parameter import About

__all__ = ["AbsentModules"]


class AbsentModules:
    """Puts modules of the user's own classes in the place of stubs while a hook is at work.

    They have the children, attributes and methods of what another stage holds, and tensors that
    `HookView.absent` gives. So a loop over `modules()`, `get_submodule` and `isinstance` find on
    every rank what they find on one process.

    Args:
        module: The user's LightningModule on this rank.
        reads: Stands for the tensors.
        known: What is known of these, by their names.

    Attributes:
        names: `id` of such a module -> the module, as no other one may get this `id`, and its FQN.
    """

    def __init__(self, module: nn.Module, reads: Reads, known: Mapping[str, About]) -> None:
        self._module, self._reads, self._known = module, reads, known
        self._made: list[tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]] | None = None
        self._are_shown = False
        self.names: dict[int, tuple[nn.Module, str]] = {}

    @contextmanager
    def shown(self, *, shown: bool = True) -> Iterator[None]:
        """Inside, they are in the module, or stubs are."""
        before = self._are_shown
        self._show(shown=shown)
        try:
            yield
        finally:
            self._show(shown=before)

    def _show(self, *, shown: bool) -> None:
        if self._are_shown == shown:
            return
        if self._made is None:
            # A stub has children of its own where a plan captures outputs.
            owners = [m for m in self._module.modules() if not isinstance(m, StageStub)]
            found = ((owner, self._children_of(owner)) for owner in owners)
            self._made = [(owner, pairs) for owner, pairs in found if pairs]
        for owner, pairs in self._made:
            new = dict[int, nn.Module]()
            for stub, made in pairs:
                gone, come = (stub, made) if shown else (made, stub)
                if come.training != gone.training:
                    come.train(gone.training)
                new[id(gone)] = come
            # A hook may have moved one, or have put another in its place, which is refused.
            for name, held in owner._modules.items():
                owner._modules[name] = new.get(id(held), held)
        self._are_shown = shown

    def _children_of(self, owner: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
        """Return the stubs of a module, and what is shown in the place of each."""
        pairs = list[tuple[nn.Module, nn.Module]]()
        for child in dict.fromkeys(owner._modules.values()):
            if isinstance(child, StageStub):
                made = self._like(*stands_for(child))
                # The stub says what to do instead.
                vars(made)["forward"] = _forward_of(child)
                pairs.append((child, made))
        return pairs

    def _like(self, fqn: str, module: nn.Module) -> nn.Module:
        """Return a module like one on meta; its own `__init__` would make parameters."""
        made = module.__new__(type(module))
        vars(made).update(vars(module))
        for kind in ("_parameters", "_buffers"):
            held = vars(module)[kind]
            none = {name: None for name, tensor in held.items() if tensor is None}
            named = {name: self._known.get(f"{fqn}.{name}") for name in held if name not in none}
            absent = {name: about for name, about in named.items() if about is not None}
            vars(made)[kind] = WholeTensors(self._reads, absent, none)
        vars(made)["_modules"] = {
            name: None if child is None else self._like(f"{fqn}.{name}", child)
            for name, child in module._modules.items()
        }
        vars(made)["forward"] = _refused(fqn)
        self.names[id(made)] = made, fqn
        return made


def _forward_of(stub: nn.Module) -> Callable[..., Any]:
    return lambda *args, **kwargs: stub(*args, **kwargs)


def _refused(fqn: str) -> Callable[..., Any]:
    def forward(*_: Any, **__: Any) -> Any:
        raise called_by_a_hook(fqn)

    return forward
