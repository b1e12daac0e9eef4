"""Buffers that a step changes from its samples, such as tokens that each expert has got.

Note [Counted buffers]: each replica adds to such a buffer what its own samples give, where one
process adds up all of them. A look at the step, on some samples and on their parts, tells which
buffers are sums over samples: those that the parts, one after the other, leave as the whole does,
and to which the same parts add the same once more, as they do not to a running maximum. What a step
then adds to them is summed over the replicas. Others, such as running means, are refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.engine.collectives import all_reduce
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh

__all__ = ["CountedBuffers", "buffers_of"]

_TOLERANCE = 1e-4


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that code of users' may change: those of torch's own layers
    have rules of their own.
    """
    return {
        f"{place}.{name}".removeprefix("."): buffer.detach().clone()
        for place, part in module.named_modules()
        if _is_users(part)
        for name, buffer in part.named_buffers(recurse=False)
        if not isinstance(buffer, DTensor) and not buffer.is_meta
    }


def _is_users(part: nn.Module) -> bool:
    """Whether a class of a module is not of torch, as those made by FSDP are beside the user's."""
    packages = {kind.__module__.partition(".")[0] for kind in type(part).__mro__}
    return not packages <= {"torch", "lightning_par", "builtins", "typing"}


class CountedBuffers:
    """Sums what replicas add to buffers; see Note [Counted buffers].

    Args:
        module: The user's LightningModule on this rank.
        mesh: Its replicas see other samples.
        takes_parts: Whether statistics of a part of the samples are accepted.

    Attributes:
        is_known: Whether a look has told which buffers are summed.
        names: Those buffers.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, *, takes_parts: bool) -> None:
        self._module, self._mesh = module, mesh
        self.is_known = takes_parts or mesh.sizes.world_size == 1
        self.names: list[str] = []

    def learn(
        self,
        before: Mapping[str, Tensor],
        ends: Sequence[Mapping[str, Tensor]],
        again: Callable[[], Sequence[Mapping[str, Tensor]]],
    ) -> None:
        """Find the buffers that are sums over samples.

        Args:
            before: The buffers before the step.
            ends: Those after it on some samples, and after their parts, one after the other.
            again: Runs the parts once more, after those, and gives the buffers after each.

        Raises:
            ConfigurationError: On all ranks, if there are others that samples change.

        **Communicates**: names and what changed, over all ranks; what `again` does.
        """
        self.is_known = True
        found = {
            name: _kind(before.get(name), [end.get(name) for end in ends])
            for name in {name: None for held in (before, *ends) for name in held}
        }
        every: list[Any] = [None] * self._mesh.sizes.world_size
        dist.all_gather_object(every, {name: kind for name, kind in found.items() if kind})
        replica = [every[rank] for rank in dist.get_process_group_ranks(self._mesh.replica_group)]
        told = []
        for name in sorted(set().union(*every)):
            is_sum = all(kinds.get(name, (False,))[0] for kinds in every)
            # Ranks of a replica that see other tokens add up other numbers.
            marks = [kinds[name][1] if name in kinds else 0.0 for kinds in replica]
            is_same = all(math.isclose(m, marks[0], rel_tol=_TOLERANCE) for m in marks)
            if not is_same or not (is_sum or self._mesh.sizes.data == 1):
                told.append(name)
            elif self._mesh.sizes.data > 1:
                self.names.append(name)
        self._refuse_any(told)
        if self.names:  # the same on all ranks
            parts = [*ends, *again()]
            self._refuse_any([name for name in self.names if not _adds_again(name, before, parts)])

    def _refuse_any(self, names: Sequence[str]) -> None:
        """Refuse the buffers that any rank names."""
        every: list[Any] = [None] * self._mesh.sizes.world_size
        dist.all_gather_object(every, names)
        told = sorted(set().union(*every))
        if told:
            self._refuse(told)

    def _refuse(self, names: Sequence[str]) -> None:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ConfigurationError(
            "LP325",
            f"training_step changes the buffer {names[0]}{more} from its samples. On "
            f"{self._mesh.sizes} each rank does so from its own samples or tokens, and how they "
            "join is not known, so that it would not be that of one process. Add up in it what "
            "samples give (self.total += x.sum(); self.count += len(x)), which is summed over the "
            "replicas, and divide in on_train_batch_end; tokens that tensor parallelism divides "
            "are whole with sequence_parallel=False. To accept what a part gives, as DDP does, "
            "declare ParallelPlan(batch=BatchLayout(local_statistics=True)). No weight was "
            "changed.",
        )

    @contextmanager
    def summed(self, step: str, *, fills: bool) -> Iterator[None]:
        """Surrounds a step; afterwards buffers have what all replicas have added.

        Args:
            step: Its name; others than `training_step` are left alone.
            fills: Whether the batch of this replica counts nowhere.

        **Communicates**: the buffers, over the replicas.
        """
        if not self.names or step != "training_step":
            yield
            return
        before = {name: self._module.get_buffer(name).clone() for name in self.names}
        yield
        with torch.no_grad():
            for name, value in before.items():
                buffer = self._module.get_buffer(name)
                if buffer.shape != value.shape:
                    raise ConfigurationError(
                        "LP325",
                        f"training_step changes the shape of the buffer {name} from "
                        f"{tuple(value.shape)} to {tuple(buffer.shape)}, to which it added what "
                        f"samples give so far: on {self._mesh.sizes} nobody knows how those of the "
                        "replicas join. Give it its largest shape from the start.",
                    )
                added = torch.zeros_like(value) if fills else _change(value, buffer)
                buffer.copy_(value + all_reduce(added, self._mesh.data_group))


def _kind(before: Tensor | None, ends: Sequence[Tensor | None]) -> tuple[bool, float] | None:
    """Return whether a buffer is a sum over samples, and a number of what the whole has changed;
    None if it does not change, or whatever the samples are, as a count of steps.

    Args:
        before: The buffer before the step; None: there was none.
        ends: As in `CountedBuffers.learn`.
    """
    if any(end is None or end.shape != ends[0].shape for end in ends):  # type: ignore[union-attr]
        return None  # it vanishes, or its shape is that of the samples: nothing is added up in it
    is_new = before is None or before.shape != ends[0].shape  # type: ignore[union-attr]
    # What is new, as a cache that grows, changes from nothing.
    start: Tensor = torch.zeros_like(ends[0]) if is_new else before  # type: ignore[arg-type, assignment]
    whole, *parts = [_change(_wide(start), _wide(end)) for end in ends]  # type: ignore[arg-type]
    if not bool(whole.any()) or (parts and _is_near(parts[0], whole)):
        return None
    places = torch.arange(1, whole.numel() + 1, dtype=whole.dtype, device=whole.device)
    can_add = not is_new and start.dtype != torch.bool
    is_sum = bool(parts) and can_add and _is_near(parts[-1], whole)
    return is_sum, float((_finite(whole).flatten() * places).sum())


def _adds_again(
    name: str, before: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]]
) -> bool:
    """Whether parts add the same to a buffer when they come once more.

    Args:
        name: Of the buffer.
        before: The buffers before the step.
        ends: Those after it on the whole, and, one after the other, on the parts, twice.
    """
    start, whole = before.get(name), ends[0].get(name)
    held = [start, *(end.get(name) for end in ends[1:])]
    if whole is None or any(value is None or value.shape != whole.shape for value in held):
        return False
    values = [_wide(value) for value in held if value is not None]
    changes = [_change(one, other) for one, other in pairwise(values)]
    half = len(changes) // 2
    largest = _change(values[0], _wide(whole))
    return all(
        _is_near(other, one, largest)
        for one, other in zip(changes[:half], changes[half:], strict=True)
    )


def _change(before: Tensor, end: Tensor) -> Tensor:
    """Return what was added to a buffer: nothing where it is as before, also infinite or NaN."""
    is_same = (end == before) | ((end != end) & (before != before))
    return torch.where(is_same, 0, end - before)


def _is_near(change: Tensor, whole: Tensor, scale: Tensor | None = None) -> bool:
    largest = _finite(whole if scale is None else scale).abs().max()
    return bool((_change(whole, change).abs() <= _TOLERANCE * largest).all())


def _wide(value: Tensor) -> Tensor:
    return (torch.view_as_real(value) if value.is_complex() else value).double()


def _finite(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
