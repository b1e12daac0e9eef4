"""What a step does after the blocks of a pipeline, and is seen on other ranks: what it writes, and
the modes and flags in which it leaves modules and parameters.

Only the last stage gets to the code of a step behind the model call. From the end of the last block
on, the last stage of the first replica stands in the place of rank 0: Lightning tells the step that
its rank is 0, so that it prints and writes files there; and what it calls on a logger is sent to
rank 0, which has the logger.

Note [Modes of a step]: `eval()` and `train()` after the model are called on the last stage only. So
every micro-batch begins with the modes that the batch began with, and in the end all stages have
those of the last one. There a stub stands for a block of another stage: its mode is that of all
modules in the block, unless the block has it anyway. The same holds for `requires_grad` of
parameters: where the step has set it, all stages have what the last one saw last. It counts from
the backward on, as in one process, where autograd adds no gradient to a parameter that was frozen
after the forward.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, ExitStack
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn, Tensor

from lightning_par.engine.pipeline.stage import MicroBatchState, Stage, StageStub
from lightning_par.errors import ConfigurationError
from lightning_par.upstream.functions import replaced

__all__ = ["NO_RANK", "StepWrites", "logger_like"]

NO_RANK = 1 << 30
"""What `rank_zero_only` takes a process for while nothing that a step writes may get out."""


class _Modes(NamedTuple):
    """What the last stage tells: which modules are in evaluation, which are stubs there, and the
    `requires_grad` that the step has set.
    """

    off: list[str]
    stubs: list[str]
    flags: dict[str, bool]


class _FirstNames(dict[str, str]):
    """The first FQNs of parameters, which may be tied, by their names in one module.

    Args:
        prefix: FQN of the module.
        known: What is known of the parameters of all stages.
    """

    def __init__(self, prefix: str, known: Mapping[str, Any]) -> None:
        self._prefix, self._of_all = prefix, known

    def __missing__(self, name: str) -> str:
        fqn = f"{self._prefix}.{name}".removeprefix(".")
        return self.setdefault(name, self._of_all[fqn].name if fqn in self._of_all else fqn)


class _ModesOfStages:
    """Keeps the modes of modules alike on all stages; see Note [Modes of a step]."""

    def __init__(self, module: nn.Module, stages: Sequence[Stage]) -> None:
        self._module, self._stages = module, stages
        self._views: list[dict[str, nn.Module]] = []  # of each stage, by FQN
        # Modules that hold parameters, of each stage, and the first names of what they hold.
        self._holders: list[list[tuple[nn.Module, _FirstNames]]] = []
        self._before: list[tuple[nn.Module, bool]] = []
        self._known: dict[str, Any] = {}  # of parameters of all stages, by their first names
        self._flags: dict[str, bool] = {}

    def begin(self) -> None:
        """Note the modes before a step."""
        if not self._views:
            for stage in self._stages:
                with stage.hold(MicroBatchState()):
                    self._views.append(dict(self._module.named_modules()))
            known = self._stages[0].known
            held = ([(n, m) for n, m in view.items() if m._parameters] for view in self._views)
            self._holders = [[(m, _FirstNames(n, known)) for n, m in each] for each in held]
            every = known.values()
            self._known = {about.name: about for about in every if not about.is_buffer}
        self._before = [(part, part.training) for view in self._views for part in view.values()]
        own = {name: p.requires_grad for name, p in self._parameters()}
        self._set_known(own)
        self._flags = self._flags_known() | own

    def restore(self) -> None:
        """Let a micro-batch begin with these."""
        for part, mode in self._before:
            if part.training != mode:
                part.training = mode
        self._set_flags(self._flags)

    def left(self) -> _Modes | None:
        """Return what a step has left on the last stage; None on others."""
        if not self._views or not self._stages[-1].is_last:
            return None
        named = self._views[-1].items()
        stubs = [name for name, part in named if isinstance(part, StageStub)]
        own = {name: p.requires_grad for name, p in self._parameters(slice(-1, None))}
        flags = (self._flags_known() | own).items()
        changed = {name: flag for name, flag in flags if self._flags.get(name) != flag}
        off = [name for name, part in named if not part.training]
        return _Modes(off, stubs, changed)

    def take(self, modes: _Modes | None) -> None:
        """Have the modes of the last stage.

        Args:
            modes: From `left` of that stage.
        """
        if modes is None:
            return
        off, inside = {*modes.off}, tuple(f"{name}." for name in modes.stubs)
        for stage, view in zip(self._stages, self._views, strict=True):
            for name, part in () if stage.is_last else view.items():
                if part.training == (name in off) and not name.startswith(inside):
                    if name in modes.stubs:
                        part.train(name not in off)
                    else:
                        part.training = name not in off
        self._set_flags(self._flags | modes.flags)

    def _flags_known(self) -> dict[str, bool]:
        return {name: about.requires_grad for name, about in self._known.items()}

    def _set_known(self, flags: Mapping[str, bool]) -> None:
        for name in self._known.keys() & flags.keys():
            self._known[name].requires_grad = flags[name]

    def _set_flags(self, flags: Mapping[str, bool]) -> None:
        """Set `requires_grad` of what this rank holds, and what it knows of the others."""
        self._set_known(flags)
        for name, parameter in self._parameters():
            flag = flags.get(name, parameter.requires_grad)
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)

    def _parameters(self, stages: slice = slice(None)) -> Iterator[tuple[str, nn.Parameter]]:
        """Give the parameters that modules of some stages of this rank hold now, by first names."""
        for part, first_names in chain(*self._holders[stages]):
            # As in a step a module may list those of other stages.
            for name, parameter in dict.items(part._parameters):
                if parameter is not None:
                    yield first_names[name], parameter


class StepWrites:
    """Lets a step under a pipeline write what it writes in one process.

    Args:
        module: The user's LightningModule.
        stages: Those of this rank.
        source: Global rank of the last stage of this replica.
        group: Ranks of its pipeline.

    Attributes:
        is_known: Whether it is known, from a look at it, that the training step writes.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        stages: Sequence[Stage],
        source: int,
        group: dist.ProcessGroup,
    ) -> None:
        self._module, self._stages, self._rank = module, stages, dist.get_rank()
        # Only one pipeline writes: that of rank 0. Others compute the same of other samples.
        self._has_rank_zero = 0 in dist.get_process_group_ranks(group)
        # Where rank 0 is itself the last stage, it writes at once.
        self._records = self._rank == source != 0
        self._calls: list[bytes] = []
        self._is_noted = self._is_in_place = self._has_warned = self.is_known = False
        self._kinds: dict[tuple[int, type], type] = {}
        self._modes = _ModesOfStages(module, stages)

    def begin(self) -> None:
        """Note what is there before a step, and drop what a look has left that came to no end."""
        self._modes.begin()
        self.take()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Surrounds a look, which leaves the modes and flags of before."""
        try:
            yield
        finally:
            self._modes.restore()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Surrounds the user's step for a micro-batch."""
        self._modes.restore()
        # The stage that is running now: a rank may hold several.
        stage = next(stage for stage in self._stages if stage.current is not None)
        # Rank 0 may hold later stages, too: there it is another rank up to the last block.
        is_other = self._rank == 0 and not stage.is_first
        own = rank_zero_only.rank  # type: ignore[attr-defined]
        # As in the first look: nothing may get out.
        is_silent = own == NO_RANK  # every replica then notes whether the step writes
        if not (stage.is_last or is_other) or not (self._has_rank_zero or is_silent):
            yield
            return
        processes = getattr(self._module.trainer.strategy, "processes", None)

        def show(rank: int) -> None:
            self._is_in_place = rank == 0
            # Shifted and not set: the value may count from another base than the global rank.
            shown = own if is_silent else own - self._rank + rank
            rank_zero_only.rank = _Rank(shown, self.note)  # type: ignore[attr-defined]
            if processes is not None:
                processes.shown_rank = _Rank(rank, self.note)

        with ExitStack() as stack:
            # `replaced` puts both back, whatever `show` has set meanwhile.
            if processes is not None:
                stack.enter_context(replaced(processes, "shown_rank", None))
            stack.enter_context(replaced(rank_zero_only, "rank", own))
            for index, logger in enumerate(self._module.trainer.loggers):
                kind = type(logger)
                # The class and not the object: the step holds `self.logger` perhaps.
                stack.callback(setattr, logger, "__class__", kind)
                logger.__class__ = self._kind_of(index, kind, keeps=not is_silent)
            stack.callback(setattr, stage, "after_blocks", None)
            stack.callback(setattr, self, "_is_in_place", False)
            # From there on it stands for rank 0; before, blocks that ask run everywhere.
            if stage.is_last and self._has_rank_zero:
                stage.after_blocks = partial(show, 0)
            show(1 if is_other else self._rank)
            yield

    def note(self) -> None:
        """Note that the step writes, or asks whether it is on rank 0."""
        self._is_noted = True

    def take(self) -> tuple[bool, list[bytes], _Modes | None]:
        """Return whether the step writes, its calls of loggers since the last time, and the modes
        in which it leaves modules.
        """
        found = self._is_noted, self._calls, self._modes.left()
        self._is_noted, self._calls = False, []
        return found

    def write(self, name: str, found: tuple[bool, list[bytes], _Modes | None], count: int) -> None:
        """Carry out, on rank 0, what the last stage called; and have its modes on all ranks.

        Args:
            name: Of the step.
            found: From `take`, on the last stage.
            count: Number of micro-batches.
        """
        is_noted, calls, modes = found
        self._modes.take(modes)
        if (is_noted or (self.is_known and name == "training_step")) and count > 1:
            self._warn(name, count)
        if self._rank != 0:
            return
        # In the order in which the step made them, micro-batch after micro-batch.
        for call in calls:
            # Of a rank of this run, which has pickled it itself: nothing from outside.
            index, path, args, kwargs = pickle.loads(call)
            target: Any = self._module.trainer.loggers[index]
            for place in path:
                target = getattr(target, place) if isinstance(place, str) else target[place[0]]
            target(*args, **kwargs)

    def _warn(self, name: str, count: int) -> None:
        """Say, once, that a step which writes does so for every micro-batch."""
        if self._has_warned or rank_zero_only.rank == NO_RANK:  # type: ignore[attr-defined]
            return
        self._has_warned = True
        rank_zero_warn(
            f"{type(self._module).__name__}.{name} writes to a logger, the terminal or a file, or "
            f"asks whether its rank is 0. Under a pipeline the step runs once for each of {count} "
            f"micro-batches, so it writes {count} times. A run on one process writes once for the "
            "whole batch. Use self.log; or return the values together with the loss, as in "
            "{'loss': loss, 'best': best}, and write outputs['best'] in on_train_batch_end; or "
            "use num_microbatches=1."
        )

    def _kind_of(self, index: int, kind: type, *, keeps: bool) -> type:
        """Return a class like that of a logger, which records what is called in the step."""
        # Kept: a class per step would never be freed by whoever caches classes.
        known = self._kinds.get((index, kind))
        if known is not None:
            return known

        def experiment(logger: Any) -> Any:
            self.note()
            if not self._is_in_place:
                # On a stage that does not write every call is taken and dropped, as Lightning's
                # own does off rank 0.
                return DummyLogger().experiment
            if self._records:
                return _Recorder(self._record, (index, "experiment"))
            plain: Any = super(made, logger)
            return plain.experiment

        def method(name: str) -> Callable[..., Any]:
            def call(logger: Any, *args: Any, **kwargs: Any) -> Any:
                self.note()
                if not self._is_in_place:
                    return None
                if self._records:
                    return self._record((index, name), args, kwargs)
                return getattr(super(made, logger), name)(*args, **kwargs)

            return call

        made: Any = logger_like(kind, method, experiment=property(experiment))
        if keeps:
            self._kinds[index, kind] = made
        return made  # type: ignore[no-any-return]

    def _record(self, path: tuple[Any, ...], args: Any, kwargs: Any) -> None:
        file = io.BytesIO()
        try:
            # At once: the step may change what it passed, and it is sent after the schedule.
            _Pickler(file).dump((path[0], path[1:], args, kwargs))
        except Exception as error:
            called = ".".join(p if isinstance(p, str) else repr(p[0]) for p in path[1:])
            raise ConfigurationError(
                "LP323",
                f"the step calls self.logger.{called}(...) after the model call. Under a pipeline "
                "this code runs on the last stage, but rank 0 writes to the logger, and the "
                f"arguments cannot be sent to rank 0: {error}. Pass numbers, text, arrays and "
                "tensors instead, for example a list instead of a generator. No weight was "
                "changed in this step.",
            ) from error
        self._calls.append(file.getvalue())


def logger_like(kind: type, method: Callable[[str], Callable[..., Any]], **attributes: Any) -> type:
    """Return a class like that of a logger, with other methods that log.

    It has another name, as a command line looks classes up by theirs.

    Args:
        kind: Class of a logger.
        method: Name of a method ``log_...`` -> what stands in its place.
        attributes: What else it has.
    """
    # `log_dir` is a property of loggers, not a method.
    names = [name for name in dir(kind) if name.startswith("log_") and name != "log_dir"]
    methods = {name: method(name) for name in names if callable(getattr(kind, name))}
    return type(f"_{kind.__name__}InStep", (kind,), {**methods, **attributes})


class _Rank(int):
    """A rank that tells when it is compared, as it is before something is written on rank 0."""

    _note: Callable[[], None]

    def __new__(cls, value: int, note: Callable[[], None]) -> "_Rank":
        made = super().__new__(cls, value)
        made._note = note
        return made

    def __eq__(self, other: object) -> bool:
        self._note()
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        self._note()
        return int(self) != other

    def __gt__(self, other: int) -> bool:
        self._note()
        return int(self) > other

    def __bool__(self) -> bool:
        self._note()
        return int(self) != 0

    # Defining `__eq__` takes it away.
    __hash__ = int.__hash__

    # A plain number where it is sent to another process.
    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)


class _Recorder:
    """Stands for an object of a logger: what is called on it, at any depth, is recorded."""

    # Or Python would call `__getitem__` with 0, 1, ... for ever.
    __iter__ = None

    def __init__(self, record: Callable[..., None], path: tuple[Any, ...]) -> None:
        self._record_call, self._path = record, path

    def __getattr__(self, name: str) -> "_Recorder":
        # copy and pickle ask for these, which are no calls of a logger.
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(self._record_call, (*self._path, name))

    def __getitem__(self, key: Any) -> "_Recorder":
        return _Recorder(self._record_call, (*self._path, (key,)))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record_call((*self._path, "__setitem__"), (key, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._record_call(self._path, args, kwargs)


class _Pickler(pickle.Pickler):
    """Writes tensors as they are now, on the host."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu().clone().__reduce_ex__(2)
        return NotImplemented
