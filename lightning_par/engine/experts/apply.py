"""Expert parallelism: experts sharded over the ``ep`` axis.

E experts, n ranks of the ``ep`` axis; a rank holds E/n experts, and `token_dispatch.py` brings it
their tokens.

Note [Which ranks]: ``ep`` divides the ranks of ``dp_shard x cp``, neighbors first; these see other
tokens anyway. Ranks at the same place of different ``ep`` groups hold the same experts: FSDP2
shards these over such ranks only, as the ZeRO stage says. With one group, the gradients of experts
take part in no reduction at all.

Note [Gradient scale]: gradients of other weights are averaged over all d = n m replicas, those of
an expert over m. An expert's gradient holds the tokens of all n ranks, so what flows back into the
experts is divided by n, and multiplied again on its way out. Only tokens are scaled, no weights.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_par.engine.collectives import all_reduce
from lightning_par.engine.experts.router_balance import balance_over_replicas, balances_routers
from lightning_par.engine.experts.token_dispatch import (
    compute_by_forward,
    computes_rows,
    dispatch_tokens,
    sorts_tokens,
)
from lightning_par.engine.pipeline.stage import matching_modules
from lightning_par.engine.tensor.huggingface_layers import divide_first
from lightning_par.engine.tensor.styles import local_parameters
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import either, PlanError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.sizes import ParallelSizes
from lightning_par.upstream.functions import replaced

__all__ = [
    "ExpertParallel",
    "apply_expert_parallel",
    "apply_replica_sums",
    "check_experts",
    "expert_shard_dim",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertParallel:
    """Expert parallelism of one model: its mesh, and what is sharded over it.

    Attributes:
        mesh: Mesh with the axes of `mesh.EXPERT_AXES`.
        modules: FQN -> module that holds experts, for those on this rank.
        parameters: FQNs of their parameters; dim 0 is sharded over ``ep``.
    """

    mesh: DeviceMesh
    modules: Mapping[str, nn.Module]
    parameters: frozenset[str]

    def held(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the experts on this rank."""
        for module in self.modules.values():
            yield from module.parameters()

    def placed(self, tensor: Placement | None) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh of an expert parameter and its placements there.

        Args:
            tensor: Placement on the ``tp`` axis, or None if there is no such axis.
        """
        if tensor is None:
            return self.mesh["ep"], (Shard(0),)
        # A style may divide the experts of dim 0 once more, each of the parts of ``ep``.
        return self.mesh["ep", "tp"], (Shard(0), tensor)

    def shard(self, prefix: str, *, reshard_after_forward: bool) -> set[nn.Parameter]:
        """Apply FSDP2 to the experts below a module, over the ranks that hold the same experts.

        Args:
            prefix: FQN of the module; empty for the whole model.
            reshard_after_forward: As in `fully_shard`.

        Returns:
            The parameters that no other rank holds, which FSDP2 has to ignore.
        """
        # One FSDP unit for each module with experts: it is called as a whole.
        inside = [m for n, m in self.modules.items() if not prefix or n.startswith(prefix + ".")]
        copies, shards = self.mesh["expert_replicate"].size(), self.mesh["expert_shard"].size()
        # Nothing to reduce or gather: every expert is on one rank only.
        if copies * shards == 1:
            return {p for module in inside for p in module.parameters()}
        axes = ("expert_replicate", "expert_shard") if copies > 1 else ("expert_shard",)
        for module in inside:
            fully_shard(
                module,
                mesh=self.mesh[axes],
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=lambda p: _shard_of(p, shards),
            )
        return set()


def _shard_of(parameter: nn.Parameter, shards: int) -> Shard:
    """Return the FSDP2 shard dim of an expert parameter; see `expert_shard_dim`."""
    assert isinstance(parameter, DTensor)
    taken = {p.dim for p in parameter.placements if isinstance(p, Shard)}
    return Shard(expert_shard_dim(parameter.shape, taken, shards))


def expert_shard_dim(shape: Sequence[int], taken: Collection[int], shards: int) -> int:
    """Return the dim along which the ranks that hold the same experts shard a parameter of them.

    Args:
        shape: Shape of the whole parameter.
        taken: Dims that other axes shard.
        shards: Number of ranks.

    Returns:
        The last free dim that divides evenly; if none does, dim 0.
    """
    # The last dims of expert weights are features: large, and mostly even.
    free = [d for d, size in enumerate(shape) if d not in taken and not size % shards]
    return free[-1] if free else 0


def check_experts(model: nn.Module, resolved: ResolvedPlan, sizes: ParallelSizes) -> None:
    """Raise if the experts of a model cannot be sharded over the ``ep`` axis.

    Args:
        model: Its parameters may be on meta; nothing is changed.
        resolved: The resolved plan.
        sizes: Sizes of the mesh axes.

    Raises:
        PlanError: They cannot; the message names every problem.
    """
    if sizes.expert == 1:
        return
    asked = f"expert_parallel_size={sizes.expert}"
    found = matching_modules(model, resolved.plan.experts)
    if not found:
        raise PlanError(
            "LP206",
            f"{asked}: the plan of {type(model).__name__} does not say which modules hold its "
            "experts. If it has none, use expert_parallel_size=1. If it has, return "
            'ParallelPlan(experts=("blocks.*.experts",)) from parallel_plan() of the model. Such a '
            "module holds the parameters of all experts, stacked in dim 0, and has a method "
            "compute(rows, counts); or it has num_experts and forward(hidden_states, top_k_index, "
            "top_k_weights), as experts of transformers.",
        )
    problems = [
        f"{asked}: ParallelPlan(experts=...) names {name}, but its class {type(module).__name__} "
        "has no method compute(rows, counts). Add this method, which computes the outputs of the "
        "experts for their rows."
        for name, module in found.items()
        if not computes_rows(module) and not sorts_tokens(module)
    ]
    counts: dict[tuple[int, int], str] = {}
    for name, module in found.items():
        style = TENSOR_STYLES[resolved.styles.get(name, "replicated")]
        for key, parameter in module.named_parameters():
            # Experts are stacked in dim 0, which the ``ep`` axis divides, and a style may, too.
            count = parameter.shape[0] if parameter.ndim else 0
            parts = sizes.tensor if style.sharded_dim(key) == 0 else 1
            counts[count, parts] = f"{name}.{key}"
            if sorts_tokens(module) and count != module.num_experts:
                problems.append(
                    f"{asked}: {name}.{key} is one weight that all experts share. Its gradient "
                    "would have to be summed over the ranks that divide the experts, which is not "
                    "supported. Use expert_parallel_size=1."
                )
    problems += [
        f"{asked}: {name} has {count} experts in dim 0, not divisible by {sizes.expert * parts}. "
        f"Use expert_parallel_size={either(_divisors(count // parts) or [1])}."
        for (count, parts), name in counts.items()
        if not count or count % (sizes.expert * parts)
    ]
    raise_problems(PlanError, "LP206", problems)


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def apply_expert_parallel(
    model: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, max_rows: int | None = None
) -> ExpertParallel | None:
    """Make every module with experts send rows to the ranks of their experts; the parameters are
    sharded later, as `ExpertParallel.placed` says.

    Args:
        model: Parameters may be on meta. Modules of other pipeline stages may be missing.
        resolved: The resolved plan.
        mesh: The mesh; without an ``ep`` axis nothing changes.
        max_rows: To how many rows parts are padded; None: they are not, see `dispatch_tokens`.
    """
    if mesh.expert_mesh is None:
        return None
    modules = matching_modules(model, resolved.plan.experts)
    names = set()
    for fqn, module in modules.items():
        names |= {f"{fqn}.{key}" for key, _ in module.named_parameters()}
        if sorts_tokens(module):
            # Before its parameters are local, which this forward computes with.
            compute_by_forward(module, padded=max_rows is not None)
        divide_first(module, mesh.sizes.expert)
        for child in module.modules():
            if next(child.parameters(recurse=False), None) is not None:
                # Each module with parameters, as inner ones compute with theirs.
                wrap_forward(child, partial(_with_local_parameters, child), "local_parameters")
        dispatch_tokens(module, mesh.expert_mesh.get_group("ep"), max_rows)
        # After `dispatch_tokens`, whose `compute` is what is to run in a call.
        _compute_in_a_call(module)
    return ExpertParallel(mesh=mesh.expert_mesh, modules=modules, parameters=frozenset(names))


def _compute_in_a_call(module: nn.Module) -> None:
    """Let `module.compute` run inside of a call of its module, also where code around it calls it.

    Only a call has what a computation with this rank's parameters needs: hooks of FSDP2, which
    gather them, and a forward that sees local tensors.
    """
    compute: Forward = module.compute  # type: ignore[assignment]
    # Inside of a call of the module its hooks have run: calling it again would gather again.
    is_called = False

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_called
            is_called = True
            try:
                return inner(*args, **kwargs)
            finally:
                is_called = False

        return forward

    def compute_in_a_call(*args: Any, **kwargs: Any) -> Any:
        if is_called:
            return compute(*args, **kwargs)
        # For this one call the forward is `compute`: hooks of FSDP2 run around it.
        with replaced(module, "forward", _with_local_parameters(module, compute)):
            return module(*args, **kwargs)

    wrap_forward(module, around, "compute")
    module.compute = compute_in_a_call  # type: ignore[assignment]


def apply_replica_sums(model: nn.Module, resolved: ResolvedPlan, group: dist.ProcessGroup) -> bool:
    """Sum what the modules of `ParallelPlan.replica_sums` compute over the replicas.

    Args:
        model: The forwards of these modules are wrapped.
        resolved: The resolved plan.
        group: Process group of the replicas.

    Returns:
        Whether there is a model whose loss balances experts, see Note [Router balance].

    **Communicates**: one all-reduce of each output in training; and `balance_over_replicas`.
    """
    if group.size() == 1:
        return False
    modules = matching_modules(model, resolved.plan.replica_sums).values()
    balancing = [module for module in modules if balances_routers(module)]
    for module in modules:
        around = balance_over_replicas if module in balancing else _summed
        wrap_forward(module, partial(around, module, group), "replica_sum")
    return bool(balancing)


def _summed(module: nn.Module, group: dist.ProcessGroup, inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = inner(*args, **kwargs)
        # Detached: these are counts or statistics, whose gradient belongs to no replica.
        return all_reduce(out.detach(), group) if module.training else out

    return forward


def _with_local_parameters(module: nn.Module, inner: Forward) -> Forward:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module):
            return inner(*args, **kwargs)

    return forward
