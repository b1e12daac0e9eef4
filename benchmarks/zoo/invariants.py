"""Invariants of a run, in the manner of TrainCheck (OSDI'25); this code is ours.

TrainCheck infers relations from traces of healthy runs and checks them while another run goes on.
Here are relations of its kinds, learned from a healthy run of the very same layout, which is the
best case for it: the sequence of collectives of each part of a step with their dtypes, sizes and
groups (APISequence, APIArg); copies of parameters that ranks hold alike (Consistent); what an
update changes (EventContain); norms after clipping, rates and counts (APIOutput); batches that
replicas share, and that follow each other.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.zoo.comm import AXES
from benchmarks.zoo.model import cut
from benchmarks.zoo.proof import Verdict
from benchmarks.zoo.trainer import Trainer

__all__ = ["Learned", "Watcher"]

Learned = list[dict[str, Any]]
"""For each step what a healthy run has shown on this rank."""

_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all_single", "send", "recv")
_PARTS = {
    "run_stage": "forward",
    "run_stage_back": "backward",
    "reduce_gradients": "backward",
    "reported": "forward",
    "clip": "clip",
    "evaluate": "evaluation",
}


class Watcher:
    """Notes what a rank does in each step, and compares it with what was learned.

    Args:
        learned: From a healthy run; None: this is one.

    Attributes:
        noted: What this run has shown on this rank.
        verdict: First relation that did not hold.
        seconds: That the steps alone took.
    """

    def __init__(self, learned: Learned | None) -> None:
        self._learned = learned
        self.noted: Learned = []
        self.seconds = 0.0
        self.verdict: Verdict | None = None
        self._calls: list[Any] = []
        self._part, self._rate = "forward", 0.0

    def attach(self, trainer: Trainer) -> None:
        """Follow the parts of a step of a trainer."""
        for name, part in _PARTS.items():
            setattr(trainer, name, self._marked(getattr(trainer, name), part))
        optimizer, plain = trainer.optimizer, trainer.optimizer.rate

        def rate() -> float:
            self._rate = plain()
            return self._rate

        vars(optimizer).update(step=self._marked(optimizer.step, "update"), rate=rate)

    def _marked(self, plain: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            before, self._part = self._part, part
            try:
                return plain(*args)
            finally:
                self._part = before

        return call

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, collectives of torch are noted."""
        plain = {name: getattr(dist, name) for name in _COLLECTIVES}
        for name, function in plain.items():
            setattr(dist, name, self._noting(name, function))
        try:
            yield
        finally:
            for name, function in plain.items():
                setattr(dist, name, function)

    def _noting(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0][0] if isinstance(args[0], list) else args[0]
            group = kwargs.get("group")
            ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else args[1:]
            self._calls.append((self._part, name, str(tensor.dtype), tuple(tensor.shape), ranks))
            return plain(*args, **kwargs)

        return call

    def take_step(self, trainer: Trainer) -> float:
        """Take a step of a trainer, and check it."""
        self._calls = []
        number, batch = trainer.step, trainer.data.batch(trainer.step)["rows"]
        before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        with self.watching():
            began = time.perf_counter()
            loss = trainer.train_step()
            self.seconds += time.perf_counter() - began
        squares = [g.square().sum() / trainer.copies(n) for n, g in trainer.grads.items()]
        norm = trainer.comm.sum(torch.stack(squares).sum(), *AXES[1:]).sqrt()
        self.noted.append(
            {
                "calls": self._calls,
                "update": [n for n, p in trainer.model.named_parameters() if p.equal(before[n])],
                "rate": (self._rate, trainer.optimizer.count),
                "clip": float(norm) <= trainer.config.clip * 1.001,
            }
        )
        found = {"forward": loss != loss or not _is_alike(batch), "update": _copies_differ(trainer)}
        self._check(number, next((phase for phase, is_found in found.items() if is_found), ""))
        return loss

    def evaluate(self, trainer: Trainer) -> float:
        """Evaluate, and check it."""
        self._calls = []
        with self.watching():
            began = time.perf_counter()
            metric = float(trainer.evaluate(trainer.data.held_out()))
            self.seconds += time.perf_counter() - began
        trains = [part.training for part in trainer.model.modules()]
        self.noted.append({"calls": self._calls, "evaluation": any(trains)})
        self._check(trainer.step, "")
        return metric

    def _check(self, step: int, phase: str) -> None:
        """Keep the first relation that does not hold on any rank."""
        if self._learned is None or self.verdict is not None:
            return
        found = [phase for phase in _gathered(self._differing() or phase) if phase]
        if found:
            self.verdict = Verdict(step=step, phase=found[0])

    def _differing(self) -> str:
        """Return the phase of what differs from the same step of the healthy run."""
        assert self._learned is not None
        wanted, got = self._learned[len(self.noted) - 1], self.noted[-1]
        key = next((key for key in wanted if wanted[key] != got[key]), "")
        if key != "calls":
            return "update" if key == "rate" else key
        pairs = itertools.zip_longest(wanted["calls"], got["calls"])
        first = next((w or g) for w, g in pairs if w != g)
        return str(first[0])


def _copies_differ(trainer: Trainer) -> bool:
    """Tell whether ranks hold other copies of a parameter."""
    box = [trainer.whole("weights")]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    # What is whole is the mean over copies: a copy itself, unless one differs.
    pairs = [(cut(n, box[0][n], trainer.comm), p) for n, p in trainer.model.named_parameters()]
    return any(float((w - p).norm()) > 1e-5 * float(p.norm()) for w, p in pairs)


def _is_alike(batch: Tensor) -> bool:
    """Tell whether all ranks read the same batch."""
    found = _gathered(batch.tolist())
    return all(each == found[0] for each in found)


def _gathered(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
