"""Our checker: `lightning_par.compare` on the trainer, at some steps, and once more by axis."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, Tensor

from benchmarks.zoo.comm import Comm, Layout
from benchmarks.zoo.fault import Fault
from benchmarks.zoo.model import Config, Model
from benchmarks.zoo.trainer import Batch, Trainer
from lightning_par import capture, compare

__all__ = ["PHASE", "Verdict", "prove", "trainer_alone", "trainer_of"]

PHASE = {
    "start": "start",
    "loss": "forward",
    "gradient": "backward",
    "handed": "clip",
    "weight": "update",
}
"""Kind of the difference that is told -> phase."""
PARENTS = {"zero": "dp", "sequence": "tp"}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a checker has found.

    Attributes:
        step: In which it was found.
        phase: That it names; empty: none.
        axis: Likewise.
        text: What it says.
    """

    step: int
    phase: str = ""
    axis: str = ""
    text: str = ""


def trainer_of(
    layout: Layout, config: Config, saved: Mapping[str, Any], fault: Fault | None
) -> Trainer:
    """Return the trainer of this rank, which goes on from a checkpoint; every rank calls it."""
    trainer = Trainer(Model(config, Comm.of(layout)).to(config.dtype))
    trainer.step = saved["step"]
    if fault is not None:
        fault.plant_in(trainer)
    trainer.load(saved)
    return trainer


def trainer_alone(like: Trainer, saved: Mapping[str, Any], fault: Fault | None) -> Trainer:
    """Return the trainer of one process, which goes on from a checkpoint."""
    comm = Comm(layout=Layout(micro=like.comm.layout.micro))
    alone = around(Model(like.config, comm).to(like.config.dtype), like, fault)
    alone.load(saved)
    return alone


def around(model: nn.Module, like: Trainer, fault: Fault | None) -> Trainer:
    """Return the trainer of a model: that of this rank, or one of one process."""
    if model is like.model:
        return like
    assert isinstance(model, Model)
    alone = Trainer(model)
    alone.step = like.step
    return fault.plant_in(alone) if fault is not None and fault.is_shared else alone


def prove(
    trainer: Trainer, saved: Mapping[str, Any], fault: Fault | None, *, kind: str
) -> Verdict | None:
    """Compare a step or an evaluation with one process.

    Args:
        trainer: Of this rank, before the step.
        saved: State of all ranks, whole.
        fault: That is planted, to plant it again where an axis is left out.
        kind: "fresh": the run begins, goes on from `saved`, or has written it; "later"; or
            "evaluation".
    """
    report = _compare(trainer, saved, fault, kind)
    assert not report.unknown, report.unknown
    if not report.differs:
        return None
    phase = PHASE[report.difference.kind] if report.difference is not None else "forward"
    phase = "evaluation" if kind == "evaluation" else phase
    axis = _blamed_axis(trainer, saved, fault, kind)
    return Verdict(step=trainer.step, phase=phase, axis=axis, text=str(report))


def _blamed_axis(trainer: Trainer, saved: Any, fault: Fault | None, kind: str) -> str:
    """Return the axes without which nothing differs, or "any"; the proof's own advice."""
    layout = trainer.comm.layout
    if not _differs(layout, trainer, saved, fault, kind):
        return ""  # it does not come again, so leaving an axis out tells nothing
    without = {axis: layout.without(axis) for axis in layout.axes}
    cures = [a for a, w in without.items() if not _differs(w, trainer, saved, fault, kind)]
    named = [axis for axis in cures if not any(PARENTS.get(c) == axis for c in cures)]
    return " x ".join(named) or "any"


def _differs(
    layout: Layout, like: Trainer, saved: Mapping[str, Any], fault: Fault | None, kind: str
) -> bool:
    trainer = trainer_of(layout, like.config, saved, fault)
    differs: bool = _compare(trainer, saved, fault, kind).differs
    trainer.comm.close()
    return differs


def _compare(trainer: Trainer, saved: Mapping[str, Any], fault: Fault | None, kind: str) -> Any:
    # Without the fault: `around` plants what is shared.
    captured = capture(trainer_alone(trainer, saved, None).model)
    # Its number, as the one process reads batches with a loader of its own.
    number = {"step": torch.tensor(trainer.step)}

    def evaluate(model: nn.Module, _: Batch) -> Tensor:
        once = around(model, trainer, fault)
        return once.evaluate(once.data.held_out())

    if kind == "evaluation":
        trainer.grads = {}
        own = trainer.model, number, evaluate
        return compare(captured, *own, replica=0, whole=trainer.whole)
    # Where the run goes on from a file, so does the one process; else from the ranks' own state.
    states = saved if kind == "fresh" else _states(trainer)

    def step(model: nn.Module, number: Batch) -> Tensor:
        once = around(model, trainer, fault)
        return once.forward_backward(once.data.batch(int(number["step"])))

    def update(model: nn.Module) -> None:
        if model is not trainer.model:
            once = around(model, trainer, fault)
            once.load_moments(states)
            once.optimizer.count = states["count"]
            once.grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            once.update()
            return
        kept = copy.deepcopy((trainer.optimizer.first, trainer.optimizer.second))
        count = trainer.optimizer.count
        trainer.update()
        trainer.optimizer.first, trainer.optimizer.second = kept
        trainer.optimizer.count = count

    return compare(
        captured,
        trainer.model,
        number,
        step,
        replica=0,
        whole=trainer.whole,
        update=update,
        fresh=kind == "fresh",
    )


def _states(trainer: Trainer) -> dict[str, Any]:
    found: dict[str, Any] = {which: trainer.whole(which) for which in ("first", "second")}
    return {**found, "count": trainer.optimizer.count}
