"""Sharded data parallelism on FSDP2: ZeRO stages 0 to 3 over ``dp_replicate x dp_shard``.

==========  ======================  =======================================  ==================
zero_stage  parameters              gradients                                optimizer states
==========  ======================  =======================================  ==================
0           whole                   all-reduced once a step                  whole
1           gathered once a step    reduce-scattered once a step             sharded
2           gathered once a step    reduce-scattered after every backward    sharded
3           gathered block by block reduce-scattered after every backward    sharded
==========  ======================  =======================================  ==================

Note [Overlap on the CPU]: FSDP2 overlaps through CUDA streams; elsewhere its collectives block. So
on the CPU a unit's all-gather is started, without waiting, before the unit ahead of it computes.

Note [Gradients of shards]: a step that reads a parameter itself, as for a penalty, gets the
gradient of that on the shard, by autograd. FSDP2 adds that of the forward, on a stream of which
autograd knows nothing. So what autograd adds to a shard waits for the reductions that were started.

Without other axes stage 0 needs no FSDP: see `ReplicatedGradients` in `gradient_reduction.py`.

A step has several backwards where a pipeline runs micro-batches. While gradients accumulate over
batches, no stage communicates gradients, unless they are added up on the host.

**Source**: Rajbhandari et al. 1910.02054 (ZeRO); Zhao et al. 2304.11277 (FSDP).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    fully_shard,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.nn.modules.module import register_module_parameter_registration_hook

from lightning_par.engine.data.absent_gradients import AbsentGradients
from lightning_par.engine.data.gather_on_use import GatherOnUse
from lightning_par.engine.data.unit_order import UnitOrder
from lightning_par.engine.data.zero_weight_loss import ZeroWeightBackward
from lightning_par.engine.experts.apply import ExpertParallel
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.upstream.fsdp import (
    hide_from_modes,
    initialize,
    keep_attributes,
    reduce_gradients,
    unshard_without_streams,
    wait_for_reductions,
)
from lightning_par.upstream.functions import replaced
from lightning_par.upstream.tensor import own_attributes

__all__ = ["Sharding", "second_names_dropped", "shard_model"]


@contextmanager
def second_names_dropped(
    module: nn.Module, kept: Callable[[Tensor], Tensor] = lambda parameter: parameter
) -> Iterator[None]:
    """Inside of a step, a parameter of the module that it keeps becomes a plain attribute.

    So does a whole one. Torch would list the parameter under its new name alone, and save it twice.

    Args:
        module: The user's.
        kept: Returns what is kept after the step.
    """
    added = list[tuple[nn.Module, str, Tensor]]()

    def note(owner: nn.Module, name: str, parameter: Tensor) -> None:
        # As they are: a list of parameters in a step would gather all.
        held = (p for part in module.modules() for p in dict.values(vars(part)["_parameters"]))
        if name not in owner._parameters and any(parameter is p for p in held):
            added.append((owner, name, parameter))

    try:
        with register_module_parameter_registration_hook(note):
            yield
    finally:
        for owner, name, parameter in added:
            if owner._parameters.get(name) is parameter:
                del owner._parameters[name]
                vars(owner)[name] = kept(parameter)


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().clone()


class _StepRoot(nn.Module):
    """Root of the FSDP units: its forward is one call of the user's step, which may call any module
    of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: Callable[[], Any]) -> Any:
        # A copy: FSDP2 will free the memory of what it has gathered.
        with second_names_dropped(self.model, _copy):
            return step()


class Sharding:
    """Forwards and backwards of a model whose parameters are sharded over the data axes.

    Args:
        root: The FSDP root, or the root of an unsharded model; None if there is one replica, and
            then every method does nothing.
        zero_stage: 0 to 3.
        experts: Modules with experts that are sharded over the replicas.
        in_steps: Whether the user's training steps run their backwards themselves.
        copies: Parameters that every replica holds whole.
        runs: The blocks of each pipeline stage of this rank, if they are FSDP units.

    Attributes:
        absent: Gradients that this rank lacks; None if FSDP does not reduce them.
        copies: As given; the caller averages their gradients over the replicas.
        is_plain: Whether there is one replica.
        synchronizes: Whether the next step reduces gradients over the replicas.
        zero_weight: Hooks for losses with weight 0.
    """

    def __init__(
        self,
        root: nn.Module | None,
        zero_stage: int,
        experts: Sequence[nn.Module] = (),
        *,
        in_steps: bool = False,
        copies: Sequence[nn.Parameter] = (),
        runs: Sequence[Sequence[FSDPModule]] = (),
    ) -> None:
        self._root, self._stage, self.copies = root, zero_stage, tuple(copies)
        modules = () if root is None else root.modules()
        self._units = [m for m in modules if isinstance(m, FSDPModule)]
        self.is_plain, self.synchronizes = root is None, True
        plain = [] if root is None else [root]
        # The hooks need some module to surround, also where nothing is sharded.
        self.zero_weight = ZeroWeightBackward(self._units or plain, experts)
        self._in_steps, self._on_use = in_steps, None
        self._order: UnitOrder | None = None
        self._shards: list[tuple[nn.Module, str, nn.Parameter]] = []
        self.absent: AbsentGradients | None = None
        if not isinstance(root, FSDPModule):
            return
        self.absent = AbsentGradients(self._units, in_steps=in_steps)
        if in_steps:
            found = self.zero_weight.find
            # Calls of blocks come in any order there, so that no order of the model can be kept.
            self._on_use = GatherOnUse(root, self._units, found, reshards=zero_stage == 3)
        else:
            self._order = UnitOrder(root, runs)
            named = ((m, m.named_parameters("", False, False)) for m in root.modules())
            self._shards = [(m, name, p) for m, parameters in named for name, p in parameters]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communicating them.

        A step that runs its own backwards may use, or drop, gradients after any of them, so that
        there each is reduced at once.
        """
        # `in_steps`: the user may step an optimizer after any backward of the step.
        self.synchronizes = self._in_steps
        try:
            yield
        finally:
            self.synchronizes = True

    def call(self, step: Callable[[], Any]) -> Any:
        """Run one forward that may use any parameter of the model.

        FSDP2 cannot gather parameters in inference mode, which Lightning uses for evaluation on
        CUDA; there `no_grad` takes its place.
        """
        if self._root is None:
            return step()
        if not self._units:
            return self._root(step)
        if self._order is not None:
            # Around the step, and inside of the root's forward, in which blocks are gathered.
            step = self._order.in_order(step)
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self._root(step)
            output = self._root(step)
            self._keep_flags()
            return output
        except Exception:
            # FSDP2 would take the next forward for a part of this one, and reshard nothing. The
            # look at a step goes on after an error.
            reset: Any = getattr(self._root, "reset_iter_state", None)  # since torch 2.12
            if reset is not None:
                reset()
            raise

    def _keep_flags(self) -> None:
        """Let shards have the `requires_grad` that a step has set on what is gathered of them."""
        for module, name, shard in self._shards:
            # Not as the user's step reads it, which may get another answer.
            now = dict.__getitem__(module.__dict__["_parameters"], name)
            if now is not shard and now.requires_grad != shard.requires_grad:
                shard.requires_grad_(now.requires_grad)

    def catch_up(self) -> None:
        """Gather, in a forward, what other replicas may gather before they exchange anything else.

        **Communicates**: parameters of blocks that the forward has skipped, over the data axes.
        """
        if self._order is not None:
            self._order.catch_up()

    def call_with_backwards(self, step: Callable[[], Any]) -> Any:
        """Run a step that runs its backwards itself; see Note [Several backwards] in
        `gather_on_use.py`.
        """
        if self._on_use is None:
            return self.call(step)
        self._on_use.begin()
        try:
            return step()
        finally:
            self._on_use.end()

    @contextmanager
    def backward_in_step(self) -> Iterator[None]:
        """Surrounds a backward inside of such a step; afterwards its gradients are reduced.

        **Communicates**: gradients, and what belongs to no block, over the data axes.
        """
        if self._on_use is not None:
            assert self.absent is not None
            self.absent.begin()
            self._on_use.before_backward()
        yield
        if self._on_use is not None:
            self._on_use.after_backward()

    def shard_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the shard of a parameter that is gathered inside of such a step."""
        return parameter if self._on_use is None else self._on_use.shard_of(parameter)

    def after_update(self) -> None:
        """Forget gathered parameters that an optimizer has changed inside of such a step."""
        if self._on_use is not None and self._on_use.is_on:
            self._on_use.reshard()

    def before_backward(self, *, is_last: bool = True, is_whole: bool = True) -> None:
        """Set up FSDP for the backward that follows.

        Args:
            is_last: Gradients are then complete and parameters may be resharded.
            is_whole: It computes the gradients of all weights. Otherwise some come later, and are
                kept unsharded until `finish`, at every ZeRO stage.
        """
        if isinstance(self._root, FSDPModule):
            # Stages 0 and 1 accumulate gradients unsharded; the last backward reduces them.
            # Stages 2 and 3 reduce after each micro-batch, to hold shards of gradients only.
            reduces = self.synchronizes and is_whole and (is_last or self._stage >= 2)
            if self._order is not None:
                self._order.begin_backward()
            # FSDP2 waits for its reductions, and forgets the order of its forwards, in the last
            # backward only.
            self._root.set_is_last_backward(is_last)
            for unit in self._units:
                unit.set_requires_gradient_sync(reduces, recurse=False)
                # Before the last micro-batch of stages 0 to 2, weights stay gathered for the next
                # forward.
                unit.set_reshard_after_backward(is_last or self._stage == 3, recurse=False)

    def without_backward(self) -> None:
        """Do what FSDP2 does at the end of a backward, where none ran after `before_backward`."""
        if isinstance(self._root, FSDPModule):
            reduce_gradients(self._root)

    def finish(self) -> None:
        """Reduce the gradients that were computed after the backwards, unless they accumulate.

        FSDP2 does this at the end of a backward, for all parameters that have a gradient by then.
        """
        if isinstance(self._root, FSDPModule):
            self.before_backward()
            if self._order is not None:
                self._order.forget()
            reduce_gradients(self._root)

    def wait_for_gradients(self) -> None:
        """Let the host wait for the gradients that FSDP2 copies to it."""
        if isinstance(self._root, FSDPModule):
            wait_for_reductions(self._root, "host")

    def hold(self) -> None:
        """Gather all parameters and keep them until `release`, so that forwards communicate
        nothing and replicas may run different numbers of them.

        **Communicates**: every parameter once, over the data axes.
        """
        if not isinstance(self._root, FSDPModule):
            return
        # FSDP2 cannot gather in inference mode, in which Lightning evaluates.
        with torch.inference_mode(False):
            for unit in self._units:
                unit.unshard()
                unit.set_reshard_after_forward(False, recurse=False)

    def release(self) -> None:
        """Reshard gathered parameters."""
        if self._order is not None:
            self._order.forget()
        for unit in self._units:
            # To FSDP2 a forward that failed goes on, and a root stays whole after one: in that
            # state reshard() does nothing unless the module is to be resharded after its forward.
            unit.set_reshard_after_forward(True, recurse=False)
            unit.reshard()
            # Only blocks of stage 3 are gathered anew in the backward; the root stays whole for
            # the step.
            gathers_again = self._stage == 3 and unit is not self._root
            unit.set_reshard_after_forward(gathers_again, recurse=False)


_ON_DEVICE = OffloadPolicy()


@contextmanager
def _axes_made_once() -> Iterator[None]:
    """Inside, the mesh of an axis is made once; FSDP2 asks a mesh of two for each parameter."""
    made: dict[tuple[int, Any], tuple[DeviceMesh, DeviceMesh]] = {}
    make = DeviceMesh.__getitem__

    def axis(mesh: DeviceMesh, names: str | tuple[str, ...]) -> DeviceMesh:
        key = id(mesh), names
        if key not in made:  # with the whole mesh, whose id nothing else may get meanwhile
            made[key] = mesh, make(mesh, names)
        return made[key][1]

    with replaced(DeviceMesh, "__getitem__", axis):
        yield


@_axes_made_once()
def shard_model(
    model: nn.Module,
    resolved: ResolvedPlan,
    mesh: ParallelMesh,
    *,
    zero_stage: int,
    materialize: Callable[[nn.Module, str], None],
    bounds: Sequence[tuple[int, int]] = (),
    experts: ExpertParallel | None = None,
    reduce_dtype: torch.dtype | None = None,
    offload: OffloadPolicy = _ON_DEVICE,
    reduces: bool = True,
    in_steps: bool = False,
) -> Sharding:
    """Materialize and shard the model unit by unit: every block, then the rest.

    Args:
        model: Parameters on meta, or unsharded; changed in place.
        resolved: The resolved plan.
        mesh: The mesh, whose data axes are sharded over.
        zero_stage: 0 to 3.
        materialize: Initializes the parameters below a module, given with its FQN.
        bounds: First and one-past-last block of every pipeline stage, if there are several.
        experts: Experts that are sharded over the replicas, each held by some of them only.
        reduce_dtype: Dtype in which gradients are summed; None: that of the parameters.
        offload: Where shards are kept, except those of sharded experts.
        reduces: Whether FSDP reduces gradients over the replicas. Otherwise parameters stay
            unsharded, and the caller reduces their gradients.
        in_steps: Whether the user's training steps run their backwards themselves.
    """
    whole, copies = set[nn.Parameter](), list[nn.Parameter]()
    units = [n for n in resolved.block_names if not isinstance(model.get_submodule(n), StageStub)]
    shards = mesh.sizes.data > 1 and reduces
    axes = ("dp_replicate", "dp_shard") if mesh.sizes.data_replicate > 1 else ("dp_shard",)
    fully: dict[str, Any] = {
        "mesh": mesh.device_mesh[axes],
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
        "offload_policy": offload,
        "ignored_params": whole,
    }
    for name in units:
        block = model.get_submodule(name)
        materialize(block, name)
        if shards:
            if experts is not None:
                whole |= experts.shard(name, reshard_after_forward=zero_stage == 3)
            copies += _unshardable(block, whole)
            _shard(block, reshard_after_forward=zero_stage == 3, **fully)
    # What is left on meta: what belongs to no block.
    materialize(model, "")
    root = _StepRoot(model)
    if not shards:
        return Sharding(root if mesh.sizes.data > 1 else None, zero_stage, in_steps=in_steps)
    copies += _unshardable(root, whole)
    # The root holds what is used before and after the blocks: gathered once for the whole step.
    _shard(root, reshard_after_forward=False, **fully)
    runs = [resolved.block_names[lo:hi] for lo, hi in bounds or [(0, len(resolved.block_names))]]
    held: Any = [[model.get_submodule(n) for n in r] for r in runs if set(r) & set(units)]
    # Elsewhere FSDP2 overlaps by streams; prefetching would only hold more memory.
    if mesh.device_type == "cpu" and not in_steps:  # which use blocks in any order
        _gather_ahead(root, held)
    assert isinstance(root, FSDPModule)
    initialize(root)  # now, so that all that changes the modules has happened after set-up
    _order_gradients(root, mesh.device_type, whole)
    held_experts = () if experts is None else list(experts.modules.values())
    return Sharding(root, zero_stage, held_experts, in_steps=in_steps, copies=copies, runs=held)


def _shard(unit: nn.Module, **options: Any) -> None:
    """Shard a unit; parameters keep the attributes that users have set.

    FSDP2 takes only parameters that are contiguous, which those of a model in `channels_last` or of
    a transposed matrix are not; they become so, with the values that they have.
    """
    # fully_shard replaces the parameters; what users set on them (`p.no_decay`) is put back.
    held = [(m._parameters, n, p) for m in unit.modules() for n, p in m._parameters.items()]
    for parameter in unit.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()
    fully_shard(unit, **options)
    for parameters, name, before in held:
        if before is not None:
            vars(parameters[name]).update(own_attributes(before))
    assert isinstance(unit, FSDPModule)
    keep_attributes(unit)
    hide_from_modes(unit)


def _unshardable(unit: nn.Module, whole: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return, and add to `whole`, what FSDP2 refuses to shard of a unit: scalars, and weights that
    train in another dtype than most, such as complex ones.
    """
    inside = [m for m in unit.modules() if isinstance(m, FSDPModule)]
    done = whole.union(*(m.parameters() for m in inside))
    held = [p for p in unit.parameters() if p not in done]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in held:
        sizes[parameter.dtype] += parameter.numel() if parameter.requires_grad else 0
    # FSDP2 gathers a unit in one buffer, and refuses trained parameters of several dtypes.
    main = max(sizes, key=sizes.__getitem__, default=None)
    found = [p for p in held if not p.ndim or (p.requires_grad and p.dtype != main)]
    whole.update(found)
    return found


def _order_gradients(root: FSDPModule, device_type: str, ignored: Container[nn.Parameter]) -> None:
    """Let what autograd adds to gradients of shards wait; see Note [Gradients of shards]."""
    if device_type == "cpu":  # where collectives block
        return

    def wait(grad: Tensor | None) -> None:
        if grad is not None:  # else nothing is added, see `WholeParameters`
            wait_for_reductions(root, "host" if grad.device.type == "cpu" else "stream")

    assert isinstance(root, nn.Module)
    for shard in root.parameters():
        trains, is_number = shard.requires_grad, shard.is_floating_point() or shard.is_complex()
        if shard in ignored or not is_number:
            continue
        # A hook needs `requires_grad`; a frozen parameter that is thawed later has it, too.
        shard.requires_grad_(True).register_hook(wait)  # may be unfrozen later
        shard.requires_grad_(trains)


def _gather_ahead(root: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> None:
    """Start a block's all-gather before the block ahead of it computes; see Note [Overlap on the
    CPU]. What comes before the blocks runs ahead of one stage only, if there are several.
    """
    assert isinstance(root, FSDPModule)
    unshard_without_streams(root)
    for blocks in stages:
        chain = [root, *blocks] if len(stages) == 1 else blocks
        for unit, following in pairwise(chain):
            assert isinstance(unit, FSDPModule)
            unit.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]
