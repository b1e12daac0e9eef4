"""Expert parallelism: experts divided among ranks, tokens sent to them and back by all-to-all.

Shapes: A rows (tokens times the experts of each) of this rank, M rows that arrive here, D model
dim, E experts, n ranks of the ``ep`` axis; a rank holds E/n experts.

Note [Which ranks]: ``ep`` divides the ranks of ``dp_shard x cp``, neighbors first; these see other
tokens anyway. Ranks at the same place of different ``ep`` groups hold the same experts: FSDP2
shards these over such ranks only, as the ZeRO stage says. With one group, the gradients of experts
take part in no reduction at all.

Note [Gradient scale]: gradients of other weights are averaged over all d = n m replicas, those of
an expert over m. An expert's gradient holds the tokens of all n ranks, so what flows back into the
experts is divided by n, and multiplied again on its way out. Only tokens are scaled, no weights.

Note [Under way]: the exchange of the rows starts before, and ends after, the work that `compute` is
given to do beside it, such as shared experts.

**Source**: Lepikhin et al. 2006.16668 (GShard), section 3; Gale et al. 2211.15841 (no row dropped
or padded).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_par.engine.collectives import all_reduce, apply_function
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.tensor.apply import local_parameters
from lightning_par.errors import either, PlanError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan import match_pattern
from lightning_par.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.upstream.distributed import functional_operators

__all__ = [
    "ExpertParallel",
    "apply_expert_parallel",
    "apply_replica_sums",
    "check_experts",
    "expert_shard_dim",
]

_ops = functional_operators
_Beside = Callable[[], Tensor] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertParallel:
    """Where the experts of one model are.

    Attributes:
        mesh: Axes as in `mesh.EXPERT_AXES`.
        modules: FQN -> the modules that hold experts, those on this rank.
        parameters: FQNs of their parameters; dim 0 is sharded over ``ep``.
    """

    mesh: DeviceMesh
    modules: Mapping[str, nn.Module]
    parameters: frozenset[str]

    def held(self) -> Iterator[nn.Parameter]:
        """Give the parameters of the experts on this rank."""
        for module in self.modules.values():
            yield from module.parameters()

    def placed(self, tensor: Placement | None) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh of an expert parameter and how it is placed there.

        Args:
            tensor: On the ``tp`` axis, or None if there is none.
        """
        if tensor is None:
            return self.mesh["ep"], (Shard(0),)
        return self.mesh["ep", "tp"], (Shard(0), tensor)

    def shard(self, prefix: str, *, reshard_after_forward: bool) -> set[nn.Parameter]:
        """Shard the experts below a module over the ranks that hold the same ones.

        Args:
            prefix: FQN of the module; empty for the whole model.
            reshard_after_forward: As in `fully_shard`.

        Returns:
            The parameters that no other rank holds, and that nobody may shard.
        """
        inside = [m for n, m in self.modules.items() if not prefix or n.startswith(prefix + ".")]
        copies, shards = self.mesh["expert_replicate"].size(), self.mesh["expert_shard"].size()
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
    """Return a dim that no other axis shards and that divides; else the first one, which need
    not.
    """
    assert isinstance(parameter, DTensor)
    taken = {p.dim for p in parameter.placements if isinstance(p, Shard)}
    return Shard(expert_shard_dim(parameter.shape, taken, shards))


def expert_shard_dim(shape: Sequence[int], taken: Collection[int], shards: int) -> int:
    """Return the dim along which the ranks that hold the same experts shard a parameter of them.

    Args:
        shape: Of the whole parameter.
        taken: Dims that other axes shard.
        shards: Number of ranks.
    """
    free = [d for d, size in enumerate(shape) if d not in taken and not size % shards]
    return free[-1] if free else 0


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    return {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, StageStub) and any(match_pattern(p, name) for p in patterns)
    }


def check_experts(model: nn.Module, resolved: ResolvedPlan, sizes: ParallelSizes) -> None:
    """Refuse a model whose experts cannot be divided among the ``ep`` ranks.

    Args:
        model: Its parameters may be on meta; nothing is changed.
        resolved: The resolved plan.
        sizes: Of the mesh.

    Raises:
        PlanError: With every problem.
    """
    if sizes.expert == 1:
        return
    asked = f"expert_parallel_size={sizes.expert}"
    found = _matching(model, resolved.plan.experts)
    if not found:
        raise PlanError(
            f"{asked}: the plan of {type(model).__name__} names no experts; return "
            'ParallelPlan(experts=("blocks.*.experts",)) from its parallel_plan(), or use '
            "expert_parallel_size=1."
        )
    problems = [
        f"{asked}: {name} is a {type(module).__name__} without compute(rows, counts, beside)."
        for name, module in found.items()
        if not callable(getattr(module, "compute", None))
    ]
    numbers = {
        f"{name}.{key}": parameter.shape[0] if parameter.ndim else 0
        for name, module in found.items()
        for key, parameter in module.named_parameters()
    }
    misfits = {count: name for name, count in numbers.items() if not count or count % sizes.expert}
    problems += [
        f"{asked}: {name} has {count} experts in dim 0, not divisible by {sizes.expert}. Use "
        f"{either([n for n in range(1, count + 1) if count % n == 0] or [1])}."
        for count, name in misfits.items()
    ]
    raise_problems(PlanError, problems)


def apply_expert_parallel(
    model: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh
) -> ExpertParallel | None:
    """Make every module with experts send rows to where their experts are; parameters are sharded
    later, as `ExpertParallel.placed` says.

    Args:
        model: Parameters may be on meta. Modules of other pipeline stages may be missing.
        resolved: The resolved plan.
        mesh: With an ``ep`` axis, or without: then nothing changes.
    """
    if mesh.expert_mesh is None:
        return None
    modules = _matching(model, resolved.plan.experts)
    names = set()
    for fqn, module in modules.items():
        names |= {f"{fqn}.{key}" for key, _ in module.named_parameters()}
        for part in module.modules():
            if next(part.parameters(recurse=False), None) is not None:
                _use_local_parameters(part)
        _exchange_around(module, mesh.expert_mesh.get_group("ep"))
    return ExpertParallel(mesh=mesh.expert_mesh, modules=modules, parameters=frozenset(names))


def apply_replica_sums(model: nn.Module, resolved: ResolvedPlan, group: dist.ProcessGroup) -> None:
    """Let what `ParallelPlan.replica_sums` names give the sum over the replicas in training.

    Args:
        model: Its modules are changed.
        resolved: The resolved plan.
        group: The replicas.

    **Communicates**: one all-reduce of each output.
    """
    if group.size() == 1:
        return
    for module in _matching(model, resolved.plan.replica_sums).values():
        module.forward = _summed(module, module.forward, group)


def _summed(
    module: nn.Module, inner: Callable[..., Tensor], group: dist.ProcessGroup
) -> Callable[..., Tensor]:
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = inner(*args, **kwargs)
        return all_reduce(out.detach(), group) if module.training else out

    return forward


def _use_local_parameters(module: nn.Module) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module):
            return inner(*args, **kwargs)

    module.forward = forward


def _exchange_around(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let `module.compute` see the rows of all ranks for the experts that are here.

    **Communicates**: E numbers, then A D values out and back over ``ep``, less those that stay;
    the values once more in the backward.
    """
    inner: Callable[..., tuple[Tensor, Any]] = module.compute  # type: ignore[assignment]

    def compute(x: Tensor, counts: Tensor, beside: _Beside = None) -> tuple[Tensor, Any]:
        routes = _find_routes(counts, group)
        pending = routes.start(x)
        other = None if beside is None else beside()
        rows = apply_function(_Exchange, x, [pending], routes, float(group.size()))
        rows = apply_function(_Permute, rows, routes.order, routes.back)
        answers, _ = inner(rows, routes.counts)
        answers = apply_function(_Permute, answers, routes.back, routes.order)
        home = routes.reverse()
        out = apply_function(_Exchange, answers, [home.start(answers)], home, 1.0 / group.size())
        return out, other

    module.compute = compute  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Routes:
    """How many rows go where.

    Attributes:
        sent: [n], rows for every rank, in the order of the ranks.
        received: [n], rows from every rank.
        counts: [E/n], rows of every expert here.
        order: [M], int64: the places of the rows that arrived, expert by expert.
        back: [M], int64: its inverse.
        group: The ``ep`` axis.
    """

    sent: list[int]
    received: list[int]
    counts: Tensor
    order: Tensor
    back: Tensor
    group: dist.ProcessGroup

    def reverse(self) -> "_Routes":
        """Return the way of the answers."""
        return _Routes(
            sent=self.received,
            received=self.sent,
            counts=self.counts,
            order=self.order,
            back=self.back,
            group=self.group,
        )

    def start(self, x: Tensor) -> Tensor:
        """Start an all-to-all of the rows of `x`; the result is to be waited for."""
        return _all_to_all(x.detach(), self.received, self.sent, self.group)


def _all_to_all(
    x: Tensor, received: Sequence[int], sent: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    started: Tensor = _ops.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return started


@torch.no_grad()
def _find_routes(counts: Tensor, group: dist.ProcessGroup) -> _Routes:
    """Exchange how many rows every expert gets; [E] on each rank."""
    ranks = group.size()
    here = len(counts) // ranks
    equal = [here] * ranks
    arriving = _ops.wait_tensor(_all_to_all(counts, equal, equal, group))
    experts = torch.arange(here, device=counts.device).repeat(ranks)
    order = experts.repeat_interleave(arriving).argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    by_rank = torch.stack([counts.view(ranks, here), arriving.view(ranks, here)]).sum(-1)
    sent, received = by_rank.tolist()
    return _Routes(
        sent=sent,
        received=received,
        counts=arriving.view(ranks, here).sum(0),
        order=order,
        back=back,
        group=group,
    )


class _Exchange(torch.autograd.Function):
    """Ends an all-to-all that has started; its gradient travels back, times a factor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, pending: list[Tensor], routes: _Routes, factor: float
    ) -> Tensor:
        ctx.routes, ctx.factor = routes, factor
        arrived: Tensor = _ops.wait_tensor(pending.pop())
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        back = _ops.wait_tensor(ctx.routes.reverse().start(grad))
        return back * ctx.factor, None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient is put back by the inverse, without any addition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grad[back], None, None
