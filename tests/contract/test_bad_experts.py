"""What users get wrong about experts is said before any process starts."""

import re

import pytest
from torch import nn

from lightning_par.errors import ConfigurationError, MeshError, PlanError
from tests.support.faults.user_mistakes import Case, fit, planned
from tests.support.models.mixture import make

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore")]


def mixtral(**config):
    return lambda: make(**config)[0]


def without_compute():
    module = make()[0]
    for block in module.model.blocks:
        block.moe.experts = nn.Linear(4, 4)
    plan = module.model.parallel_plan()
    keep = {k: v for k, v in plan.tensor.items() if ".experts" not in k}
    module.model.parallel_plan = lambda: type(plan)(
        blocks="blocks", tensor=keep, experts=plan.experts
    )
    return module


DP2 = {"tp": 1, "pp": 1, "dp": 2, "expert_parallel_size": 2}

CASES = {
    "ranks that do not divide": Case(
        error=MeshError,
        devices=4,
        options={"tp": 1, "pp": 1, "dp": 4, "expert_parallel_size": 3},
        says=r"expert_parallel_size=3 does not divide the 4 data-parallel ranks .* Use one of "
        r"1, 2 or 4\.",
    ),
    "ranks of tensor parallelism": Case(
        error=MeshError,
        options={"tp": 2, "pp": 1, "expert_parallel_size": 2},
        says=r"expert_parallel_size=2 does not divide the 1 data-parallel ranks .* Use 1\.",
    ),
    "more than shard": Case(
        error=MeshError,
        devices=4,
        options={
            "tp": 1,
            "pp": 1,
            "dp": 4,
            "expert_parallel_size": 4,
            "data_parallel_replicate_size": 2,
        },
        says=r"expert_parallel_size=4 does not divide the 2 data-parallel ranks .* 1 or 2\.",
    ),
    "no number": Case(
        error=MeshError,
        options={**DP2, "expert_parallel_size": 0},
        says=r"expert_parallel_size=0 must be a whole number of 1 or more, or 'auto'",
    ),
    "no number of rows": Case(
        error=ConfigurationError,
        options={**DP2, "expert_max_rows": 0},
        says=r"expert_max_rows=0 must be a whole number of 1 or more, or None\.",
    ),
    "experts that do not divide": Case(
        error=PlanError,
        options=DP2,
        module=mixtral(num_experts=5),
        says=r"expert_parallel_size=2: model\.blocks\.\d\.moe\.experts\.\w+\.weight has 5 experts "
        r"in dim 0, not divisible by 2\. Use expert_parallel_size=1 or 5\.",
    ),
    "no experts": Case(
        error=PlanError,
        options=DP2,
        says=r"expert_parallel_size=2: the plan of ToyModule does not say which modules .* "
        r"ParallelPlan\(experts=",
    ),
    "experts of another kind": Case(
        error=PlanError,
        options=DP2,
        module=without_compute,
        says=r"names model\.blocks\.0\.moe\.experts, but its class Linear has no method compute",
    ),
    "a pattern without a match": Case(
        error=PlanError,
        options=DP2,
        module=planned(experts=("blocks.*.expert",), replica_sums=("blocks.*.sum",)),
        says=r"(?s)experts=.*'model.blocks.\*.expert' matches no module.*replica_sums=.* 'model\.",
    ),
    "features that do not divide": Case(
        error=PlanError,
        options={"tp": 2, "pp": 1},
        module=mixtral(ff_dim=21),
        says=r"experts\.gate\.weight \(and 2 others\) has size 21 in dim 1, not divisible by 2",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_before_any_process_starts(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    with pytest.raises(case.error) as caught:
        fit(case)
    assert re.search(case.says, str(caught.value), re.DOTALL), str(caught.value)
