"""The whole, plain module in the place of a divided one, for a while: `MeshStrategy.whole`.

Hooks see a divided module as if it were whole, and communicate for every value. Code that needs
many values, or a forward on one rank, as for samples, statistics, pruning or averages, gathers them
once instead. The user's module gets the form that it has before and after a run; see
`module_forms.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.data.equal_copies import checksum_of
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.rng import collect_random_states, restore_random_states
from lightning_par.errors import ConfigurationError, either
from lightning_par.strategies.components.module_forms import broadcast_state
from lightning_par.strategies.components.state_map import named_tensors
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.absent_parameter import user_line

__all__ = ["whole_module"]

_ON = ("every", "rank 0")


@contextmanager
def whole_module(
    model: ParallelModel | None,
    processes: MeshProcesses,
    module: pl.LightningModule | None,
    part: nn.Module | None,
    on: str,
) -> Iterator[Any]:
    """Give the user's module its whole form inside; see `MeshStrategy.whole`.

    Args:
        model: The model on its mesh; None: there is none yet.
        processes: The processes of the run.
        module: The user's LightningModule, which a Trainer has taken.
        part: What is yielded: a module in `module`; None: `module` itself.
        on: On which ranks: ``"every"`` or ``"rank 0"``; the others get None.

    Raises:
        ConfigurationError: It is called in a step, or for a module of another run; or it is left
            with other tensors than before, or with other values on each rank.

    **Communicates**: all-gathers of every shard and one gather over the stages, then, for every
    rank, a broadcast of all tensors; at the end, checksums, and what rank 0 has written.
    """
    if on not in _ON:
        raise ConfigurationError("LP902", f"whole(on={on!r}): use {either(_ON)}.")
    assert module is not None
    name, is_here = _name_of(module, part), on == "every" or processes.rank == 0
    # It is whole already: before and after a run, or inside of another `whole`.
    if model is None or model.module is not module or model.forms.is_whole:
        yield module.get_submodule(name) if is_here else None
        return
    if model.steps.is_in_step:
        raise ConfigurationError(
            "LP420",
            f"whole(){user_line()} is called inside a step, where each rank computes with its "
            "part of the module. Call it in a hook between two steps, such as on_train_batch_end "
            "or on_validation_epoch_end. A step can read a weight without whole(): it gets the "
            "whole weight.",
        )
    model.steps.reads.agree(f"strategy.whole(on={on!r})")
    with model.steps.reads.paused():
        # Before the gather, so that a rank which calls it alone can be named.
        processes.meet()
        loan = _Loan(model, processes, is_here=is_here, from_first=on != "every")
        try:
            yield module.get_submodule(name) if is_here else None
            # Not in `finally`: after an exception ranks may be apart, and this communicates.
            written = loan.find_writes()
        finally:
            loan.end()
        loan.keep(written)


def _name_of(module: nn.Module, part: nn.Module | None) -> str:
    """Return the FQN of a module in the user's module."""
    names: dict[int, str] = {id(each): name for name, each in module.named_modules()}
    name = names.get(id(module if part is None else part))
    if name is None:
        raise ConfigurationError(
            "LP203",
            f"whole({type(part).__name__}){user_line()} was called with a module that "
            f"{type(module).__name__} does not contain. Pass a submodule of "
            f"{type(module).__name__}; or call whole() without an argument, which gathers all of "
            "it.",
        )
    return name


class _Loan:
    """The whole form that a module has for a while, on the ranks that want it.

    Args:
        model: The model on its mesh.
        processes: The processes of the run.
        is_here: Whether this rank gets the whole form.
        from_first: Whether what rank 0 writes is kept, and not what every rank writes alike.
    """

    def __init__(
        self, model: ParallelModel, processes: MeshProcesses, *, is_here: bool, from_first: bool
    ) -> None:
        self._model, self._processes = model, processes
        self._is_here, self._from_first = is_here, from_first
        module, modes, state = model.module, _gather_modes(model), model.gather_tensors()
        if not from_first and processes.world_size > 1:
            state = broadcast_state(state, None, processes.device)
        # A backward inside must not add to gradients for which an optimizer waits.
        # Of the parallel form, whose parameters are out of sight inside.
        self._gradients = [(p, p.grad) for p in module.parameters()]
        self._held: dict[str, Tensor] = {}
        if not is_here:
            return
        for parameter, _ in self._gradients:
            parameter.grad = None
        model.forms.show_whole(state)
        self._modes = [(each, modes[name]) for name, each in module.named_modules()]
        self._restore_modes()
        self._held = named_tensors(module)
        # Checksums: a second copy of all weights would not fit.
        self._before = _describe(self._held)

    def _restore_modes(self) -> None:
        for each, training in self._modes:
            each.training = training

    def find_writes(self) -> dict[str, Tensor]:
        """Return what has been written, as it is now.

        Raises:
            ConfigurationError: On every rank; see `whole_module`.
        """
        now = named_tensors(self._model.module) if self._is_here else {}
        about, before = _describe(now), self._before if self._is_here else {}
        found = {name: told for name, told in about.items() if before.get(name) != told}
        shapes = {name: told[0] for name, told in about.items()}
        is_other = shapes != {name: told[0] for name, told in before.items()}
        everywhere: list[Any] = [(is_other, found)] * self._processes.world_size
        if len(everywhere) > 1:
            dist.all_gather_object(everywhere, everywhere[0])
        _check_writes(everywhere[:1] if self._from_first else everywhere)
        # Copies: a whole tensor out of use loses its memory.
        return {name: now[name].detach().clone() for name in found}

    def end(self) -> None:
        """Give the module its parallel form, with the values that it had before."""
        if not self._is_here:
            return
        # Before the exchange: it compares tensors by identity.
        _put_back(self._model.module, self._held)
        self._model.forms.show_parallel()
        self._model.forms.free_whole()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._from_first:  # other ranks have seen no change of them
            self._restore_modes()

    def keep(self, written: Mapping[str, Tensor]) -> None:
        """Copy what has been written into the parts of all ranks."""
        model, device = self._model, self._processes.device
        if self._from_first and self._processes.world_size > 1:
            drawn: Any = {"": collect_random_states(device)}
            # With the random state of rank 0, which alone has drawn inside.
            found = broadcast_state({**written, **drawn}, None, device)
            restore_random_states(found.pop(""), device)
            written = found
        parameters = model.resolved.canonical
        model.states.copy_tensors(
            model.module,
            # Marked as what they are, by which `copy_tensors` finds its target.
            {n: nn.Parameter(t, False) if n in parameters else t for n, t in written.items()},
        )


def _gather_modes(model: ParallelModel) -> dict[str, bool]:
    """Return FQN -> whether the module is in training mode, of the modules of all stages.

    **Communicates**: these, over the ``pp`` axis.
    """
    named = model.module.named_modules()
    own = {name: each.training for name, each in named if not isinstance(each, StageStub)}
    stages: list[Any] = [own] * model.mesh.sizes.pipeline
    if len(stages) > 1:
        dist.all_gather_object(stages, own, group=model.mesh.group("pp"))
    return {name: training for stage in stages for name, training in stage.items()}


def _describe(named: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
    """Return name -> shape and dtype, and a checksum, of every tensor."""
    return {n: (f"{tuple(t.shape)} {t.dtype}", checksum_of(t)) for n, t in named.items()}


def _check_writes(everywhere: list[tuple[bool, dict[str, tuple[str, int]]]]) -> None:
    """Refuse what has been written, by rank, if it fits no parts or differs."""
    others, writes = zip(*everywhere, strict=True)
    if any(others):
        raise ConfigurationError(
            "LP420",
            f"inside whole(){user_line()} rank {others.index(True)} changed names, shapes or "
            "dtypes of parameters or buffers. Write values into the existing tensors, as in "
            "p.data.mul_(mask); or change the module in __init__ or configure_model.",
        )
    names = {name for found in writes for name in found}
    differ = sorted(n for n in names if len({found.get(n) for found in writes}) > 1)
    if differ:
        raise ConfigurationError(
            "LP420",
            f"inside whole(){user_line()} the ranks wrote different values to {len(differ)} "
            f"tensors, the first of which is {differ[0]}. Write the same values on every rank; or "
            "use whole(on='rank 0'), where only rank 0 writes and the other ranks copy its values.",
        )


def _put_back(module: nn.Module, held: Mapping[str, Tensor]) -> None:
    """Undo that other tensors were assigned to parameters and buffers."""
    for name, tensor in held.items():
        owner, _, leaf = name.rpartition(".")
        part = module.get_submodule(owner)
        kind = part._parameters if isinstance(tensor, nn.Parameter) else part._buffers
        if kind.get(leaf) is not tensor:
            kind[leaf] = tensor  # type: ignore[assignment]
