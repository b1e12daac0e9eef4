"""Says why a rank ran out of memory: what was asked for and where, what held it, what would fit.

Note [Counted or forecast]: weights, gradients and states are counted from this rank's tensors when
the exception arrives, before anything is freed; the rest is what the process or the allocator holds
besides. The memory model gives the peak of a whole step, which this one may not have reached. Each
number says which of the two it is.
"""

import contextlib
import logging
import re
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from mmap import mmap
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn, Tensor

from lightning_par.engine.activity import Activity
from lightning_par.engine.memory.measured import (
    address_space,
    available_memory,
    bytes_held,
    current_memory,
    lacks_memory,
)
from lightning_par.engine.tensor.whole_parameters import failing_module
from lightning_par.engine.tensor_tree import tensors_of
from lightning_par.errors import CheckpointError, OutOfMemoryError, PipelineError
from lightning_par.profiling.post_mortem import Change, PostMortem, write_post_mortem
from lightning_par.strategies.post_mortem.memory_changes import Forecast, forecast_step
from lightning_par.strategies.post_mortem.run_folder import find_folder
from lightning_par.strategies.setup.parallel_model import ParallelModel
from lightning_par.strategies.step.absent_parameter import is_of_a_framework
from lightning_par.units import in_words
from lightning_par.upstream.lightning import trainer_of

__all__ = ["DeviceOutOfMemoryError", "MemoryWatch"]

_ASKED = re.compile(r"tried to allocate ([\d.]+) (bytes|[KMGT]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_RESERVE = 32 * 2**20
"""Bytes of address space that are kept, where it is limited, to say what has happened."""
_GROWING = 3
"""Steps from which on memory that grows is a leak."""
_PROOF = "verify="
_OBSERVE = "lightning_par.observe."
_logger = logging.getLogger(__name__)


class DeviceOutOfMemoryError(OutOfMemoryError, torch.OutOfMemoryError):
    """A rank ran out of the memory of its GPU."""


@dataclass(kw_only=True)
class MemoryWatch:
    """What is known before a rank runs out of memory.

    Attributes:
        folder: Of the run; None: it leaves nothing.
        began: `time.monotonic` when the training began.
        base: Bytes that the process, or the allocator, held then, with the weights.
        space: Bytes of address space then, if it is limited.
    """

    folder: str | None = None
    began: float = field(default_factory=time.monotonic)
    base: int = 0
    space: int = 0
    _reserve: mmap | None = None

    def begin(self, trainer: pl.Trainer, activity: Activity, device: torch.device) -> None:
        """Note what is held before the first step, and where the run leaves its files.

        **Communicates**: the directory of the logger, from rank 0.
        """
        self.folder = find_folder(trainer)
        if device.type == "cuda":
            activity.held = lambda: torch.cuda.memory_allocated(device)
        activity.ended.clear()
        self.base = current_memory(device)
        limited = address_space()
        # Untouched, it takes no memory, but address space that can be given back.
        if limited is not None and self._reserve is None:
            with contextlib.suppress(OSError):
                self._reserve = mmap(-1, _RESERVE)
        self.space = limited[0] if limited is not None else 0

    def leave(self, found: PostMortem) -> bool:
        """Leave what is known of this rank in the folder of the run; tell whether that was done."""
        # As a path, a URL would name a folder here.
        if self.folder is None or "://" in self.folder:
            return False
        try:
            write_post_mortem(found, Path(self.folder))
        except Exception as error:  # as without memory: whoever says why must still end
            _logger.warning(
                "the reason why this rank ended could not be written to a file: %s", error
            )
            return False
        return True

    def explain(
        self, error: BaseException, module: pl.LightningModule | None, activity: Activity
    ) -> OutOfMemoryError | None:
        """Return what to say of an exception, and leave it in the folder of the run; None if it is
        about something else.

        Args:
            error: What was raised, before anything is freed.
            module: Of the run, if there is one.
            activity: What this rank was doing.
        """
        short, trainer = _find(error), trainer_of(module)
        if short is None or trainer is None:
            return None
        if self._reserve is not None:
            self._reserve.close()
            self._reserve = None
        try:
            found = _Death(short, trainer, activity, self).describe()
        except Exception as problem:  # as where not even this has memory: the error says it all
            _logger.warning(
                "what held the memory is not known, since counting it failed: %s", problem
            )
            return None
        said = list(found.lines())
        if trainer.world_size > 1:
            said[0] = f"{found.name}: {said[0]}"
        if self.leave(found):
            said.append(f"lightning-par why {self.folder} prints this again.")
        is_device = isinstance(short, torch.OutOfMemoryError)
        kind = DeviceOutOfMemoryError if is_device else OutOfMemoryError
        made = kind("LP613", "\n".join(said))
        for note in getattr(short, "__notes__", ()):  # as that of the proof
            made.add_note(note)
        return made


def _find(error: BaseException | None) -> BaseException | None:
    """Return the lack of memory that an exception is, or that it was raised from."""
    while error is not None and not lacks_memory(error):
        wraps = isinstance(error, CheckpointError | PipelineError)
        error = error.__cause__ if wraps else None
    # Not what has been explained already, as by a Trainer inside of a Trainer.
    return None if isinstance(error, OutOfMemoryError) else error


def _said(error: BaseException) -> str:
    # A MemoryError has no text.
    return ": ".join(word for word in (type(error).__name__, str(error)) if word)


class _Death:
    """A rank that has run out of memory."""

    def __init__(
        self, error: BaseException, trainer: pl.Trainer, activity: Activity, watch: MemoryWatch
    ) -> None:
        self._error, self._trainer, self._watch = error, trainer, watch
        self._activity, self._now = activity, activity.now()
        strategy: Any = trainer.strategy
        self._strategy, self._device = strategy, strategy.root_device
        self._model: ParallelModel | None = None
        with contextlib.suppress(AssertionError):  # not before `setup`
            self._model = strategy.parallel_model
        found = _ASKED.search(str(error))
        self._asked = 0 if found is None else int(float(found[1]) * _UNITS[found[2].lower()])
        self._frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]

    def describe(self) -> PostMortem:
        counted = self._count()
        forecast, reason = self._forecast()
        cause, own = self._cause(counted, forecast)
        changes, fit = own, None
        if forecast is not None and not own:
            reached = sum(size for kind, size in counted.items() if kind in _OF_THE_STEP)
            room, updates = self._room(counted), self._now.action == "optimizer step"
            changes, fit = forecast.changes(room, reached + self._asked, updates=updates)
        asked = f"{in_words(self._asked)} were asked for" if self._asked else _said(self._error)
        sizes = self._strategy.sizes
        return PostMortem(
            rank=self._strategy.processes.rank,
            name=sizes.describe(self._strategy.processes.rank),
            when=time.strftime("%Y-%m-%d %H:%M:%S"),
            summary=f"out of memory ({self._place()}): {asked}{self._limit()}. Cause: {cause}.",
            counted=counted,
            forecast={} if forecast is None else forecast.kinds,
            unforeseen=reason,
            changes=changes,
            fits=fit,
            steps=[(n, when - self._watch.began, held) for n, when, held in self._activity.ended],
        )

    # What can be counted --------------------------------------------------------------------------

    def _count(self) -> dict[str, float]:
        module, trainer = self._trainer.lightning_module, self._trainer
        states = [list(each.state.values()) for each in trainer.optimizers]
        held: dict[str, float] = {
            "weights": bytes_held([list(module.parameters()), list(module.buffers())]),
            "gradients": bytes_held([p.grad for p in module.parameters()]),
            "optimizer states": bytes_held(states),
        }
        now = current_memory(self._device)
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            held["activations and other"] = now - sum(held.values())
            held["kept by the allocator, unused"] = reserved - now
            held["other processes and CUDA itself"] = total - free - reserved
            return held
        if not self._watch.base:  # outside of a training
            held["all else of the process"] = max(0, now - sum(held.values()))
            return held
        # The program, with its data, was there before the first step.
        program = max(0, self._watch.base - held["weights"])
        held["activations and other"] = max(0, now - program - sum(held.values()))
        held["Python, torch and what was there before the first step"] = program
        return held

    def _limit(self) -> str:
        """Return what was in use, and of how much; empty where no one says."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            return f"; {in_words(free)} of the GPU's {in_words(total)} were free"
        limited = address_space()
        if limited is not None:
            used, limit = limited
            return (
                f"; {in_words(used)} of {in_words(limit)} of address space (RLIMIT_AS, ulimit -v) "
                "are in use"
            )
        free_here = available_memory()
        return "" if free_here is None else f"; {in_words(free_here)} of CPU memory are free"

    def _room(self, counted: Mapping[str, float]) -> float | None:
        """Return the bytes that the model and its step may take."""
        if self._device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self._device)
            return total - counted["other processes and CUDA itself"]
        limited = address_space()
        if limited is not None:
            # Of the address space, too, the weights were a part.
            return limited[1] - (self._watch.space - counted["weights"])
        free = available_memory()
        if free is None:
            return None
        return free + sum(size for kind, size in counted.items() if kind in _OF_THE_STEP)

    def _forecast(self) -> tuple[Forecast | None, str]:
        if self._model is None or not hasattr(self._model.steps, "begun"):
            return None, "no training step had begun"
        if self._now.action in _EVALUATIONS:
            return None, f"only training steps can be predicted, and this is a {self._now.action}"
        try:
            return forecast_step(self._error, self._model, self._strategy.options, self._device), ""
        except Exception as problem:  # of a model that the planner cannot read, or short of memory
            said = getattr(problem, "message", None) or f"{type(problem).__name__}: {problem}"
            return None, str(said).rstrip(".")

    # Where and why --------------------------------------------------------------------------------

    def _place(self) -> str:
        """Return what this rank was doing, in which module, and the user's line."""
        words = [str(self._now)]
        module = self._trainer.lightning_module
        name, _ = failing_module(module, self._error.__traceback__)
        words += [f"in {name}"] if name else []
        own = [
            f"{Path(frame.f_code.co_filename).name}:{line}"
            for frame, line in traceback.walk_tb(self._error.__traceback__)
            if not is_of_a_framework(frame.f_code.co_filename)
        ]
        # The first line of the traceback is the one that called the Trainer.
        words += [f"at {own[-1]}"] if len(own) > 1 else []
        return ", ".join(words)

    def _cause(
        self, counted: Mapping[str, float], forecast: Forecast | None
    ) -> tuple[str, list[Change]]:
        """Return the cause, and the changes that it alone suggests."""
        if any(_PROOF in note for note in getattr(self._error, "__notes__", ())):
            told = Change(write="verify=False", note="The run then trains without the comparison")
            return "the comparison of the step with one process (verify=)", [told]
        if any(frame.f_code.co_name == "save_checkpoint" for frame in self._frames):
            return "a checkpoint that is being saved", list(self._changes_of_saving())
        if (leak := self._leak(counted)) is not None:
            return leak
        if self._frames[-1].f_globals.get("__name__", "").startswith(_OBSERVE):
            return "a copy of weights or buffers for the first look at the step", []
        if self._now.action == "optimizer step":
            new = ", which its first step makes" if self._now.step <= 0 else ""
            return f"states and work memory of the optimizer{new}", []
        if self._now.action in _EVALUATIONS:
            told = Change(write="a smaller batch_size in the loader of these batches")
            return f"what {self._now.action} computes of a batch", [told]
        what = "activations"
        if forecast is not None and forecast.is_of_logits:
            what = f"logits over a vocabulary of {forecast.planner.shape.vocab:,}"
        if self._model is not None and forecast is not None:
            layout, length = forecast.layout, forecast.planner.shape.length
            what += f" of {layout.micro_batch:,} samples"
            what += f" of {length:,} tokens" if length > 1 else ""
        return what, []

    def _changes_of_saving(self) -> Iterator[Change]:
        options = self._strategy.options
        if options.async_save:
            yield Change(
                write="async_save=False", note="The run then holds no copy of the checkpoint"
            )
        if options.checkpoint_format != "folder":
            note = "Each rank then writes its own part"
            yield Change(write='checkpoint_format="folder"', note=note)

    def _leak(self, counted: Mapping[str, float]) -> tuple[str, list[Change]] | None:
        """Return which memory stays from step to step, if that is most of what is not the step's.

        The first step is left out: states and caches are made there.
        """
        held = [(step, size) for step, _, size in self._activity.ended][1:]
        if len(held) < _GROWING:
            return None
        # Not all steps are looked at.
        growth = statistics.median(
            (after - before) / max(1, last - first)
            for (first, before), (last, after) in pairwise(held)
        )
        steps = max(self._now.step, held[-1][0]) - held[0][0] + 1
        kept = growth * (steps - 1)
        if growth <= 0 or kept < counted.get("activations and other", 0) / 3:
            return None
        cause = (
            f"memory that is kept from step to step: each of the last {steps} steps kept "
            f"{in_words(growth)} more (median)"
        )
        name, tensors = max(self._keepers(), key=lambda pair: len(pair[1]), default=("", []))
        if not name:
            return cause, []
        graphs = sum(tensor.grad_fn is not None for tensor in tensors)
        own = bytes_held(tensors)
        cause += (
            f"; {name} holds {len(tensors)} tensors of {in_words(own)}, {graphs} of them with an "
            "autograd graph"
        )
        # What is small itself holds the rest by the activations that its graph has saved.
        if graphs and own < kept / 2:
            write = f"keep no graphs in {name}: append value.detach()"
        else:
            write = f"keep fewer tensors in {name}, or only numbers: append value.mean().item()"
        return cause, [Change(write=write)]

    def _keepers(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield the user's attributes and globals that hold several tensors besides the model's."""
        module, trainer = self._trainer.lightning_module, self._trainer
        owners: list[tuple[str, Mapping[str, Any]]] = [
            (".".join(["self", *([name] if name else [])]), vars(child))
            for name, child in module.named_modules()
        ]
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        owners += [(type(each).__name__, vars(each)) for each in callbacks]
        for frame in self._frames:
            if not is_of_a_framework(frame.f_code.co_filename):
                owners.append(("the script", frame.f_globals))
        for owner, held in owners:
            for name, value in held.items():
                own = name not in ("_parameters", "_buffers") and isinstance(value, _NESTS)
                tensors = [t for t in tensors_of(value) if not isinstance(t, nn.Parameter)]
                if own and len(tensors) > 1:
                    yield f"{owner}.{name}", tensors


_OF_THE_STEP = ("weights", "gradients", "optimizer states", "activations and other")
_EVALUATIONS = ("validation_step", "test_step", "predict_step")
_NESTS = (list, dict, tuple)
