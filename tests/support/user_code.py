"""Modules as strangers write them, trained on one process and on meshes: equal, or refused.

A test file keeps its modules in a `Cases`, and checks every cell of its table:

    CASES = Cases(__name__)

    @CASES.add(equal="tp2 zero3", refused={"pp2": "parameters of another stage"})
    def weight_decay_by_hand():
        return Module(), samples

    @pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
    def test_equal_or_refused(case, layout, refusal):
        CASES.check(case, layout, refusal)

A cell trains 4 steps in float64 and compares losses and weights with one process. A crash that is
no error of this package, or a hang, fails the test.
"""

import importlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy
from lightning_par.dtensor import local_part
from lightning_par.engine.pipeline.schedules import SCHEDULES
from lightning_par.errors import LightningParError
from tests.support.models.plain_language_model import blocks_of_plain_nets
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks

__all__ = ["LAYOUTS", "Case", "Cases", "Messages", "strategy_of", "train_case", "world_of"]

_ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": _ONES,
    "tp2": {**_ONES, "tensor_parallel_size": 2},
    "tp2_whole_sequence": {**_ONES, "tensor_parallel_size": 2, "sequence_parallel": False},
    "pp2": {**_ONES, "pipeline_parallel_size": 2},
    "pp2_one_microbatch": {**_ONES, "pipeline_parallel_size": 2, "num_microbatches": 1},
    "pp2_interleaved": {**_ONES, "pipeline_parallel_size": 2, "schedule": "interleaved"},
    "tp2pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "zero0": {**_ONES, "zero_stage": 0},
    "zero1": {**_ONES, "zero_stage": 1},
    "zero2": {**_ONES, "zero_stage": 2},
    "zero3": {**_ONES, "zero_stage": 3},
    "zero2_offload": {**_ONES, "zero_stage": 2, "offload_options": {}},
    "zero1tp2": {**_ONES, "tensor_parallel_size": 2, "zero_stage": 1},
    "zero1pp2": {**_ONES, "pipeline_parallel_size": 2, "zero_stage": 1},
    "zero1ep2": {**_ONES, "expert_parallel_size": 2, "zero_stage": 1},
    "zero1ep2tp2": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "expert_parallel_size": 2,
        "zero_stage": 1,
    },
    "zero1ep2pp2": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "expert_parallel_size": 2,
        "zero_stage": 1,
    },
    "zero3ep2": {**_ONES, "expert_parallel_size": 2, "zero_stage": 3},
    "cp2": {**_ONES, "context_parallel_size": 2},
    "cp2tp2": {**_ONES, "context_parallel_size": 2, "tensor_parallel_size": 2},
    "cp2pp2": {**_ONES, "context_parallel_size": 2, "pipeline_parallel_size": 2},
    "cp2ep2": {**_ONES, "context_parallel_size": 2, "expert_parallel_size": 2},
}
"""Name of a layout -> options of the strategy. The zero layouts have two replicas, but zero3ep2 has
four: two hold the same experts.
"""
_SHARDS = ("tp2", "zero1", "zero3", "zero1tp2")
_FOUR_RANKS = (
    *("tp2pp2", "zero1tp2", "zero1pp2", "zero1ep2tp2", "zero1ep2pp2", "zero3ep2"),
    *("cp2tp2", "cp2pp2"),
)
_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module as a stranger writes it.

    Attributes:
        make: Returns the module, its samples (a list, or a data loader's dataset), and, if it needs
            one, the `collate_fn`.
        cells: Layout -> pattern of the refusal, or None where the run equals one process.
        large: Those of them that `make test` leaves out.
        strategy: More options of the strategy.
        trainer: More options of the Trainer, or a function that returns them.
        batch_size: Samples of a global batch.
        tolerance: Allowed difference of weights, absolute; logged losses, which Lightning may keep
            in float32, may differ by 1e-6 or by this, if it is more.
        blocks: Of a `PlainNet`, at least; the time of a cell grows with them.
    """

    make: Callable[[], tuple[Any, ...]]
    cells: Mapping[str, str | None]
    large: frozenset[str] = frozenset()
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] | Callable[[], Mapping[str, Any]] = field(default_factory=dict)
    batch_size: int = 8
    tolerance: float = 1e-8
    blocks: int = 2

    def blocks_on(self, layout: str | None) -> int:
        """Return the blocks of a `PlainNet` on a layout: under some schedules a rank has two."""
        schedule = {**LAYOUTS[layout or "one"], **self.strategy}.get("schedule")
        chunks = SCHEDULES[schedule].stages_per_rank if schedule in SCHEDULES else 1
        return 2 * chunks if chunks > 1 else self.blocks


class Cases:
    """The cases of a test file.

    Args:
        file: Its ``__name__``.
        blocks: Of the cases that do not say it. Two are enough for all layouts but those with two
            stages on a rank; four where a case tells blocks of one stage apart.
    """

    def __init__(self, file: str, *, blocks: int = 2) -> None:
        self._file, self._blocks = file, blocks
        self.cases: dict[str, Case] = {}

    def add(
        self,
        *,
        equal: str = "",
        refused: Mapping[str, str] | None = None,
        large: str = "",
        **options: Any,
    ) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Add a case, which has the name of the decorated function.

        Args:
            equal: Layouts on which the run equals one process, separated by blanks.
            refused: Layout -> pattern that the text of the refusal holds; several layouts may be
                separated by blanks.
            large: More layouts on which it equals one process, which `make test-all` runs.
            options: Other fields of `Case`.
        """
        cells: dict[str, str | None] = dict.fromkeys([*equal.split(), *large.split()])
        for layouts, pattern in (refused or {}).items():
            cells |= dict.fromkeys(layouts.split(), pattern)

        def decorate(make: Callable[[], Any]) -> Callable[[], Any]:
            chosen = frozenset(large.split())
            given = {"blocks": self._blocks, **options}
            self.cases[make.__name__] = Case(make=make, cells=cells, large=chosen, **given)
            return make

        return decorate

    def cells(self) -> list[Any]:
        """Return the parameters of the test: case, layout, pattern of its refusal."""
        return [
            pytest.param(
                name,
                layout,
                refusal,
                id=f"{name}-{layout}",
                marks=[pytest.mark.exhaustive] if layout in case.large else [],
            )
            for name, case in self.cases.items()
            for layout, refusal in case.cells.items()
        ]

    def check(self, case: str, layout: str, refusal: str | None) -> None:
        """Assert that a case on a layout equals one process, or is refused on every rank."""
        world = world_of(layout)
        results = run_ranks(_train_rank, world, self._file, case, layout, timeout=180)
        refusals = [result.get("refused") for result in results]
        if refusal is not None:
            for rank, text in enumerate(refusals):
                assert text is not None, f"rank {rank} trained on"
                assert re.search(refusal, text, re.DOTALL), text
            return
        assert refusals == [None] * world, next(filter(None, refusals))
        wanted = _one_process(self._file, case, self.cases[case].blocks_on(layout))
        tolerance = self.cases[case].tolerance
        for result in results:
            torch.testing.assert_close(
                result["losses"], wanted["losses"], rtol=0, atol=max(1e-6, tolerance)
            )
        weights = results[0]["weights"]
        assert set(weights) == set(wanted["weights"])
        for name, weight in weights.items():
            note = lambda m, n=name: f"{n}: {m}"  # noqa: E731
            torch.testing.assert_close(
                weight, wanted["weights"][name], rtol=0, atol=tolerance, msg=note
            )
        if layout in _SHARDS:
            assert all(result["held"] < wanted["held"] for result in results), "nothing is sharded"


class Messages(logging.Handler):
    """Keeps the texts of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a text."""
        self.texts.append(record.getMessage())


def strategy_of(layout: str | None, **options: Any) -> Any:
    """Return the strategy of a layout; without one, that of one process."""
    return "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout], **options)


def world_of(layout: str) -> int:
    """Return the number of ranks of a layout."""
    return 1 if layout == "one" else 4 if layout in _FOUR_RANKS else 2


class _Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []
        self.held = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.found.append(float(trainer.callback_metrics["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note how many entries of parameters this rank holds."""
        self.held = sum(local_part(p).numel() for p in own_parameters(pl_module).values())


def _train_rank(rank: int, world: int, file: str, name: str, layout: str) -> dict[str, Any]:
    case = importlib.import_module(file).CASES.cases[name]
    return train_case(case, layout, rank, world)


@cache
def _one_process(file: str, name: str, blocks: int) -> dict[str, Any]:
    case = importlib.import_module(file).CASES.cases[name]
    try:
        return train_case(replace(case, blocks=blocks), None, 0, 1)
    finally:
        torch.set_default_dtype(torch.float32)


def train_case(
    case: Case, layout: str | None, rank: int, world: int, *, watches: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Train 4 steps; the module logs its loss as "loss".

    Args:
        case: What is trained.
        layout: A name of `LAYOUTS`; None: a plain Trainer.
        rank: Of this process.
        world: Number of processes.
        watches: More callbacks.

    Returns:
        The logged losses, the whole weights (on rank 0), and the number of entries of parameters
        that this rank held; or "refused", with the text of the error.
    """
    with blocks_of_plain_nets(case.blocks_on(layout)):
        return _train_case(case, layout, rank, world, watches)


def _train_case(
    case: Case, layout: str | None, rank: int, world: int, watches: Sequence[Callback]
) -> dict[str, Any]:
    seed_everything(0, verbose=False)
    module, samples, *rest = case.make()
    replicas = 2 if (layout or "").startswith("zero") else 1
    replicas = 4 if layout == "zero3ep2" else replicas
    sampler = None
    if replicas > 1 and not (layout or "").endswith("pp2"):  # whose stages are the outer ranks
        replica = rank * replicas // world
        sampler = DistributedSampler(samples, replicas, replica, shuffle=False)
    loader = DataLoader(
        samples, case.batch_size // replicas, sampler=sampler, collate_fn=rest[0] if rest else None
    )
    losses = _Losses()
    options = dict(case.trainer() if callable(case.trainer) else case.trainer)
    callbacks = [*options.pop("callbacks", []), losses, *watches]
    strategy = strategy_of(layout, **case.strategy)
    try:
        trainer = quiet_trainer(
            devices=world,
            strategy=strategy,
            callbacks=callbacks,
            num_sanity_val_steps=0,
            proves=True,
            **{"precision": "64-true", "max_steps": _STEPS, **options},
        )
        trainer.fit(module, loader)
        weights = getattr(trainer.strategy, "gather_state_dict", module.state_dict)()
    except LightningParError as error:
        if layout is None:
            raise
        return {"refused": "\n".join([str(error), *getattr(error, "__notes__", [])])}
    kept = {k: v.detach().clone() for k, v in weights.items() if isinstance(v, torch.Tensor)}
    return {"losses": losses.found, "weights": kept, "held": losses.held}
