"""Expected communication volume of a step, computed from the plan; profilers compare it with the
measured one.

n is the size of the group; x and y are the input and the output of a module on this rank.

=========================  =========================================================================
tensor style               payload in the forward, then in the backward
=========================  =========================================================================
entry of sharded weights   with sequence parallelism: all-gather n x, reduce-scatter n x;
                           without: nothing, all-reduce x
exit of sharded weights    with sequence parallelism: reduce-scatter n y, all-gather n y;
                           without: all-reduce y, nothing
``vocab_head``             as an entry; its loss: all-reduces of one and of two numbers per token,
                           or of each chunk of logits one all-gather of two numbers per token
``colwise_gather_output``  as an entry; all-gather y, nothing
=========================  =========================================================================

Entries and exits are the rows of `lightning_par.plan.tensor_styles.TENSOR_STYLES` with a
`crossing`. A backward communicates only if x or y requires grad.

Rows travel to experts of other ranks in all-to-alls: rows and answers, and in the backward their
gradients, after the number of rows of each expert. Padded by ``expert_max_rows``, these bytes are
exact. Parts of their own sizes depend on what tokens choose, which is not known before: given is
the expectation of even routing, in which as many rows arrive at a rank as its tokens choose. It is
exact in sum over the ranks, but for rows that are dropped.

A pipeline stage sends the output of its last block, and the gradient of the input of its first.
The all-gathers and reduce-scatters of the ZeRO stages (see `lightning_par.engine.data.fsdp`) are
counted for every unit of sharding: a block, or all that is outside of the blocks. FSDP pads a
parameter along dim 0 to a multiple of the shards.

Not foreseen: what the user's step communicates or logs, batches and losses shared within a replica,
under a pipeline what a block hands on beside the hidden states, and the data axes where experts are
divided, or the tokens of a sample.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor, Shard

from lightning_par.dtensor import local_part
from lightning_par.engine.collectives import split_sizes
from lightning_par.engine.data.gradient_reduction import ReplicatedGradients, SharedGradients
from lightning_par.engine.pipeline.actions import Action, ActionKind
from lightning_par.engine.pipeline.stage import matching_modules, StageStub
from lightning_par.engine.pipeline.stage_links import group_name
from lightning_par.engine.tensor.chunked_logits import ChunkedLogits
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.plan.tensor_styles import StyleSpec, TENSOR_STYLES
from lightning_par.profiling.comm_volume import CommVolume, CommVolumeEntry, ring_bytes
from lightning_par.upstream.autograd import is_in_backward
from lightning_par.upstream.pytree import tree_leaves

__all__ = ["Forecast", "Parts"]

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
_WEIGHTS_OF_THE_LOSS = 32
"""Bytes: four numbers in float64, summed over the replicas."""

_NORM = 16
"""Bytes: two numbers in float64, summed over all ranks."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a model on a mesh that decide what is communicated.

    Attributes:
        module: Holds this rank's part.
        resolved: Its resolved plan.
        mesh: Where it is.
        bounds: First and one-past-last block of every pipeline stage.
        owners: The pipeline rank of every stage.
        shared: Parameters whose gradients are summed after the backward.
        averaged: Parameters of which each replica has a copy, if FSDP reduces no gradients.
        zero_stage: 0 to 3.
        sequence_parallel: Whether activations between the blocks are sharded along T.
        compiled: Whether the blocks are compiled; hooks inside them would not run then.
        expert_max_rows: Rows of every part sent to experts, by padding; None: as many as chosen.
        compresses: Whether gradients are compressed on their way to other replicas.
        takes_norm: Whether the norm of all gradients is taken before the optimizer steps.
    """

    module: nn.Module
    resolved: ResolvedPlan
    mesh: ParallelMesh
    bounds: Sequence[tuple[int, int]]
    owners: Sequence[int]
    shared: Sequence[SharedGradients]
    averaged: Sequence[ReplicatedGradients]
    zero_stage: int
    sequence_parallel: bool
    compiled: bool
    expert_max_rows: int | None
    compresses: bool
    takes_norm: bool


@dataclass(eq=False)
class _Sum:
    calls: int = 0
    payload: int = 0


@dataclass(eq=False)
class Forecast:
    """Computes the communication volume that one step on this rank should have.

    Shapes come from forward hooks, which are installed for the first step of each kind (training,
    validation ...).

    Args:
        parts: The parts of the model that communicate.
        ledger: Names the groups.
    """

    parts: Parts
    ledger: CommVolume
    _found: dict[tuple[str, str], _Sum] = field(default_factory=dict)
    _groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def watch(self) -> ExitStack:
        """Install forward hooks that read shapes; closing the result removes them."""
        self._found = {}
        hooks = ExitStack()
        for module, hook in self._hooks():
            # After the forward: the output's shape is known, and the inputs are still at hand.
            hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        for module in self._experts():
            # `compute` is called by the module's own forward, and has no hooks of its own.
            hooks.callback(setattr, module, "compute", module.compute)
            module.compute = _ExpertHook(self, module.compute)
        return hooks

    def rows(self, actions: Sequence[Action], *, synchronizes: bool) -> tuple[CommVolumeEntry, ...]:
        """Return the expected volume of the step that was watched, by axis and operation.

        Args:
            actions: The actions of the schedule that this rank ran; empty without a pipeline.
            synchronizes: Whether gradients are reduced over the replicas at its end.
        """
        self._foresee_replicas(actions, synchronizes)
        if synchronizes:
            for shared in self.parts.shared:
                self._foresee_shared(shared)
            if self.parts.takes_norm and dist.group.WORLD is not None:
                self._add(dist.group.WORLD, "all_reduce", _NORM)
        rows = []
        for (axis, operation), total in self._found.items():
            ranks = self._groups[axis].size()
            rows.append(
                CommVolumeEntry(
                    axis=axis,
                    operation=operation,
                    calls=total.calls,
                    payload=total.payload,
                    sent=round(ring_bytes(operation, total.payload, ranks, False)),
                )
            )
        return tuple(rows)

    def _add(self, group: dist.ProcessGroup, operation: str, payload: int, calls: int = 1) -> None:
        if group.size() == 1 or not calls:
            return
        axis = self.ledger.axis_of(group)
        self._groups[axis] = group
        total = self._found.setdefault((axis, operation), _Sum())
        total.calls += calls
        total.payload += payload * calls

    def _hooks(self) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        parts = self.parts
        # A hook inside a compiled block would be traced into it, or break its graph.
        if parts.mesh.sizes.tensor > 1 and not parts.compiled:
            held = _own_modules(parts.module)
            for fqn, style in parts.resolved.styles.items():
                if fqn in held and TENSOR_STYLES[style].crossing is not None:
                    yield held[fqn], _TensorHook(self, TENSOR_STYLES[style])
        for stage, (lo, hi) in enumerate(parts.bounds):
            if parts.owners[stage] != parts.mesh.place["pp"]:
                continue
            names = parts.resolved.block_names
            # The first block of a stage receives, its last one sends.
            if stage > 0:
                yield parts.module.get_submodule(names[lo]), _BoundaryHook(self, stage - 1, False)
            if stage < len(parts.bounds) - 1:
                yield parts.module.get_submodule(names[hi - 1]), _BoundaryHook(self, stage, True)

    def _experts(self) -> list[Any]:
        """Return the modules here whose experts are divided over ranks."""
        parts = self.parts
        if parts.mesh.expert_mesh is None or parts.compiled:
            return []
        return list(matching_modules(parts.module, parts.resolved.plan.experts).values())

    def _foresee_shared(self, shared: SharedGradients) -> None:
        by_dtype: dict[torch.dtype, int] = {}
        for p in shared.parameters:
            if p.requires_grad:
                # With each gradient goes whether there is one.
                payload = _bytes(local_part(p)) + p.element_size()
                by_dtype[p.dtype] = by_dtype.get(p.dtype, 0) + payload
        for payload in by_dtype.values():
            self._add(shared.group, "all_reduce", payload)

    def _foresee_replicas(self, actions: Sequence[Action], synchronizes: bool) -> None:
        parts, sizes = self.parts, self.parts.mesh.sizes
        if sizes.data == 1 or parts.mesh.expert_mesh is not None or parts.compresses:
            return
        # Weight, samples, and length of rows, over all replicas.
        self._add(parts.mesh.data_group, "all_reduce", _WEIGHTS_OF_THE_LOSS)
        if parts.averaged:
            for copies in parts.averaged if synchronizes else ():
                for payload in copies.messages():
                    self._add(copies.group, "all_reduce", payload)
            return
        # Without a pipeline a step is one forward and one backward.
        walk = actions or (Action(0, _F, 0), Action(0, _B, 0))
        # Below ZeRO 2 gradients accumulate whole, and are reduced once. A split backward (W)
        # reduces at the end, too.
        once = not synchronizes or parts.zero_stage < 2 or any(a.kind is _W for a in walk)
        backwards = 1 if once else sum(a.kind is _B for a in walk)
        shard, replicate = parts.mesh.group("dp_shard"), parts.mesh.group("dp_replicate")
        for block, parameters in self._units():
            if not parameters:
                continue
            gathers = self._gathers(walk, block)
            whole = sum(_padded(p, parts.mesh) * p.element_size() for p in parameters)
            trained = [p for p in parameters if p.requires_grad]
            reduced = sum(_padded(p, parts.mesh) * p.element_size() for p in trained)
            self._add(shard, "all_gather", whole, gathers)
            if synchronizes and trained:
                self._add(shard, "reduce_scatter", reduced, backwards)
                # HSDP: each replica group reduces its shard, after the reduce-scatter.
                self._add(replicate, "all_reduce", reduced // sizes.data_shard, backwards)

    def _units(self) -> Iterator[tuple[int | None, list[nn.Parameter]]]:
        """Give the units of sharding that this rank holds: block or None, and its parameters."""
        seen: set[int] = set()
        held = _own_modules(self.parts.module)
        for number, name in enumerate(self.parts.resolved.block_names):
            if name in held:
                parameters = list(held[name].parameters())
                seen |= {id(p) for p in parameters}
                yield number, parameters
        # The root's unit: what no block has.
        yield None, [p for p in self.parts.module.parameters() if id(p) not in seen]

    def _gathers(self, walk: Sequence[Action], block: int | None) -> int:
        """Return how often a unit is gathered in a step."""
        if self.parts.zero_stage < 3:
            return 1
        if block is not None:
            stage = next((s for s, (lo, hi) in enumerate(self.parts.bounds) if lo <= block < hi), 0)
            # ZeRO 3 reshards after every use: each forward and each backward gathers anew.
            return sum(a.stage == stage and a.kind is not _W for a in walk)
        # The root is not resharded after its forward (FSDP2's default for a root): a backward
        # right after it finds it whole.
        count, whole = 0, False
        for action in walk:
            if action.kind is not _W:
                count += not whole
                whole = action.kind is _F
        return count


@dataclass(frozen=True)
class _TensorHook:
    """Adds the collectives of one call of a module with a tensor style."""

    forecast: Forecast
    style: StyleSpec

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        group = self.forecast.parts.mesh.group("tp")
        # The first tensor: hidden states, however they are passed.
        x = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        if self.style.crossing == "enter":
            self._cross(group, x, "all_gather", "reduce_scatter", in_forward=False)
        else:
            self._cross(group, output, "reduce_scatter", "all_gather", in_forward=True)
        if isinstance(output, ChunkedLogits):
            rows, size = output.numel() // output.shape[-1], max(output.element_size(), 4)
            for start in range(0, rows, output.tokens_at_once):
                numbers = 2 * group.size() * min(output.tokens_at_once, rows - start)
                self.forecast._add(group, "all_gather", numbers * size)
        elif self.style.output == "logits":
            tokens = output.numel() // output.shape[-1] * output.element_size()
            self.forecast._add(group, "all_reduce", tokens)
            self.forecast._add(group, "all_reduce", 2 * tokens)
        if self.style.output == "gathered":
            features = output.shape[-1]
            # All-gathers want equal parts: the largest, on every rank.
            padded = split_sizes(features, group.size())[0] * group.size()
            self.forecast._add(group, "all_gather", _bytes(output) // features * padded)

    def _cross(
        self,
        group: dist.ProcessGroup,
        tensor: Tensor,
        forward: str,
        backward: str,
        *,
        in_forward: bool,
    ) -> None:
        # A forward that is recomputed communicates again, but has one backward.
        returns = tensor.requires_grad and not _recomputes()
        size, add = _bytes(tensor), self.forecast._add
        if self.forecast.parts.sequence_parallel:
            add(group, forward, group.size() * size)
            if returns:
                add(group, backward, group.size() * size)
        elif in_forward or returns:
            add(group, "all_reduce", size)


@dataclass(frozen=True)
class _BoundaryHook:
    """Adds the messages of one micro-batch over a boundary between stages."""

    forecast: Forecast
    boundary: int
    sends: bool

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        parts = self.forecast.parts
        earlier, later = parts.owners[self.boundary], parts.owners[self.boundary + 1]
        # Both on this rank: no message. A recomputed block receives nothing anew.
        if earlier == later or _recomputes():
            return
        leaves = tree_leaves(output if self.sends else (args, kwargs))
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        # A tensor that is returned twice is sent once.
        moved = list({id(t): t for t in tensors}.values()) if self.sends else tensors[:1]
        for kind, ends in (("activations", (earlier, later)), ("gradients", (later, earlier))):
            operation = "send" if (kind == "activations") == self.sends else "recv"
            group = self.forecast.ledger.group_of(group_name(kind, *ends))
            travels = [t for t in moved if kind == "activations" or t.requires_grad]
            for tensor in travels:
                self.forecast._add(group, operation, _bytes(tensor))
            if kind == "gradients" and travels:  # a byte each: whether there is a gradient
                self.forecast._add(group, operation, len(travels))


@dataclass(frozen=True)
class _ExpertHook:
    """Adds the all-to-alls of one call of `compute` of a module with experts, which it calls."""

    forecast: Forecast
    inner: Callable[..., Any]

    def __call__(self, x: Tensor, counts: Tensor, *more: Any, **named: Any) -> Any:
        parts, add = self.forecast.parts, self.forecast._add
        assert parts.mesh.expert_mesh is not None
        found = self.inner(x, counts, *more, **named)
        out = found[0] if isinstance(found, tuple) else found  # with the work beside, or alone
        group = parts.mesh.expert_mesh.get_group("ep")
        rows = int(parts.mesh.sizes.exchanged_rows(len(x), parts.expert_max_rows))
        add(group, "all_to_all", _bytes(counts))
        for tensor in (x, out):
            size = rows * tensor.shape[1:].numel() * tensor.element_size()
            returns = tensor.requires_grad and not _recomputes()
            add(group, "all_to_all", size, 2 if returns else 1)
        return found


def _recomputes() -> bool:
    """Whether a forward runs inside a backward."""
    return is_in_backward()


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _own_modules(module: nn.Module) -> Mapping[str, nn.Module]:
    named = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in named if not isinstance(part, StageStub)}


def _padded(parameter: nn.Parameter, mesh: ParallelMesh) -> int:
    """Return the number of entries of a parameter on this rank of ``tp``, with dim 0 padded to a
    multiple of the shards.
    """
    shape = list(parameter.shape)
    # FSDP shards along dim 0 what tp has left of it.
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        for name, placement in zip(names, parameter.placements, strict=True):
            if name == "tp" and isinstance(placement, Shard):
                sizes = split_sizes(shape[placement.dim], mesh.sizes.tensor)
                shape[placement.dim] = sizes[mesh.place["tp"]]
    if not shape:
        return 1
    shards = mesh.sizes.data_shard
    return -(-shape[0] // shards) * shards * math.prod(shape[1:])
