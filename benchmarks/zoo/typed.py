"""The zoo under spmd_types 0.3: which faults of tensor parallelism its types see.

python -m benchmarks.zoo --typed

Needs `pip install spmd-types==0.3.0`. It checks code that is written with its collectives and
annotated tensors, so this is a port of one axis: `Comm` sends over "tp" by its collectives, and
parameters are annotated as divided (V) or alike (I). Faults are those that are planted on two
tensor-parallel ranks without experts and sequence parallelism; gradients that are added up by hand
after the backward, clipping, updates and checkpoints have no types.
"""

from typing import Any
from unittest.mock import patch

import spmd_types as spmd
import spmd_types.checker
from torch import Tensor

import benchmarks.zoo.faults  # noqa: F401  (it fills FAULTS)
from benchmarks.zoo import proof
from benchmarks.zoo.comm import Comm, Layout
from benchmarks.zoo.fault import FAULTS
from benchmarks.zoo.model import build, Config, SHARDS
from benchmarks.zoo.proof import trainer_of
from benchmarks.zoo.trainer import Trainer
from tests.support.ranks.api import run_ranks

__all__ = ["check", "print_found"]

TP = Layout(tp=2)
OPTIONS: list[dict[str, Any]] = [{}, {"dropout": 0.2}, {"recompute": True}]


class _Typed(Comm):
    """Sends over tensor-parallel ranks by the collectives of spmd_types."""

    def enter(self, x: Tensor) -> Tensor:
        return spmd.convert(x, self.groups["tp",], src=spmd.I, dst=spmd.R)

    def add_up(self, x: Tensor, *axes: str) -> Tensor:
        group = self.groups[axes]
        partial = spmd.reinterpret(x, group, src=spmd.V, dst=spmd.P)
        return spmd.all_reduce(partial, group, src=spmd.P, dst=spmd.I)

    def max(self, x: Tensor, *axes: str) -> Tensor:
        with spmd.no_typecheck():
            found = super().max(x.detach(), *axes)
        return spmd.assert_type(found, {self.groups[axes]: spmd.R})


def check(rank: int, world: int, number: int | None, options: dict[str, Any]) -> str:
    """Run forward and backward of a rank with types; return the error, or nothing."""
    fault = None if number is None else FAULTS[number]
    config = Config(**options)
    begins = fault.begins if fault is not None else 0
    with patch.object(proof, "Comm", _Typed):
        saved = {**Trainer(build(config)).save(), "step": begins}
        trainer = trainer_of(TP, config, saved, fault)
    group = trainer.comm.groups["tp",]
    try:
        with spmd.set_current_mesh([group]), spmd_types.checker.typecheck("permissive"):
            for name, parameter in trainer.model.named_parameters():
                is_divided = "tp" in dict(SHARDS.get(name.rpartition(".")[2], ()))
                spmd.assert_type(parameter, {group: spmd.V if is_divided else spmd.I})
            ((tokens, labels),) = trainer.divide(trainer.data.batch(begins))
            loss = trainer.model(tokens, labels, (0, 0)) + trainer.model.balances()
            loss.backward()
    except spmd.SpmdTypeError as error:
        return str(error).splitlines()[0]
    finally:
        trainer.comm.close()
    return ""


def print_found() -> None:
    """Print what is found of each fault, and of healthy runs."""
    chosen = [n for n, f in enumerate(FAULTS) if f.layout == TP and "experts" not in f.options]
    found = 0
    for number in chosen:
        fault = FAULTS[number]
        error = run_ranks(check, 2, number, dict(fault.options))[0]
        found += bool(error)
        print(f"{fault.name} ({fault.phase}): {error or '-'}", flush=True)
    alarms = [o for o in OPTIONS if run_ranks(check, 2, None, o)[0]]
    told = f"false alarms: {len(alarms)} of {len(OPTIONS)} healthy runs {alarms or ''}"
    print(f"\nfound {found} of {len(chosen)}; {told}")
