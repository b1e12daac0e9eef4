"""A step on one process of a model that is too large to be whole on rank 0.

Note [By blocks]: rank 0 takes the step with a copy of the module whose parameters have no memory.
Before an operator reads one, in the forward or in the backward, all ranks gather it to rank 0,
where those that were not read for the longest time give up their memory first. Blocks keep their
inputs only, and compute their forward again in the backward. Once the gradient of a parameter is
known, it is compared with that of the mesh, and let go of. So rank 0 holds few parameters at a time
and no gradient, at the price of gathering each parameter some three times.

The mesh takes forward and backward again after the step, without dropout, with the weights it has
then, and keeps its gradients in place while rank 0 asks for them. So nothing of the step itself has
to be copied. What follows the backward, which are hooks and the update, is not compared. A step of
validation, test or prediction has no backward: rank 0 takes it so, before the mesh does.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.dtensor import like_parameter
from lightning_par.engine.activations.checkpointing import recompute
from lightning_par.engine.memory.measured import available_memory
from lightning_par.engine.tensor_tree import broadcast_object
from lightning_par.observe.compare import GradientDifferences
from lightning_par.observe.report import StepRecord
from lightning_par.strategies.proof.gathering import (
    Form,
    gather_buffers,
    gather_forms,
    gather_tensors,
    global_loss,
)
from lightning_par.strategies.proof.judge import agree, CannotProveError, Differs, Judge
from lightning_par.strategies.proof.second_step import MeshStep
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.upstream.dispatch import operator_schema, TorchDispatchMode
from lightning_par.upstream.pytree import tree_leaves
from lightning_par.upstream.tensor import storage_key

__all__ = ["GatheredWhenRead", "TooLongError", "compare_by_blocks", "evaluate_by_blocks"]

_Kind = Literal["value", "gradient"]
_WATCHED = 2**26
"""Bytes of a tensor on the CPU from which on the free memory is looked at first."""
_KEPT_FREE = 2**29
"""Bytes that have to stay free then."""
_WORK = 4 / 3
"""What forward and backward with recomputation cost, in units of those without."""


class TooLongError(CannotProveError):
    """One process would need too long.

    Args:
        seconds: How long, about.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds

    def __str__(self) -> str:
        return (
            f"one process would need about {self.seconds / 60:.0f} minutes for its batch. The "
            "step is compared later, when this time is a small enough share of the time of the run"
        )


def compare_by_blocks(
    step: MeshStep, judge: Judge | None, longest: float = math.inf
) -> Differs | CannotProveError | None:
    """Take a batch again on the mesh, and by blocks on rank 0; see Note [By blocks].

    Args:
        step: From `MeshStep.rehearsal`.
        judge: On rank 0: compares; its step begins with no tensors.
        longest: Seconds that it may take; they are forecast from those of the mesh.

    Returns:
        On every rank: how loss or gradients differ, or why that is not known; None: they are equal.

    **Communicates**: as forward and backward do, then every parameter and gradient to rank 0, one
    by one, and the verdict.
    """
    if not step.can_repeat:
        return CannotProveError(
            "the model is compared by blocks only, for which forward and backward are repeated "
            "without dropout. This is not possible in manual optimization, with compressed "
            "gradients or compiled blocks"
        )
    model = step.model
    # Before the batch, which may change buffers.
    forms, buffers, begin = gather_forms(model), gather_buffers(model), monotonic()
    with step.taken() as weighted:
        loss = global_loss(model, weighted, step.device)
        seconds = _WORK * model.mesh.sizes.world_size * (monotonic() - begin)
        model.sharding.release()
        pieces = _Pieces(model)
        if judge is None:
            pieces.serve()

        def judged() -> Differs | None:
            assert judge is not None
            try:
                if seconds > longest:
                    raise TooLongError(seconds)
                return _Reference(judge, pieces, forms, buffers).judge(loss)
            finally:
                pieces.end()

        return agree(judged)  # type: ignore[no-any-return]


def evaluate_by_blocks(
    model: ParallelModel,
    judge: Judge | None,
    step: Callable[[Judge], Any],
    longest: float = math.inf,
) -> Any:
    """Run an evaluation step on rank 0, where parameters are gathered while operators read them.

    Args:
        model: The model on the mesh.
        judge: On rank 0: its step begins with no tensors, and gets them here.
        step: Runs the step, on rank 0.
        longest: Seconds after which no operator reads a parameter any more.

    Returns:
        On rank 0 what `step` returns; elsewhere None.

    **Communicates**: the forms of parameters and the buffers, then every parameter that the step
    reads to rank 0, one by one.
    """
    model.sharding.release()
    forms, buffers, pieces = gather_forms(model), gather_buffers(model), _Pieces(model)
    if judge is None:
        pieces.serve()
        return None
    try:
        parameters = _all_without_memory(judge, forms)
        start = replace(judge.given.start, tensors={**buffers, **parameters})
        judge.given = replace(judge.given, start=start)
        with _reading(parameters, pieces, longest):
            return step(judge)
    finally:
        pieces.end()


class _Pieces:
    """Parameters and gradients of the mesh, whole, one at a time.

    Args:
        model: The model on the mesh, whose gradients are in place.
    """

    def __init__(self, model: ParallelModel) -> None:
        self._model, self._world = model, dist.group.WORLD
        canonical = model.resolved.canonical
        self._named = defaultdict[str, list[tuple[str, nn.Parameter]]](list)
        for name, parameter in model.module.named_parameters():
            self._named[canonical.get(name, name)].append((name, parameter))

    def serve(self) -> None:
        """Take part in what rank 0 asks for, until it asks for nothing any more."""
        while asked := self._exchange(None):
            self._gather(*asked)

    def ask(self, kind: _Kind, name: str) -> Tensor | None:
        """Return a parameter or its gradient on rank 0, on the CPU; None: there is none.

        Args:
            kind: Which of both.
            name: Of the parameter, as one process lists it.
        """
        hidden, dist.group.WORLD = dist.group.WORLD, self._world
        try:
            self._exchange((kind, name))
            return self._gather(kind, name).get(name)
        finally:
            dist.group.WORLD = hidden

    def end(self) -> None:
        """Let the other ranks go on; rank 0 calls it."""
        self._exchange(())

    def _exchange(self, asked: Any) -> Any:
        assert self._world is not None
        return broadcast_object(asked, 0, self._world)

    def _gather(self, kind: _Kind, name: str) -> Mapping[str, Tensor]:
        model, held = self._model, self._named.get(name, [])
        tensors = ((n, p if kind == "value" else p.grad) for n, p in held)
        return gather_tensors(tensors, model.resolved.canonical, model.mesh)


class GatheredWhenRead(TorchDispatchMode):
    """Inside, parameters have memory only while operators read them, and some time longer.

    Args:
        parameters: Name -> parameter without memory, see `without_memory`.
        value_of: Returns the value of a parameter.
        room: Bytes that all parameters may have at once; twice the largest one is enough for an
            operator that reads a weight and its bias. One that reads more of them gets more.

    Attributes:
        peak: The most bytes that they had.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        value_of: Callable[[str], Tensor],
        room: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters, self._value_of, self._room = parameters, value_of, room
        self._names = {storage_key(p.untyped_storage()): name for name, p in parameters.items()}
        self._held = dict[str, int]()  # in the order in which they were read
        self._written = set[str]()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = [name for t in tree_leaves((args, kwargs)) if (name := self._name_of(t))]
        for name in read:
            self._bring(name, read)
        if read and operator_schema(func).is_mutable:  # what it may write to keeps its memory
            self._written.update(read)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                _refuse_to_fill(tensor)
        return out

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for name in self._held:
            self._parameters[name].untyped_storage().resize_(0)
        self._held.clear()

    def _name_of(self, value: Any) -> str | None:
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None
        return self._names.get(storage_key(value.untyped_storage()))

    def _bring(self, name: str, read: Sequence[str]) -> None:
        if name in self._held:
            self._held[name] = self._held.pop(name)
            return
        parameter = self._parameters[name]
        size = parameter.numel() * parameter.element_size()
        for other in [n for n in self._held if n not in read and n not in self._written]:
            if sum(self._held.values()) + size <= self._room:
                break
            self._parameters[other].untyped_storage().resize_(0)
            del self._held[other]
        parameter.untyped_storage().resize_(size)
        # Through `.data`, as autograd must not see a change of what it has saved.
        parameter.data.copy_(self._value_of(name))
        self._held[name] = size
        self.peak = max(self.peak, sum(self._held.values()))


class _Reference:
    """The batch on one process, on rank 0, against gradients of the mesh.

    Args:
        judge: Compares.
        pieces: Of the mesh.
        forms: Name -> form of every parameter.
        buffers: Name -> value of every buffer.
    """

    def __init__(
        self,
        judge: Judge,
        pieces: _Pieces,
        forms: Mapping[str, Form],
        buffers: Mapping[str, Tensor],
    ) -> None:
        self._pieces, self._caller = pieces, judge
        self._parameters = _all_without_memory(judge, forms)
        self._tensors: dict[str, Tensor] = {**buffers, **self._parameters}
        trains = frozenset(name for name, form in forms.items() if form.is_trained)
        start = replace(judge.given.start, tensors=self._tensors, trains=trains)
        self._judge = replace(judge, given=replace(judge.given, start=start, prepare=self._prepare))
        self._differences = GradientDifferences("gradient", self._judge.tolerance)
        self._scaler, self._overflows = getattr(judge.plugin, "scaler", None), False

    def judge(self, loss: float) -> Differs | None:
        """Return how the mesh differs; None: it does not.

        Args:
            loss: Of the global batch, on the mesh.

        Raises:
            CannotProveError: That is not known.
        """
        pieces, trained = self._pieces, self._parameters
        with _reading(trained, pieces):
            self._judge.take_again(self._tensors, drops=False)
        left = [name for name, p in trained.items() if p.requires_grad]
        for name in [name for name in left if name not in self._differences]:
            self._add(name, None)
        if self._overflows:
            raise CannotProveError("gradients overflow with the present scale of the loss")
        loss *= 1.0 if self._scaler is None else self._scaler.get_scale()
        found = self._judge.judge_gradients(StepRecord(losses=[loss]), self._differences)
        self._caller.difference = self._judge.difference
        return found

    def _prepare(self, module: pl.LightningModule) -> None:
        """Let the blocks of the copy keep their inputs only, and compare each gradient at once."""
        parts = dict(module.named_modules())
        for name in self._caller.model.resolved.block_names:
            if name in parts and not _keeps_numbers(parts[name]):
                recompute(parts[name], "full")
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._compare, name))

    def _compare(self, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        self._add(name, gradient.cpu())

    def _add(self, name: str, wanted: Tensor | None) -> None:
        got = self._pieces.ask("gradient", name)
        if self._scaler is not None:
            found = (each for each in (got, wanted) if each is not None)
            self._overflows |= not all(bool(each.isfinite().all()) for each in found)
        self._differences.add(name, got, wanted)


def _reading(
    parameters: Mapping[str, nn.Parameter], pieces: _Pieces, longest: float = math.inf
) -> GatheredWhenRead:
    """Return the mode in which operators read parameters of the mesh, for so many seconds."""
    room, begin = 2 * max((p.nbytes for p in parameters.values()), default=0), monotonic()

    def value_of(name: str) -> Tensor:
        if monotonic() - begin > longest:
            minutes = f"{longest / 60:.0f} minutes"
            raise CannotProveError(f"one process needs more than {minutes} for its batch")
        # Where memory is short this fails alone, before the other ranks wait in the gather.
        torch.empty(parameters[name].nbytes, dtype=torch.uint8, device=parameters[name].device)
        value = pieces.ask("value", name)
        assert value is not None
        return value

    return GatheredWhenRead(parameters, value_of, room)


def _all_without_memory(judge: Judge, forms: Mapping[str, Form]) -> dict[str, nn.Parameter]:
    named = judge.skeleton.module.named_parameters()
    return {name: _without_memory(p, forms[name], judge.device) for name, p in named}


def _without_memory(like: nn.Parameter, form: Form, device: torch.device) -> nn.Parameter:
    """Return a parameter whose storage has no bytes: only a `GatheredWhenRead` lets it be read."""
    data = torch.empty(form.shape, dtype=form.dtype, device=device)
    parameter = like_parameter(like, data)
    parameter.untyped_storage().resize_(0)
    return parameter


def _keeps_numbers(block: nn.Module) -> bool:
    """Whether a block has buffers that a forward may change, and read when it runs again."""
    parameters = {name for name, _ in block.named_parameters(remove_duplicate=False)}
    # `keep_vars`, as a detached parameter counts as one that was read.
    kept = block.state_dict(keep_vars=True).items()
    buffers = [value for name, value in kept if name not in parameters]
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in buffers)


def _refuse_to_fill(tensor: Tensor) -> None:
    """Raise before the host's memory ends, where the kernel would end the process.

    Raises:
        MemoryError: Little is free.
    """
    if tensor.nbytes >= _WATCHED:
        free = available_memory()
        if free is not None and free < _KEPT_FREE:
            raise MemoryError(f"{free / 2**30:.1f} GiB are free on the host of rank 0")
