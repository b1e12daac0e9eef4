"""Optimizers when they are made: without parameters on a stage, or in need of whole tensors."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.dtensor import local_part
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.components.optimizer_forms import give_parts
from lightning_par.strategies.components.state_map import state_like
from lightning_par.strategies.hooks.whole_groups import cut_to_stage, is_absent, note_places
from lightning_par.strategies.optimizers.local_step import step_on_shards
from lightning_par.strategies.optimizers.reach import (
    check_references,
    declared_reach,
    LOOKS_ACROSS,
    looks_across_model,
    right_on_shards,
    steps_alone,
)
from lightning_par.strategies.optimizers.whole_step import WholeStep
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.replaced_parameters import check_membership
from lightning_par.upstream.dtensor import sharded_like
from lightning_par.upstream.functions import replaced

__all__ = [
    "adopt_optimizers",
    "kept_by_optimizers",
    "move_states",
    "optimizers_of_a_stage",
    "prepare_optimizers",
]

_logger = logging.getLogger(__name__)
_MIB = 2**20


@contextmanager
def optimizers_of_a_stage(stages: int) -> Iterator[None]:
    """Let optimizers that are made inside hold the parameters of this stage only.

    The user's code gives them parameters of all stages, those of other stages as stand-ins, so that
    lists and groups are as long as on one process, and in the same order. A group may become empty,
    and so may all of them, which torch's own constructor takes for a mistake.

    Args:
        stages: Number of pipeline ranks; with 1 nothing changes.
    """
    if stages == 1:
        yield
        return
    # On the class: each optimizer of torch calls it with the parameters as the user gave them.
    original = Optimizer.__init__

    def init(self: Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if not isinstance(params, Tensor):  # which torch refuses
            # As lists: generators are read twice, for the places and for the members.
            given = [_with_list(entry) for entry in params]
            groups = given if any(isinstance(entry, dict) for entry in given) else [given]
            note_places(self, map(_members, groups))
            # Torch refuses an empty list, but takes a group without members.
            params = _held_groups(given) or [{"params": []}]
        original(self, params, defaults)
        self.register_load_state_dict_pre_hook(cut_to_stage)

    with replaced(Optimizer, "__init__", init):
        yield


def _members(group: Any) -> list[Any]:
    return group["params"] if isinstance(group, dict) else group  # type: ignore[no-any-return]


def _held_groups(given: Iterable[Any]) -> list[Any]:
    """Return what an optimizer is given, without the parameters of other stages."""
    groups = [_held(entry) for entry in given if not is_absent(entry)]
    members = [group["params"] for group in groups if isinstance(group, dict)]
    if not all(members):  # torch wants names in all groups or in none; one without members has none
        for held in members:
            held[:] = [member[1] if isinstance(member, tuple) else member for member in held]
    return groups


def _with_list(given: Any) -> Any:
    """Return a group whose parameters are a list, and a parameter as it is."""
    if not isinstance(given, dict):
        return given
    members = given["params"]
    return {**given, "params": [members] if isinstance(members, Tensor) else [*members]}


def _held(given: Any) -> Any:
    """Return a group without the parameters of other stages, and a parameter as it is."""
    if not isinstance(given, dict):
        return given
    return {**given, "params": [member for member in given["params"] if not is_absent(member)]}


def adopt_optimizers(optimizers: Iterable[Optimizer], model: ParallelModel) -> None:
    """Give optimizers that were made before the mesh its parameters, and refuse those that train
    something else than the module; see `replaced_parameters`. Compression of gradients begins anew.

    Args:
        optimizers: What `configure_optimizers` gave; changed in place.
        model: The model on the mesh.
    """
    for optimizer in optimizers:
        _complete(optimizer)
    give_parts(model, optimizers)
    check_membership(optimizers, model.module.parameters(), model.mesh.sizes.world_size)
    if model.compression is not None:
        model.compression.reset()
    for optimizer in optimizers:
        # User code loads whole states, in `configure_optimizers` or in a hook.
        optimizer.register_load_state_dict_post_hook(_cut_states)
        _cut_states(optimizer)


def _complete(optimizer: Optimizer) -> None:
    """Give an optimizer what torch's constructor would have; wrappers of others do not call it.

    Otherwise its hooks do not exist, or are not called.
    """
    if not getattr(type(optimizer).step, "hooked", False):
        # A scheduler has put the step without hooks there.
        vars(optimizer).pop("step", None)
    Optimizer.__setstate__(optimizer, {})
    groups = [group["params"] for group in optimizer.param_groups]
    if any(is_absent(member) for group in groups for member in group):
        note_places(optimizer, groups)
        for group in groups:
            group[:] = [member for member in group if not is_absent(member)]


def _cut_states(optimizer: Optimizer) -> None:
    """Let this rank keep its parts of states that are whole."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state.get(parameter)
        if isinstance(parameter.data, DTensor) and isinstance(state, MutableMapping):
            state.update({name: state_like(parameter, value) for name, value in state.items()})


def kept_by_optimizers(
    model: ParallelModel | None, module: nn.Module, optimizers: Sequence[Optimizer]
) -> Callable[[ParallelModel], None]:
    """Return a function that gives an earlier fit's optimizers the parameters of a new run's model.

    An evaluation puts the module on the mesh anew. A checkpoint that is saved after it holds the
    states of optimizers as after the fit, as with a plain Trainer.

    Args:
        model: The model on the mesh of the earlier run; None: there was none.
        module: The module of this run, in its whole form.
        optimizers: Those of the earlier run.
    """
    if model is None or model.module is not module or not optimizers:
        return lambda _: None
    # The names are those of the parallel form, whose parameters the optimizers hold.
    model.forms.show_parallel()
    names = [model.states.names_in_groups(module, optimizer) for optimizer in optimizers]
    model.forms.show_whole({})

    def follow(model: ParallelModel) -> None:
        named = {model.resolved.canonical[n]: p for n, p in module.named_parameters()}
        for optimizer, of_groups in zip(optimizers, names, strict=True):
            for group, members in zip(optimizer.param_groups, of_groups, strict=True):
                held = group["params"]
                pairs = [(p, named.get(n, p)) for p, n in zip(held, members, strict=True)]
                # Another layout has other shards, whose states would not fit.
                if all(local_part(old).shape == local_part(new).shape for old, new in pairs):
                    group["params"] = [new for _, new in pairs]
                    for old, new in pairs:
                        if old is not new and old in optimizer.state:
                            optimizer.state[new] = _sharded_states(optimizer.state.pop(old), new)

    return follow


def _sharded_states(states: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """Return states whose shards are of the mesh of a parameter of the same shape."""
    return {
        key: sharded_like(local_part(value), parameter) if isinstance(value, DTensor) else value
        for key, value in states.items()
    }


def move_states(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states of optimizers to a device, but not their steps, which torch wants where they
    are.

    Args:
        optimizers: Changed in place.
        device: Where the parameters are.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            if not isinstance(state, MutableMapping):
                optimizer.state[parameter] = move_data_to_device(state, device)
                continue
            moved = {k: move_data_to_device(v, device) for k, v in state.items() if k != "step"}
            state.update(moved)


def prepare_optimizers(
    optimizers: Iterable[Optimizer], model: ParallelModel, device: torch.device
) -> None:
    """Refuse an optimizer that has no parameter on any stage, and let those step on whole tensors
    whose updates look at more than one rank holds; see `WholeStep`.

    Args:
        optimizers: Optimizers of this rank; all ranks have as many.
        model: The model on the mesh.
        device: Device of this rank.

    Raises:
        ConfigurationError: On every rank.

    **Communicates**: a few numbers for each optimizer, over all ranks.
    """
    if model.mesh.sizes.world_size == 1:
        return
    found = list(optimizers)
    if model.mesh.sizes.pipeline > 1:
        _check_parameters(found, model.mesh.group("pp"), device)
    # The optimizer on the host has whole shards in memory of its own.
    if model.host is not None:  # its own check allows Adam alone
        return
    for optimizer in found:
        if optimizer.param_groups:
            _prepare(optimizer, model, device)
            model.steps.watch(optimizer)


def _needs(
    optimizer: Optimizer, reach: Any, model: ParallelModel, device: torch.device
) -> tuple[bool, ...]:
    """Return whether an update looks across the model, across shards, or would look across those of
    parameters that the optimizer may be given later on; the same on every rank.
    """
    across_model = model.mesh.sizes.pipeline > 1 and (
        reach == "model" or (reach is None and looks_across_model(optimizer, device))
    )
    own = [p for group in optimizer.param_groups for p in group["params"]]
    across_shards = _has_shards(own) and (
        reach is not None or not right_on_shards(optimizer, device)
    )
    # As where layers are unfrozen: matrices after vectors.
    dims = {p.ndim for p in own if _has_shards([p])}
    later = [p for p in model.module.parameters() if p.ndim not in dims]
    across_later = _has_shards(later) and (
        reach is not None or not right_on_shards(optimizer, device, later)
    )
    # Found by trying, on the parameters of this rank: if any rank needs it, all step alike.
    found = [across_model, across_shards, across_later]
    needs = torch.tensor(found, device=device, dtype=torch.int)
    dist.all_reduce(needs, dist.ReduceOp.MAX)
    return tuple(bool(need) for need in needs.tolist())


def _prepare(optimizer: Optimizer, model: ParallelModel, device: torch.device) -> None:
    reach, mesh = declared_reach(optimizer), model.mesh
    if reach == "entry":
        # One that is declared so may find its values by the parameters, as in attributes.
        if not hasattr(optimizer, LOOKS_ACROSS):
            step_on_shards(optimizer)
        return
    across_model, across_shards, across_later = _needs(optimizer, reach, model, device)
    if not (across_model or across_shards or across_later):
        return
    try:
        check_references(optimizer)
    except ConfigurationError:
        if across_model or across_shards:
            raise
        return  # which it may never be given
    # What it may be given was not tried for this.
    is_alone = across_shards and not across_model and steps_alone(optimizer, device)
    alone = torch.tensor(is_alone, device=device, dtype=torch.int)
    dist.all_reduce(alone, dist.ReduceOp.MIN)
    step = WholeStep(
        optimizer,
        lambda: model.states.names_in_groups(model.module, optimizer),
        mesh,
        device,
        across_stages=across_model,
        by_owners=bool(alone),
        order=model.states.place,
    )
    if mesh.rank == 0:
        _logger.info(
            "the update of %s depends on %s, so %s. This takes %.0f MiB for parameters and "
            "gradients in each step on this rank.",
            type(optimizer).__name__,
            "parameters of several stages" if across_model else "whole parameters",
            "each parameter is gathered on one rank, which computes its update"
            if step.has_owners
            else "every rank gathers them and computes the same update",
            step.bytes_in_step / _MIB,
        )


def _has_shards(parameters: Iterable[Any]) -> bool:
    sharded = (p for p in parameters if isinstance(p, DTensor))
    return any(not placement.is_replicate() for p in sharded for placement in p.placements)


def _check_parameters(
    optimizers: Iterable[Optimizer], group: dist.ProcessGroup, device: torch.device
) -> None:
    groups = [optimizer.param_groups for optimizer in optimizers]
    # Lightning's stand-in for no optimizer at all has no groups.
    counts = [sum(len(group["params"]) for group in found) if found else 1 for found in groups]
    held = torch.tensor(counts, device=device)
    dist.all_reduce(held, group=group)
    if 0 in held.tolist():
        raise ConfigurationError(
            "LP413",
            "configure_optimizers returned an optimizer that has no parameter of the "
            "LightningModule on any pipeline stage. Pass it parameters of the LightningModule, "
            "such as self.parameters().",
        )
