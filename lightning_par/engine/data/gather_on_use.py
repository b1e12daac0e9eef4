"""FSDP units in steps that run their backwards themselves, several in one step.

Note [Several backwards]: FSDP2 expects one forward of the root, then one backward, then the
optimizer. In manual optimization the user's step runs them in any order and number, all inside of
what would be the forward. So here the root is not called: what belongs to no block is gathered when
the first module computes, all gradients are reduced and all parameters resharded at the end of
every backward, and resharded again when an optimizer has changed them. Between a backward and the
next forward the module therefore holds its shards, as between steps.

Note [Penalties of gradients]: the backward of a gradient (`torch.autograd.grad` with a graph) needs
weights in an order that FSDP2 does not see. So what is gathered when a backward begins stays so
until its end. At ZeRO stage 3 blocks are sharded by then; there, a block that is found gathered
outside of its forward tells that a gradient was taken, and everything is gathered for the backward.

Note [Flags]: `requires_grad` may change in the step (`toggle_optimizer`), on the shards that the
optimizers know or on what is gathered of them; FSDP2 carries it over when it gathers, and not while
it is gathered. Both are compared with the last known value, and the one that differs is the news.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_par.upstream.fsdp import reduce_gradients

__all__ = ["GatherOnUse"]


@dataclass(eq=False)
class _Place:
    """A parameter in the module that holds it.

    Attributes:
        module: It; FSDP2 exchanges shards and what is gathered there.
        name: Of the parameter.
        shard: The parameter while it is sharded.
        trains: The known value of its `requires_grad`.
    """

    module: nn.Module
    name: str
    shard: nn.Parameter
    trains: bool

    @property
    def now(self) -> nn.Parameter:
        """The shard, or what is gathered of it."""
        # Not as the user's step reads it, which may get another answer.
        found: nn.Parameter = dict.__getitem__(self.module.__dict__["_parameters"], self.name)
        return found

    def begin(self) -> None:
        """Take what the module holds, now that nothing is gathered."""
        self.shard = self.now
        self.trains = self.shard.requires_grad

    def update_flag(self) -> None:
        """Carry `requires_grad` over to the other form; see Note [Flags]."""
        now = self.now
        if not isinstance(now, nn.Parameter):
            return  # inside of a forward that computes with the local part of a shard
        # The one that differs from the known value is the news; with two values, it is its
        # opposite.
        if now.requires_grad != self.shard.requires_grad:
            self.trains = not self.trains
            now.requires_grad_(self.trains)
            self.shard.requires_grad_(self.trains)
        self.trains = self.shard.requires_grad


class GatherOnUse:
    """Gathers units when a module computes; see Note [Several backwards].

    Args:
        root: The FSDP root; its hooks are set up, and nothing is gathered.
        units: All FSDP units, with the root.
        gathered: Called with the root when it has been gathered for a forward.
        reshards: Whether blocks are sharded again after their forward, as at ZeRO stage 3.

    Attributes:
        is_on: Whether a step is at work that runs its own backwards.
    """

    def __init__(
        self,
        root: FSDPModule,
        units: Sequence[FSDPModule],
        gathered: Callable[[nn.Module], None],
        *,
        reshards: bool,
    ) -> None:
        self.is_on, self._gathered = False, gathered
        self._is_listed = self._keeps = False
        self._shards: dict[int, nn.Parameter] = {}  # id of what is gathered -> its shard
        self._root, self._units = root, units
        # Only at stage 3 are blocks sharded between their forward and a backward.
        self._blocks: list[Any] = [u for u in units if reshards and u is not root]
        # Id of a unit -> its own; of any other module outside of blocks -> those below it.
        self._places: dict[int, list[_Place]] = {id(unit): [] for unit in units}
        self._watch(dict(_owners(root, units)))

    def _watch(self, owners: Mapping[nn.Module, FSDPModule]) -> None:
        root: Any = self._root
        own: dict[nn.Module, list[_Place]] = {}
        for module, unit in owners.items():
            named = module.named_parameters(recurse=False, remove_duplicate=False)
            own[module] = [_Place(module, name, p, p.requires_grad) for name, p in named]
            self._places[id(unit)] += own[module]
        for module, unit in owners.items():
            if unit is root and module is not root:
                # Blocks have places of their own, which are updated when they compute.
                below = (m for m in module.modules() if owners[m] is root)
                self._places[id(module)] = [place for m in below for place in own[m]]
            # Not one without parameters, as a metric, which is copied while a run goes on.
            gathers = module is not root and next(module.parameters(), None) is not None
            if gathers and (unit is root or id(module) == id(unit)):
                # Before FSDP2's own hook, which gathers with the flags that it finds.
                module.register_forward_pre_hook(self._enter, prepend=True)

    def begin(self) -> None:
        """Begin a step: backwards that are not announced reduce and reshard nothing."""
        self.is_on = True
        # Here the shards are in their places; later they may be exchanged for whole parameters.
        for place in self._all():
            place.begin()
        self._set(reduces=False)

    def end(self) -> None:
        """End a step; all parameters are sharded then."""
        self.reshard()
        self.is_on = False

    def before_backward(self) -> None:
        """Let the next backward reduce its gradients.

        **Communicates**: what belongs to no block, over the data axes, unless it is gathered.
        """
        for place in self._all():
            place.update_flag()
        # The root is never called here, so that no hook of FSDP2 gathers it for the backward.
        self._root.unshard()
        if self._keeps or any(map(self._is_gathered, self._blocks)):
            for unit in self._units:
                unit.unshard()
        self._set(reduces=True)

    def after_backward(self) -> None:
        """Reduce gradients that FSDP has not reduced yet, and reshard all parameters.

        **Communicates**: gradients over the data axes.
        """
        reduce_gradients(self._root)
        self.reshard()
        self._keeps = False
        self._set(reduces=False)

    def reshard(self) -> None:
        """Let go of all that is gathered, as after an update."""
        for place in self._all():
            place.update_flag()
        for unit in self._units:
            unit.reshard()
        self._is_listed = False

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the shard of a gathered parameter, and anything else as it is."""
        if not self.is_on:
            return parameter
        self._is_listed = True  # and perhaps written to
        if id(parameter) not in self._shards:
            held = [(place.now, place.shard) for place in self._all()]
            self._shards |= {id(p): shard for p, shard in held if isinstance(p, nn.Parameter)}
        return self._shards.get(id(parameter), parameter)

    def _set(self, *, reduces: bool) -> None:
        self._root.set_is_last_backward(True)
        for unit in self._units:
            unit.set_requires_gradient_sync(reduces, recurse=False)
            # What is gathered now stays so until the end, see Note [Penalties of gradients].
            reshards = reduces and not self._is_gathered(unit)
            unit.set_reshard_after_backward(reshards, recurse=False)

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self.is_on:
            return
        if self._is_listed:
            # An optimizer, or the user, may have changed the shards since they were handed out.
            self.reshard()
        if any(module is block and self._is_gathered(block) for block in self._blocks):
            self._keeps = True  # see Note [Penalties of gradients]
        gathers = not self._is_gathered(self._root)
        # Gathering the root carries over the flags of all that belongs to it.
        root: list[_Place] = self._places[id(self._root)] if gathers else []
        for place in (*self._places[id(module)], *root):
            place.update_flag()
        if gathers:
            self._root.unshard()
            assert isinstance(self._root, nn.Module)
            self._gathered(self._root)

    def _all(self) -> Iterator[_Place]:
        for unit in self._units:
            yield from self._places[id(unit)]

    def _is_gathered(self, unit: Any) -> bool:
        return any(place.now is not place.shard for place in self._places[id(unit)])


def _owners(
    root: FSDPModule, units: Iterable[FSDPModule]
) -> Iterator[tuple[nn.Module, FSDPModule]]:
    """Give every module and the innermost unit that holds it."""
    innermost: dict[nn.Module, FSDPModule] = {}
    for unit in units:  # outer ones first
        assert isinstance(unit, nn.Module)
        innermost |= dict.fromkeys(unit.modules(), unit)
    yield from innermost.items()
