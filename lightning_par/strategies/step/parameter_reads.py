"""Parameters that a user's step reads itself, as for an L2 term or a norm of weights.

Note [Reads in a step]: inside its module's forward a parameter stands for this rank's part of it.
A step that reads one, through `parameters()` or as an attribute, means the whole: so outside of
every forward a sharded parameter answers with a whole tensor, whose gradient is counted once. What
another pipeline stage holds answers with an `AbsentParameter`, which tells its shape, dtype and
device and refuses to take part in a computation.

Note [Lists in manual optimization]: there the step does what is otherwise done between two of them:
it clips and reads gradients, freezes networks, clamps weights, or averages them into another
network. It goes over `parameters()` for that. So such a list gives this rank's shards themselves,
as hooks between backward and optimizer see them; a parameter read as an attribute is whole.

Length: steps and hooks read the same parameters, and what a step writes is kept.
"""

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.distributed.tensor import DTensor

from lightning_par.dtensor import local_part, shard_of, whole
from lightning_par.engine.data.fsdp import Sharding
from lightning_par.engine.data.whole_parameter import as_parameter, WholeParameters
from lightning_par.engine.pipeline.stage import Stage, StageStub
from lightning_par.engine.wrapping import Forward, wrap_forward, wrapped_parts
from lightning_par.errors import NonFiniteError, PlanError
from lightning_par.mesh import ParallelMesh
from lightning_par.observe.contents import is_container
from lightning_par.strategies.hooks.absent_modules import AbsentModules
from lightning_par.strategies.step.absent_parameter import (
    About,
    absent_parameter,
    AbsentPart,
    HookView,
    module_refusal,
    Refusals,
)
from lightning_par.strategies.step.metrics import is_plain_metric
from lightning_par.upstream.pytree import leaves_of
from lightning_par.upstream.tensor import count_of_changes

__all__ = ["ParameterReads", "called_by_steps"]

_SHORT = 128
"""Entries up to which a container is searched for weights that it keeps."""
_COMPARED = 4
"""Times that values with gradients are compared with what was handed out."""


@dataclass(frozen=True)
class _Handed:
    """A parameter that a step has read.

    Attributes:
        parameter: As the module holds it.
        shard: What the optimizer holds of it: another one if FSDP has gathered it, else itself.
        value: What the step got: a whole tensor, or the gathered parameter itself.
        memory: That of `value`, which ``.data = ...`` takes from it.
        changes: Of `value`, as torch counted then.
        needs_grad: Whether it was read to be differentiated, and not to be averaged or clamped.
    """

    parameter: Tensor
    shard: Tensor
    value: Tensor
    memory: Tensor
    changes: int
    needs_grad: bool

    @property
    def is_counted(self) -> bool:
        """Whether torch has counted a write."""
        return count_of_changes(self.value) != self.changes

    def restore_memory(self) -> bool:
        """Undo ``.data = ...``, but for the values: FSDP gathers into the memory that it knows.

        Returns:
            Whether there was one.
        """
        if self.value.data_ptr() == self.memory.data_ptr():
            return False
        self.memory.data.copy_(self.value)
        self.value.data = self.memory
        return True

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return this rank's part as it was, and as the step left it."""
        return local_part(self.shard), local_part(shard_of(self.value.detach(), self.shard))


class _Settled:
    """A parameter that a step has read, and of which what it wrote was kept.

    Args:
        handed: As it was handed out.
    """

    def __init__(self, handed: _Handed) -> None:
        self.handed_of = handed.parameter, handed.shard
        # A parameter that FSDP has gathered is the tensor of every step.
        is_new = handed.value is not handed.parameter
        self.value = weakref.ref(handed.value) if is_new else lambda: None
        # It shares the count of changes, which outlives the entries, but not the memory.
        self._counter = handed.value.detach()
        self._counter.data = self._counter.new_empty(0)
        self.changes = count_of_changes(self._counter)

    @property
    def is_written(self) -> bool:
        """Whether torch has counted a write since."""
        return count_of_changes(self._counter) != self.changes


class ParameterReads:
    """Answers reads of parameters in a user's step; see Note [Reads in a step].

    Args:
        module: The user's LightningModule on this rank.
        blocks: FQNs of the blocks.
        mesh: Mesh of this run.
        known: What `describe_tensors` gave of the whole module.
        stages: The pipeline stages of this rank, if there are several.
        partial: Parameters whose gradients are summed over ``tp``, each rank having a part.
        is_compiled: Whether blocks are compiled; what they hold is then not watched.
        device: Device of this rank.
        sharding: Knows the shards of gathered parameters.

    Attributes:
        active: Whether the user's step is at work outside of every forward of its modules, or one
            of the user's hooks is.
        wholes: Gives parameters that are read to be differentiated.
        known: As given.
        absent_modules: What stands for modules of other stages in hooks.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        blocks: Sequence[str],
        mesh: ParallelMesh,
        known: Mapping[str, About],
        stages: Sequence[Stage],
        partial: Iterable[nn.Parameter],
        device: torch.device,
        sharding: Sharding,
        *,
        is_compiled: bool,
    ) -> None:
        self._module, self._mesh, self._device, self.known = module, mesh, device, known
        self._blocks = frozenset(blocks)
        self._partial = {id(parameter) for parameter in partial}
        self.active, self._depth, self._in_step = False, 0, False
        self._sharding = sharding
        self.wholes = WholeParameters(device, sharding.wait_for_gradients)
        names = Counter(about.name for about in known.values())
        # What this rank holds of tied parameters, of which it may lack the module of one name.
        self._tied: dict[str, tuple[_Watched, str] | None] = {
            n: None for n in names if names[n] > 1
        }
        self._refusals = Refusals(waits=mesh.sizes.pipeline > 1)
        self._handed: dict[int, _Handed] = {}
        self._settled, self._wholes_of_last = list[_Settled](), list[_Settled]()
        self._steps, self._compares = 0, True
        self._view: HookView | None = None
        self.absent_modules = AbsentModules(module, self, known)
        for stage in stages:
            stage.known = known
        if mesh.sizes.world_size == 1:
            return
        skipped = tuple(f"{name}." for name in blocks) if is_compiled else ()
        watched = [
            (fqn, child)
            for fqn, child in module.named_modules()
            if isinstance(child, StageStub) or not f"{fqn}.".startswith(skipped or "\0")
        ]
        self._watch([*watched, *_stubs_of_stages(module, stages)])
        called = [*called_by_steps(module, blocks), *wrapped_parts(module, blocks)]
        for child in {id(part): part for part in called}.values():
            wrap_forward(child, self._outside, "parameter_reads")

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Surrounds the user's step; at the end, what it wrote to a whole tensor is kept."""
        self._in_step, self.active = True, not self._depth
        try:
            yield
        finally:
            self.active = False
            try:
                self.settle()
                if torch.is_grad_enabled():  # an evaluation comes between two steps
                    self._tell_kept()
            finally:
                self._in_step = False
                self._settled.clear()

    @contextmanager
    def in_hook(self, view: HookView) -> Iterator[None]:
        """Surrounds a hook outside of the steps: modules list what other stages hold, too.

        Args:
            view: Gives what stands for that.
        """
        before = self._view, self.active
        self._view, self.active = view, True
        try:
            with self.absent_modules.shown():
                yield
        finally:
            self._view, self.active = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Surrounds what this package does inside of a hook: the module is that of this rank."""
        before = self._view, self.active
        self._view, self.active = None, False
        pause = nullcontext() if before[0] is None else before[0].paused()
        try:
            with pause, self.absent_modules.shown(shown=False):
                yield
        finally:
            self._view, self.active = before

    def paused_in_hooks(self) -> AbstractContextManager[None]:
        """As `paused`, where a hook may be at work or not; it is asked in every step."""
        return self.paused() if self.in_hooks else nullcontext()

    @property
    def in_hooks(self) -> bool:
        """Whether a hook outside of the steps is at work."""
        return self._view is not None

    def agree(self, what: str) -> None:
        """Refuse what some ranks do not do in a hook; see `WholeView.agree`."""
        if self._view is not None:
            self._view.agree(what)

    def settle(self) -> None:
        """Keep what the step wrote to whole tensors, and hand out new ones from now on."""
        # What is written to a gathered parameter, one tensor, after a second read is kept below.
        again = {(id(h.value), h.changes) for h in self._handed.values() if h.value is h.parameter}
        self._settled = [s for s in self._settled if (id(s.handed_of[0]), s.changes) not in again]
        late = next((one for one in self._settled if one.is_written), None)
        if late is not None:
            self._forget()
            raise PlanError("LP408", _written_late(self._name_of(*late.handed_of)))
        if handed := list(self._handed.values()):
            self._handed.clear()
            self._steps += 1
            self._keep_writes(handed)
            self._compares = self._steps < _COMPARED
            if self._in_step:
                self._settled += map(_Settled, handed)

    def _tell_kept(self) -> None:
        """Warn where an attribute keeps a whole tensor that the step before this one has read."""
        # Nearly always none: what no attribute keeps goes with the graph of its step.
        old = {id(v): s for s in self._wholes_of_last if (v := s.value()) is not None}
        self._wholes_of_last = [s for s in self._settled if s.value() is not None]
        for part in self._module.modules() if old else ():
            for attribute, held in vars(part).items():
                kept = leaves_of(held) if is_container(held) and len(held) <= _SHORT else [held]
                for one in filter(None, (old.get(id(v)) for v in kept)):
                    warnings.warn(_kept(self._name_of(*one.handed_of), attribute), stacklevel=2)

    def _forget(self) -> None:
        """Drop what was handed out: the end of the step is not to refuse another one instead."""
        self._handed.clear()
        self._settled.clear()

    def _name_of(self, *held: Tensor) -> str:
        return next(n for n, p in self._named() if any(p is h for h in held))

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Surrounds a pipelined step: what any stage reads of another one is refused on all.

        Until then other values stand in, as the stages wait for each other.

        Raises:
            PlanError: On every stage, after the first step.

        **Communicates**: a text over the ``pp`` axis, the first time.
        """
        if not self._refusals.waits:
            yield
            return
        try:
            yield
        except NonFiniteError:  # on every stage: perhaps of the values that stood in
            self._agree()
            raise
        self._agree()

    def _agree(self) -> None:
        self._refusals.waits = False
        group = self._mesh.group("pp")
        found: list[Any] = [None] * group.size()
        dist.all_gather_object(found, self._refusals.text, group=group)
        text = next((text for text in found if text), None)
        if text is not None:
            raise PlanError("LP408", text) from None

    def read(self, parameter: Any, shard: Tensor | None = None) -> Any:
        """Return the whole of a sharded parameter; anything else as it is.

        Args:
            parameter: As the module holds it.
            shard: What it was at the beginning, if FSDP may have gathered it since.
        """
        is_whole = not isinstance(parameter, DTensor)
        if self.in_hooks:  # which FSDP may have gathered: the shard has the gradient
            return shard if is_whole and shard is not None else parameter
        if is_whole and not (
            # And not this rank's part of it, which stands there inside of its module's forward.
            shard is not None
            and self._is_gathered(shard)
            and isinstance(parameter, nn.Parameter)
            and parameter.shape == shard.shape
        ):
            return parameter
        known = self._handed.get(id(parameter))
        grad = torch.is_grad_enabled() and parameter.requires_grad
        if known is not None and (is_whole or known.needs_grad == grad):
            return known.value
        if known is not None:  # what is handed out now has what was written to that one
            self._keep_writes([self._handed.pop(id(parameter))])
        if is_whole:
            found: Tensor = parameter
        elif grad:
            found = self.wholes.of(parameter, self._average(parameter))
        else:
            with torch.no_grad():
                found = whole(parameter.detach()).detach()
        shard = parameter if shard is None else shard
        value = found if is_whole else as_parameter(found, parameter, shard)
        memory, changes = found.detach(), count_of_changes(found)
        self._handed[id(parameter)] = _Handed(parameter, shard, value, memory, changes, grad)
        return found

    def listed(self, parameter: Any, shard: Tensor | None = None) -> Any:
        """Return what a list of parameters gives; see Note [Lists in manual optimization]."""
        if self.in_hooks or self._module.automatic_optimization or parameter is None:
            return self.read(parameter, shard)
        return self._sharding.shard_of(parameter)

    def absent(self, about: About) -> Tensor:
        """Return what stands for a parameter of another stage; if it is tied to one here, that."""
        place = self._tied.get(about.name)
        if place is not None:
            found: Tensor = place[0].here(place[1])
            return found
        if self._view is not None:
            return self._view.absent(about)
        return absent_parameter(about, self._device, self._refusals)

    def _in_block(self, fqn: str) -> str:
        """Return the FQN of a module inside a block of a pipeline stage, else nothing."""
        if self._mesh.sizes.pipeline == 1 or self._blocks.isdisjoint(_above(f"{fqn}.")):
            return ""
        return fqn

    def refuse_part(self, fqn: str, name: str) -> None:
        """Refuse a read of one block's parameter, which other stages cannot make alike."""
        text = module_refusal(fqn, name)
        if not self._refusals.waits:
            raise PlanError("LP408", text)
        self._refusals.text = self._refusals.text or text

    def _average(self, parameter: DTensor) -> Callable[[Tensor], Tensor]:
        """Return how the gradient of a whole parameter becomes one that is counted once."""
        group = self._mesh.data_group
        # An unsharded parameter of FSDP has no data axis: FSDP averages its gradient later.
        averages = self._is_gathered(parameter) and group.size() > 1
        factor = 1 / group.size() if averages else 1.0
        if id(parameter) in self._partial:  # every tensor rank has all of it, and they are summed
            factor /= self._mesh.sizes.tensor

        def average(grad: Tensor) -> Tensor:
            if averages:
                grad = grad.contiguous().clone()
                dist.all_reduce(grad, group=group)
            return grad if factor == 1 else grad * factor

        return average

    def _is_gathered(self, parameter: Any) -> bool:
        """Return whether FSDP gathers it for its forward, perhaps ahead of it."""
        axes = parameter.device_mesh.mesh_dim_names or ()
        return any(axis.startswith("dp_") for axis in axes)

    def _named(self) -> Iterator[tuple[str, Any]]:
        for prefix, child in self._module.named_modules():
            for name, parameter in dict.items(child.__dict__["_parameters"]):
                yield f"{prefix}.{name}", parameter

    @torch.no_grad()
    def _keep_writes(self, handed: Sequence[_Handed]) -> None:
        """Copy what the step wrote to whole tensors into the parameters.

        A write through ``.data`` is not counted by torch, so that values are compared: in the first
        steps, and always if there was one or if they were read without gradients.
        """
        compared = [h.restore_memory() or self._compares or not h.needs_grad for h in handed]
        uncounted = [h for h, c in zip(handed, compared, strict=True) if c and not h.is_counted]
        differ = [torch.ne(*h.parts()).any() for h in uncounted]
        flags = torch.stack(differ).tolist() if differ else []
        found = [h for h, differs in zip(uncounted, flags, strict=True) if differs]
        for one in [h for h in handed if h.is_counted] + found:
            if one.shard is one.parameter and self._is_gathered(one.parameter):
                self._forget()
                raise PlanError("LP408", _written(self._name_of(one.parameter)))
            self._write(one, one.is_counted)
        if found:
            self._steps = 0

    def _write(self, handed: _Handed, counted: bool) -> None:
        """Copy a value into this rank's part, and into what FSDP has gathered of it."""
        for held in {id(p): p for p in (handed.parameter, handed.shard)}.values():
            if held is handed.value:
                continue
            mine, new = local_part(held), local_part(shard_of(handed.value.detach(), held))
            if counted:
                mine.copy_(new)
            else:
                mine.data.copy_(new)  # as the user did, without telling autograd

    def _watch(self, watched: Sequence[tuple[str, nn.Module]]) -> None:
        stubs = {fqn for fqn, module in watched if isinstance(module, StageStub)}
        # Of a module its own parameters, of a stub all that the block has.
        known: dict[tuple[str, bool], dict[str, About]] = defaultdict(dict)
        for name, about in self.known.items():
            owner, _, last = name.rpartition(".")
            if not about.is_buffer:
                known[owner, False][last] = about
                for above in stubs.intersection(_above(name)):
                    known[above, True][name.removeprefix(f"{above}.")] = about
        for fqn, module in watched:
            held, is_stub = module.__dict__["_parameters"], isinstance(module, StageStub)
            own = known[fqn, is_stub]
            absent = {name: about for name, about in own.items() if is_stub or name not in held}
            if absent or held:
                kind = _WatchedInPart if absent else _Watched
                block = "" if is_stub else self._in_block(fqn)
                shown = module.__dict__["_parameters"] = kind(held, self, absent, block)
                for name in held:
                    first = own[name].name if name in own else ""
                    if first in self._tied:
                        self._tied[first] = shown, name

    def _outside(self, inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.active and (self._handed or self._settled):
                self.settle()  # what the forward has to see
            self._depth += 1
            self.active = False
            try:
                return inner(*args, **kwargs)
            finally:
                self._depth -= 1
                self.active = (self._in_step or self.in_hooks) and not self._depth

        return forward


class _Watched(dict[str, Any]):
    """The parameters of a module; in a user's step it answers as `ParameterReads` says.

    Copies of the module get a plain dict.
    """

    def __init__(
        self,
        held: Mapping[str, Any],
        reads: ParameterReads,
        absent: Mapping[str, About],
        block: str,
    ) -> None:
        super().__init__(held)
        self._reads, self._absent, self._block = reads, absent, block
        # As FSDP puts other tensors in these places while it has gathered them.
        self._shards = {name: p for name, p in held.items() if isinstance(p, DTensor)}

    def __reduce__(self) -> Any:
        return dict, (dict(self.items() if self._reads.in_hooks else self),)

    def __getitem__(self, name: str) -> Any:
        if not self._reads.active:
            return super().__getitem__(name)
        if self._block and not self._reads.in_hooks:
            self._reads.refuse_part(self._block, name)
        found = self._below(name)
        if found is not None:
            return found
        return self.here(name)

    def items(self) -> Any:
        """Return names and parameters, those of other stages too."""
        if not self._reads.active:
            return super().items()
        held = {n: self._reads.listed(p, self._shards.get(n)) for n, p in super().items()}
        absent = {n: self._reads.absent(about) for n, about in self._absent.items()}
        return {**held, **absent}.items()

    def values(self) -> Any:
        """Return the parameters as `items` does."""
        return dict(self.items()).values()

    def here(self, name: str) -> Any:
        """Return a parameter that this rank holds."""
        return self._reads.read(super().__getitem__(name), self._shards.get(name))

    def _below(self, name: object) -> Any:
        about = self._absent.get(name) if isinstance(name, str) else None
        if about is not None:
            return self._reads.absent(about)
        prefix = f"{name}."
        known = self._absent.items()
        parts = {n.removeprefix(prefix): a for n, a in known if n.startswith(prefix)}
        return AbsentPart(parts, self._reads.absent) if parts else None


class _WatchedInPart(_Watched):
    """Parameters of which other stages hold some; others need no look at every name."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            return True
        return self._reads.active and self._below(name) is not None


def _written(fqn: str) -> str:
    return (
        f"the step writes to {fqn}, but data parallelism may already have gathered its shards "
        "into a copy, which the write does not change. Write to weights in on_train_batch_start "
        "or on_train_batch_end, or use data_parallel_size=1."
    )


def _written_late(fqn: str) -> str:
    return (
        f"the step writes to {fqn} through a tensor that it read before it called a module or an "
        "optimizer. On a mesh this tensor is a copy, so the write does not change the weight. Read "
        "the weight again directly before you write to it."
    )


def _kept(name: str, attribute: str) -> str:
    return (
        f"the attribute {attribute} holds the weight {name}, which an earlier step has read. On "
        "this mesh each step reads a new tensor, so the stored one has old values. Store the name "
        f"instead, and read the weight in each step: dict(self.named_parameters())[{name!r}]."
    )


def _above(name: str) -> list[str]:
    """Return the FQNs of the modules in which a parameter lies, from the root on."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def _stubs_of_stages(module: nn.Module, stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Module]]:
    """Give the stubs that a stage sees where the model rests with a part of the rank."""
    names = {id(child): name for name, child in module.named_modules()}
    for stage in stages:
        for owner, name, child in stage.slots:
            if isinstance(child, StageStub):
                yield f"{names[id(owner)]}.{name}".removeprefix("."), child


def called_by_steps(module: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Return the modules whose forward a step may call: children of what the blocks lie in, and
    what lists among these hold.
    """
    above = {""}
    for block in blocks:
        above.update(_above(block))
    found: dict[int, nn.Module] = {}
    for name in above:
        found |= {id(child): child for child in _callable_children(module.get_submodule(name))}
    return list(found.values())


def _callable_children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callable_children(child)
        elif not isinstance(child, StageStub) and not is_plain_metric(child):
            yield child
