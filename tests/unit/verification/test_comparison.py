"""What `verify` finds in traces, and what it names as the cause."""

import math
from typing import Any

import torch
from torch import Tensor

from lightning_par import ParallelPlan
from lightning_par.observe.report import StepRecord
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.comparison import VerifyReport
from lightning_par.verification.run_trace import Trace
from lightning_par.verification.verify import compare_traces

TP, PP, DP = ParallelSizes(tensor=2), ParallelSizes(pipeline=2), ParallelSizes(data_shard=2)
GRADIENT, WEIGHT = torch.tensor([0.5, -2.0]).double(), torch.tensor([3.0, 4.0]).double()


def step(loss: float = 1.0, gradient: Tensor = GRADIENT, weight: Tensor = WEIGHT) -> StepRecord:
    return StepRecord(losses=[loss], gradients=[{"a.w": gradient}], state={"a.w": weight})


def trace(*steps: StepRecord, **facts: Any) -> Trace:
    return Trace(steps=list(steps), styles={"a": "replicated"}, **facts)


def report(
    one: Trace, *ranks: Trace, sizes: ParallelSizes = DP, dropout: tuple[Trace, ...] = ()
) -> VerifyReport:
    both = zip(ranks, dropout or [None] * len(ranks), strict=True)
    return compare_traces(one, list(both), sizes, sizes, ParallelPlan(positions={"": "ids"}))


def test_roundings_are_equal_and_rows_give_the_largest() -> None:
    rounded = step(1 + 1e-12, GRADIENT + 1e-11, WEIGHT + 2e-10)
    found = report(trace(step()), trace(step()), trace(rounded))
    assert found.equal
    (row,) = found.rows
    assert math.isclose(row.gradient, 1e-11 / 2, rel_tol=1e-3)
    assert math.isclose(row.weight, 2e-10 / 4, rel_tol=1e-3)


def test_losses_come_before_gradients_and_those_before_weights() -> None:
    wrong = step(1.0, 3 * GRADIENT, 2 * WEIGHT)
    assert str(report(trace(step()), trace(step()), trace(wrong)).first) == (
        "the gradient of a.w at step 0 differs on rank 1 by 4 (largest value 2)"
    )
    wrong.losses = [2.0]
    found = report(trace(step()), trace(wrong), trace(wrong)).first
    assert str(found) == "the loss at step 0 differs on rank 0 by 1 (largest value 1)"
    late = report(trace(step()), trace(step(weight=WEIGHT + 1)), trace(step()))
    assert str(late.first) == "the weight of a.w at step 0 differs on rank 0 by 1 (largest value 4)"
    assert late.causes[0].startswith("the optimizer: all gradients are equal")


def test_what_is_not_a_number_differs_also_from_itself() -> None:
    nan = step(math.nan, GRADIENT * math.nan)
    assert "differs on rank 0 by nan" in str(report(trace(nan), trace(nan), trace(nan)).first)
    infinite = step(gradient=GRADIENT * math.inf)
    found = report(trace(infinite), trace(infinite), trace(infinite))
    assert str(found.first).startswith("the gradient of a.w at step 0 differs on rank 0 by inf")


def test_a_stage_is_compared_in_what_it_holds_under_the_name_of_one_process() -> None:
    one = step()
    one.state["b.w"] = one.gradients[0]["b.w"] = WEIGHT  # type: ignore[index]
    tied = StepRecord(losses=[1.0], gradients=[{"head": GRADIENT}], state={"head": WEIGHT})
    other = StepRecord(losses=[1.0], gradients=[{"b.w": WEIGHT}], state={"b.w": WEIGHT})
    plain = trace(one, ties={"head": "a.w"})
    assert report(plain, trace(tied), trace(other), sizes=PP).equal
    tied.gradients = [{}]  # one process has it
    found = report(plain, trace(tied), trace(other), sizes=PP)
    assert "the gradient of head at step 0 differs on rank 0 by 2" in str(found.first)


def test_every_optimizer_of_a_step_is_compared() -> None:
    both = step()
    both.gradients *= 2
    wrong = step()
    wrong.gradients.append({"a.w": GRADIENT + 1})
    assert "the gradient of a.w at step 0" in str(
        report(trace(both), trace(both), trace(wrong)).first
    )


def test_causes_of_a_gradient() -> None:
    double = step(gradient=2 * GRADIENT)
    assert report(trace(step()), trace(double), trace(double)).causes == (
        "a factor: the gradient of a.w is 2 times that on one process",
    )
    part, rest = step(gradient=0.25 * GRADIENT), step(gradient=0.75 * GRADIENT)
    whole = {"whole": frozenset({"a.w"})}
    (cause,) = report(trace(step()), trace(part, **whole), trace(rest, **whole), sizes=TP).causes
    assert cause.startswith("a gradient that is not summed: a.w has the style 'replicated'")
    other = step(gradient=GRADIENT + 1)
    missed, copies = trace(other, unstyled=("a.w",), **whole), trace(step(), **whole)
    assert [c.split(":")[0] for c in report(trace(step()), missed, copies, sizes=TP).causes] == [
        "copies of a.w get different gradients on tensor-parallel ranks",
        "a missed plan pattern",
    ]


def test_causes_of_a_loss_follow_the_axes() -> None:
    wrong = trace(step(2.0))
    all_axes = ParallelSizes(context=2, tensor=2, data_shard=2)
    causes = report(trace(step()), *[wrong] * 8, sizes=all_axes).causes
    assert [cause.split()[0] for cause in causes] == ["masks:", "a", "a"]
    assert "a wrong tensor style" in causes[1]
    assert "no mean over labels" in causes[2]
    drawn = report(trace(step(), draws=True), wrong, wrong).causes
    assert [cause.split(":")[0] for cause in drawn] == ["random numbers"]


def test_causes_of_a_later_difference() -> None:
    late = trace(step(), step(2.0))
    (cause,) = report(trace(step(), step()), late, late).causes
    assert cause.startswith("a value that the first step changes")


def test_copies_that_differ_with_dropout_only_are_named() -> None:
    drawn = [trace(step(gradient=GRADIENT * k), whole=frozenset({"a.w"})) for k in (1, 2)]
    equal = trace(step())
    found = report(equal, equal, equal, sizes=TP, dropout=(drawn[0], drawn[1]))
    assert found.causes[0].startswith("dropout drawn differently per rank")
    assert "the copies of a.w get" in found.causes[0]
    assert "not equal: nothing differs without dropout" in str(found)
