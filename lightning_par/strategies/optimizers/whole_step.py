"""Steps of an optimizer on whole tensors: every rank computes what one process would.

Note [Whole step]: an optimizer whose update looks across a matrix (Muon, Adafactor) is wrong on
shards, and one that looks across the model (LBFGS, SAM, a normalized gradient) is wrong on a
pipeline stage. Before such an optimizer steps, its parameters and gradients are gathered, and
whole tensors take the places of the parameters in its groups; after the step every rank keeps its
part of them. States of a parameter's shape are kept sharded as the parameter is. A closure
that the optimizer calls runs on the parameters, which take their places while it does.

An optimizer that may update each parameter on another rank gathers each on one rank only; see Note
[Owners]. It gathers them once its closure has run, and so only once in a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.dtensor import local_part, replicated, shard_of, whole
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.strategies.optimizers.owners import Owners, whole_state

__all__ = ["WholeStep"]


@dataclass(kw_only=True, eq=False)
class _Entry:
    """One parameter of the optimizer in the whole model.

    Attributes:
        name: Its name in the whole model.
        group: Index of its group.
        stage: The pipeline rank that holds it; the first, if several do.
        place: Its place in the group on this rank; None: it is on another stage.
        shape: Global shape.
        dtype: Dtype of the parameter.
        tensor: Stands for the whole parameter; it has no memory between steps.
    """

    name: str
    group: int
    stage: int
    place: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: nn.Parameter = field(repr=False)


class WholeStep:
    """Lets an optimizer step on whole tensors; see Note [Whole step].

    Args:
        optimizer: Its groups hold this rank's parameters, whatever takes their places in a step.
        names: Gives the name of every parameter of each group, in order.
        mesh: Mesh of this run.
        device: Device of this rank.
        across_stages: Whether it also steps on the parameters of other pipeline stages.
        by_owners: Whether each rank may step on some of the parameters only; see `steps_alone`.
        order: Place of a name in the whole model.

    **Communicates**: the names and shapes of the parameters, over the ``pp`` axis. In every step
    parameters, gradients and states over the axes that shard them; with `across_stages`
    parameters and gradients over the ``pp`` axis, too.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: Callable[[], Sequence[Sequence[str]]],
        mesh: ParallelMesh,
        device: torch.device,
        *,
        across_stages: bool,
        by_owners: bool,
        order: Callable[[str], int],
    ) -> None:
        self._optimizer, self._mesh, self._device = optimizer, mesh, device
        self._across = across_stages and mesh.sizes.pipeline > 1
        self._names, self._order = names, order
        self._entries: list[_Entry] = []
        self._parameters: list[list[Any]] = []  # those of each group, while others are shown
        self._depth, self._loaded = 0, False
        self._by_owners, self._is_gathered = by_owners, False
        self._list()
        # torch calls these inside the wrapper of `step`, so also where Lightning's wrapper or a
        # scaler calls it.
        optimizer.register_step_pre_hook(self._before)
        after = optimizer.register_step_post_hook(self._after)
        # Before hooks of the user, which are to see the parameters.
        hooks: Any = after.hooks_dict_ref()
        hooks.move_to_end(after.id, last=False)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    @property
    def bytes_in_step(self) -> int:
        """Bytes of the whole parameters and gradients that a step holds on this rank."""
        held = (e for e in self._entries if not self._owners.is_elsewhere(e.tensor))
        return 2 * sum(torch.Size(e.shape).numel() * e.dtype.itemsize for e in held)

    @property
    def has_owners(self) -> bool:
        """Whether parameters are whole on one rank each."""
        return self._owners.has_any

    def _list(self) -> None:
        """List the parameters of the groups, and choose their owners."""
        self._parameters = [list(group["params"]) for group in self._optimizer.param_groups]
        # The same tensors as before a change: states of other stages are keyed by them.
        known = {entry.name: entry.tensor for entry in self._entries}
        self._entries = list(self._list_entries(self._names(), known))
        own = ((e.group, e.tensor, p) for e, p in self._own() if self._by_owners)
        self._owners = Owners(own)

    def _has_changed(self) -> bool:
        """Whether a group was added, or has other parameters; on pipelines on any stage."""
        groups = self._optimizer.param_groups
        held = [[*map(id, parameters)] for parameters in self._parameters]
        changed = held != [[*map(id, group["params"])] for group in groups]
        if self._across:
            vote = torch.tensor(changed, device=self._device, dtype=torch.int)
            dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._mesh.group("pp"))
            changed = bool(vote)
        return changed

    def _list_entries(
        self, names: Sequence[Sequence[str]], known: Mapping[str, nn.Parameter]
    ) -> Iterator[_Entry]:
        groups = self._optimizer.param_groups
        held = [
            {
                name: (place, tuple(p.shape), p.dtype)
                for place, (name, p) in enumerate(zip(of_group, group["params"], strict=True))
            }
            for of_group, group in zip(names, groups, strict=True)
        ]
        stages: list[Any] = [held]
        here = 0
        if self._across:
            stages = [None] * self._mesh.sizes.pipeline
            dist.all_gather_object(stages, held, group=self._mesh.group("pp"))
            here = self._mesh.place["pp"]
        for number, own in enumerate(held):
            found: dict[str, tuple[int, Any]] = {}
            # The first stage that holds a parameter owns it, e.g. of tied tables.
            for stage, parts in enumerate(stages):
                for name, about in parts[number].items():
                    found.setdefault(name, (stage, about))
            # Within one stage in the order of the user, over stages in that of the model.
            ordered = sorted(found, key=self._order) if self._across else list(found)
            for name in ordered:
                stage, (_, shape, dtype) = found[name]
                place = own[name][0] if name in own else None
                tensor = nn.Parameter(torch.empty(0, dtype=dtype, device=self._device))
                yield _Entry(
                    name=name,
                    group=number,
                    stage=stage if self._across else here,
                    place=place,
                    shape=shape,
                    dtype=dtype,
                    # Made once: states of the optimizer are keyed by it while it steps.
                    tensor=known.get(name, tensor),
                )

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Put whole tensors in place; the pre-hook of the step.

        A class and its base may both call the hooks: only the outermost call counts.
        """
        self._depth += 1
        if self._depth > 1:
            return None
        # As where layers are unfrozen, with a group of their own.
        if self._has_changed():
            self._list()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        # Every rank steps together, so that all of them are in these collectives.
        if closure is None or not self._by_owners:
            self._gather()
        else:
            # Nothing until the closure has run; `steps_alone` has found that nothing is read.
            self._show([[] for _ in self._parameters])
        if closure is None:
            return None
        # The closure runs the user's step, which needs the parameters and not the whole tensors.
        around = self._around(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": around}
        return (args[0], around, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._is_gathered:
            self._scatter(keep=False)
            return
        self._show(self._parameters)
        kind = type(optimizer).__name__
        raise ConfigurationError(
            "LP610",
            f"{kind}.step did not call the closure that it was given, although it did so in a "
            "trial. So no weight was updated in this step. Call the closure at the beginning of "
            "every step.",
        )

    def _after_load(self, optimizer: Optimizer) -> None:
        """Forget the states of absent parameters: those of other stages are loaded by them."""
        self._loaded = self._across
        for entry in self._entries:
            optimizer.state.pop(entry.tensor, None)

    def _around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            # What the optimizer has changed so far is what the closure computes with.
            is_first = not self._is_gathered
            if is_first:
                self._show(self._parameters)
            else:
                self._scatter(keep=True)
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException:
                self._depth = 0  # torch calls no hook after it
                raise
            # A callback may have added a group. Later closures find states with owners.
            if (is_first or not self._by_owners) and self._has_changed():
                self._list()
            # LBFGS's line search compares losses: ranks that decided differently would call the
            # closure another number of times, and hang.
            if isinstance(loss, Tensor) and self._mesh.sizes.data > 1:
                # What one process would have: the optimizer decides by it, alike on every rank.
                loss = loss.detach().clone()
                dist.all_reduce(loss, group=self._mesh.data_group)
                loss = loss / self._mesh.sizes.data
            self._gather()
            return loss

        return run

    def _own(self) -> Iterator[tuple[_Entry, Any]]:
        for entry in self._entries:
            if entry.place is not None:
                yield entry, self._parameters[entry.group][entry.place]

    @torch.no_grad()
    def _gather(self) -> None:
        """Put whole tensors, with whole gradients and states, in the place of the parameters."""
        state = self._optimizer.state
        self._owners.gather(state)
        for entry, parameter in self._own():
            if entry.tensor in self._owners:
                continue
            tensor, plain = entry.tensor, torch.contiguous_format  # as other stages receive them
            tensor.grad = None
            tensor.data = whole(parameter.detach()).detach().clone(memory_format=plain)
            if parameter.grad is not None:
                tensor.grad = whole(parameter.grad).detach().clone(memory_format=plain)
            if parameter in state:
                # Moved and not copied: the entry of the parameter comes back after the step.
                held = state.pop(parameter)
                state[tensor] = {k: whole_state(v) for k, v in held.items()}
        if self._across:
            self._exchange()
        self._is_gathered = True
        shown = [e for e in self._entries if not self._owners.is_elsewhere(e.tensor)]
        numbers = range(len(self._parameters))
        self._show([[e.tensor for e in shown if e.group == number] for number in numbers])

    def _show(self, lists: Sequence[Sequence[Any]]) -> None:
        """Give each group of the optimizer a list of tensors."""
        for group, tensors in zip(self._optimizer.param_groups, lists, strict=True):
            # In place: an optimizer may keep the list.
            group["params"][:] = tensors

    def _exchange(self) -> None:
        """Give every stage the parameters, gradients and, after a load, the states of others."""
        group, place = self._mesh.group("pp"), self._mesh.place["pp"]
        # Whether there is a gradient, from its owner: shapes everybody knows, but without a
        # gradient there must be no broadcast.
        has = torch.tensor(
            [e.stage == place and e.tensor.grad is not None for e in self._entries],
            device=self._device,
            dtype=torch.int,
        )
        dist.all_reduce(has, group=group)
        for entry, trained in zip(self._entries, has.tolist(), strict=True):
            source, tensor = self._mesh.rank_at("pp", entry.stage), entry.tensor
            if entry.stage != place and entry.place is None:
                tensor.data = torch.empty(entry.shape, dtype=entry.dtype, device=self._device)
                tensor.grad = torch.empty_like(tensor) if trained else None
            # In the order of the entries, which is the same on all stages.
            dist.broadcast(tensor.data, source, group=group)
            if trained:
                grad = torch.empty_like(tensor) if tensor.grad is None else tensor.grad
                dist.broadcast(grad, source, group=group)
                tensor.grad = grad
        # Once after a load: later on each stage steps all states itself, alike.
        if self._loaded:
            self._loaded = False
            self._exchange_states(group)

    def _exchange_states(self, group: dist.ProcessGroup) -> None:
        state, place = self._optimizer.state, self._mesh.place["pp"]
        mine = {
            number: state[entry.tensor]
            for number, entry in enumerate(self._entries)
            if entry.stage == place and entry.tensor in state
        }
        stages: list[Any] = [None] * self._mesh.sizes.pipeline
        dist.all_gather_object(stages, mine, group=group)
        for number, values in (item for found in stages for item in found.items()):
            if self._entries[number].place is None:
                state[self._entries[number].tensor] = values

    @torch.no_grad()
    def _scatter(self, *, keep: bool) -> None:
        """Put the parameters back, with this rank's part of the whole tensors and states.

        Args:
            keep: The step goes on after a closure: keep the memory of the whole tensors.
        """
        state = self._optimizer.state
        self._is_gathered = False
        self._owners.scatter(state, keep=keep)
        for entry, parameter in self._own():
            if entry.tensor in self._owners:
                continue
            # Into the memory of the parameter: FSDP and others hold it.
            local_part(parameter).copy_(local_part(shard_of(entry.tensor.detach(), parameter)))
            if not keep and entry.tensor in state:
                held = state.pop(entry.tensor)
                state[parameter] = {k: _part_of_state(v, parameter) for k, v in held.items()}
        self._show(self._parameters)
        if not keep:
            for entry in self._entries:
                entry.tensor.grad = None
                # Its memory is needed in the next forward.
                entry.tensor.data = entry.tensor.data.new_empty(0)


def _part_of_state(value: Any, parameter: Tensor) -> Any:
    """Return a state as it is kept: like its parameter, or known to be the same on every rank."""
    sharded = isinstance(parameter, DTensor) and isinstance(value, Tensor)
    if not sharded or value.ndim == 0:
        return value
    assert isinstance(parameter, DTensor)
    if value.shape == parameter.shape:
        return shard_of(value, parameter)
    # E.g. Adafactor's row and column means: the same on every rank, and a DTensor, so that a
    # checkpoint knows it.
    return replicated(value, parameter)
