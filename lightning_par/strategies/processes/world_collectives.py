"""Collectives that the user's code asks for: they go over the replicas, or are refused.

Ranks of one replica have the same samples. A sum or a gather over all ranks, which is what
`torch.distributed` and torchmetrics do without a group, would count each sample once for every rank
of its replica; behind the blocks of a pipeline only the ranks of its last stage would get there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, ExitStack
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric

from lightning_par.engine.activity import Activity, ActivityRecord
from lightning_par.engine.collectives import all_gather, gather_partial
from lightning_par.engine.tensor_tree import broadcast_object, map_tensors, to_cpu
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.processes.metric_groups import groups_by_code
from lightning_par.upstream.functions import copied_function, diverted, replaced
from lightning_par.upstream.torchmetrics import set_update_count

__all__ = ["check_world_collectives", "gather_over_replicas", "user_frame"]

_COUNTING = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "gather", "gather_object", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter", "scatter_object_list"),
)
_TOGETHER = ("barrier", "broadcast", "broadcast_object_list")
"""Have the same result over all ranks, if all of them get there."""
_SAME_OF_COPIES = ("AVG", "MAX", "MIN", "BAND", "BOR")
"""Reductions that stay the same where each value comes as often as the others."""
_PASSED_ON = (
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed.nn.functional", "torch.autograd.function", "torch.utils._contextlib"),
    *("os", "_collections_abc", "collections.abc"),  # `os.environ.get`
    "lightning_par.strategies.processes.world_size",  # two contexts of it, one in the other
)
_OF_FRAMEWORKS = (
    *("torch", "torchmetrics"),
    *("lightning", "lightning_fabric", "lightning_par", "pytorch_lightning"),
)
_ASKS_FOR_ANY = ("transformers.generation.utils",)
"""Adds flags up to learn whether any rank goes on with its text, which counts nothing."""


def gather_over_replicas(
    mesh: ParallelMesh, tensor: Tensor, group: Any, sync_grads: bool
) -> Tensor:
    """Return the tensors of all replicas, stacked in a new first dim; see `Strategy.all_gather`.

    Args:
        mesh: Mesh of this run.
        tensor: That of this rank.
        group: Other ranks to gather from. `LightningModule.all_gather` passes the group of all
            ranks where its caller named none, which then means the replicas.
        sync_grads: Whether the gradient is that of the sum over the replicas.

    Raises:
        ConfigurationError: Context-parallel ranks hold values of their own tokens.

    **Communicates**: one all-gather; the backward one reduce-scatter. With context parallelism
    also one all-reduce over its axis.
    """
    if group is None or group is dist.group.WORLD:
        group = mesh.data_group
        if mesh.sizes.context > 1:
            _check_tokens(mesh, tensor)
    # As `Strategy.all_gather` of Lightning: a graph only where it was asked for.
    with torch.set_grad_enabled(torch.is_grad_enabled() and sync_grads):
        # Its backward sums what every rank does with the gathered tensors: a reduce-scatter.
        gather = gather_partial if sync_grads and tensor.requires_grad else all_gather
        return gather(tensor[None], 0, group)


def _check_tokens(mesh: ParallelMesh, tensor: Tensor) -> None:
    group = mesh.group("cp")
    # On every rank of the axis, as all of them call `all_gather`.
    every = all_gather(tensor.detach()[None], 0, group)
    # Some tolerance: what was joined over the axis differs by roundings.
    if not torch.allclose(every, every[:1], rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigurationError(
            "LP321",
            f"self.all_gather was called with a tensor of shape {tuple(tensor.shape)}. It gathers "
            f"from the {mesh.sizes.data} replicas, but the {mesh.sizes.context} context-parallel "
            "ranks of each replica hold different values, computed from their own tokens. To log "
            "a number, use self.log(..., reduce_fx='sum' or 'mean'), which combines the values of "
            "all ranks. To gather from the context-parallel ranks, too, call self.all_gather(x, "
            "group=self.trainer.strategy.mesh.token_group).",
        )


@contextmanager
def check_world_collectives(mesh: ParallelMesh, activity: Activity) -> Iterator[None]:
    """Inside, collectives of the user's code over all ranks are refused where they would count
    samples several times, or would not be reached by all ranks. Metrics go over the replicas, and
    collections of them share states by `groups_by_code`.

    Args:
        mesh: Mesh of this run.
        activity: Tells whether a pipeline runs the user's step.
    """
    sizes = mesh.sizes
    if sizes.world_size == 1:
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(groups_by_code())
        # Every rank is a replica: all collectives mean what they say.
        if sizes.data == sizes.world_size:
            yield
            return
        stack.enter_context(replaced(Metric, "sync", _synced(Metric.sync, mesh, activity)))
        for name in (*_COUNTING, *_TOGETHER):
            function = getattr(dist.distributed_c10d, name)  # also while `dist` has another
            check = partial(_check, sizes, activity, name)
            # The code of the function itself is replaced, as users import it by name; a copy
            # keeps the original.
            original = copied_function(function)
            stack.enter_context(diverted(function, _checked(original, check)))
        yield


def _synced(
    original: Callable[..., None], mesh: ParallelMesh, activity: Activity
) -> Callable[..., None]:
    """Return `Metric.sync` for metrics that no module holds, such as those of a callback or in a
    dict: `bind_metrics` does not find them, nor does anything else before they are used.
    """

    @wraps(original)
    def sync(
        self: Metric,
        dist_sync_fn: Any = None,
        process_group: Any = None,
        should_sync: bool = True,
        distributed_available: Any = None,
    ) -> None:
        is_there = distributed_available or self.distributed_available_fn
        # Not on the one rank that repeats a step alone, where `is_there` says no.
        if should_sync and not (process_group or self.process_group) and is_there and is_there():
            process_group = mesh.token_group
            if mesh.sizes.pipeline > 1:
                # A stage that takes its own value from the cache would not join the others.
                self.compute_with_cache = False
                if not _is_in_stage(mesh.sizes, activity.now()):
                    _share_states(self, mesh.group("pp"))
        original(self, dist_sync_fn, process_group, should_sync, distributed_available)

    return sync


def _share_states(metric: Metric, stages: dist.ProcessGroup) -> None:
    """Give the states of a metric that a step has updated, on the last stage only, to all stages.

    **Communicates**: over the stages the numbers of updates; if they differ, the states.
    """
    counts: list[Any] = [None] * stages.size()
    dist.all_gather_object(counts, metric.update_count, group=stages)
    if len(set(counts)) == 1:  # by a hook, which every stage runs
        return
    source = dist.get_global_rank(stages, counts.index(max(counts)))
    held = {name: to_cpu(getattr(metric, name)) for name in metric.metric_state}
    for name, value in broadcast_object(held, source, stages).items():
        setattr(metric, name, map_tensors(value, lambda tensor: tensor.to(metric.device)))
    set_update_count(metric, max(counts))


def _checked(original: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    names = list(signature(original).parameters)
    place = names.index("group")
    op_place = names.index("op") if "op" in names else len(names)

    @wraps(original)  # whose signature a run inside of this one asks for
    def run(*args: Any, **kwargs: Any) -> Any:
        group = args[place] if len(args) > place else kwargs.get("group")
        # With a group of their own users know what they do.
        if group is None or group is dist.group.WORLD:
            check(args[op_place] if len(args) > op_place else kwargs.get("op"))
        return original(*args, **kwargs)

    return run


def _is_in_stage(sizes: ParallelSizes, doing: ActivityRecord) -> bool:
    """Return whether a pipeline runs a step, where only the last stage gets to its end."""
    return sizes.pipeline > 1 and bool(doing.action) and doing.micro_batch >= 0


def _check(sizes: ParallelSizes, activity: Activity, name: str, op: Any) -> None:
    """Refuse a collective over all ranks that the user's code calls."""
    in_stage = _is_in_stage(sizes, activity.now())
    is_same = name in _TOGETHER or (op is not None and _name_of(op) in _SAME_OF_COPIES)
    if is_same and not in_stage:
        return
    # Last, as walking frames is the dearest of these questions.
    frame = user_frame(sys._getframe(1))
    if frame is None or (not in_stage and frame.f_globals.get("__name__") in _ASKS_FOR_ANY):
        return
    where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    ranks = sizes.world_size // sizes.data
    why = f"and {ranks} ranks hold the same samples, so each sample would be counted {ranks} times"
    if in_stage:
        why = (
            "but only the ranks of the last pipeline stage run the code after the blocks, so the "
            "other ranks would not make this call"
        )
    raise ConfigurationError(
        "LP321",
        f"{frame.f_code.co_name} ({where}) calls torch.distributed.{name} without a group: on "
        f"{sizes} it runs over all {sizes.world_size} ranks, {why}. Use self.all_gather(tensor) or "
        "self.trainer.strategy.reduce(tensor, reduce_op='sum'), or pass "
        "group=self.trainer.strategy.mesh.data_group: these run over the replicas only. For a "
        f"mean, divide by self.trainer.strategy.mesh.sizes.data ({sizes.data}), the number of "
        "replicas. If the call has to run over all ranks, pass your own group: "
        "torch.distributed.new_group().",
    )


def _name_of(op: Any) -> str:
    return str(op).rpartition(".")[2].upper()


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the user's code that called a collective; None if a framework did."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        # Decorators and wrappers of torch stand between the user's code and the function.
        if module != __name__ and module not in _PASSED_ON:
            return None if module.partition(".")[0] in _OF_FRAMEWORKS else frame
        frame = frame.f_back
    return None
