"""Weights and optimizer states under global names and global shapes: gathered to rank 0, cut again
on loading.

What is gathered is what a single process would have: `Trainer()` reads it, and any layout reads
what `Trainer()` wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from lightning_par.errors import CheckpointError
from lightning_par.mesh import ParallelMesh

__all__ = ["StateMap"]


class StateMap:
    """Translates between the states of this rank and those of one process.

    Args:
        mesh: Where the states are.
        state_order: Keys of the whole model's `state_dict`, in order.
        parameter_order: Canonical FQNs of the whole model's parameters, in order.
        canonical: FQN of every parameter -> its canonical FQN.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        state_order: Sequence[str],
        parameter_order: Sequence[str],
        canonical: Mapping[str, str],
    ) -> None:
        self._mesh, self._canonical = mesh, dict(canonical)
        self._state_order = list(state_order)
        self._rank_of = {name: i for i, name in enumerate(parameter_order)}

    def gather_weights(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the whole state dict on rank 0, on the CPU; elsewhere an empty dict.

        **Communicates**: all-gathers of every sharded tensor, then one gather over the pipeline
        stages.
        """
        local = {name: self._whole(value) for name, value in module.state_dict().items()}
        merged: dict[str, Tensor] = {}
        for part in self._gather_stages(local):
            merged.update(part)
        order = [name for name in self._state_order if name in merged]
        return {name: merged[name] for name in [*order, *(merged.keys() - set(order))]}

    @torch.no_grad()
    def load_weights(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copy this rank's part of a whole state dict into `module`.

        Args:
            module: Parameters are whole or DTensors.
            state: Key -> whole tensor; the same on every rank.
            strict: Refuse missing and unexpected keys.

        Raises:
            CheckpointError: With every key that is missing, unexpected or of another shape.
        """
        known = set(self._state_order)
        problems = []
        if strict:
            problems += [f"missing {name}" for name in self._state_order if name not in state]
            problems += [f"unexpected {name}" for name in state if name not in known]
        target = module.state_dict()
        for name, tensor in target.items():
            if name in state and isinstance(tensor, Tensor) and tensor.shape != state[name].shape:
                found, wanted = tuple(state[name].shape), tuple(tensor.shape)
                problems.append(f"{name} has shape {found}, the model {wanted}")
        if problems:
            raise CheckpointError(
                "the checkpoint does not fit the model: " + "; ".join(problems) + "."
            )
        for name, tensor in target.items():
            if name in state and isinstance(tensor, Tensor):
                _local(tensor).copy_(_part_like(tensor, state[name]))

    def gather_optimizer(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state dict as one process would have it, on rank 0; elsewhere an
        empty dict.

        **Communicates**: all-gathers of every sharded tensor, then one gather over the pipeline
        stages.
        """
        names = self._names(module)
        states = {
            names[id(p)]: {k: self._whole(v) for k, v in optimizer.state[p].items()}
            for group in optimizer.param_groups
            for p in group["params"]
            if p in optimizer.state
        }
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        options = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        parts = self._gather_stages((states, groups))
        if not parts:
            return {}
        merged: dict[str, Any] = {}
        for part, _ in parts:
            merged.update(part)
        numbers, numbered = self._number([names for _, names in parts])
        return {
            "state": {
                numbers[name]: state
                for name, state in sorted(merged.items(), key=lambda i: numbers[i[0]])
            },
            "param_groups": [
                {**o, "params": ids} for o, ids in zip(options, numbered, strict=True)
            ],
        }

    def load_optimizer(
        self, module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load this rank's part of a whole optimizer state dict.

        Args:
            module: Whose parameters the optimizer holds.
            optimizer: Of this rank.
            state: As one process would have it; the same on every rank.

        Raises:
            CheckpointError: The numbers of groups or parameters differ.

        **Communicates**: the names in every group, over the pipeline stages.
        """
        names = self._names(module)
        groups = [[names[id(p)] for p in g["params"]] for g in optimizer.param_groups]
        stages: list[Any] = [None] * self._mesh.sizes.pipeline
        if len(stages) > 1:
            dist.all_gather_object(stages, groups, group=self._mesh.group("pp"))
        else:
            stages = [groups]
        numbers, numbered = self._number(stages)
        saved = state["param_groups"]
        if [len(g["params"]) for g in saved] != [len(ids) for ids in numbered]:
            raise CheckpointError(
                f"the checkpoint's optimizer has groups of {[len(g['params']) for g in saved]} "
                "parameters, this one "
                f"of {[len(ids) for ids in numbered]}."
            )
        local_state, local_groups, position = {}, [], 0
        for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
            ids = []
            for parameter in group["params"]:
                entry = state["state"].get(numbers[names[id(parameter)]])
                if entry is not None:
                    local_state[position] = {k: _state_like(parameter, v) for k, v in entry.items()}
                ids.append(position)
                position += 1
            local_groups.append({**saved_group, "params": ids})
        optimizer.load_state_dict({"state": local_state, "param_groups": local_groups})

    def _names(self, module: nn.Module) -> dict[int, str]:
        named = module.named_parameters(remove_duplicate=False)
        return {id(p): self._canonical[name] for name, p in named}

    def _number(
        self, stages: Sequence[Sequence[Sequence[str]]]
    ) -> tuple[dict[str, int], list[list[int]]]:
        """Number the parameters of all stages as one process would: group by group, in the model's
        order.
        """
        numbers: dict[str, int] = {}
        numbered = []
        for parts in zip(*stages, strict=True):
            names = sorted({n for part in parts for n in part}, key=self._rank_of.__getitem__)
            numbered.append([numbers.setdefault(name, len(numbers)) for name in names])
        return numbers, numbered

    def _whole(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        return value.detach().cpu() if isinstance(value, Tensor) else value

    def _gather_stages(self, value: Any) -> list[Any]:
        """Return the values of all stages on rank 0, in order; elsewhere an empty list."""
        place = self._mesh.place
        if any(at for axis, at in place.items() if axis != "pp"):
            return []
        if self._mesh.sizes.pipeline == 1:
            return [value]
        parts: list[Any] | None = [None] * self._mesh.sizes.pipeline if place["pp"] == 0 else None
        target = self._mesh.neighbour("pp", 0)
        dist.gather_object(value, parts, dst=target, group=self._mesh.group("pp"))
        return parts or []


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _part_like(tensor: Tensor, full: Tensor) -> Tensor:
    """Return the part of `full` that `tensor`, a DTensor or a whole tensor, holds on this rank."""
    if not isinstance(tensor, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    for dim, (size, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), size)
    return full


def _state_like(parameter: nn.Parameter, value: Any) -> Any:
    """Shard an optimizer state like its parameter, where it has the same shape."""
    data = parameter.data
    if not isinstance(data, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != data.shape or value.ndim == 0:
        return value
    local = _part_like(data, value).to(data.device).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local,
        data.device_mesh,
        data.placements,
        run_check=False,
        shape=data.shape,
        stride=data.stride(),
    )
