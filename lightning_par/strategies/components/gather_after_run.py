"""The end of a run: the user's module becomes whole and plain again, and lies on the host."""

import logging
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_par.engine.memory.measured import available_memory
from lightning_par.strategies.components.module_forms import broadcast_state
from lightning_par.strategies.components.optimizer_forms import gather_optimizers
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.setup.stage_optimizers import move_states

__all__ = ["gather_after_run"]

_SHARE = 4
"""With "auto", the whole modules of a host's ranks may take one part in this many of its free
memory.
"""
_log = logging.getLogger(__name__)


def gather_after_run(
    model: ParallelModel,
    optimizers: Sequence[Optimizer],
    options: MeshOptions,
    processes: MeshProcesses,
) -> None:
    """Give every rank the whole module, if the option says so and the ranks are still together.

    A whole module goes to the host, where every strategy of Lightning leaves it, and with it the
    states of the optimizers on one device; on several, those of torch's optimizers are of
    parameters that it no longer has, and others get whole ones.

    Args:
        model: The model on its mesh.
        optimizers: Its optimizers.
        options: With `gather_after_run`.
        processes: The processes of the run.

    **Communicates**: the weights, to every rank, where there are several.
    """
    # While FSDP has gathered parameters, other tensors than shards are in their places.
    if not model.forms.is_whole:  # it is, where the set-up of another run failed
        model.sharding.release()
        _gather(model, optimizers, options, processes)
    if model.forms.is_whole:
        # In a rehearsal they are fake tensors, which torch cannot put into the place of others.
        tensors = chain(model.module.parameters(), model.module.buffers())
        if any(tensor.device.type != "cpu" for tensor in tensors):
            model.module.cpu()
        if processes.world_size == 1:
            # Their parameters are on the host now, so a further step needs the states there.
            move_states(optimizers, torch.device("cpu"))


def _gather(
    model: ParallelModel,
    optimizers: Sequence[Optimizer],
    options: MeshOptions,
    processes: MeshProcesses,
) -> None:
    if processes.world_size == 1:
        # On one device most parameters are the whole ones themselves; only FSDP's and replaced
        # ones have to be gathered.
        model.forms.show_whole(model.gather_tensors() if model.forms.needs_values else {})
        return
    # After an exception nobody knows where the other ranks are.
    if processes.interruption.is_handled or not _is_wanted(model, options, processes):
        return
    # Optimizers before the module changes: names of their parameters are those of the parallel
    # form.
    tensors, held = model.gather_tensors(), gather_optimizers(model, optimizers)
    model.forms.show_whole(broadcast_state(tensors, None, processes.device), _trained(model))
    for optimizer in held:
        optimizer.show(model)


def _trained(model: ParallelModel) -> dict[str, bool]:
    """Return `requires_grad` of all parameters, of whichever stage: code of the user may freeze
    and unfreeze some while the run goes on.

    **Communicates**: an object, over all ranks.
    """
    found: list[Any] = [None] * dist.get_world_size()
    named = model.module.named_parameters(remove_duplicate=False)
    dist.all_gather_object(found, {name: p.requires_grad for name, p in named})
    return {name: flag for each in found for name, flag in each.items()}


def _is_wanted(model: ParallelModel, options: MeshOptions, processes: MeshProcesses) -> bool:
    """Whether every rank is to hold the whole module; the same on all ranks."""
    if options.gather_after_run != "auto":
        return bool(options.gather_after_run)
    needed, free = model.forms.whole_bytes * processes.num_local, available_memory()
    # Unanimous: hosts differ in their free memory, and a gather needs all ranks.
    fits = processes.decide(free is None or needed * _SHARE <= free, unanimous=True)
    if not fits:
        _log.info(
            "after the run every rank keeps only its part of the module: whole modules for the "
            "%d ranks of a host would take %.1f GiB, more than a quarter of its free memory. "
            "gather_after_run=True gathers them in spite of this. A checkpoint always holds the "
            "whole module.",
            processes.num_local,
            needed / 2**30,
        )
    return fits
