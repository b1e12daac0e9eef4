"""How often the host waits for the device in a steady step of each layout: once, at most.

The one wait is for the verdict on the step: whether its loss and gradients are finite. Where tokens
go to experts of other ranks in parts of their own sizes, it waits once more for each layer: NCCL
takes sizes from the host. Padded parts have one size, which the host knows. In other dtypes than
bfloat16 experts are multiplied one by one, and the host reads once for each layer how many rows
each has.
"""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from lightning_par import BatchLayout
from tests.support.cuda_simulation import is_wanted
from tests.support.cuda_simulation.steady import experts, steady_step
from tests.support.exhaustive import some
from tests.support.models.mixture import layout
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.models.toy_gpt import ToyModule
from tests.support.ranks.api import run_ranks

pytestmark = pytest.mark.skipif(not is_wanted(), reason="needs the simulated device")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, layout()),
    "tp2": (2, layout(tp=2)),
    "pp2": (2, layout(pp=2, num_microbatches=4)),
    "zero1": (2, layout(dp=2)),
    "zero2": (2, layout(dp=2, zero=2)),
    "zero3": (2, layout(dp=2, zero=3)),
    "cp2": (2, layout(context_parallel_size=2)),
    "offload": (1, layout(offload_options={})),
    "zero3, offload": (2, layout(dp=2, zero=3, offload_options={})),
    "experts, float32": (1, layout()),
    "experts ep2": (2, layout(dp=2, ep=2)),
    "experts ep2, zero3": (2, layout(dp=2, ep=2, zero=3)),
    "experts ep2, padded": (2, layout(dp=2, ep=2, zero=3, expert_max_rows=40)),
    "experts ep2, switch, padded": (2, layout(dp=2, ep=2, expert_max_rows=20)),
    "experts tp2": (2, layout(tp=2)),
    "experts pp2": (2, layout(pp=2)),
    "undeclared, zero1": (2, layout(dp=2)),
    "undeclared, pp2": (2, layout(pp=2)),
    "tp2 pp2": (4, layout(tp=2, pp=2)),
    "pp2 zero3": (4, layout(pp=2, dp=2, zero=3)),
    "tp2 zero3": (4, layout(tp=2, dp=2, zero=3)),
    "cp2 zero3": (4, layout(context_parallel_size=2, dp=2, zero=3)),
}
LARGE = [name for name, (ranks, _) in LAYOUTS.items() if ranks == 4]
LARGE += ["experts ep2, zero3", "experts ep2, padded", "experts tp2", "experts pp2"]
OF_LIGHTNING = (
    "lightning.pytorch.loops.training_epoch_loop._broadcast_sigterm_tensor",
    "lightning.fabric.utilities.apply_func.to_item",
)
"""Where Lightning makes a tensor of whether SIGTERM came, and reads it, in every step of several
ranks; and reads what is logged with ``prog_bar=True``, as the experts' module does. No public name
of either can be overridden.
"""
EXPERT_LAYERS = 3
SWITCH = {"routing": "switch", "experts_per_token": 1}


class Undeclared(PlainModule):
    """Says nothing of its batch, so that the run has to find how its loss is made of parts; as no
    label is left out, several rules fit, and every batch may tell them apart.
    """

    batch = BatchLayout()


def undeclared() -> tuple[Any, Any]:
    return Undeclared(), [(x.clamp(min=1), y.clamp(min=1)) for x, y in token_pairs(64)]


class LogsNorms(Undeclared):
    """Logs the norm of every gradient in every step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


def logs_norms() -> tuple[Any, Any]:
    return LogsNorms(), undeclared()[1]


class Reading(ToyModule):
    """Asks for the value of its loss in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


class Copying(ToyModule):
    """Copies from memory that is not pinned in every step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.ones(1).to(loss.device, non_blocking=True).sum()


@pytest.mark.parametrize("name", some(LAYOUTS, LARGE))
def test_a_steady_step_waits_once(name: str) -> None:
    world, options = LAYOUTS[name]
    reads = options["expert_parallel_size"] > 1 and "expert_max_rows" not in options
    precision = "32-true" if "float32" in name else "bf16-mixed"
    routed = EXPERT_LAYERS * (reads + (precision == "32-true"))
    has_experts = name.startswith("experts")
    made: Any = undeclared if name.startswith("undeclared") else ToyModule
    if has_experts:
        made = partial(experts, **SWITCH) if "switch" in name else experts
    kind = {"kind": made, "precision": precision if has_experts else "32-true"}
    found = run_ranks(steady_step, world, options, **kind, timeout=120)
    for rank, traffic in enumerate(found):
        sys.stdout.write(f"{name}, rank {rank}: {traffic}\n")
        ours = {key: n for key, n in traffic.waits.items() if not key[-1].startswith(OF_LIGHTNING)}
        assert sum(ours.values()) <= 1 + routed
        assert traffic.waits.total() - sum(ours.values()) <= 2 + has_experts


@pytest.mark.parametrize("name", ["one device", "tp2", "pp2", "zero3"])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("pinned", [True, False])
def test_no_loader_adds_a_wait(name: str, workers: int, pinned: bool) -> None:
    world, options = LAYOUTS[name]
    loading = {"num_workers": workers, "pin_memory": pinned}
    # Workers are copies of a rank, which must not have run anything before.
    fresh = workers > 0
    for traffic in run_ranks(steady_step, world, options, **loading, fresh=fresh, timeout=120):
        ours = {key: n for key, n in traffic.waits.items() if not key[-1].startswith(OF_LIGHTNING)}
        assert sum(ours.values()) <= 1, str(traffic)


@pytest.mark.parametrize("name", ["tp2", "zero1", "pp2"])
def test_norms_of_all_gradients_add_one_wait(name: str) -> None:
    """For which of them there are; Lightning itself waits for each."""
    world, options = LAYOUTS[name]
    for traffic in run_ranks(steady_step, world, options, kind=logs_norms, timeout=120):
        ours = {key: n for key, n in traffic.waits.items() if not key[-1].startswith(OF_LIGHTNING)}
        assert sum(ours.values()) <= 2, str(traffic)


def test_a_step_that_reads_its_loss_or_copies_waits_once_more() -> None:
    kinds = ToyModule, Reading, Copying
    plain, *more = (run_ranks(steady_step, 1, {}, kind)[0] for kind in kinds)
    assert [traffic.waits.total() - plain.waits.total() for traffic in more] == [1, 1]
